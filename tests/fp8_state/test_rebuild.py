"""FP8 scaling that weights contradict: found by `amax inspect`, rebuilt by `fix` and `reshard`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import fix_amax, inspect_amax, reshard, strip_amax, verify
from megtool.cli.app import main
from megtool.errors import FormatError, UsageError
from megtool.formats import open_checkpoint
from megtool.fp8_state.checks import check_state
from megtool.fp8_state.rebuild import rebuild_state
from megtool.megatron_state.extra_states.names import Site
from megtool.megatron_state.extra_states.te_state import (
    ExtraState,
    make_delayed_recipe,
    replace_tensors,
)
from megtool.number_formats.delayed_scaling import ScalingRule
from megtool.options.layout import ParallelConfig
from tests.support import folders
from tests.support.checkpoints.extra_states import Hostile, pack_state, states_of
from tests.support.checkpoints.fp8_trained import amax_of, edit_ranks, rank_files, sites, state
from tests.support.checkpoints.trained import config, write

FC1, FC2 = (f"decoder.layers.{{}}.mlp.linear_fc{n}" for n in (1, 2))
BEGIN = 0.02 * 4.5
"""The amax of a normal weight of standard deviation 0.02, as training begins."""


def spoil(model: dict[str, Any], _: str) -> None:
    """States as bugs leave them: of the first random weight, of none, with what is no number."""
    small, large = FC1.format(1), FC1.format(2)
    model[f"{small}._extra_state"] = pack_state(state(1.5, BEGIN))
    model[f"{large}._extra_state"] = pack_state(state(1.5, 40.0))
    key = FC2.format(2)
    odd = state(1.5, amax_of(model, key))
    odd["scale_fwd"][0] = 1
    odd["amax_history_bwd"][3, 0] = float("nan")
    model[f"{key}._extra_state"] = pack_state(odd)
    none = state(1.5, amax_of(model, FC2.format(3)))
    none["amax_history_fwd"][:, 1], none["scale_fwd"][1] = 0, 1
    model[f"{FC2.format(3)}._extra_state"] = pack_state(none)


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    return rank_files(tmp_path)


def kinds(source: Path) -> dict[str, set[str]]:
    """What is wrong, by module."""
    out: dict[str, set[str]] = {}
    for line, found in inspect_amax(source).findings:
        out.setdefault(line.module, set()).add(found.kind)
    return out


def differing(a: Path, b: Path) -> dict[str, str]:
    """The part that `verify` finds another, by the module: of two checkpoints alike in the rest."""
    report = verify(a, b)
    verdicts = {p.part: p.verdict for p in report.parts}
    assert (verdicts["tensors"], verdicts["configuration"]) == ("equal", "equal")
    return {d.tensor.removesuffix("._extra_state"): d.part for d in report.differences}


def states_by_site(folder: Path) -> dict[Site, ExtraState]:
    return states_of(folder)


def test_what_holds_together_is_left_alone(ranks: Path, tmp_path: Path) -> None:
    report = inspect_amax(ranks)
    assert (report.exit_status, report.findings) == (0, [])
    assert len(report.modules) == len(sites())
    line = report.modules[0]
    assert (line.release, line.steps) == (2, 8)
    assert line.amax["weight"] == line.weight
    assert line.scale["weight"] == pytest.approx(448 / line.amax["weight"])
    assert line.scale["input"] == line.implied["input"]
    assert line.implied["output"] is None
    assert json.loads(json.dumps(report.to_json()))["wrong"] == 0
    assert "nothing is wrong" in "\n".join(report.lines())
    fixed = fix_amax(ranks, tmp_path / "fixed", fsync=False)
    assert fixed.amax is not None
    assert (fixed.amax.rebuilt, fixed.amax.rewritten) == (0, 0)


def test_stale_scaling_is_found_and_rebuilt(ranks: Path, tmp_path: Path) -> None:
    edit_ranks(ranks, spoil)
    assert inspect_amax(ranks).exit_status == 7
    assert kinds(ranks) == {
        FC1.format(1): {"uncovered"},
        FC1.format(2): {"stale"},
        FC2.format(2): {"nan", "scale"},
        FC2.format(3): {"zeros"},
    }
    before = folders.file_states(ranks)
    report = fix_amax(ranks, tmp_path / "fixed", fsync=False)
    assert folders.file_states(ranks) == before
    assert report.amax is not None
    assert report.amax.rebuilt == 4
    assert report.target_format == "megatron"
    again = inspect_amax(tmp_path / "fixed")
    assert (again.exit_status, again.findings) == (0, [])
    assert differing(ranks, tmp_path / "fixed") == {m: "training state" for m in kinds(ranks)}
    for line in again.modules:
        if line.module in (FC1.format(1), FC1.format(2), FC2.format(3)):
            assert line.amax["weight"] == line.weight
            assert line.scale["weight"] == np.float32(448) / np.float32(line.weight)
        if line.module == FC1.format(1):  # nothing else of it changed
            assert line.amax["input"] == np.float32(1.5)


def test_rebuild_in_reshard_equals_fix(ranks: Path, tmp_path: Path) -> None:
    edit_ranks(ranks, spoil)
    fix_amax(ranks, tmp_path / "fixed", fsync=False)
    reshard(tmp_path / "fixed", tmp_path / "a", to="torch_dist", tp=2, pp=2, fsync=False)
    options: dict[str, Any] = dict(to="torch_dist", tp=2, pp=2, amax="rebuild", fsync=False)
    report = reshard(ranks, tmp_path / "b", **options)
    assert report.amax is not None
    assert report.amax.rebuilt == 4
    a, b = (states_by_site(tmp_path / n) for n in "ab")
    assert a.keys() == b.keys() == set(sites())
    for site, held in a.items():
        for name, array in held.tensors.items():
            assert np.array_equal(array, b[site].tensors[name]), (site, name)
    # And the fix of objects in torch_dist is the same again.
    reshard(ranks, tmp_path / "c", to="torch_dist", tp=2, pp=2, fsync=False)
    fix_amax(tmp_path / "c", tmp_path / "d", fsync=False)
    d = states_by_site(tmp_path / "d")
    assert all(np.array_equal(d[s].tensors["scale_fwd"], a[s].tensors["scale_fwd"]) for s in a)
    assert (
        open_checkpoint(tmp_path / "d").objects.keys()
        == open_checkpoint(tmp_path / "c").objects.keys()
    )


@pytest.mark.parametrize(
    "kind", ["fully_reshardable", pytest.param("dp_reshardable", marks=pytest.mark.slow)]
)
def test_optimizer_state_stays_as_it_is(kind: str, tmp_path: Path, materialize: Any) -> None:
    write(tmp_path / "a", config(), ParallelConfig(), materialize)
    reshard(tmp_path / "a", tmp_path / "ranks", to="megatron", fsync=False)
    spoiled = pack_state(state(1.5, BEGIN))
    edit_ranks(
        tmp_path / "ranks", lambda m, _: m.update({f"{FC1.format(1)}._extra_state": spoiled})
    )
    options: dict[str, Any] = dict(to="torch_dist", tp=2, dp=2, optimizer_format=kind, fsync=False)
    reshard(tmp_path / "ranks", tmp_path / "td", **options)
    report = fix_amax(tmp_path / "td", tmp_path / "fixed", fsync=False)
    assert report.amax is not None
    assert report.amax.rebuilt == 1
    assert report.layout["tp"] == 2
    before, after = (open_checkpoint(tmp_path / n) for n in ("td", "fixed"))
    assert {t.name: t.shape for t in before.tensors} == {t.name: t.shape for t in after.tensors}
    assert before.objects.keys() == after.objects.keys()
    assert differing(tmp_path / "td", tmp_path / "fixed") == {FC1.format(1): "training state"}


def test_a_change_of_dtype_in_release_1_is_corrected(tmp_path: Path) -> None:
    ranks = rank_files(tmp_path, release=1)

    def copied_in_place(model: dict[str, Any], _: str) -> None:
        held = state(1.5, amax_of(model, FC1.format(0)))
        held["amax_history_fwd"][0, 1] = 448.0
        model[f"{FC1.format(0)}._extra_state"] = pack_state(held, 1)
        held = state(1.5, amax_of(model, FC1.format(1)))
        held["amax_history_fwd"][0, 1] = amax_of(model, FC1.format(1))  # as it should be
        model[f"{FC1.format(1)}._extra_state"] = pack_state(held, 1)

    edit_ranks(ranks, copied_in_place)
    assert kinds(ranks)[FC1.format(0)] >= {"pending"}
    assert FC1.format(1) not in kinds(ranks)
    fix_amax(ranks, tmp_path / "fixed", fsync=False)
    assert inspect_amax(tmp_path / "fixed").findings == []
    reshard(tmp_path / "fixed", tmp_path / "td", to="torch_dist", fsync=False)
    fixed = states_by_site(tmp_path / "td")[Site(FC1.format(0))]
    line = next(n for n in inspect_amax(tmp_path / "td").modules if n.module == FC1.format(0))
    assert fixed.release == 1
    assert line.weight is not None
    assert fixed.tensors["amax_history_fwd"][0, 1] == line.weight
    assert math.isclose(fixed.tensors["scale_inv_fwd"][1], line.weight / 448, rel_tol=1e-6)


def test_a_maximum_that_left_the_history_is_no_fault(ranks: Path) -> None:
    def behind(model: dict[str, Any], _: str) -> None:
        held = state(1.5, amax_of(model, FC1.format(0)))
        held["scale_fwd"][0] /= 1.5
        model[f"{FC1.format(0)}._extra_state"] = pack_state(held)

    edit_ranks(ranks, behind)
    report = inspect_amax(ranks)
    assert kinds(ranks) == {FC1.format(0): {"lag"}}
    assert report.exit_status == 0


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scales_follow_the_recipe(algorithm: str) -> None:
    """The step under way is in no scale yet; margins and algorithms are the recipe's."""
    history = np.array([[0, 0, 0], [4, 2, 0], [8, 1, 0], [2, 2, 0]], np.float32)
    tops = [8, 2] if algorithm == "max" else [2, 2]
    scale = np.array([448 / t / 4 for t in tops] + [1], np.float32)
    rule = ScalingRule(margin=2, algorithm=algorithm)
    held = ExtraState(
        tensors={"amax_history_fwd": history, "scale_fwd": scale},
        facts={"recipe": make_delayed_recipe(rule, 4)},
        release=2,
    )
    assert check_state("decoder.final._extra_state/shard_0_1", held, 2.0) == []
    assert rebuild_state(held, 2.0) == (None, [])
    history = history.copy()
    history[0] = 16, 2, 0
    under_way = replace_tensors(held, {**held.tensors, "amax_history_fwd": history})
    assert check_state("x", under_way, 2.0) == []
    over = replace_tensors(held, {**held.tensors, "scale_fwd": scale * np.float32(1.5)})
    assert {f.kind for f in check_state("x", over, 2.0)} == {"scale"}
    new, said = rebuild_state(over, 2.0)
    assert new is not None
    assert new.tensors["scale_fwd"].tolist() == [*scale[:2].tolist(), 1.5]
    assert [kind for kind, _ in said] == ["scale"]


def test_the_command_line(ranks: Path, tmp_path: Path, capsys: Any) -> None:
    edit_ranks(ranks, spoil)
    assert main(["amax", "inspect", str(ranks), "--json", "-q"]) == 7
    assert json.loads(capsys.readouterr().out)["wrong"] == 5
    assert main(["amax", "fix", str(ranks), str(tmp_path / "fixed"), "-q"]) == 0
    assert "rebuilt" in capsys.readouterr().out
    assert main(["amax", "inspect", str(tmp_path / "fixed"), "--no-weights"]) == 0
    assert main(["amax", "derive", str(tmp_path / "fixed"), str(tmp_path / "cal"), "-q"]) == 0
    assert "without data" in capsys.readouterr().out
    assert main(["amax", "strip", str(ranks), str(tmp_path / "lean"), "-n", "-q"]) == 0
    assert not (tmp_path / "lean").exists()


def test_strip_leaves_out_what_holds_nothing(ranks: Path, tmp_path: Path) -> None:
    odd = "decoder.layers.0.mlp.activation._extra_state"
    edit_ranks(ranks, lambda m, _: m.update({odd: pack_state(None)}))
    reshard(ranks, tmp_path / "td", to="torch_dist", fsync=False)
    assert inspect_amax(tmp_path / "td").empty
    report = strip_amax(tmp_path / "td", tmp_path / "lean", fsync=False)
    assert report.amax is not None
    assert (report.amax.stripped, report.amax.modules) == (1, len(sites()))
    assert not [n for n in open_checkpoint(tmp_path / "lean").objects if "activation" in n]
    assert states_by_site(tmp_path / "lean").keys() == set(sites())


def test_refusals(ranks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no FP8 scaling state"):
        fix_amax(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(UsageError, match="has no extra states"):
        strip_amax(tmp_path / "hf", tmp_path / "out")
    value = torch.tensor(list(__import__("pickle").dumps({"scale_fwd": Hostile()})))
    edit_ranks(ranks, lambda m, _: m.update({f"{FC1.format(0)}._extra_state": value.byte()}))
    for act in (lambda: inspect_amax(ranks), lambda: fix_amax(ranks, tmp_path / "out")):
        with pytest.raises(FormatError, match="hostile"):
            act()
    assert not (tmp_path / "out").exists()


def test_what_fix_leaves_is_said(ranks: Path, tmp_path: Path) -> None:
    """Weights say what their scales have to be; of inputs that saw nothing, nothing does."""

    def put(model: dict[str, Any], _: str) -> None:
        held = state(1.5, amax_of(model, FC1.format(1)))
        held["amax_history_fwd"][:, 0], held["scale_fwd"][0] = 0, 1
        model[f"{FC1.format(1)}._extra_state"] = pack_state(held)
        model[f"{FC2.format(1)}._extra_state"] = pack_state(state(1.5, BEGIN))

    edit_ranks(ranks, put)
    text = "\n".join(inspect_amax(ranks).lines())
    assert "2 things are wrong" in text
    assert "`megtool amax fix` rebuilds what follows from weights and histories: 1 of" in text
    assert "1 cannot (zeros)" in text
    fix_amax(ranks, tmp_path / "fixed", fsync=False)
    again = inspect_amax(tmp_path / "fixed")
    assert again.exit_status == 7
    text = "\n".join(again.lines())
    assert "puts right" not in text
    assert "1 cannot (zeros)" in text


@pytest.mark.parametrize(
    ("times", "kind", "status"), [(1.5, None, 0), (6.0, "loose", 0), (9.0, "stale", 7)]
)
def test_a_scale_made_for_more_is_said_and_for_much_more_is_stale(
    times: float, kind: str | None, status: int, ranks: Path, tmp_path: Path
) -> None:
    def put(model: dict[str, Any], _: str) -> None:
        held = state(1.5, times * amax_of(model, FC1.format(1)))
        model[f"{FC1.format(1)}._extra_state"] = pack_state(held)

    edit_ranks(ranks, put)
    found = inspect_amax(ranks)
    assert found.exit_status == status
    assert kinds(ranks) == ({FC1.format(1): {kind}} if kind else {})
    fixed = fix_amax(ranks, tmp_path / "fixed", fsync=False)
    assert fixed.amax is not None
    assert fixed.amax.rebuilt == (status == 7)
