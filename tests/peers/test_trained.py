"""Optimizer state that real megatron-core trained and saved, resharded, and loaded by it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard, verify
from megtool.errors import FormatError
from tests.support.peers.run_trained import read_with_torch, run_world

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]


def assert_same(folder: Path, truth: Path) -> None:
    """Weights, master weights and moments are equal to the last bit."""
    found, want = read_with_torch(folder), read_with_torch(truth)
    assert set(found) == set(want)
    for name, tensor in want.items():
        have = found[name]
        if have.shape != tensor.shape:  # the vocabulary is padded for another TP
            rows = min(have.shape[0], tensor.shape[0])
            have, tensor = have[:rows], tensor[:rows]
        assert torch.equal(have, tensor), name
    assert sum(k.startswith("optimizer.state.exp_avg_sq.") for k in want) >= 8


def assert_loaded(folder: Path, trained: Path, options: dict[str, Any]) -> None:
    """What Megatron had in memory, and dumped, is what it trained.

    Where buffers have several buckets, megatron-core 0.16.1 writes wrong master weights and moments
    into its own `fully_reshardable` (it says so in a warning), so `dp_reshardable` is the truth.
    """
    if options.get("overlap"):
        report = verify(folder, trained / "dp_reshardable")
        assert report.verdict == "equal", list(report.lines())
    else:
        assert_same(folder, trained / "fully_reshardable")


def of_loading(options: dict[str, Any], kind: str) -> dict[str, Any]:
    """Options of the run that loads: it dumps what can be trusted."""
    more = {k: v for k, v in options.items() if k != "layout"}
    if options.get("overlap"):
        more["dump_kind"] = "dp_reshardable"
        if kind == "fully_reshardable":  # nor does it load that right into several buckets
            more |= {"overlap": False, "bucket_size": None}
    return more


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied": True, "grads_in_fp32": True},
    "bucketed": {"overlap": True, "bucket_size": 9000},
    "padded": {"busbw": True},
    "experts": {"experts": 4, "layout": {"ep": 2}},
}


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A training state of two data-parallel ranks, saved in three formats."""
    folder = tmp_path_factory.mktemp("trained")
    options = {"layout": {}, **KINDS[request.param]}
    kinds = ("fully_reshardable", "dp_reshardable", "legacy")
    run_world("train", saves=[[k, str(folder / k)] for k in kinds], **options)
    return folder, options


def test_all_formats_say_the_same(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, options = trained
    kinds = ["fully_reshardable", "dp_reshardable", "legacy"][bool(options.get("overlap")) :]
    for kind in kinds[1:]:
        report = verify(folder / kinds[0], folder / kind)
        assert report.verdict == "equal", list(report.lines())


def test_what_megatron_saves_wrong_is_found(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Of several buckets, its own fully reshardable state holds master weights of other weights."""
    folder, options = trained
    source = folder / "fully_reshardable"
    if not options.get("overlap"):
        reshard(source, tmp_path / "out", verify_master_weights=True, tp=1, pp=2, ep=1)
        return
    with pytest.raises(FormatError, match="master weight"):
        reshard(source, tmp_path / "out", verify_master_weights=True, tp=2)
    reshard(folder / "dp_reshardable", tmp_path / "out", verify_master_weights=True, tp=2)


@pytest.mark.parametrize("source", ["dp_reshardable", "legacy"])
@pytest.mark.parametrize("target", ["fully_reshardable", "dp_reshardable", "legacy"])
def test_megatron_loads_it_at_another_layout(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, source: str, target: str
) -> None:
    folder, options = trained
    layout = {"tp": 1, "pp": 2, "ep": 1} if options.get("experts") else {"tp": 2, "pp": 1}
    reshard(
        folder / source,
        tmp_path / "out",
        to="megatron" if target == "legacy" else "torch_dist",
        optimizer_format=target,
        **layout,
    )
    out = run_world(
        "load",
        kind=target,
        folder=str(tmp_path / "out"),
        dump=str(tmp_path / "dump"),
        layout=layout,
        **of_loading(options, target),
    )
    assert "loaded [2.0" in out
    assert_loaded(tmp_path / "dump", folder, options)


def test_megatron_loads_two_by_two(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """DP2 TP1 in buckets becomes TP2 PP2 with virtual stages, in both of Megatron's formats."""
    folder, options = trained
    if options.get("experts"):
        layout = {"tp": 1, "pp": 2, "ep": 2, "dp": 2}
    else:
        layout = {"tp": 2, "pp": 2, "vpp": 2}
    for kind in ("fully_reshardable", "dp_reshardable"):
        at = tmp_path / kind
        reshard(folder / "dp_reshardable", at / "out", optimizer_format=kind, **layout)
        run_world(
            "load",
            kind=kind,
            folder=str(at / "out"),
            dump=str(at / "dump"),
            layout=layout,
            world=4,
            **of_loading(options, kind),
        )
        assert_loaded(at / "dump", folder, options)


def test_an_optimizer_that_is_not_distributed(tmp_path: Path) -> None:
    """Its rank files and its `torch_dist` say the same, and a distributed one can take it over."""
    kinds = (("legacy", "legacy"), ("float16", "torch_dist"))
    run_world(
        "train",
        saves=[[kind, str(tmp_path / name)] for kind, name in kinds],
        layout={"tp": 2},
        distributed=False,
    )
    assert verify(tmp_path / "legacy", tmp_path / "torch_dist").verdict == "equal"
    reshard(tmp_path / "legacy", tmp_path / "out", to="torch_dist", tp=1, strict=True)
    out = run_world(
        "load",
        kind="fully_reshardable",
        folder=str(tmp_path / "out"),
        dump=str(tmp_path / "dump"),
        layout={},
    )
    assert "loaded [2.0" in out
    assert verify(tmp_path / "dump", tmp_path / "torch_dist").verdict == "equal"


def test_experts_whole_on_every_tensor_rank(tmp_path: Path) -> None:
    """Buckets of each tensor rank hold all experts where those are not cut and not spread."""
    options: dict[str, Any] = {"layout": {"tp": 2, "etp": 1}, "experts": 4}
    kinds = ("fully_reshardable", "dp_reshardable", "legacy")
    run_world("train", saves=[[k, str(tmp_path / k)] for k in kinds], **options)
    for kind in kinds[1:]:
        assert verify(tmp_path / kinds[0], tmp_path / kind).verdict == "equal"
    reshard(
        tmp_path / "legacy", tmp_path / "out", to="torch_dist", optimizer_format="dp_reshardable"
    )
    run_world(
        "load",
        kind="dp_reshardable",
        folder=str(tmp_path / "out"),
        dump=str(tmp_path / "dump"),
        **options,
    )
    assert_same(tmp_path / "dump", tmp_path / kinds[0])
