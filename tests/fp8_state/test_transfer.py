"""FP8 scaling state through a reshard: merged over ranks, split and joined over experts."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import inspect_amax
from megtool.errors import FormatError, UsageError
from megtool.formats import open_checkpoint
from megtool.megatron_state.extra_states.names import Site
from megtool.options.layout import ParallelConfig
from tests.support.checkpoints.extra_states import (
    FC1,
    ITERATION,
    LENGTH,
    MOE,
    Hostile,
    assert_state,
    edit_ranks,
    in_columns,
    largest,
    pack_state,
    rank,
    ranks,
    reshard_copy,
    scaling,
    states_of,
    unpack_state,
)
from tests.support.checkpoints.trained import config, write

QKV = "decoder.layers.{}.self_attention.linear_qkv._extra_state"


@pytest.fixture
def per_rank(tmp_path: Path, materialize: Any) -> Path:
    """Rank files at TP4 PP2, each tensor rank with FP8 states of its own."""
    write(tmp_path / "a", config(), ParallelConfig(), materialize)
    reshard_copy(
        tmp_path / "a", tmp_path / "tp4", to="megatron", tp=4, pp=2, optimizer_format="none"
    )

    def own(model: dict[str, Any], name: str) -> None:
        tp, pp = map(int, name.split("_")[2:4])
        for layer in range(2):
            model[QKV.format(layer)] = pack_state(scaling(100 * (2 * pp + layer) + tp))

    edit_ranks(tmp_path / "tp4", own)
    return tmp_path / "tp4"


def test_ranks_end_where_they_began_under_max(per_rank: Path, tmp_path: Path) -> None:
    report = reshard_copy(per_rank, tmp_path / "tp2", to="megatron", tp=2, pp=4)
    assert report.amax is not None
    assert (report.amax.modules, report.amax.ranks, report.amax.differing) == (4, 4, 4)
    assert (report.amax.release, report.amax.history) == (2, LENGTH)
    assert report.amax.findings == ()
    assert "merged by max over 4 ranks, which differ in 4" in "\n".join(report.lines())
    assert json.loads(json.dumps(report.to_json()))["amax"]["merged"] == 4
    again = reshard_copy(tmp_path / "tp2", tmp_path / "back", to="megatron", tp=4, pp=2)
    assert again.amax is not None
    assert (again.amax.ranks, again.amax.differing, again.amax.rewritten) == (2, 0, 0)
    for name in ranks(tmp_path / "back"):
        pp = int(name.split("_")[3])
        model = rank(tmp_path / "back", name)
        for layer in range(2):
            one = [scaling(100 * (2 * pp + layer) + tp) for tp in range(4)]
            assert_state(unpack_state(model[QKV.format(layer)]), largest(one))
        fc1 = model["decoder.layers.0.mlp.linear_fc1._extra_state"]
        assert fc1.numel() == 0  # None is what releases 2.0 to 2.7 cannot read


def test_virtual_stages_stacked_keys_and_back(per_rank: Path, tmp_path: Path) -> None:
    reshard_copy(per_rank, tmp_path / "objects", to="torch_dist", tp=1, pp=1)
    found = states_of(tmp_path / "objects")
    assert len(found) == 4
    report = reshard_copy(tmp_path / "objects", tmp_path / "more", to="torch_dist", tp=2, pp=2)
    assert report.amax is not None
    assert (report.amax.modules, report.amax.ranks, report.amax.rewritten) == (4, 1, 0)
    reshard_copy(tmp_path / "more", tmp_path / "vpp", to="megatron", tp=1, pp=2, vpp=2)
    file = tmp_path / "vpp" / ITERATION / "mp_rank_00_001/model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    for chunk, layer in (("model0", 1), ("model1", 3)):
        want = largest([scaling(100 * layer + tp) for tp in range(4)])
        assert_state(unpack_state(tree[chunk][QKV.format(0)]), want)
        assert_state(found[Site(QKV.format(layer).removesuffix("._extra_state"))].tensors, want)


@pytest.mark.parametrize(
    ("release", "columns"), [(1, "blocked"), (2, "blocked"), (2, "interleaved")]
)
def test_experts_apart_and_together(
    release: int, columns: str, tmp_path: Path, materialize: Any
) -> None:
    write(tmp_path / "a", config(**MOE), ParallelConfig(), materialize)
    layout = {"to": "megatron", "tp": 1, "optimizer_format": "none"}
    reshard_copy(tmp_path / "a", tmp_path / "ep2", ep=2, dp=2, **layout)
    held: dict[tuple[int, int], dict[str, Any]] = {}

    def own(model: dict[str, Any], name: str) -> None:
        ep = int(name.split("_")[-1])
        for layer in range(4):
            seed = 10 * layer + ep
            held[layer, ep] = scaling(seed, gemms=2, columns=columns)
            model[FC1.format(layer)] = pack_state(held[layer, ep], release)
            model[FC1.format(layer).replace("fc1", "fc2")] = pack_state(None, release)

    edit_ranks(tmp_path / "ep2", own)
    report = reshard_copy(tmp_path / "ep2", tmp_path / "ep1", ep=1, dp=1, **layout)
    assert report.amax is not None
    assert (report.amax.modules, report.amax.release) == (16, release)
    assert not [d for d in report.dropped if d.is_lost and "extra_state" in d.name]
    all_four = unpack_state(rank(tmp_path / "ep1", "mp_rank_00")[FC1.format(3)])
    assert all_four["extra_fp8_variables"]["num_gemms"] == 4
    for ep in range(2):
        for name in ("amax_history_fwd", "amax_history_bwd", "scale_fwd", "scale_bwd"):
            part = in_columns(all_four[name], 4, columns)[..., 2 * ep : 2 * ep + 2, :]
            assert torch.equal(part, in_columns(held[3, ep][name], 2, columns))
    reshard_copy(tmp_path / "ep1", tmp_path / "back", ep=2, dp=2, **layout)
    for name in ranks(tmp_path / "back"):
        ep = int(name.split("_")[-1])
        for layer in range(4):
            found = unpack_state(rank(tmp_path / "back", name)[FC1.format(layer)])
            assert_state(found, held[layer, ep])
            assert ("scale_inv_fwd" in found) == (release == 1)


def test_a_recipe_without_state_of_grouped_experts_travels(
    tmp_path: Path, materialize: Any
) -> None:
    write(tmp_path / "a", config(**MOE), ParallelConfig(), materialize)
    layout = {"to": "megatron", "tp": 1, "optimizer_format": "none"}
    reshard_copy(tmp_path / "a", tmp_path / "ep2", ep=2, dp=2, **layout)
    flat = {"recipe": None, "extra_fp8_variables": {"num_gemms": 2, "fp8_checkpoint": True}}
    edit_ranks(tmp_path / "ep2", lambda m, _: m.update({FC1.format(1): pack_state(flat)}))
    report = reshard_copy(tmp_path / "ep2", tmp_path / "ep1", ep=1, dp=1, **layout)
    assert report.amax is not None
    assert (report.amax.modules, report.amax.stateless) == (0, 4)
    assert not [d for d in report.dropped if d.is_lost and "extra_state" in d.name]
    found = unpack_state(rank(tmp_path / "ep1", "mp_rank_00")[FC1.format(1)])
    assert found["extra_fp8_variables"] == {"num_gemms": 4, "fp8_checkpoint": True}


def test_states_numbered_by_expert(tmp_path: Path, materialize: Any) -> None:
    write(tmp_path / "a", config(**MOE), ParallelConfig(), materialize)
    layout = {"to": "megatron", "tp": 1, "optimizer_format": "none"}
    reshard_copy(tmp_path / "a", tmp_path / "ep2", ep=2, dp=2, **layout)

    def own(model: dict[str, Any], name: str) -> None:
        ep = int(name.split("_")[-1])
        model[FC1.format(0)] = pack_state(scaling(10 * ep))
        if ep == 0:  # the other rank's second expert has none
            model[FC1.format(0) + "1"] = pack_state(scaling(1))
        else:
            model[FC1.format(0) + "1"] = pack_state(None)

    edit_ranks(tmp_path / "ep2", own)
    report = reshard_copy(tmp_path / "ep2", tmp_path / "ep1", ep=1, dp=1, **layout)
    assert report.amax is not None
    assert [f.kind for f in report.amax.findings] == ["missing"]
    found = unpack_state(rank(tmp_path / "ep1", "mp_rank_00")[FC1.format(0)])
    scales = found["scale_fwd"].view(3, 4)
    for k, seed in ((0, 0), (1, 1), (2, 10)):
        assert torch.equal(scales[:, k], scaling(seed)["scale_fwd"])
    assert scales[:, 3].tolist() == [1, 1, 1]


def test_another_release_and_another_length(per_rank: Path, tmp_path: Path) -> None:
    want = largest([scaling(tp) for tp in range(4)])
    report = reshard_copy(
        per_rank, tmp_path / "one", to="megatron", tp=1, pp=1, te_version="1", amax_history=9
    )
    assert report.amax is not None
    assert (report.amax.source_release, report.amax.release) == (2, 1)
    assert (report.amax.source_history, report.amax.history) == (LENGTH, 9)
    found = rank(tmp_path / "one", "mp_rank_00")
    assert isinstance(found[QKV.format(0)], io.BytesIO)
    old = unpack_state(found[QKV.format(0)])
    assert "recipe" not in old
    assert torch.equal(old["scale_fwd"], want["scale_fwd"])
    assert torch.equal(old["scale_inv_fwd"], 1 / want["scale_fwd"])
    assert torch.equal(old["amax_history_bwd"][-3:], want["amax_history_bwd"][-3:])
    assert found["decoder.layers.0.mlp.linear_fc1._extra_state"] is None
    reshard_copy(
        tmp_path / "one", tmp_path / "two", to="torch_dist", te_version="2", amax_history=LENGTH
    )
    new = states_of(tmp_path / "two")[Site(QKV.format(0).removesuffix("._extra_state"))]
    assert (new.release, new.recipe["amax_history_len"]) == (2, LENGTH)
    assert_state(new.tensors, want)


def test_what_is_wrong_is_found_and_reported(per_rank: Path, tmp_path: Path) -> None:
    def spoil(model: dict[str, Any], name: str) -> None:
        state = scaling(3)
        state["amax_history_fwd"][:, 1] = 0
        state["amax_history_bwd"][2, 0] = float("nan")
        state["amax_history_fwd"][3, 0] = float("inf")
        model[QKV.format(1)] = pack_state(state)

    edit_ranks(per_rank, spoil)
    report = reshard_copy(per_rank, tmp_path / "out", to="torch_dist", tp=1, pp=1)
    assert report.amax is not None
    assert {f.kind for f in report.amax.findings} == {"zeros", "nan", "inf"}
    assert {f.module for f in report.amax.findings} == {
        f"decoder.layers.{n}.self_attention.linear_qkv" for n in (1, 3)
    }
    text = "\n".join(report.lines())
    assert "only zeros in the history of the weight" in text
    assert "NaN in the history of the gradient of the output" in text


@pytest.mark.parametrize(
    ("spoil", "kind", "text"),
    [
        (lambda s: s["amax_history_fwd"][3, 0].fill_(float("nan")), "nan", "NaN in the history"),
        (lambda s: s["scale_fwd"][1].fill_(float("nan")), "nan", "NaN in the scale of the weight"),
        (lambda s: s["amax_history_bwd"][2, 0].fill_(-5), "negative", "negative numbers"),
        (lambda s: s["amax_history_fwd"][:, 0].fill_(0), "zeros", "only zeros"),
        (lambda s: s.update(amax_history_fwd=s["amax_history_fwd"][:, :2]), "shape", "do not fit"),
        (lambda s: s.clear(), "missing", "some ranks have no state"),
        (None, "missing", "some ranks have no state"),
    ],
)
@pytest.mark.parametrize("tensor_rank", [0, 2])
def test_what_is_wrong_on_one_rank_is_found(
    spoil: Any, kind: str, text: str, tensor_rank: int, per_rank: Path, tmp_path: Path
) -> None:
    """Merging takes NaN, negative numbers and zeros of one rank away, and must not be silent."""

    def put(model: dict[str, Any], name: str) -> None:
        if name == f"mp_rank_{tensor_rank:02}_000":
            state = scaling(5)
            if spoil is not None:
                spoil(state)
            key = QKV.format(1)
            model[key] = None if spoil is None else pack_state(state or None)

    edit_ranks(per_rank, put)
    report = reshard_copy(per_rank, tmp_path / "out", to="torch_dist", tp=1, pp=1)
    assert report.amax is not None
    module = QKV.format(1).removesuffix("._extra_state")
    assert {(f.module, f.kind) for f in report.amax.findings} == {(module, kind)}
    assert text in report.amax.findings[0].text
    found = inspect_amax(per_rank, weights=False)
    assert found.exit_status == 7
    assert [f.kind for f in found.joint_findings] == [f.kind for f in report.amax.findings]
    assert any(line.startswith(f"{kind}: {module}: ") for line in found.lines())
    assert found.to_json()["wrong"] == len(found.joint_findings)
    assert inspect_amax(tmp_path / "out", weights=False).exit_status == 0


def test_what_holds_nothing_is_left_out_where_megatron_loads_without(
    per_rank: Path, tmp_path: Path
) -> None:
    odd = "decoder.layers.0.mlp.activation._extra_state"
    edit_ranks(per_rank, lambda m, _: m.update({odd: pack_state(None)}))
    kept = reshard_copy(per_rank, tmp_path / "kept", to="torch_dist", tp=1, pp=1)
    report = reshard_copy(per_rank, tmp_path / "out", to="torch_dist", tp=1, pp=1, amax="strip")
    assert kept.amax is not None
    assert report.amax is not None
    assert (kept.amax.stripped, report.amax.stripped) == (0, 2)
    assert report.amax.modules == 4
    assert not [n for n in open_checkpoint(tmp_path / "out").objects if "activation" in n]
    assert states_of(tmp_path / "out").keys() == states_of(tmp_path / "kept").keys()


def test_hostile_states_end_the_reshard(per_rank: Path, tmp_path: Path) -> None:
    value = torch.tensor(list(pickle.dumps({"scale_fwd": Hostile()})), dtype=torch.uint8)
    edit_ranks(per_rank, lambda m, _: m.update({QKV.format(0): value}))
    with pytest.raises(FormatError, match="hostile"):
        reshard_copy(per_rank, tmp_path / "out", to="torch_dist", tp=1, pp=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"amax": "drop"}, "amax is 'drop'"),
        ({"te_version": "3"}, "--te-version is '3'"),
        ({"amax_history": 0}, "--amax-history is 0"),
        ({"to": "safetensors", "te_version": "2"}, "has no effect with --to safetensors"),
    ],
)
def test_wishes_that_make_no_sense(
    more: dict[str, Any], match: str, tmp_path: Path, materialize: Any
) -> None:
    write(tmp_path / "a", config(), ParallelConfig(), materialize)
    with pytest.raises(UsageError, match=match):
        reshard_copy(tmp_path / "a", tmp_path / "b", **more)
