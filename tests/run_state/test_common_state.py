"""What is not tensors: extra states, random and rerun state, args, ModelOpt's files."""

from __future__ import annotations

import io
import pickle
import sys
import tempfile
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from megtool import inspect, reshard
from megtool.errors import CoverageError
from megtool.formats import open_checkpoint
from megtool.megatron_state.extra_states.names import Site, StateNaming, parse_site
from megtool.megatron_state.extra_states.te_state import decode
from megtool.megatron_state.saved_objects import read_object
from megtool.options.groups import SourceOptions
from megtool.options.layout import ParallelConfig
from megtool.pickles.small_files import recode_pickle_file
from megtool.pickles.writer import encode
from megtool.source.open import open_source
from megtool.spec import layer_sets
from tests.support.checkpoints.trained import config, write
from tests.support.models import tiny_llama

MOE = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 8}
MIXED = MOE | {"shared_ffn_hidden_size": 8, "moe_layer_freq": (0, 1, 0, 1)}
LAYERS = 4


def nested_checkpoint(folder: str) -> dict[str, bytes]:
    """The files of a checkpoint that torch.distributed writes; megtool pickles its metadata."""
    with tempfile.TemporaryDirectory() as temporary:
        torch_checkpoint.save(
            {"state": {"mode": "quantize"}, "amax": torch.ones(3)},
            checkpoint_id=temporary,
            no_dist=True,
        )
        files = {path.name: path.read_bytes() for path in Path(temporary).iterdir()}
        files[".metadata"] = recode_pickle_file(Path(temporary, ".metadata"))
    return {f"{folder}/{name}": data for name, data in files.items()}


MODELOPT = nested_checkpoint("modelopt_state") | {
    "modelopt_state/metadata.json": b'{"sharded_backend": "torch_dist"}'
}
BESIDE = MODELOPT | {"tokenizer/tokenizer.json": b"{}", "tokenizer/tokenizer_config.json": b"{}"}


def item(value: Any) -> bytes:
    """An object as Megatron saves it: a list of it alone."""
    out = io.BytesIO()
    torch.save([value], out)
    return out.getvalue()


def fp8(number: int) -> Any:
    """An extra state as Transformer Engine keeps it: a pickled dict in a tensor of bytes.

    Pickled as megtool does, which does not change when it is decoded and encoded again.
    """
    return torch.frombuffer(bytearray(encode({"scale": number}, protocol=3)), dtype=torch.uint8)


def random_state(seed: int) -> dict[str, Any]:
    """What a rank saves of its generators."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "random_rng_state": (3, (seed, 1, 2), None),
        "torch_rng_state": generator.get_state(),
        "rng_tracker_states": {"model-parallel-rng": generator.get_state()},
    }


def objects_of(model: Any, parallel: ParallelConfig, *, replicas: int = 1) -> dict[str, bytes]:
    """Extra states of every layer and expert, random state and rerun state of every rank."""
    out: dict[str, bytes] = {}
    for layer in range(LAYERS):
        is_moe = layer in layer_sets.moe_layers(model) if model.moe.num_experts else False
        at, place = f"decoder.layers.{layer}.", "0_1"
        if layer_sets.is_homogeneous(model):
            at, place = "decoder.layers.", f"{layer}_{LAYERS}"
        out[f"{at}self_attention.linear_qkv._extra_state/shard_{place}"] = item(fp8(layer))
        empty = torch.empty(0, dtype=torch.uint8)
        out[f"{at}self_attention.linear_proj._extra_state/shard_{place}"] = item(empty)
        if not is_moe:
            out[f"{at}mlp.linear_fc1._extra_state/shard_{place}"] = item(fp8(100 + layer))
        for e in range(model.moe.num_experts if is_moe else 0):
            place = f"{layer}.{e}_{LAYERS}.4" if layer_sets.is_homogeneous(model) else f"{e}_4"
            name = f"{at}mlp.experts.experts.linear_fc1._extra_state/shard_{place}"
            out[name] = item(fp8(1000 + 10 * layer + e))
    out["decoder.final_layernorm._extra_state/shard_0_1"] = item(fp8(5))
    for pp in range(parallel.pp):
        for tp in range(parallel.tp):
            states = [random_state(100 * pp + 10 * tp + r) for r in range(replicas)]
            out[f"rng_state/shard_{pp}.{tp}_{parallel.pp}.{parallel.tp}"] = item(states)
    for rank in range(parallel.world_size):
        name = f"rerun_state_machine_state/shard_{rank}_{parallel.world_size}"
        out[name] = item({"rerun_requested": False, "rank": rank})
    return out


def save(
    folder: Path, materialize: Any, parallel: ParallelConfig, *, replicas: int = 1, **more: Any
) -> Any:
    """A training state with all that is not tensors."""
    model = config(**more)
    state = {
        "opt_param_scheduler": {"num_steps": 448},
        "num_floating_point_operations_so_far": 1.5e9,
        "rerun_state_machine": {"mode": "x", "state": 1, "current_iteration": 7},
    }
    objects = objects_of(model, parallel, replicas=replicas)
    write(
        folder,
        model,
        parallel,
        materialize,
        objects=objects,
        beside=BESIDE,
        small_state=state,
    )
    return model


def values(folder: Path) -> dict[str, Any]:
    """All objects of a checkpoint by name, as plain bytes and values."""
    catalogue = open_checkpoint(folder)
    return {n: shown(read_object(catalogue, o)) for n, o in catalogue.objects.items()}


def shown(value: Any) -> str:
    """An inert value as text: what it is made of, and the bytes of its tensors."""
    if isinstance(value, dict):
        return repr({k: shown(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return repr([shown(v) for v in value])
    if hasattr(value, "args") and hasattr(value, "pairs"):
        return f"{value.name}{[shown(a) for a in value.args]}"
    if hasattr(value, "data"):
        return repr(value.data)
    return repr(value)


def extra(found: dict[str, Any]) -> dict[Site | None, Any]:
    """Extra states that hold something, by whose they are."""
    return {
        parse_site(n): v
        for n, v in found.items()
        if "_extra_state" in n and v != "None" and "b''" not in v
    }


@pytest.mark.parametrize("more", [{}, MOE, MIXED], ids=["dense", "experts", "some experts"])
def test_extra_states_follow_their_layers_and_experts(
    more: dict[str, Any], tmp_path: Path, materialize: Any
) -> None:
    save(tmp_path / "a", materialize, ParallelConfig(), **more)
    ep = 4 if more else 1  # as many as there are experts: each rank's own is one module
    reshard(tmp_path / "a", tmp_path / "b", to="torch_dist", tp=2, pp=2, fsync=False)
    reshard(tmp_path / "b", tmp_path / "c", to="megatron", tp=2, pp=2, ep=ep, dp=4, fsync=False)
    reshard(tmp_path / "c", tmp_path / "d", to="torch_dist", tp=1, pp=1, ep=1, fsync=False)
    want = extra(values(tmp_path / "a"))
    assert len(want) >= 9
    assert extra(values(tmp_path / "b")) == want
    assert extra(values(tmp_path / "d")) == want
    rank = torch.load(
        next((tmp_path / "c/iter_0000007").glob("mp_rank_01_001*/model_optim_rng.pt")),
        weights_only=False,
    )
    state = rank["model"]["decoder.layers.1.self_attention.linear_qkv._extra_state"]
    assert pickle.loads(state.numpy().tobytes()) == {"scale": 3}


def scaling(number: int, gemms: int = 1) -> dict[str, Any]:
    """What Transformer Engine pickles of delayed scaling, but for the recipe; no output is used."""
    made = torch.Generator().manual_seed(number)
    out: dict[str, Any] = {}
    for d, kinds in (("fwd", 3), ("bwd", 2)):
        scale, history = (torch.rand(*n, kinds, gemms, generator=made) for n in ((), (4,)))
        scale[-1], history[:, -1] = 1, 0
        out |= {f"scale_{d}": scale.reshape(-1), f"amax_history_{d}": history.reshape(4, -1)}
    return out | {"extra_fp8_variables": {"num_gemms": gemms}}


@pytest.mark.parametrize("release", [1, 2])
def test_experts_in_one_module_have_one_state_together(
    release: int, tmp_path: Path, materialize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(number: int) -> Any:
        if release == 2:
            raw = bytearray(pickle.dumps(scaling(number)))
            return torch.frombuffer(raw, dtype=torch.uint8)
        out = io.BytesIO()
        torch.save(scaling(number), out)
        out.seek(0)
        return out

    def load(value: Any) -> dict[str, Any]:
        held = value.getvalue() if release == 1 else value.numpy().tobytes()
        return torch.load(io.BytesIO(held)) if release == 1 else pickle.loads(held)

    monkeypatch.setattr(sys.modules[__name__], "fp8", state)
    save(tmp_path / "a", materialize, ParallelConfig(), **MOE)
    layout = {"tp": 1, "pp": 1, "ep": 2, "dp": 2}
    report = reshard(tmp_path / "a", tmp_path / "b", to="megatron", fsync=False, **layout)
    assert not [d for d in report.dropped if "experts" in d.name and d.is_lost]
    file = tmp_path / "b/iter_0000007/mp_rank_00_001/model_optim_rng.pt"
    rank = torch.load(file, weights_only=False)
    name = "decoder.layers.2.mlp.experts.linear_fc1._extra_state"
    held = load(rank["model"][name])
    assert held["extra_fp8_variables"] == {"num_gemms": 2}
    for k in range(2):  # Megatron's own rule, TEGroupedLinear._split_extra_state
        one = scaling(1000 + 10 * 2 + 2 + k)
        assert torch.equal(held["scale_fwd"].view(3, -1)[:, k], one["scale_fwd"])
        history = held["amax_history_bwd"].view(4, 2, -1)[:, :, k]
        assert torch.equal(history, one["amax_history_bwd"])
    reshard(tmp_path / "b", tmp_path / "c", to="torch_dist", ep=4, dp=4, fsync=False)
    saved = open_checkpoint(tmp_path / "c")
    for layer, e in product(range(LAYERS), range(4)):
        site = Site(f"decoder.layers.{layer}.mlp.experts.experts.linear_fc1", e)
        found = next(o for n, o in saved.objects.items() if parse_site(n) == site)
        back = decode(read_object(saved, found))
        assert back is not None
        want = scaling(1000 + 10 * layer + e)
        assert all(np.array_equal(t, want[n]) for n, t in back.tensors.items())
        assert back.num_gemms == 1


@pytest.mark.parametrize("to", ["torch_dist", "megatron"])
def test_extra_states_of_some_layers(to: str, tmp_path: Path, materialize: Any) -> None:
    save(tmp_path / "a", materialize, ParallelConfig())
    reshard(tmp_path / "a", tmp_path / "b", to=to, tp=2, fsync=False)
    report = reshard(tmp_path / "b", tmp_path / "c", to="torch_dist", layers="2,0", fsync=False)
    found, before = extra(values(tmp_path / "c")), extra(values(tmp_path / "a"))
    for new, old in enumerate((2, 0)):
        at = ("decoder.layers.{}.self_attention.linear_qkv", "decoder.layers.{}.mlp.linear_fc1")
        for name in at:
            assert found[Site(name.format(new))] == before[Site(name.format(old))]
    assert not [s for s in found if s and (s.layer or 0) > 1]
    if to == "torch_dist":
        assert set(MODELOPT) <= {d.name for d in report.dropped}
        assert not list((tmp_path / "c").rglob("modelopt_state"))


FORCED = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "seq_length",
    "num_attention_heads",
    "num_query_groups",
    "group_query_attention",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "add_position_embedding",
    "use_rotary_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "add_bias_linear",
    "add_qkv_bias",
    "squared_relu",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "apply_layernorm_1p",
    "normalization",
    "apply_query_key_layer_scaling",
    "attention_dropout",
    "hidden_dropout",
    "mtp_num_layers",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_grouped_gemm",
    "moe_shared_expert_intermediate_size",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "padded_vocab_size",
    "ckpt_format",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "expert_model_parallel_size",
]
"""What `load_args_from_checkpoint` of Megatron-LM takes of a decoder."""


def test_args_made_from_hugging_face_are_all_that_megatron_takes(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "out", to="torch_dist", tp=2, pp=2, fsync=False)
    args = open_checkpoint(tmp_path / "out").metadata["args"]
    assert [name for name in FORCED if name not in args] == []
    want = {
        "num_layers": 4,
        "num_query_groups": 2,
        "group_query_attention": True,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": True,
        "padded_vocab_size": 256,
        "ckpt_format": "torch_dist",
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    }
    assert {name: args[name] for name in want} == want
    assert "no_save_rng" not in args  # a release is not asked for it


def test_names_of_extra_states_in_every_spelling() -> None:
    one = Site("decoder.layers.3.mlp.experts.experts.linear_fc1", 2)
    for name in (
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_3.2_4.8",
        "module.decoder.layers.3.mlp.experts.experts.linear_fc1._extra_state/shard_2_8",
        "decoder.layers.3.mlp.experts.experts.2.linear_fc1._extra_state/shard_0_1",
    ):
        assert parse_site(name) == one, name
    plain = Site("decoder.layers.1.mlp.linear_fc2")
    for name in (
        "decoder.layers.mlp.linear_fc2._extra_state/shard_1_4",
        "decoder.layers.1.mlp.linear_fc2._extra_state/shard_0_1",
    ):
        assert parse_site(name) == plain, name
    stacked = StateNaming(4, 8, frozenset())
    assert stacked.name(one).endswith("linear_fc1._extra_state/shard_3.2_4.8")
    assert (
        StateNaming(0, 8, frozenset())
        .name(one)
        .endswith("3.mlp.experts.experts.linear_fc1._extra_state/shard_2_8")
    )
    for odd in ("rng_state/shard_0.0_1.1", "decoder.layers.x._extra_state/shard_4_4"):
        assert parse_site(odd) is None


@pytest.mark.parametrize("to", ["torch_dist", "megatron"])
def test_random_state_stays_where_its_ranks_do(
    to: str, tmp_path: Path, materialize: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a", materialize, ParallelConfig(tp=2, pp=2))
    report = reshard(tmp_path / "a", tmp_path / "b", to=to, fsync=False)
    assert not [d for d in report.dropped if "rng" in d.name]
    assert not caplog.messages
    back = reshard(tmp_path / "b", tmp_path / "c", to="torch_dist", fsync=False)
    assert "rng_state/shard_1.0_2.2" in back.moved["objects"]
    before, after = values(tmp_path / "a"), values(tmp_path / "c")
    assert {n: v for n, v in before.items() if n.startswith("rng")} == {
        n: v for n, v in after.items() if n.startswith("rng")
    }
    lost = reshard(tmp_path / "b", tmp_path / "d", to=to, tp=1, pp=2, fsync=False)
    names = {d.name for d in lost.dropped if "--no-load-rng" in d.reason}
    assert names == {f"rng_state/shard_{p}.{t}_2.2" for p in (0, 1) for t in (0, 1)}
    assert any("--no-load-rng" in m for m in caplog.messages)
    with pytest.raises(CoverageError, match="random state"):
        reshard(tmp_path / "b", tmp_path / "e", to=to, tp=1, strict=True, fsync=False)
    args = open_checkpoint(tmp_path / "d").metadata["args"]
    assert args["no_save_rng"] is True
    assert not open_checkpoint(tmp_path / "c").metadata["args"].get("no_save_rng")


def test_random_state_of_data_parallel_ranks_needs_as_many(
    tmp_path: Path, materialize: Any
) -> None:
    save(tmp_path / "a", materialize, ParallelConfig(dp=2), replicas=2)
    report = reshard(tmp_path / "a", tmp_path / "b", dp=2, fsync=False)
    assert "rng_state/shard_0.0_1.1" in report.moved["objects"]
    report = reshard(tmp_path / "a", tmp_path / "c", dp=1, fsync=False)
    assert (
        "2 data-parallel ranks"
        in {d.name: d.reason for d in report.dropped}["rng_state/shard_0.0_1.1"]
    )


def test_rerun_state_stays_in_its_world(tmp_path: Path, materialize: Any) -> None:
    save(tmp_path / "a", materialize, ParallelConfig(tp=2, dp=2))
    same = reshard(tmp_path / "a", tmp_path / "b", dp=2, fsync=False)
    assert "rerun_state_machine_state/shard_3_4" in same.moved["objects"]
    assert "rerun_state_machine" in open_checkpoint(tmp_path / "b").metadata["common"]
    other = reshard(tmp_path / "a", tmp_path / "c", dp=1, fsync=False)
    assert "rerun_state_machine_state/shard_3_4" in {d.name for d in other.dropped}
    assert "rerun_state_machine" not in open_checkpoint(tmp_path / "c").metadata["common"]


def test_small_state_and_files_travel(tmp_path: Path, materialize: Any) -> None:
    model = save(tmp_path / "a", materialize, ParallelConfig())
    reshard(tmp_path / "a", tmp_path / "b", to="megatron", tp=2, fsync=False)
    legacy = open_checkpoint(tmp_path / "b").metadata
    assert legacy["args"]["ckpt_format"] == "torch"
    assert "content_metadata" not in legacy["common"]
    report = reshard(tmp_path / "b", tmp_path / "c", to="torch_dist", pp=2, tp=1, fsync=False)
    found = open_checkpoint(tmp_path / "c").metadata
    assert found["common"]["opt_param_scheduler"] == {"num_steps": 448}
    assert found["common"]["num_floating_point_operations_so_far"] == 1.5e9
    assert found["iteration"] == 7
    args = Namespace(**found["args"])
    assert (args.ckpt_format, args.dist_ckpt_optim_fully_reshardable) == ("torch_dist", True)
    assert args.padded_vocab_size == -(-model.embedding.vocab_size // 8) * 8
    assert "common state: opt_param_scheduler" in report.moved["objects"]
    weights = reshard(tmp_path / "a", tmp_path / "d", optimizer_format="none", tp=2, fsync=False)
    assert {n: (tmp_path / "d/iter_0000007" / n).read_bytes() for n in BESIDE} == BESIDE
    assert set(BESIDE) <= set(weights.moved["files"])
    assert open_checkpoint(tmp_path / "d").metadata["args"]["no_save_optim"] is True
    hf = reshard(tmp_path / "a", tmp_path / "hf", to="hf", family="llama", fsync=False)
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == b"{}"
    assert {d.name for d in hf.dropped if "modelopt" in d.name} == set(MODELOPT)


TARGETS: list[dict[str, Any]] = [
    {"to": "torch_dist", "tp": 2, "optimizer_format": "dp_reshardable"},
    {"to": "torch_dist", "pp": 2, "tp": 1, "optimizer_format": "none"},
    {"to": "megatron", "tp": 2, "pp": 2},
    {"to": "dcp"},
    {"to": "zarr"},
    {"to": "hf", "family": "llama"},
]


@pytest.mark.parametrize("source", ["torch_dist", "buckets", "legacy"])
def test_everything_is_accounted_for_once(source: str, tmp_path: Path, materialize: Any) -> None:
    save(tmp_path / "a", materialize, ParallelConfig(tp=2))
    at = tmp_path / "a"
    if source != "torch_dist":
        at = tmp_path / source
        how = {"to": "megatron"} if source == "legacy" else {"optimizer_format": "dp_reshardable"}
        reshard(tmp_path / "a", at, fsync=False, **how)
    for number, target in enumerate(TARGETS):
        if target["to"] == "zarr":
            pytest.importorskip("zarr")
        with_state = target.get("optimizer_format") != "none"
        held = open_source(
            at, SourceOptions(family=target.get("family")), optimizer=with_state
        ).catalogue
        report = reshard(at, tmp_path / f"out{number}", dry_run=True, **target)
        stated = [n for lists in (report.moved, report.derived) for k in lists for n in lists[k]]
        stated += [d.name for d in report.dropped]
        assert len(stated) == len(set(stated)), target
        names = {t.name for t in held.tensors} | set(held.objects) | set(held.auxiliary_files)
        names |= {f"common state: {k}" for k in held.metadata["common"]}
        assert set(stated) == names, target
        line = next(x for x in report.lines() if x.startswith("  objects"))
        assert " moved, " in line
        assert " derived, " in line
        data = report.to_json()
        assert sorted(data["moved"]["tensors"]) == sorted(report.moved["tensors"])
        assert {d["kind"] for d in data["dropped"]} <= {"tensors", "objects", "files"}


def test_inspect_folds_padding_and_equal_sizes(tmp_path: Path, materialize: Any) -> None:
    save(tmp_path / "a", materialize, ParallelConfig(tp=2))
    text = list(inspect(tmp_path / "a").lines())
    padding = next(x for x in text if x.startswith("  padding"))
    assert padding.count("word_embeddings") == 1
    assert padding.endswith("and their optimizer state")
    assert "etp" not in next(x for x in text if x.startswith("  layout"))
