"""FP8 states of grouped experts of each release: kept right through ranks, objects and releases."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import derive_amax, fix_amax, inspect_amax
from megtool.errors import CalibrationError, UsageError
from megtool.megatron_state.extra_states.names import Site
from megtool.megatron_state.extra_states.te_state import decode
from megtool.options.layout import ParallelConfig
from tests.support.checkpoints.extra_states import (
    FC1,
    LENGTH,
    MOE,
    assert_state,
    edit_ranks,
    in_columns,
    pack_state,
    rank,
    ranks,
    reshard_copy,
    scale_of,
    scaling,
    states_of,
    unpack_state,
)
from tests.support.checkpoints.trained import config, write

MODULE = "decoder.layers.{}.mlp.experts.experts.linear_fc1"
RANKS = {"to": "megatron", "tp": 1, "optimizer_format": "none"}
NAMES = ("scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd")


def grouped(
    folder: Path, materialize: Any, columns: str, *, ep: int = 2, odd: bool = False
) -> Path:
    """Rank files of four experts over EP, with the states that Transformer Engine has there.

    What is `odd` has something in all columns, as no run leaves it.
    """
    write(folder / "a", config(**MOE), ParallelConfig(), materialize)
    reshard_copy(folder / "a", folder / f"ep{ep}", ep=ep, dp=ep, **RANKS)

    def own(model: dict[str, Any], name: str) -> None:
        for layer in range(4):
            seed = 10 * layer + int(name.split("_")[-1])
            held = scaling(seed, gemms=4 // ep, columns=columns)
            if odd:
                held["amax_history_fwd"][:] = 1
            model[FC1.format(layer)] = pack_state(held)

    edit_ranks(folder / f"ep{ep}", own)
    return folder / f"ep{ep}"


def own_of(layer: int, expert: int) -> dict[str, Any]:
    """The state of one expert, whichever way its rank lays it out."""
    whole = scaling(10 * layer + expert // 2, gemms=2)
    return {n: in_columns(whole[n], 2, "blocked")[..., expert % 2, :] for n in NAMES}


def tensors_of(value: Any) -> Any:
    """Scales and histories in what a release keeps; a recipe in it may need what is not here."""
    if isinstance(value, io.BytesIO):
        return unpack_state(value)
    state = decode(value.numpy().tobytes())
    assert state is not None
    return state.tensors


def assert_ranks(folder: Path, experts: int, columns: str) -> None:
    """Rank files, with `experts` on each rank, hold the state of every expert where TE reads it."""
    for name in ranks(folder):
        ep = int(name.split("_")[-1]) if name.count("_") > 2 else 0
        for layer in range(4):
            found = tensors_of(rank(folder, name)[FC1.format(layer)])
            for k in range(experts):
                mine = {n: in_columns(torch.as_tensor(found[n]), experts, columns)[..., k, :]
                        for n in NAMES}  # fmt: skip
                assert_state(mine, own_of(layer, experts * ep + k))


@pytest.mark.parametrize("columns", ["blocked", "interleaved"])
def test_objects_are_what_megatron_joins_and_splits(
    columns: str, tmp_path: Path, materialize: Any
) -> None:
    ep2 = grouped(tmp_path, materialize, columns)
    report = reshard_copy(ep2, tmp_path / "td", to="torch_dist", ep=2, dp=2)
    assert report.amax is not None
    said = [f.text for f in report.amax.findings if f.kind == "experts"]
    assert bool(said) == (columns == "interleaved")
    assert all("for 2 experts on each rank" in text for text in said)
    objects = states_of(tmp_path / "td")
    for layer, expert in ((0, 0), (1, 1), (3, 2), (3, 3)):
        whole = scaling(10 * layer + expert // 2, gemms=2, columns=columns)
        found = objects[Site(MODULE.format(layer), expert)].tensors
        # `_split_extra_state` in megatron-core, which knows of no other order
        assert_state(found, {"scale_fwd": whole["scale_fwd"].view(3, -1)[:, expert % 2]})
        history = whole["amax_history_bwd"].view(LENGTH, 2, -1)[..., expert % 2]
        assert_state(found, {"amax_history_bwd": history})
    for ep, experts in ((1, 4), (2, 2), (4, 1)):
        reshard_copy(tmp_path / "td", tmp_path / f"r{ep}", ep=ep, dp=ep, **RANKS)
        assert_ranks(tmp_path / f"r{ep}", experts, columns)
    report = reshard_copy(tmp_path / "td", tmp_path / "same", to="torch_dist", ep=2, dp=2)
    assert report.amax is not None
    assert report.amax.rewritten == 0
    assert states_of(tmp_path / "same").keys() == objects.keys()
    reshard_copy(tmp_path / "td", tmp_path / "alone", to="torch_dist", ep=4, dp=4)
    for site, state in states_of(tmp_path / "alone").items():
        assert_state(state.tensors, own_of(site.layer or 0, site.expert or 0))


@pytest.mark.parametrize("columns", ["blocked", "interleaved"])
def test_another_release_has_another_order(columns: str, tmp_path: Path, materialize: Any) -> None:
    ep2 = grouped(tmp_path, materialize, columns)
    for te, order in (("1", "blocked"), ("2.2", "blocked"), ("2.3", "interleaved"),
                      ("2", columns), (2, columns)):  # fmt: skip
        reshard_copy(ep2, tmp_path / f"te{te}", ep=1, te_version=str(te), overwrite=True, **RANKS)
        assert_ranks(tmp_path / f"te{te}", 4, order)
    reshard_copy(tmp_path / "te1", tmp_path / "new", ep=2, dp=2, te_version="2", **RANKS)
    assert_ranks(tmp_path / "new", 2, "interleaved")
    with pytest.raises(UsageError, match=r"--te-version is '3\.1'"):
        reshard_copy(ep2, tmp_path / "no", ep=1, te_version="3.1", **RANKS)


def test_a_state_that_does_not_tell_is_read_as_the_others(tmp_path: Path, materialize: Any) -> None:
    ep2 = grouped(tmp_path, materialize, "interleaved")
    quiet = scaling(0, gemms=2, columns="interleaved")
    for name in NAMES:  # a weight that was never seen: this might be either
        quiet[name][..., [1, 4] if "fwd" in name else [0, 2]] = 0 if "amax" in name else 1

    def put(model: dict[str, Any], name: str) -> None:
        if name.endswith("000"):
            model[FC1.format(2)] = pack_state(quiet)

    edit_ranks(ep2, put)
    reshard_copy(ep2, tmp_path / "ep1", ep=1, **RANKS)
    found = unpack_state(rank(tmp_path / "ep1", "mp_rank_00")[FC1.format(2)])
    assert torch.equal(torch.as_tensor(found["scale_fwd"])[:6], quiet["scale_fwd"])


def test_rank_files_that_do_not_tell_are_refused_or_reported(
    tmp_path: Path, materialize: Any
) -> None:
    source = grouped(tmp_path, materialize, "interleaved", odd=True)
    report = reshard_copy(source, tmp_path / "out", ep=1, **RANKS)
    assert report.amax is not None
    assert {f.kind for f in report.amax.findings} == {"columns"}
    assert [d for d in report.dropped if d.is_lost and "extra_state" in d.name]
    assert_refused(source, tmp_path)


def test_objects_that_do_not_tell_are_refused_or_reported(tmp_path: Path, materialize: Any) -> None:
    ranks_of_one = grouped(tmp_path, materialize, "blocked", ep=4, odd=True)
    reshard_copy(ranks_of_one, tmp_path / "alone", to="torch_dist", ep=4, dp=4)
    alone = inspect_amax(tmp_path / "alone", weights=False)
    assert alone.joint_findings == ()  # one expert on a rank: no doubt whose numbers they are
    report = reshard_copy(tmp_path / "alone", tmp_path / "td", to="torch_dist", ep=2, dp=2)
    assert report.amax is not None
    assert {f.kind for f in report.amax.findings} == {"experts", "assumed"}
    report = reshard_copy(tmp_path / "td", tmp_path / "out", ep=4, dp=4, **RANKS)
    assert report.amax is not None
    assert {f.kind for f in report.amax.findings} == {"columns"}
    for name in ranks(tmp_path / "out"):  # a state that is not known is not changed
        found = unpack_state(rank(tmp_path / "out", name)[FC1.format(0)])
        assert torch.as_tensor(found["amax_history_fwd"]).min() == 1
    assert_refused(tmp_path / "td", tmp_path)


def assert_refused(source: Path, folder: Path) -> None:
    """What works with the numbers of single experts refuses, and inspect says why."""
    found = inspect_amax(source, weights=False)
    assert found.exit_status == 7
    assert {f.kind for f in found.joint_findings} == {"columns"}
    assert "refuses" in "\n".join(found.lines())
    with pytest.raises(CalibrationError, match="cannot be assigned"):
        derive_amax(source, folder / "cal")
    with pytest.raises(CalibrationError, match="cannot be assigned"):
        fix_amax(source, folder / "fixed", fsync=False)
    assert not (folder / "cal").exists()
    assert not (folder / "fixed").exists()


@pytest.mark.parametrize("columns", ["blocked", "interleaved"])
@pytest.mark.parametrize("form", ["megatron", "torch_dist"])
def test_what_is_sound_is_left_and_what_is_stale_is_mended(
    form: str, columns: str, tmp_path: Path, materialize: Any
) -> None:
    """The states fit the weights of their experts: only one that was spoiled is made anew."""
    ep2 = grouped(tmp_path, materialize, columns)

    def own(spoilt: bool) -> Any:
        def put(model: dict[str, Any], name: str) -> None:
            for layer in range(4):
                for fc in ("linear_fc1", "linear_fc2"):
                    key = FC1.format(layer).replace("linear_fc1", fc)
                    tops = [float(model[key.replace("_extra_state", f"weight{k}")].abs().max())
                            for k in range(2)]  # fmt: skip
                    if spoilt and (layer, fc, name[-3:]) == (2, "linear_fc2", "001"):
                        tops[1] /= 50
                    model[key] = pack_state(of_weights(tops, columns))

        return put

    edit_ranks(ep2, own(False))
    source = ep2
    if form == "torch_dist":
        source = tmp_path / "td"
        reshard_copy(ep2, source, to="torch_dist", ep=2, dp=2)
    found = inspect_amax(source)
    assert (found.exit_status, found.findings, found.joint_findings) == (0, [], ())
    fixed = fix_amax(source, tmp_path / "same", fsync=False)
    assert fixed.amax is not None
    assert (fixed.amax.rebuilt, fixed.amax.rewritten) == (0, 0)
    edit_ranks(ep2, own(True))
    if form == "torch_dist":
        reshard_copy(ep2, source, to="torch_dist", ep=2, dp=2, overwrite=True)
    found = inspect_amax(source)
    stale = Site(MODULE.format(2).replace("fc1", "fc2"), 3)
    assert {(line.module, line.expert) for line, _ in found.findings} == {
        (stale.module, stale.expert)
    }
    fixed = fix_amax(source, tmp_path / "fixed", fsync=False)
    assert fixed.amax is not None
    assert fixed.amax.rebuilt == 1
    assert inspect_amax(tmp_path / "fixed").exit_status == 0
    reshard_copy(tmp_path / "fixed", tmp_path / "ranks", ep=2, dp=2, overwrite=True, **RANKS)
    for name in ranks(tmp_path / "ranks"):
        model = rank(tmp_path / "ranks", name)
        held = tensors_of(model[FC1.format(2).replace("fc1", "fc2")])
        for k in range(2):
            top = model[f"decoder.layers.2.mlp.experts.linear_fc2.weight{k}"].abs().max()
            mine = in_columns(torch.as_tensor(held["amax_history_fwd"]), 2, columns)[:, k, 1]
            assert mine.max() == top


def of_weights(tops: list[float], columns: str) -> dict[str, Any]:
    """A state of products whose weights reach `tops`."""
    out = scaling(3, gemms=len(tops), columns=columns)
    history = in_columns(out["amax_history_fwd"], len(tops), columns)
    history[1:, :, 1] = torch.tensor(tops)
    out["scale_fwd"] = scale_of(out["amax_history_fwd"], 448.0)
    return out
