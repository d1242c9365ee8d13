"""The loader of torch_checkpointing fills models from every format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.default_resharder import DefaultResharder

import megtool
from megtool import reshard
from megtool.errors import FormatError, UsageError
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore
from megtool.torch_checkpointing import MetadataFormat, StorageConfig
from tests.support.errors import raises
from tests.support.folders import torch_tensors
from tests.support.models import tiny_llama
from tests.support.worlds.gloo_world import run_world


def load(location: str, into: Mapping[str, Any], **settings: Any) -> Mapping[str, Any]:
    logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
    config = CheckpointManager.Config.with_sync_save()
    config.items = {"model": ItemSpec(resharder=DefaultResharder())}
    config.storage_config = StorageConfig(use_direct_io=False, **settings)
    manager = CheckpointManager(config)
    try:
        return manager.load(location, into=into, strict=True, metadata_format=MetadataFormat)
    finally:
        manager.close()


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("model") / "hf", num_hidden_layers=1)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory, hf: Path) -> Path:
    out = tmp_path_factory.mktemp("model") / "megatron"
    reshard(hf, out, to="torch_dist", tp=2)
    return out


def test_a_megatron_checkpoint_fills_a_model_of_transformers(hf: Path, megatron: Path) -> None:
    expected = torch_tensors(hf)
    state = {n: torch.zeros_like(t) for n, t in expected.items()}
    load(str(megatron), {"model": state})
    assert all(torch.equal(state[n], t) for n, t in expected.items())
    other = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in expected.items()}
    load(str(megatron), {"model": other}, naming="hf")
    assert all(torch.equal(other[n], t.double()) for n, t in expected.items())


def test_a_model_of_megatron_is_filled_from_a_hugging_face_folder(hf: Path, megatron: Path) -> None:
    names = (
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "embedding.word_embeddings.weight",
    )
    expected = {n: megtool.open(megatron).as_("megatron")[n].torch() for n in names}
    state = {n: torch.zeros_like(t) for n, t in expected.items()}
    load(str(hf), {"model": state})
    assert all(torch.equal(state[n], t) for n, t in expected.items())


@pytest.mark.parametrize("recipe", ["fp8_per_channel", "int8_weight_only"])
def test_a_quantized_folder_is_decoded(recipe: str, hf: Path, tmp_path: Path) -> None:
    """To the bits of the converted copy, which are not those of the weights."""
    megtool.quantize(hf, tmp_path / "quantized", recipe, fsync=False)
    reshard(tmp_path / "quantized", tmp_path / "copy", to="hf", dtype="bfloat16", fsync=False)
    expected = torch_tensors(tmp_path / "copy")
    state = {n: torch.zeros_like(t) for n, t in expected.items()}
    load(str(tmp_path / "quantized"), {"model": state})
    assert all(torch.equal(state[n], t) for n, t in expected.items())
    assert any(not torch.equal(t, expected[n]) for n, t in torch_tensors(hf).items())


def test_what_cannot_be_loaded_is_said(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no_such"):
        load(str(hf), {"model": {"no_such.weight": torch.zeros(2)}})
    (tmp_path / "empty").mkdir()
    with raises(FormatError, id="not-a-checkpoint"):
        load(str(tmp_path / "empty"), {"model": {"a": torch.zeros(2)}})
    config = CheckpointManager.Config.with_sync_save()
    config.items = {"model": ItemSpec(resharder=DefaultResharder())}
    manager = CheckpointManager(config)
    with raises(UsageError, hint="StorageConfig"):
        manager.load(str(hf), into={"model": {"a": torch.zeros(2)}}, metadata_format=MetadataFormat)
    manager.close()


def test_a_checkpoint_in_a_store_is_loaded(hf: Path) -> None:
    register_store(MemoryStore("memory://loader"))
    reshard(hf, "memory://loader/run", to="torch_dist")
    expected = torch_tensors(hf)
    state = {n: torch.zeros_like(t) for n, t in expected.items()}
    load("memory://loader/run", {"model": state})
    assert all(torch.equal(state[n], t) for n, t in expected.items())


def load_on_a_rank(rank: int, size: int, source: str, hf: str) -> bool:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    expected = torch_tensors(Path(hf))
    state = {
        n: distribute_tensor(torch.zeros_like(t), mesh, [Shard(k % t.ndim)])
        for k, (n, t) in enumerate(expected.items())
    }
    load(source, {"model": state})
    whole = {n: t.full_tensor() for n, t in state.items() if isinstance(t, DTensor)}
    return all(torch.equal(whole[n], t) for n, t in expected.items())


@pytest.mark.slow
def test_ranks_fill_their_parts_of_dtensors(hf: Path, megatron: Path) -> None:
    assert run_world(load_on_a_rank, 2, str(megatron), str(hf)) == [True, True]
