"""Shares planned alone are together the whole plan, whatever the layouts and the workers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from megtool.errors import FormatError
from megtool.plan import work_units
from megtool.plan.copies import PlanSource, ReshardPlan
from megtool.plan.planner import build_plan
from megtool.plan.share import (
    count_file_bytes,
    expected_file_bytes,
    is_surely_contiguous,
    plan_share_units,
)
from megtool.plan.work_units import is_interleaved
from megtool.process.worker_identity import WorkerIdentity
from megtool.staging.record import WorkerRecord
from megtool.staging.workers.share_copy import check_coverage
from megtool.transport.shard_locator import ShardLocator
from tests.support.checkpoints import raw_checkpoints
from tests.support.checkpoints.plan_layouts import LAYOUTS, build_layout, place
from tests.support.errors import raises

ROWS, COLS = 256, 300  # rows of a piece are runs long enough to be written as they are


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_units, "UNIT_BYTES", 100_000)


def build(
    seed: int, to: str, worker: WorkerIdentity | None = None, *, rows: int = ROWS, cols: int = COLS
) -> ReshardPlan:
    """A plan of three tensors from a layout drawn by the seed to another one."""
    rng, names = random.Random(seed), ["a", "b", "c"]
    here, there = place(rng.choice(LAYOUTS), names, rows, cols), place(to, names, rows, cols)
    source = build_layout(raw_checkpoints, Path("/source"), rng, here, "float32")
    target = build_layout(raw_checkpoints, Path("/target"), rng, there, "float32")
    sources = [PlanSource(catalogue=source, placements=here)]
    return build_plan(sources, raw_checkpoints.destination(target), there, worker=worker)


def records_of(seed: int, to: str, count: int) -> tuple[list[ReshardPlan], list[WorkerRecord]]:
    """The plans of all shares, and what their workers would record."""
    plans = [build(seed, to, WorkerIdentity(n, count)) for n in range(count)]
    records = []
    for index, plan in enumerate(plans):
        assert plan.share is not None
        target = plan.target.catalogue
        locator = ShardLocator(target)
        units = plan_share_units(plan, locator, tiled_only=bool(seed % 2))
        written = count_file_bytes(plan, locator, units)
        assert sum(written.values()) == sum(u.num_bytes for u in units)
        records.append(
            WorkerRecord(
                fingerprint=plan.fingerprint,
                index=index,
                count=count,
                num_units=len(units),
                span=(plan.share.begin, plan.share.end),
                file_bytes={target.files[n].path: size for n, size in written.items()},
            )
        )
    return plans, records


@pytest.mark.parametrize("to", ["apart", "stacked", "rows", "mixed"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_shares_are_together_the_whole_plan(to: str, count: int) -> None:
    for seed in range(6):
        whole = build(seed, to)
        plans, records = records_of(seed, to, count)
        assert {plan.fingerprint for plan in plans} == {whole.fingerprint}
        check_coverage(whole.target.catalogue, records)
        owners = [set(p.share.entries.tolist()) for p in plans if p.share is not None]
        assert set().union(*owners) == set(range(len(whole.entries)))
        for plan in plans:
            assert plan.share is not None
            for n in plan.share.entries.tolist():
                assert len(range(plan.steps.first[n], plan.steps.first[n + 1])) == len(
                    range(whole.steps.first[n], whole.steps.first[n + 1])
                )
        if count == 8:
            assert all(len(plan.steps) < len(whole.steps) for plan in plans)
        total = whole.target.catalogue.num_bytes
        sizes = [sum(r.file_bytes.values()) for r in records]
        assert max(sizes) - total // count <= 100_000


@pytest.mark.parametrize("to", ["woven columns", "columns"])
def test_what_is_written_between_others_takes_the_plan_of_all(to: str) -> None:
    plan = build(1, to, WorkerIdentity(0, 2), rows=16, cols=12)
    assert plan.share is None
    assert len(plan.steps) == len(build(1, to, rows=16, cols=12).steps)


def test_what_is_surely_contiguous_never_lies_between_others() -> None:
    tried = 0
    for seed in range(60):
        plan = build(seed, random.Random(seed).choice(LAYOUTS), rows=16, cols=12)
        target = ShardLocator(plan.target.catalogue)
        for number, entry in enumerate(plan.entries):
            if is_surely_contiguous(entry.target, plan.target_tensor(entry).shape):
                tried += 1
                assert not is_interleaved(plan, entry, plan.target_pieces.of(number), target)
    assert tried > 20


def test_missing_or_doubled_bytes_are_refused() -> None:
    plans, records = records_of(2, "rows", 3)
    target = plans[0].target.catalogue
    assert expected_file_bytes(target).sum() == target.num_bytes
    name = next(iter(records[1].file_bytes))
    size = records[1].file_bytes[name]
    less = replace(records[1], file_bytes={**records[1].file_bytes, name: size - 4})
    begin, end = records[1].span or (0, 0)
    for wrong, message in (
        (less, "bytes of tensors to this file, which has"),
        (replace(records[1], file_bytes={"other": 1}), "not of this plan"),
        (replace(records[1], span=(begin + 4, end)), "its share begins at byte"),
        (replace(records[1], span=None), "not of this plan"),
    ):
        with raises(FormatError, message, "same version"):
            check_coverage(target, [records[0], wrong, records[2]])
    with raises(FormatError, "the shares end at byte"):
        check_coverage(target, records[:2])
