"""Summaries: numbers that add up, and rows that line up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megtool.dtypes import dtype
from megtool.plan import planner
from megtool.plan import summary as plan_summary
from megtool.plan.copies import DroppedItem, Fill, PlanSource, ReshardPlan
from megtool.plan.summary import summarize
from megtool.report.sections import Section
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

ROWS = 1 << 14


def tensor(name, *shape, kind="float32", packing=None) -> GlobalTensor:
    return GlobalTensor(name=name, shape=shape, dtype=dtype(kind), packing=packing)


@pytest.fixture(scope="module")
def plan(raw) -> ReshardPlan:
    """Whole rows, columns, a cast, a half-used encoded tensor, padding, and one tensor dropped."""
    source = [
        tensor("rows", ROWS, 4),
        tensor("columns", ROWS, 4),
        tensor("cast", 10),
        tensor("encoded", 8, packing="gguf:Q8_0"),
        tensor("dropped", 3),
        tensor("empty", 0),
    ]
    target = [
        tensor("rows", ROWS, 4),
        tensor("columns", ROWS, 4),
        tensor("cast", 10, kind="bfloat16"),
        tensor("encoded", 6, kind="bfloat16"),
        tensor("empty", 0),
    ]
    whole = [[([0] * len(t.shape), list(t.shape), k % 2)] for k, t in enumerate(source)]
    halves = [([0, 0], [ROWS, 2], 0), ([0, 2], [ROWS, 4], 1)]
    cut = [[([0] * len(t.shape), list(t.shape), 0)] for t in target]
    cut[1] = halves
    a = raw.lay_out(Path("a"), source, whole)
    b = raw.lay_out(Path("b"), target, cut)
    at = {t.name: Placement.identity(t.name, t.shape) for t in source}
    at["encoded"] = Placement.identity("encoded", (4,))
    to = {t.name: at[t.name] for t in target}
    return planner.build_plan(
        [PlanSource(catalogue=a, placements=at)],
        raw.destination(b, small_files={"index": b"12345"}, final_files={"done": b"6"}),
        to,
        fills=[Fill(stored="encoded", lo=(4,), hi=(6,))],
        dropped=[DroppedItem(name="dropped", reason="asked for", num_bytes=12)],
    )


def test_bytes_are_counted_by_operation(plan):
    s = summarize(plan)
    assert dataclasses.asdict(s.num_bytes) == {
        "kernel": ROWS * 16,
        "strided": ROWS * 16,
        "cast": 20,
        "decode": 8,
        "fill": 4,
        "reduce": 0,
        "merge": 0,
    }
    assert s.num_bytes.total == sum(t.num_bytes for t in plan.target.catalogue.tensors)
    assert s.read_bytes == 2 * ROWS * 16 + 40 + 32 // 2
    assert s.header_bytes == 16 * 2 + 6
    assert (s.source_files, s.target_files) == (2, 4)
    assert (s.moved, s.derived, s.dropped, s.dropped_bytes) == (3, 2, 1, 12)
    assert s.steps == len(plan.steps) == 6
    assert s.fingerprint == plan.fingerprint


def test_digesting_everything_leaves_nothing_to_the_kernel(plan):
    s = summarize(plan, digest_all=True)
    assert (s.num_bytes.kernel, s.num_bytes.strided) == (0, 2 * ROWS * 16)
    assert s.seconds > summarize(plan).seconds


def test_memory_is_bounded_by_what_is_allowed_and_what_is_there(plan, raw):
    mib = 1 << 20
    assert summarize(plan, threads=2, memory_bytes=mib).peak_buffer_bytes <= mib
    least = 4 * plan_summary.NUM_BUFFERS * plan_summary.MIN_BUFFER_BYTES
    assert summarize(plan, threads=4, memory_bytes=1).peak_buffer_bytes == least
    largest = plan_summary.DEFAULT_BUFFER_BYTES * plan_summary.NUM_BUFFERS
    assert summarize(plan, memory_bytes=1 << 40).peak_buffer_bytes == largest
    same = {"t": Placement.identity("t", (8,))}
    flat = [raw.lay_out(Path(p), [tensor("t", 8)], [[([0], [8], 0)]]) for p in "ab"]
    kernel = planner.build_plan(
        [PlanSource(catalogue=flat[0], placements=same)], raw.destination(flat[1]), same
    )
    assert summarize(kernel).peak_buffer_bytes == 0


def test_more_threads_take_less_time_up_to_a_limit(plan):
    seconds = [summarize(plan, threads=n).seconds for n in (1, 2, 4, 64, 128)]
    assert seconds[0] > seconds[1] > seconds[2] > seconds[3] == seconds[4]
    one = ROWS * 16 / plan_summary.KERNEL_RATE + ROWS * 16 / plan_summary.STRIDED_RATE
    assert seconds[0] == pytest.approx(one, rel=1e-3)


def test_lines_are_aligned_and_say_what_matters(plan):
    lines = list(Section(rows=summarize(plan, threads=2).rows()).lines())
    name = "  headers and small files"
    assert all(line[len(name) : len(name) + 2] == "  " for line in lines)
    assert all(line[len(name) + 2] != " " for line in lines)
    text = "\n".join(lines)
    for part in (
        "raw -> raw",
        "copied by the kernel     256.0 KiB",
        "copied in buffers        256.0 KiB",
        "38 B",
        "512.1 KiB of 2 files",
        "512.1 KiB to 4 files",
        "3 moved, 2 derived, 1 dropped (12 B)",
        "2 threads",
        "less than a second",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("seconds", "says"), [(0, "less than"), (3.4, "3 s"), (300, "5 min"), (9000, "2.5 h")]
)
def test_times_are_rounded_to_what_an_estimate_is_worth(plan, seconds, says):
    s = dataclasses.replace(summarize(plan), seconds=seconds)
    assert says in s.rows()[-1][1]


def test_json_holds_the_same_numbers(plan):
    s = summarize(plan)
    again = json.loads(json.dumps(s.to_json()))
    assert again["num_bytes"]["cast"] == 20
    assert again["steps"] == s.steps
    assert again["seconds"] == s.seconds


def test_an_empty_plan_is_summed_up(raw):
    empty = raw.lay_out(Path("e"), [], [])
    s = summarize(planner.build_plan([], raw.destination(empty), {}))
    assert (s.num_bytes.total, s.steps, s.seconds, s.peak_buffer_bytes) == (0, 0, 0, 0)
    assert s.rows()
    assert np.isfinite(s.seconds)
