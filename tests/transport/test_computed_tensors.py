"""Feeds in a plan: proved with it, resumed and repaired with it, whatever the source's layout."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.dtypes import dtype
from megtool.errors import CoverageError
from megtool.formats.safetensors.reader import open_checkpoint, plan_safetensors_layout
from megtool.plan.copies import Op, PlanSource, ReshardPlan
from megtool.plan.execute import execute
from megtool.plan.planner import build_plan
from megtool.plan.work_units import FeedUnit
from megtool.plan.work_units import plan_units as units_of
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.tensors.box import numel, strides
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import (
    RegionReader,
    TargetRegion,
    count_region_bytes,
    iter_boxes,
)
from megtool.transport.strided import Array
from megtool.transport.tile import Index
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed

ROWS, COLUMNS = 24, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubled:
    """Rows of a float32 tensor times a factor, three at a time."""

    placement: Placement
    stored: str
    first: int
    end: int
    factor: float = 2.0

    @property
    def reads(self) -> tuple[Placement, ...]:
        return (self.placement,)

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        return (TargetRegion(stored=self.stored, lo=(self.first, 0), hi=(self.end, COLUMNS)),)

    @property
    def num_bytes(self) -> int:
        return count_region_bytes(self.writes[0], 4)

    @property
    def identity(self) -> bytes:
        return repr(self.factor).encode()

    def generate(self, taking: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        with taking.open(self.placement, dtype("float32")) as run:
            for row in range(self.first, self.end, 3):
                stop = min(row + 3, self.end)
                made = run.read(row * COLUMNS, stop * COLUMNS) * np.float32(self.factor)
                yield 0, (row - self.first, 0), made.view("<u4").reshape(-1, COLUMNS)


def numbers(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def source(folder: Path) -> tuple[Catalogue, dict[str, Placement]]:
    """`x` woven with another in pairs of rows, and `y` by itself."""
    from safetensors.numpy import save_file

    folder.mkdir()
    woven = np.stack([numbers(0).reshape(-1, 2, COLUMNS), numbers(1).reshape(-1, 2, COLUMNS)], 1)
    save_file(
        {"w": woven.reshape(2 * ROWS, COLUMNS), "y": numbers(2)}, folder / "model.safetensors"
    )
    places = {
        name: Placement(
            canonical=name,
            stored="w",
            shape=(ROWS // 2, 2, COLUMNS),
            dims=(0, 0, 1),
            mults=(4, 1, 1),
            base=(base, 0),
        )
        for name, base in (("x", 0), ("z", 2))
    }
    places["y"] = Placement.identity("y", (ROWS, COLUMNS))
    return open_checkpoint(folder), places


def planned(
    found: tuple[Catalogue, dict[str, Placement]], cuts: tuple[int, ...], factor: float = 2.0
) -> ReshardPlan:
    catalogue, places = found
    shape, kind = (ROWS, COLUMNS), dtype("float32")
    target = plan_safetensors_layout(
        [GlobalTensor(name=n, shape=shape, dtype=kind) for n in ("x", "y", "z")]
    )
    feeds = [
        Doubled(placement=places["x"], stored="x", first=a, end=b, factor=factor)
        for a, b in pairwise(cuts)
    ]
    copied = {n: Placement.identity(n, shape) for n in ("y", "z")}
    return build_plan(
        [PlanSource(catalogue=catalogue, placements=places)], target, copied, feeds=feeds
    )


def carried_out(
    plan: ReshardPlan, folder: Path, files: Files | None = None
) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    stage = open_stage(folder, files=files or Files(), fingerprint=plan.fingerprint)
    with stage:
        report = execute(plan, stage, files=stage.files, threads=2)
        stage.commit(fsync=False)
    assert report.num_bytes[Op.ENCODE] == ROWS * COLUMNS * 4
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("cuts", [(0, ROWS), (0, 1, 8, 9, ROWS)])
def test_feeds_fill_what_copies_do_not(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    found = carried_out(planned(source(tmp_path / "in"), cuts), tmp_path / "out")
    assert np.array_equal(found["x"], 2 * numbers(0))
    assert np.array_equal(found["y"], numbers(2))
    assert np.array_equal(found["z"], numbers(1))


@pytest.mark.parametrize(
    ("cuts", "said"), [((0, 20), "claimed 0 times"), ((0, 12, 11, ROWS), "claimed 2 times")]
)
def test_a_hole_or_an_overlap_is_found_before_any_byte(
    tmp_path: Path, cuts: tuple[int, ...], said: str
) -> None:
    found = source(tmp_path / "in")
    if len(cuts) == 2:
        with pytest.raises(CoverageError, match=said):
            planned(found, cuts)
        return
    catalogue, places = found
    target = plan_safetensors_layout(
        [GlobalTensor(name=n, shape=(ROWS, COLUMNS), dtype=dtype("float32")) for n in "xyz"]
    )
    feeds = [
        Doubled(placement=places["x"], stored="x", first=a, end=b) for a, b in ((0, 12), (11, ROWS))
    ]
    copied = {n: Placement.identity(n, (ROWS, COLUMNS)) for n in "yz"}
    with pytest.raises(CoverageError, match=said):
        build_plan(
            [PlanSource(catalogue=catalogue, placements=places)], target, copied, feeds=feeds
        )


def test_a_source_tensor_that_no_feed_reads_is_missed(tmp_path: Path) -> None:
    catalogue, places = source(tmp_path / "in")
    target = plan_safetensors_layout(
        [GlobalTensor(name=n, shape=(ROWS, COLUMNS), dtype=dtype("float32")) for n in "yz"]
    )
    copied = {n: Placement.identity(n, (ROWS, COLUMNS)) for n in "yz"}
    with pytest.raises(CoverageError, match="'x' is neither used"):
        build_plan([PlanSource(catalogue=catalogue, placements=places)], target, copied)


def test_facts_make_another_fingerprint(tmp_path: Path) -> None:
    found = source(tmp_path / "in")
    a, b, c = (
        planned(found, (0, ROWS)),
        planned(found, (0, ROWS), 3.0),
        planned(found, (0, 4, ROWS)),
    )
    assert len({a.fingerprint, b.fingerprint, c.fingerprint}) == 3
    assert a.fingerprint == planned(found, (0, ROWS)).fingerprint


def test_small_feeds_of_a_file_are_one_unit(tmp_path: Path) -> None:
    from megtool.transport.shard_locator import ShardLocator

    plan = planned(source(tmp_path / "in"), tuple(range(0, ROWS + 1, 2)))
    found = [
        u for u in units_of(plan, ShardLocator(plan.target.catalogue)) if isinstance(u, FeedUnit)
    ]
    assert [u.feeds for u in found] == [tuple(range(12))]
    assert found[0].num_bytes == ROWS * COLUMNS * 4


def test_a_killed_run_is_resumed_and_what_it_tore_repaired(tmp_path: Path) -> None:
    plan = planned(source(tmp_path / "in"), (0, 12, ROWS))
    want = carried_out(plan, tmp_path / "calm")
    with pytest.raises(Killed):
        carried_out(plan, tmp_path / "out", FaultyFiles().killed_at_first("rename"))
    torn = tmp_path / ".out.megtool" / "tree" / "model.safetensors"
    data = torn.read_bytes()
    torn.write_bytes(data[:-1500] + bytes(1500))
    found = carried_out(plan, tmp_path / "out")
    assert all(np.array_equal(found[n], want[n]) for n in want)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_any_range_is_cut_into_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    total = numel(tuple(shape))
    first = data.draw(st.integers(0, total))
    end = data.draw(st.integers(first, total))
    seen: list[int] = []
    step = strides(tuple(shape))
    for lo, hi in iter_boxes(tuple(shape), first, end):
        grid = np.meshgrid(*(np.arange(a, b) for a, b in zip(lo, hi, strict=True)), indexing="ij")
        flat = sum((g * s for g, s in zip(grid, step, strict=True)), np.zeros((), int))
        seen += np.asarray(flat).reshape(-1).tolist()
    assert seen == list(range(first, end))
