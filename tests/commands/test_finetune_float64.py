"""Finetune of models with recurrent mixers: five steps in float32 are transformers' in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import export
from megtool.inference.collate import collate_rows
from megtool.options.config_file import build_options
from megtool.source.open import open_decoder
from megtool.train.datasets import open_datasets
from megtool.train.options.config import TrainConfig
from megtool.train.run_log import read_log
from tests.support.models import moe_models, tiny_text
from tests.support.models.dense_decoders import fill_spread
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.finetune_runs import tune
from tests.support.runs.wide_floats import WideFloats

pytest.importorskip("transformers")

MIXERS = ("qwen3_next", "granitemoehybrid", "lfm2_moe")
HOW: dict[str, Any] = {
    "seq_length": 32,
    "train_iters": 5,
    "global_batch_size": 2,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "weight_decay": 0.1,
    "packing": False,
    "device": "cpu",
}


def build(name: str, folder: Path) -> Any:
    """transformers' model, of which every product can be in float64."""
    family, _, keys = moe_models.CASES[name]
    sizes = {"vocab_size": tiny_text.VOCABULARY, "eos_token_id": tiny_text.END}
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = tiny_model(
        family, folder, sizes=moe_models.SIZES, fill=fill_spread, **keys | sizes | eager
    )
    tiny_text.save_tokenizer(folder)
    for module in model.modules():  # Nemotron-H's is of another key in transformers
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(model.config.time_step_limit)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h-latent", *MIXERS])
def test_five_steps_are_those_of_transformers_in_float64(
    name: str, data: Path, tmp_path: Path
) -> None:
    model = build(name, tmp_path / "hf").double().train()
    tune(tmp_path / "hf", tmp_path / "out", data, **HOW)
    ours = [line for line in read_log(tmp_path / "out/log.jsonl") if "loss" in line]
    assert len(ours) == 5
    settings = build_options(TrainConfig, {"data": (str(data),), **HOW})
    rows = open_datasets(settings, open_decoder(tmp_path / "hf"), cache=None).train
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for step, line in enumerate(ours):
        batch, labels = collate_rows(rows.rows(2 * step, 2), torch.device("cpu"))
        with WideFloats():
            logits = model(batch.tokens_BS).logits
        assert logits.dtype == torch.float64
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
    export(tmp_path / "out", tmp_path / "trained", to="hf", dtype="float32")
    trained = type(model).from_pretrained(tmp_path / "trained")
    for part, parameter in trained.named_parameters():
        # Adam has a step of its full size for elements whose gradients are all rounding.
        apart = (parameter - model.get_parameter(part)).abs()
        assert apart.max() < 1e-4, part
        assert (apart > 1e-5).double().mean() < 1e-2, part
