"""Changed settings of every family, written to a config.json: transformers computes them.

A model's configuration is changed field by field, and written beside the weights without any key
that it was read from. Where the family reads its own config.json as that model, transformers'
logits have to be those of megtool's forward pass of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool.convert.families.read_back import find_lost_in_class
from megtool.errors import MappingError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.source.open import open_source
from megtool.spec.meaning import compare_functions, function_fields
from megtool.spec.model_config import ModelConfig
from tests.support.models.every_family import MODELS

transformers = pytest.importorskip("transformers")

ORIGINAL = {"original_max_position_embeddings": 16}
SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | ORIGINAL,
]
FACTORS = (
    *("embedding_scale", "residual_scale", "softmax_scale", "attn_softcap", "logit_scale"),
    *("logit_softcap", "router_scaling", "norm_eps", "rope_base", "activation_limit"),
    *("attn_value_scale", "rope_local_base"),
)
FAST = {"llama": None, "qwen2": ("activation", "window_size"), "granite": FACTORS}
"""Families of the fast sample, and the fields that are changed; None: all."""
NOT_RUN = {"bert", "bert_post_norm", "roberta", "modernbert", "t5", "mt5", "umt5"}
"""Families that are no decoders."""
TOKENS = torch.arange(3, 51)[None]


def list_changes(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Changes that leave the shapes of tensors as they are."""
    fields = function_fields(config)
    for name in FACTORS:
        if name in fields:
            value = config.get(name)
            yield name, 0.05 if name == "norm_eps" else 2.0 * value if value else 0.7
    for kind in ("silu", "gelu", "gelu_pytorch_tanh", "relu2", "quick_gelu", "relu"):
        yield "activation", kind
    if "rope_scaling" in fields:
        for scaling in SCALINGS:
            yield "rope_scaling", scaling
    layers = config.num_layers
    yield "window_size", 8 if config.window.window_size != 8 else 5
    yield "window_skip_freq", (0, *(1,) * (layers - 1))
    yield "no_rope_layers", (0, *(1,) * (layers - 1))
    yield "router_pre_softmax", not config.router.router_pre_softmax
    yield "attn_chunk_size", 6


def logits_of(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of transformers, and of megtool."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    decoder = load(open_source(folder), dtype="float32")
    tokens = TOKENS % decoder.config.embedding.vocab_size
    with torch.no_grad():
        return model(tokens).logits, decoder(Batch(tokens_BS=tokens))


def check_family(name: str, folder: Path, fields: tuple[str, ...] | None) -> list[str]:
    """Return what differs, by change."""
    MODELS[name](folder)
    source = open_source(folder)
    assert source.model is not None
    family = source.model.family
    assert family is not None
    bare = source.config.with_fields(extra={})
    before, wrong = None, []
    for field, value in list_changes(bare):
        if fields is not None and field not in fields:
            continue
        try:
            changed = bare.with_fields(**{field: value})
            stored = family.write_config(changed, dtype="bfloat16")
            if find_lost_in_class(changed, family, stored):
                continue
        except MappingError:
            continue
        if field not in compare_functions(changed, bare):
            continue
        if before is None:
            before = logits_of(folder)[0]
        other = folder.parent / "changed"
        shutil.copytree(folder, other)
        (other / "config.json").write_text(json.dumps(stored))
        theirs, ours = logits_of(other)
        shutil.rmtree(other)
        scale = float(theirs.abs().max())
        difference = float((theirs - ours).abs().max()) / scale
        if not difference < 1e-3:
            wrong.append(f"{field}={value}: {difference:.1e}")
    return wrong


@pytest.mark.parametrize("name", FAST)
def test_transformers_computes_what_was_written(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path / "model", FAST[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS.keys() - FAST.keys() - NOT_RUN))
def test_transformers_computes_what_any_family_writes(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path / "model", None) == []
