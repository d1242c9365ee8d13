"""Runs with LoRA, and PEFT's model of their adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.lora import LoraSettings, merge
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.optimizer import Optimizer
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.train.checkpointing.protocol import TrainState
from megtool.train.features.adapter_gather import WEIGHT, AdapterGather
from megtool.train.features.lora import FOLDER, LoraFeature
from megtool.train.model.build import load_for_training

TOKENS = torch.randint(1, 100, (2, 12), generator=torch.Generator().manual_seed(1))


def load(path: Path, groups: ProcessGroups | None = None, **how: Any) -> tuple[list[Decoder], Any]:
    torch.set_num_threads(1)
    opened = open_source(path)
    assert opened.model is not None
    assert opened.model.family is not None
    source = opened
    stages = load_for_training(source, groups, dtype="float32", threads=1, **how)
    return stages, opened.model.family


def fill_adapters(lora: LoraFeature) -> None:
    """Give B something to say, the same at every layout."""
    whole = {}
    for n, matrix in enumerate(sorted(AdapterGather(lora.views).matrices, key=lambda m: m.name)):
        torch.manual_seed(n)
        whole[matrix.key] = torch.randn(matrix.shape) * 0.1
    with torch.no_grad():
        for name, parameter in lora.views.tensors.items():
            parameter.copy_(lora.views.slice_local(whole, WEIGHT, name))


def write(lora: LoraFeature, optimizer: Optimizer | None, folder: Path, iteration: int = 1) -> None:
    standing = TrainState(
        iteration=iteration, consumed_samples=4 * iteration, num_steps=4 * iteration
    )
    for name, data in lora.files(optimizer, standing, folder / "spool", Files()).items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(data, Path):
            data.rename(folder / name)
        else:
            (folder / name).write_bytes(data)


def logits(stages: list[Decoder]) -> Tensor:
    stages[0].eval()
    with torch.inference_mode():
        return stages[0](Batch(tokens_BS=TOKENS)).clone()


def assert_same_as_peft(base: Path, folder: Path, settings: LoraSettings) -> None:
    """peft computes what we do with an adapter that we wrote, and so do both when it is merged."""
    peft = pytest.importorskip("peft", reason="the peft package is the oracle")
    transformers = pytest.importorskip("transformers")
    stages, kind = load(base)
    plain = logits(stages)
    lora = LoraFeature(stages, settings, kind, str(base))
    assert torch.equal(logits(stages), plain)  # B is zero
    fill_adapters(lora)
    ours = logits(stages)
    assert (ours - plain).abs().max() > 1e-2
    write(lora, None, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(theirs, folder / FOLDER).eval()
    with torch.no_grad():
        assert torch.allclose(adapted(TOKENS).logits, ours, atol=1e-5, rtol=1e-5)
    merge(stages)
    assert torch.allclose(logits(stages), ours, atol=1e-6)
    with torch.no_grad():
        alone = adapted.merge_and_unload()(TOKENS).logits
    assert torch.allclose(logits(stages), alone, atol=1e-5, rtol=1e-5)


def step(stages: list[Decoder], optimizer: Optimizer, number: int) -> None:
    groups = stages[0].groups
    tokens = torch.randint(0, 100, (4, 8), generator=torch.Generator().manual_seed(number))
    mine = tokens.chunk(groups.dp.size)[groups.dp.rank]
    stages[0].train()
    torch.manual_seed(number)
    optimizer.zero_grad()
    optimizer.begin(1)
    loss, _ = stages[0].loss(Batch(tokens_BS=mine), mine.roll(-1, 1))
    loss.backward()
    optimizer.finish(torch.tensor(32.0))
    assert optimizer.step(1e-2, 0.1).ok
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.wait_for_parameters()


def make_training(
    path: Path, groups: ProcessGroups, *, sharded: bool, dropout: float = 0.0, **how: Any
) -> tuple[list[Decoder], LoraFeature, Optimizer]:
    stages, family = load(path, groups, **how)
    lora = LoraFeature(stages, LoraSettings(rank=4, alpha=6.0, dropout=dropout), family, str(path))
    named = list(stages[0].named_parameters())
    settings = OptimizerConfig(lr=1e-2, clip_grad=0.5)
    optimizer = (
        DistributedOptimizer(named, settings, groups, chunks=stages)
        if sharded
        else ReplicatedOptimizer(named, settings, groups)
    )
    return stages, lora, optimizer


def state(lora: LoraFeature, optimizer: Optimizer) -> dict[str, Tensor]:
    """All matrices by their keys, on rank 0."""
    gathering = AdapterGather(lora.views, optimizer.pieces())
    return {matrix.key: whole for matrix, whole in gathering if whole is not None}
