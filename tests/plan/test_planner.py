"""Planning random models between random layouts, each plan carried out element by element."""

from __future__ import annotations

import dataclasses
import math
import random
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.dtypes import dtype
from megtool.errors import CoverageError, MappingError
from megtool.plan import planner
from megtool.plan.copies import DroppedItem, Fill, Op, PlanSource, ReshardPlan
from megtool.tensors.box import Boxes
from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards
from tests.support.errors import raises

FILL = 7.0


class Side:
    """One checkpoint's way to hold a model: stored tensors, placements, padding."""

    def __init__(self, rng: random.Random, prefix: str) -> None:
        self.rng, self.prefix = rng, prefix
        self.tensors: list[GlobalTensor] = []
        self.placements: dict[str, Placement] = {}
        self.fills: list[Fill] = []

    def add(self, name: str, shape, kind: str = "float32") -> str:
        name = f"{self.prefix}.{name}"
        self.tensors.append(GlobalTensor(name=name, shape=tuple(shape), dtype=dtype(kind)))
        return name

    def put(self, name: str, stored: str, shape, dims, mults, base) -> None:
        self.placements[name] = Placement(
            canonical=name,
            stored=stored,
            shape=tuple(shape),
            dims=tuple(dims),
            mults=tuple(mults),
            base=tuple(base),
        )

    def alone(self, name: str, rows: int, cols: int, kind: str) -> None:
        """One canonical matrix in one stored tensor."""
        match self.rng.choice(["plain", "transpose", "pad", "rotary", "flat", "lead"]):
            case "plain":
                self.put(
                    name, self.add(name, (rows, cols), kind), (rows, cols), (0, 1), (1, 1), (0, 0)
                )
            case "transpose":
                stored = self.add(name, (cols, rows), kind)
                self.put(name, stored, (rows, cols), (1, 0), (1, 1), (0, 0))
            case "pad":
                more = self.rng.randint(1, 3)
                stored = self.add(name, (rows + more, cols), kind)
                self.put(name, stored, (rows, cols), (0, 1), (1, 1), (0, 0))
                self.fills.append(
                    Fill(stored=stored, lo=(rows, 0), hi=(rows + more, cols), value=FILL)
                )
            case "rotary":
                heads = self.rng.choice([1, 2])
                half = rows // heads // 2
                stored = self.add(name, (rows, cols), kind)
                self.put(
                    name, stored, (heads, 2, half, cols), (0, 0, 0, 1), (2 * half, 1, 2, 1), (0, 0)
                )
            case "flat":
                stored = self.add(name, (rows * cols,), kind)
                self.put(name, stored, (rows * cols,), (0,), (1,), (0,))
            case "lead":
                stored = self.add(name, (1, rows, cols), kind)
                self.put(name, stored, (rows, cols), (1, 2), (1, 1), (0, 0, 0))

    def block(self, number: int, q_rows: int, kv_rows: int, cols: int, kind: str) -> None:
        """Query, key and value, fused by query group, concatenated, stacked or apart."""
        q, k, v = (f"{number}.{x}" for x in "qkv")
        match self.rng.choice(["groups", "stack", "apart"]):
            case "groups":
                groups = self.rng.choice([g for g in (1, 2, 4) if kv_rows % g == 0])
                per, one = q_rows // groups, kv_rows // groups
                stored = self.add(f"{number}.qkv", (q_rows + 2 * kv_rows, cols), kind)
                for name, n, base in ((q, per, 0), (k, one, per), (v, one, per + one)):
                    self.put(
                        name, stored, (groups, n, cols), (0, 0, 1), (per + 2 * one, 1, 1), (base, 0)
                    )
            case "stack":
                self.alone(q, q_rows, cols, kind)
                stored = self.add(f"{number}.kv", (2, kv_rows, cols), kind)
                for index, name in enumerate((k, v)):
                    self.put(name, stored, (kv_rows, cols), (1, 2), (1, 1), (index, 0, 0))
            case "apart":
                for name, rows in ((q, q_rows), (k, kv_rows), (v, kv_rows)):
                    self.alone(name, rows, cols, kind)

    def identity(self, name: str, shape, kind: str) -> None:
        self.placements[name] = Placement.identity(name, shape, stored=self.add(name, shape, kind))

    def catalogue(self, raw, files: int = 3) -> Catalogue:
        order = list(self.tensors)
        self.rng.shuffle(order)
        grids = [
            []
            if 0 in t.shape and self.rng.random() < 0.5
            else raw.random_grid(self.rng, t.shape, files)
            for t in order
        ]
        return raw.lay_out(Path(self.prefix), order, grids)


def model(rng: random.Random):
    """Two sides of one random model."""
    sides = Side(rng, "src"), Side(rng, "dst")
    for number in range(rng.randint(0, 3)):
        q_rows, kv_rows, cols = rng.choice([8, 16]), rng.choice([4, 8]), rng.choice([1, 2, 4])
        for side in sides:
            side.block(number, q_rows, kv_rows, cols, rng.choice(["float32", "bfloat16"]))
    for name, shape in (("scalar", ()), ("none", (0, 4)), ("bias", (5,)), ("conv", (2, 3, 2, 2))):
        if rng.random() < 0.5:
            for side in sides:
                side.identity(name, shape, rng.choice(["float32", "bfloat16"]))
    return sides


def planned(raw, seed: int):
    rng = random.Random(seed)
    a, b = model(rng)
    source = PlanSource(catalogue=a.catalogue(raw), placements=a.placements)
    target = raw.destination(b.catalogue(raw))
    plan = planner.build_plan([source], target, b.placements, fills=b.fills)
    return plan, a, b


def carry_out(plan: ReshardPlan, source: dict[str, np.ndarray]):
    """Do every step element by element; returns shards of the target, and how often each element
    of either side was touched."""
    theirs, ours = plan.sources[0], plan.target.catalogue
    held = [cut(theirs, row, source) for row in range(len(theirs.shards))]
    size = ours.shards.boxes.volume().tolist()
    out = [np.zeros(n) for n in size]
    written, read = [np.zeros(n, int) for n in size], [np.zeros(len(h), int) for h in held]
    steps = plan.steps
    for row in range(len(steps)):
        entry = plan.entries[steps.entry[row]]
        one = slice(row, row + 1)
        shape = steps.boxes.shape[row].tolist()

        def positions(lattice, piece, one=one, shape=shape):
            start, stride = lattice(piece[one], steps.boxes.lo[one])
            inner = np.indices(shape)
            at = sum(
                (i * s for i, s in zip(inner, stride[0].tolist(), strict=True)),
                np.zeros(shape, int),
            )
            return (start[0] + at).reshape(-1)

        b = positions(plan.target_lattice, steps.target_piece)
        to = plan.target_pieces.shard[steps.target_piece[row]]
        np.add.at(written[to], b, 1)
        if entry.op is Op.FILL:
            assert steps.source_piece[row] == -1
            out[to][b] = entry.fill
            continue
        a = positions(plan.source_lattice, steps.source_piece)
        at = plan.source_pieces.shard[steps.source_piece[row]]
        np.add.at(read[at], a, 1)
        out[to][b] = held[at][a]
    return out, written, read


def cut(catalogue: Catalogue, row: int, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The row-major elements of one shard."""
    array = arrays[catalogue.tensors[catalogue.shards.tensor[row]].name]
    lo, hi = catalogue.shards.boxes.lo[row].tolist(), catalogue.shards.boxes.hi[row].tolist()
    return array[tuple(map(slice, lo[: array.ndim], hi[: array.ndim]))].reshape(-1)


@given(seed=st.integers(0, 1 << 32))
def test_a_plan_writes_every_element_once_and_rightly(raw, seed):
    plan, a, b = planned(raw, seed)
    canonical, values = {}, iter(range(1, 1 << 30))
    for name, p in b.placements.items():
        canonical[name] = np.array([next(values) for _ in range(math.prod(p.shape))], float)
    stored = []
    for side in (a, b):
        arrays = {t.name: np.zeros(t.shape) for t in side.tensors}
        for name, p in side.placements.items():
            raw.put(p, canonical[name], arrays[p.stored])
        stored.append(arrays)
    for fill in b.fills:
        stored[1][fill.stored][tuple(map(slice, fill.lo, fill.hi))] = FILL
    out, written, read = carry_out(plan, stored[0])
    assert all((w == 1).all() for w in written)
    assert all((r <= 1).all() for r in read)
    assert sum(int(r.sum()) for r in read) == sum(len(c) for c in canonical.values())
    for row, got in enumerate(out):
        assert got.tolist() == cut(plan.target.catalogue, row, stored[1]).tolist()
    for entry in plan.entries:
        assert entry.target.shape == entry.shape
        assert (entry.source is None) == (entry.op is Op.FILL or 0 in entry.shape)
        if entry.op is not Op.FILL:
            same = plan.source_tensor(entry).dtype == plan.target_tensor(entry).dtype
            assert entry.op is (Op.COPY if same else Op.CAST)
            assert plan.source_dtype_bytes(entry) == plan.source_tensor(entry).dtype.itemsize
    for grouped in (plan.steps, plan.source_pieces, plan.target_pieces):
        rows = [grouped.of(k) for k in range(len(plan.entries))]
        assert sum(r.stop - r.start for r in rows) == len(grouped)
        assert all((grouped.entry[r] == k).all() for k, r in enumerate(rows))


@given(seed=st.integers(0, 1 << 32))
def test_equal_plans_have_equal_fingerprints(raw, seed):
    one, two = planned(raw, seed)[0], planned(raw, seed)[0]
    assert one.fingerprint == two.fingerprint
    assert len(one.fingerprint) == 64


def simple(raw, **more):
    """Two tensors, each cut in two in the source and three in the target."""
    tensors = [GlobalTensor(name=n, shape=(6, 2), dtype=dtype("float32")) for n in ("a", "b")]
    halves = [[([0, 0], [3, 2], 0), ([3, 0], [6, 2], 1)]] * 2
    thirds = [[([k, 0], [k + 2, 2], 0) for k in (0, 2, 4)]] * 2
    source = raw.lay_out(Path("src"), tensors, halves)
    target = raw.lay_out(Path("dst"), more.pop("to", tensors), more.pop("grid", thirds))
    same = {n: Placement.identity(n, (6, 2)) for n in ("a", "b")}
    return {"source": source, "target": target, "from": same, "at": dict(same), **more}


def build(raw, job, **more) -> ReshardPlan:
    source = PlanSource(catalogue=job["source"], placements=job["from"])
    target = raw.destination(job["target"], **job.get("files", {}))
    return planner.build_plan([source], target, job["at"], **more)


def without(catalogue: Catalogue, row: int) -> Catalogue:
    keep = np.arange(len(catalogue.shards)) != row
    s, e = catalogue.shards, catalogue.extents
    return dataclasses.replace(
        catalogue,
        shards=Shards(s.tensor[keep], s.boxes[keep], s.owner[keep]),
        extents=Extents(file=e.file[keep], offset=e.offset[keep], length=e.length[keep]),
    )


def test_a_missing_source_shard_is_refused(raw):
    job = simple(raw)
    job["source"] = without(job["source"], 1)
    with raises(CoverageError, "6", "12 elements", "'a'", tensor="a"):
        build(raw, job)


def test_a_doubled_source_shard_is_refused(raw):
    job = simple(raw)
    grid = [([0, 0], [3, 2], 0), ([3, 0], [6, 2], 0), ([3, 0], [6, 2], 1)]
    job["source"] = raw.lay_out(Path("src"), job["source"].tensors, [grid, grid])
    with pytest.raises(CoverageError, match="18 of 12 elements"):
        build(raw, job)


def test_a_hole_in_the_target_is_refused(raw):
    job = simple(raw)
    job["target"] = without(job["target"], 2)
    with pytest.raises(CoverageError, match=r"no shard holds element \[4, 0\]"):
        build(raw, job)


def test_a_target_tensor_that_nothing_fills_is_refused(raw):
    job = simple(raw)
    del job["at"]["b"]
    with raises(CoverageError, "[0, 0]", "0 times", tensor="b"):
        build(raw, job)


def test_a_fill_over_data_is_refused(raw):
    with raises(CoverageError, "[2, 1]", "2 times"):
        build(raw, simple(raw), fills=[Fill(stored="a", lo=(2, 1), hi=(3, 2))])


def test_what_is_left_over_must_be_listed(raw):
    job = simple(raw)
    only_a = [t for t in job["target"].tensors if t.name == "a"]
    job = simple(raw, to=only_a, grid=[[([0, 0], [6, 2], 0)]])
    del job["at"]["b"]
    with raises(CoverageError, match="'b' is neither used nor listed as dropped", tensor="b"):
        build(raw, job)
    dropped = [DroppedItem(name="b", reason="tied", num_bytes=48)]
    plan = build(raw, job, dropped=dropped)
    assert plan.dropped == dropped
    del job["from"]["b"]
    with pytest.raises(CoverageError, match="tensor is neither used nor listed"):
        build(raw, job)


def test_half_of_a_fused_tensor_is_not_lost_silently(raw):
    """The stored tensor is read, but one of the two canonical tensors in it goes nowhere."""
    fused = [GlobalTensor(name="kv", shape=(4,), dtype=dtype("float32"))]
    alone = [GlobalTensor(name="k", shape=(2,), dtype=dtype("float32"))]
    k = Placement.identity("k", (2,), stored="kv")
    v = dataclasses.replace(k, canonical="v", base=(2,))
    job = {
        "source": raw.lay_out(Path("src"), fused, [[([0], [4], 0)]]),
        "target": raw.lay_out(Path("dst"), alone, [[([0], [2], 0)]]),
        "from": {"k": k, "v": v},
        "at": {"k": Placement.identity("k", (2,))},
    }
    with pytest.raises(CoverageError, match="'v' is neither used nor listed"):
        build(raw, job)
    plan = build(raw, job, dropped=[DroppedItem(name="v", reason="asked for")])
    assert plan.steps.boxes.hi.tolist() == [[2]]


@pytest.mark.parametrize(
    ("side", "change", "says"),
    [
        ("at", {"c": Placement.identity("c", (6, 2), stored="a")}, "needs 'c', which the source"),
        ("at", {"a": Placement.identity("a", (6, 2), stored="x")}, "'a' in 'x', which is not"),
        ("at", {"a": Placement.identity("a", (12,))}, r"at \[0\] of a tensor of shape \[6, 2\]"),
        ("from", {"a": Placement.identity("a", (5, 2))}, "10 as 'a'|10 elements"),
        ("at", {"a": Placement.identity("a", (0, 2))}, r"shape \[6, 2\] as 'a' and \[0, 2\]"),
    ],
)
def test_placements_that_disagree_are_refused(raw, side, change, says):
    job = simple(raw)
    job[side] |= change
    with pytest.raises(MappingError, match=says):
        build(raw, job)


def test_encoded_sources_are_decoded_and_targets_never_encoded(raw):
    job = simple(raw)
    packed = [dataclasses.replace(t, packing="gguf:Q4_1") for t in job["source"].tensors]
    plan = build(raw, job | {"source": dataclasses.replace(job["source"], tensors=packed)})
    assert {e.op for e in plan.entries} == {Op.DECODE}
    with pytest.raises(MappingError, match="gguf:Q4_1"):
        build(raw, job | {"target": dataclasses.replace(job["target"], tensors=packed)})


def test_the_first_source_that_places_a_tensor_gives_it(raw):
    job = simple(raw)
    only_b = job["source"].select(lambda n: n == "b")
    b = {"b": job["from"]["b"]}
    sources = [
        PlanSource(catalogue=only_b, placements=b),
        PlanSource(catalogue=job["source"], placements=job["from"]),
    ]
    with pytest.raises(CoverageError, match="'b' is neither used"):
        planner.build_plan(sources, raw.destination(job["target"]), job["at"])
    plan = planner.build_plan(
        sources,
        raw.destination(job["target"]),
        job["at"],
        dropped=[DroppedItem(name="b", reason="given by another source")],
    )
    assert [(e.canonical, e.source_index) for e in plan.entries] == [("a", 1), ("b", 0)]
    shards = [plan.source_pieces.shard[plan.source_pieces.of(k)].tolist() for k in range(2)]
    assert shards == [[0, 1], [0, 1]]


def test_scalars_and_fills_alone_need_no_dimensions(raw):
    scalar = [GlobalTensor(name="s", shape=(), dtype=dtype("float32"))]
    more = [*scalar, GlobalTensor(name="pad", shape=(3,), dtype=dtype("float32"))]
    job = {
        "source": raw.lay_out(Path("src"), scalar, [[([], [], 0)]]),
        "target": raw.lay_out(Path("dst"), more, [[([], [], 0)], [([0], [3], 0)]]),
        "from": {"s": Placement.identity("s", ())},
        "at": {"s": Placement.identity("s", ())},
    }
    plan = build(raw, job, fills=[Fill(stored="pad", lo=(0,), hi=(3,), value=1.5)])
    assert plan.steps.boxes.hi.tolist() == [[1], [3]]
    run, plain = plan.step_runs()
    assert run.tolist() == [4, 12]
    assert plain.tolist() == [True, False]
    assert planner.build_plan([], raw.destination(raw.lay_out(Path("e"), [], [])), {}).entries == []


def test_the_fingerprint_notices_every_change_that_matters(raw):
    def mark(change=lambda job: None, **more) -> str:
        job = simple(raw)
        change(job)
        return build(raw, job, **more).fingerprint

    def files(job):
        f = job["source"].files
        f[1] = dataclasses.replace(f[1], mtime_ns=5)

    def kind(job):
        t = job["target"].tensors
        t[0] = dataclasses.replace(t[0], dtype=dtype("int32"))

    def place_elsewhere(job):
        job["source"].extents.offset[0] += 24
        job["source"].extents.offset[1:2] += 24
        job["source"].extents.offset[2:3] -= 24
        job["source"].extents.offset[3:4] -= 24

    def swapped(job):
        job["from"]["a"], job["from"]["b"] = (
            dataclasses.replace(job["from"][x], canonical=y) for x, y in (("b", "a"), ("a", "b"))
        )

    changes = {
        "nothing": mark(),
        "options": mark(options="x"),
        "files": mark(files),
        "dtype": mark(kind),
        "extents": mark(place_elsewhere),
        "mapping": mark(swapped),
        "small": mark(lambda job: job.update(files={"small_files": {"c": b"d"}})),
        "small, cut elsewhere": mark(lambda job: job.update(files={"small_files": {"cd": b""}})),
        "root": mark(lambda job: setattr(job["source"], "root", Path("other"))),
        "order of markers": mark(lambda job: job.update(files={"final_files": {"c": b"e"}})),
    }
    assert len(set(changes.values())) == len(changes)
    assert mark() == changes["nothing"]


@pytest.mark.slow
def test_a_million_shards_are_planned_in_little_memory():
    """Experts of a large model, weights and three states, from eight ways to four."""
    layers, experts, ff, hidden, states = 58, 256, 64, 32, 4
    n = layers * experts

    def side(root: str, ways: int) -> Catalogue:
        tensors, boxes, rows = [], [], []
        for state in range(states):
            for name, shape, parts in (
                ("up", (n, 2 * ff, hidden), (n, 2 * ways, 1)),
                ("down", (n, hidden, ff), (n, 1, ways)),
            ):
                step = np.array([s // p for s, p in zip(shape, parts, strict=True)], np.int64)
                lo = np.indices(parts).reshape(3, -1).T * step
                boxes.append((lo, lo + step))
                rows.append(np.full(len(lo), len(tensors), np.int32))
                tensors.append(
                    GlobalTensor(name=f"{state}.{name}", shape=shape, dtype=dtype("float32"))
                )
        at = Boxes(*(np.concatenate(x) for x in zip(*boxes, strict=True)))
        tensor = np.concatenate(rows)
        size = at.volume() * 4
        file = np.zeros(len(tensor), np.int32)
        return Catalogue(
            format="raw",
            root=Path(root),
            files=[StoredFile(path="f", size=int(size.sum()))],
            tensors=tensors,
            shards=Shards(tensor, at, file),
            extents=Extents(file=file, offset=np.cumsum(size) - size, length=size),
        )

    places = {}
    for state in range(states):
        for e in range(n):
            for name, stored, shape, base in (
                ("gate", "up", (ff, hidden), (e, 0, 0)),
                ("up", "up", (ff, hidden), (e, ff, 0)),
                ("down", "down", (hidden, ff), (e, 0, 0)),
            ):
                canonical = f"{state}.{e}.{name}"
                places[canonical] = Placement(
                    canonical=canonical,
                    stored=f"{state}.{stored}",
                    shape=shape,
                    dims=(1, 2),
                    mults=(1, 1),
                    base=base,
                )
    eight, four = side("a", 8), side("b", 4)
    assert len(eight.shards) > 1_400_000
    plan = planner.build_plan(
        [PlanSource(catalogue=eight, placements=places)],
        Destination(catalogue=four, fragments=[]),
        places,
    )
    assert len(plan.entries) == states * n * 3
    assert len(plan.steps) == len(eight.shards)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20
