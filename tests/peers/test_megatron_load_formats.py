"""Real megatron-core loads from a store, and refuses another family, by `megtool.megatron`."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megtool import reshard
from megtool.errors import MappingError
from tests.support.models import gguf_models
from tests.support.models.adapted_models import ATTENTION, save_adapter
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.exports import export_gguf

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.peers

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def make_folder(folder: Path, family: str = "llama", **keys: Any) -> Path:
    """A Hugging Face folder with a tiny model in bfloat16."""
    tiny_model(family, **{**SIZES, **keys}).bfloat16().save_pretrained(folder)
    return folder


def shard(key: str, *shape: int) -> Any:
    """The request of one rank for all of a tensor."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, torch.full(shape, 7.0))


def test_a_store_in_memory(tmp_path: Path) -> None:
    """By `load`, by a strategy of core's own load, and once installed; two ranks' files."""
    from megatron.core import dist_checkpointing

    import megtool

    hf = make_folder(tmp_path / "hf", num_hidden_layers=2)
    place = "memory://megatron-load/ranks"
    reshard(hf, place, to="megatron", tp=2, fsync=False)
    want = megtool.open(hf, framework="torch").as_("megatron")
    name = "decoder.layers.1.self_attention.linear_qkv.weight"

    def check(out: dict[str, Any]) -> None:
        assert torch.equal(out["qkv"], want[name].torch().float())

    check(megtool.megatron.load({"qkv": shard(name, 64, 32)}, place))
    with megtool.megatron.install():
        assert dist_checkpointing.check_is_distributed_checkpoint(place)
        check(dist_checkpointing.load({"qkv": shard(name, 64, 32)}, place))
    strategy = megtool.megatron.LoadStrategy(place)
    check(strategy.load({"qkv": shard(name, 64, 32)}, tmp_path))


def test_an_adapter_is_merged_into_what_is_loaded(tmp_path: Path) -> None:
    """The bits of `reshard --adapter`; no optimizer state, and no adapter twice."""
    import megtool
    from megtool.errors import UsageError

    hf, adapter = make_folder(tmp_path / "hf", num_hidden_layers=2), tmp_path / "adapter"
    save_adapter(hf, adapter, target_modules=ATTENTION)
    reshard(hf, tmp_path / "merged", adapter=[adapter], fsync=False)
    want = megtool.open(tmp_path / "merged", framework="torch").as_("megatron")
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    out = megtool.megatron.load({"qkv": shard(name, 64, 32)}, hf, adapter=adapter)
    assert torch.equal(out["qkv"], want[name].torch().float())
    state = {"state": shard(f"optimizer.state.exp_avg.{name}", 64, 32)}
    with pytest.raises(UsageError, match="without the adapter"):
        megtool.megatron.load(state, hf, adapter=adapter)
    with pytest.raises(UsageError, match="given twice"):
        megtool.megatron.load({"qkv": shard(name, 64, 32)}, hf, adapter=[adapter, adapter])
    with pytest.raises(UsageError, match="given twice"):
        reshard(hf, tmp_path / "twice", adapter=[adapter, adapter], fsync=False)


def own_tensors(view: Any) -> dict[str, Any]:
    """Requests for all tensors of a view, with other values in them."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    empty = {n: torch.full(t.shape, 7.0, dtype=torch.bfloat16) for n, t in view.items()}
    return {n: ShardedTensor.from_rank_offsets(n, t) for n, t in empty.items()}


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A world of this process alone, of which core gathers keys."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gguf_and_zarr(tmp_path: Path) -> None:
    """By each way in: the functions of core, a strategy, and the training loop's one."""
    from megatron.core import dist_checkpointing

    import megtool

    gguf_models.save(tmp_path / "hf", "llama", dtype="bfloat16")
    export_gguf(tmp_path / "hf", tmp_path / "model.gguf", fsync=False)
    reshard(tmp_path / "hf", tmp_path / "run", to="torch_dist", fsync=False)
    reshard(tmp_path / "run", tmp_path / "zarr", to="zarr", fsync=False)
    want = megtool.open(tmp_path / "hf", framework="torch").as_("megatron")
    for place in (tmp_path / "model.gguf", tmp_path / "zarr"):
        strategy = megtool.megatron.LoadStrategy(place)
        found = [megtool.megatron.load(own_tensors(want), place)]
        found.append(strategy.load(own_tensors(want), tmp_path))
        with megtool.megatron.install():
            assert dist_checkpointing.check_is_distributed_checkpoint(str(place))
            assert dist_checkpointing.load_common_state_dict(str(place))["args"].num_layers == 2
            assert want.keys() <= dist_checkpointing.load_tensors_metadata(str(place)).keys()
            found.append(dist_checkpointing.load(own_tensors(want), str(place)))
        for state in found:
            assert all(torch.equal(state[n], t.torch()) for n, t in want.items())


def test_core_compares_keys_of_every_class(tmp_path: Path, one_rank: None) -> None:
    """With a strategy, core's own load knows a key of any spelling, and names one that is none."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    import megtool

    hf = make_folder(tmp_path / "hf", num_hidden_layers=2)
    reshard(hf, tmp_path / "run", to="torch_dist", fsync=False)
    place = tmp_path / "run" / "release"
    strategy = megtool.megatron.LoadStrategy(hf)
    second = {"prepend_axis_num": 1}
    cases: list[tuple[str, tuple[int, ...], Any, dict[str, Any]]] = [
        ("decoder.layers.1.mlp.linear_fc2.weight", (32, 48), (), {}),
        ("decoder.layers.mlp.linear_fc2.weight", (32, 48), [(0, 1, 2)], second),
        ("decoder.layers.3.mlp.linear_fc2.weight", (32, 48), (), {}),  # the second of HybridModel
        ("decoder.final_norm.weight", (32,), (), {}),
    ]
    for key, shape, layer, more in cases:
        for strict in ("raise_unexpected", "log_unexpected"):
            tensor = torch.full(shape, 7.0)
            state = {"x": ShardedTensor.from_rank_offsets(key, tensor, *layer, **more)}
            out = dist_checkpointing.load(
                state, str(place), strategy, validate_access_integrity=False, strict=strict
            )
            assert not (out["x"] == 7).all(), key
    state = {"x": shard("no.such.key", 2)}
    with pytest.raises(dist_checkpointing.core.CheckpointingException, match=r"no\.such"):
        dist_checkpointing.load(state, str(place), strategy, strict="raise_unexpected")


def test_tensors_that_cannot_be_filled(tmp_path: Path) -> None:
    """Integers, and no memory at all: both are named with what is missing."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    import megtool

    hf = make_folder(tmp_path / "hf", num_hidden_layers=2)
    norm, fc2 = "decoder.final_layernorm.weight", "decoder.layers.0.mlp.linear_fc2.weight"
    whole = ShardedTensor.from_rank_offsets
    state = {
        "a": whole(norm, torch.zeros(32, dtype=torch.int32)),
        "b": whole(fc2, torch.zeros(32, 48, device="meta")),
        "c": shard("no.such.key", 2),
    }
    with pytest.raises(MappingError) as caught:
        megtool.megatron.load(state, hf)
    for text in (norm, "int32", fc2, "meta device", "no.such.key"):
        assert text in str(caught.value)


def test_another_family_and_heads_that_are_others(tmp_path: Path) -> None:
    """Qwen's weights for a Llama, whose heads are others: each tensor is named, none is read."""
    import megtool

    hf = make_folder(tmp_path / "hf", "qwen3", num_hidden_layers=2)
    layer = "decoder.layers.0"
    state = {
        "norm": shard("decoder.final_layernorm.weight", 32),
        "qkv": shard(f"{layer}.self_attention.linear_qkv.weight", 96, 32),
        "bias": shard(f"{layer}.self_attention.linear_qkv.bias", 96),
        "router": shard(f"{layer}.mlp.router.weight", 4, 32),
        "embedding": shard("embedding.word_embeddings.weight", 60, 32),
    }
    with pytest.raises(MappingError) as caught:
        megtool.megatron.load(state, hf)
    for text in ("linear_qkv.bias", "router", "[96, 32]", "word_embeddings.weight is [60, 32]"):
        assert text in str(caught.value)
    assert all((s.data == 7).all() for s in state.values())


def test_the_calls_of_megatron_bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.6.2 makes them in `training/checkpointing.py`; the package itself needs a GPU."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    import megtool

    hf = make_folder(tmp_path / "hf", num_hidden_layers=2)
    ranks = tmp_path / "ranks"
    reshard(hf, ranks, to="megatron", tp=2, fsync=False)
    want = megtool.open(hf, framework="torch").as_("megatron")
    name = "decoder.final_layernorm.weight"
    bridge: Any = types.ModuleType("megatron.bridge.training.checkpointing")
    bridge._load_base_checkpoint = lambda *_, **__: (None, "", False, None)
    bridge.checkpoint_exists = lambda _: False
    bridge.CheckpointType = enum.Enum("CheckpointType", ["LOCAL", "GLOBAL", "FSDP_DTENSOR"])
    monkeypatch.setitem(sys.modules, bridge.__name__, bridge)
    config = types.SimpleNamespace(ckpt_step=None, dist_ckpt_strictness="assume_ok_unexpected")

    def load_base(load_dir: Path, **more: Any) -> Any:
        options = {"ignore_ckpt_step": False, "cfg": None, "is_megatron_mimo": False}
        return bridge._load_base_checkpoint(
            str(load_dir),
            config,
            checkpointing_context=None,
            pg_collection=None,
            **options,
            **more,
        )

    with megtool.megatron.install():
        # _load_model_weights_from_checkpoint
        common = dist_checkpointing.load_common_state_dict(str(ranks))
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        assert metadata is None or isinstance(metadata, dict)
        out = dist_checkpointing.load(
            {"norm": shard(name, 32)},
            str(ranks),
            TorchDistLoadShardedStrategy(),
            strict="assume_ok_unexpected",
        )
        assert torch.equal(out["norm"], want[name].torch().float())
        # _load_checkpoint_from_path
        assert bridge.checkpoint_exists(str(ranks))
        assert not bridge.checkpoint_exists(str(tmp_path / "nothing"))
        state, _, is_release, kind = load_base(ranks, rank0=True)
        assert (is_release, kind.name, state["iteration"]) == (True, "GLOBAL", 0)
        assert state["args"].no_save_optim
        assert state["args"].no_save_rng
        state, place, *_ = load_base(
            ranks, rank0=False, sharded_state_dict={"norm": shard(name, 32)}
        )
        assert Path(place) == ranks / "release"
        assert torch.equal(state["norm"], want[name].torch().float())
        assert load_base(tmp_path / "nothing", rank0=True)[0] is None
    assert not bridge.checkpoint_exists(str(ranks))
