"""Models that torch wraps are filled under the names that their state dicts have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import megtool
from megtool.access.wrapped_names import find_unwrapped, unwrapped_names
from megtool.errors import MappingError
from tests.support.errors import raises
from tests.support.folders import torch_tensors
from tests.support.models.named_modules import modules_named
from tests.support.worlds.gloo_world import run_world

Q = "model.layers.1.self_attn.q_proj.weight"


def compiled(model: nn.Module) -> nn.Module:
    out: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return out


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    layers = model.get_submodule("model.layers")
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy.NO_SHARD,
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
    }
    for name, layer in layers.named_children():
        layers.register_module(name, FullyShardedDataParallel(layer, **options))
    return FullyShardedDataParallel(model, **options)


def compiled_layers(model: nn.Module) -> nn.Module:
    layers = model.get_submodule("model.layers")
    for name, layer in layers.named_children():
        layers.register_module(name, compiled(layer))
    return model


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "compiled": (compiled, f"_orig_mod.{Q}"),
    "layers": (compiled_layers, "model.layers.1._orig_mod.self_attn.q_proj.weight"),
    "replicas": (data_parallel, f"module.{Q}"),
    "both": (lambda m: data_parallel(compiled(m)), f"module._orig_mod.{Q}"),
    "sharded": (
        fully_sharded,
        "_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.self_attn.q_proj.weight",
    ),
}


def load_wrapped(rank: int, size: int, llama: Path) -> None:
    """A model in each wrapper, through both loaders; FSDP1's parameters by the names they have."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    whole = torch_tensors(llama)
    for wrap, name in WRAPPERS.values():
        for through_dcp in (False, True):
            model = wrap(modules_named(whole))
            state: dict[str, Any] = dict(model.named_parameters())
            if wrap is not fully_sharded:
                assert state.keys() == model.state_dict().keys()
            assert name in state
            with torch.no_grad():
                for tensor in state.values():
                    tensor.zero_()
            if through_dcp:
                dcp.load({"model": state}, storage_reader=megtool.dcp.Reader(llama))
                dcp.load(state, storage_reader=megtool.dcp.Reader(llama))
            else:
                report = megtool.load_state_dict(state if wrap is fully_sharded else model, llama)
                assert report.num_tensors == len(whole)
                assert not report.missing
                assert not report.unused
            for key, tensor in state.items():
                assert tensor.equal(whole[find_unwrapped(key, whole) or ""]), key


@pytest.mark.slow
def test_wrapped_models_are_filled(llama: Path) -> None:
    run_world(load_wrapped, 1, llama)


def test_missing_tensors_have_the_models_own_names(
    llama: Path, tensors: dict[str, torch.Tensor]
) -> None:
    name = "_orig_mod.model.more.weight"
    wrapped = {f"_orig_mod.{n}": torch.empty_like(t) for n, t in tensors.items()}
    wrapped[name] = torch.empty(3, 4)
    with raises(MappingError, f": {name}", tensor=name, id="missing-tensors"):
        megtool.load_state_dict(wrapped, llama)
    with pytest.raises(dcp.CheckpointException, match=f": {name}"):
        megtool.dcp.load(wrapped, llama)
    report = megtool.load_state_dict(wrapped, llama, strict=False)
    assert report.missing == (name,)
    assert not report.unused


def test_names_that_a_checkpoint_has_are_taken_first() -> None:
    """`module` may be a part of a model's own name, and then nothing is taken out of it."""
    names = ["module._orig_mod.encoder.module.weight", "module.encoder.module.weight"]
    assert [*unwrapped_names(names[0])] == [*names, "encoder.weight"]
    assert find_unwrapped(names[0], {names[1], "encoder.weight"}) == names[1]
    assert find_unwrapped(names[1], {"weight"}) is None
    assert [*unwrapped_names("module")] == ["module"]
