"""Weighted sums of several sources against numpy: any layouts, any types, resumed and saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.errors import CoverageError, MappingError
from megtool.options.execution import DigestMode
from megtool.plan.copies import Op, PlanSource, ReshardPlan
from megtool.plan.execute import execute
from megtool.plan.planner import build_plan
from megtool.plan.summary import summarize
from megtool.plan.worker import NUM_BUFFERS
from megtool.staging.open_stage import open_stage
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from tests.support.checkpoints.plan_layouts import LAYOUTS, build_layout, cast_arrays, place
from tests.support.errors import raises

FLOATS = ("float32", "bfloat16", "float16", "float64")


class Mean:
    """Canonical tensors in several sources, and a target that is to hold their weighted sums."""

    def __init__(
        self,
        raw: Any,
        folder: Any,
        rng: random.Random,
        *,
        layouts: list[str],
        here: str,
        kinds: list[str],
        kind: str,
        rows: int,
        cols: int,
    ) -> None:
        self.raw, self.folder = raw, folder
        names = ["a", "b", "c"][: rng.choice([1, 2, 3])]
        generator = np.random.default_rng(rng.randrange(1 << 30))
        self.shares = [rng.choice([0.1, 0.25, 1 / 3, 2.5]) for _ in layouts]
        wide = np.dtype("float64" if kind == "float64" else "float32")
        sums = {n: None for n in names}
        sources = []
        for number, (layout, own) in enumerate(zip(layouts, kinds, strict=True)):
            at = place(layout, names, rows, cols)
            catalogue = build_layout(raw, folder / f"source{number}", rng, at, own)
            held = {t.name: np.zeros(t.shape, t.dtype.view) for t in catalogue.tensors}
            for name, p in at.items():
                floats = generator.standard_normal((rows, cols)).astype(np.float32)
                bits = cast_arrays(floats, own)
                raw.put(p, bits, held[p.stored])
                term = cast_arrays(bits, wide.name, own) * wide.type(self.shares[number])
                sums[name] = term if sums[name] is None else sums[name] + term
            raw.write(catalogue, held)
            sources.append(PlanSource(catalogue=catalogue, placements=at))
        self.wanted = {n: cast_arrays(x, kind, wide.name) for n, x in sums.items()}
        to = place(here, names, rows, cols)
        target = build_layout(raw, folder / "tree", rng, to, kind)
        self.reference = {t.name: np.zeros(t.shape, t.dtype.view) for t in target.tensors}
        for name, p in to.items():
            raw.put(p, self.wanted[name], self.reference[p.stored])
        self.target, self.to, self.sources = target, to, sources
        self.plan = self.planned(self.shares)

    def planned(self, shares: list[float]) -> ReshardPlan:
        destination = self.raw.destination(self.target, small_files={}, final_files={"done": b"1"})
        return build_plan(self.sources, destination, self.to, shares=shares)

    def stage(self) -> Stage:
        return open_stage(self.folder / "out", files=Files(), fingerprint=self.plan.fingerprint)

    def check(self, root: Any) -> None:
        found = self.raw.read(self.plan.target.catalogue, root)
        for name, array in self.reference.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder per example."""
    count = iter(range(1 << 30))
    return lambda: tmp_path_factory.mktemp(f"mean{next(count)}")


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4),
    here=st.sampled_from(LAYOUTS),
    kind=st.sampled_from(FLOATS),
    sizes=st.sampled_from([(2, 1), (4, 6), (30, 17), (256, 300)]),
    threads=st.sampled_from([1, 2]),
)
def test_sums_of_any_layouts(
    raw: Any,
    scratch: Any,
    seed: int,
    layouts: list[str],
    here: str,
    kind: str,
    sizes: tuple[int, int],
    threads: int,
) -> None:
    rng = random.Random(seed)
    kinds = [rng.choice(FLOATS) for _ in layouts]
    rows, cols = sizes
    job = Mean(
        raw,
        scratch(),
        rng,
        layouts=layouts,
        here=here,
        kinds=kinds,
        kind=kind,
        rows=rows,
        cols=cols,
    )
    with job.stage() as stage:
        report = execute(
            job.plan, stage, files=Files(), threads=threads, memory_bytes=threads * 384 * 1024
        )
        stage.commit(fsync=False)
    job.check(job.folder / "out")
    total = job.plan.target.catalogue.num_bytes
    assert report.num_bytes == {Op.REDUCE: total}
    assert report.peak_buffer_bytes <= 2 * threads * (NUM_BUFFERS + 1) * 64 * 1024
    for name, array in job.wanted.items():
        assert report.digests.get(name) == crc32c(array.tobytes())
    s = summarize(job.plan)
    assert s.num_bytes.reduce == s.num_bytes.total == total
    assert s.read_bytes == sum(t.num_bytes for c in job.sources for t in c.catalogue.tensors)


@pytest.fixture
def mean(raw: Any, tmp_path: Any) -> Mean:
    return Mean(
        raw,
        tmp_path,
        random.Random(5),
        layouts=["stacked", "columns", "mixed"],
        here="woven rows",
        kinds=["bfloat16", "float32", "float16"],
        kind="bfloat16",
        rows=64,
        cols=48,
    )


@pytest.mark.parametrize("mode", DigestMode)
def test_what_an_earlier_run_left_is_repaired(mean: Mean, tmp_path: Any, mode: DigestMode) -> None:
    with mean.stage() as stage:
        execute(mean.plan, stage, files=Files(), digest=mode)
        path = stage.create(mean.target.files[0].path, mean.target.files[0].size)
        at = int(mean.target.extents.offset[0])
        with open(path, "r+b") as f:
            f.seek(at)
            f.write(b"\xff\x7f")
    with mean.stage() as stage:
        report = execute(mean.plan, stage, files=Files(), digest=mode)
        stage.commit(fsync=False)
    assert report.verified == report.num_units
    assert report.repaired == 1
    mean.check(tmp_path / "out")


def test_shares_and_sources_are_what_a_run_is_resumed_by(mean: Mean) -> None:
    assert mean.planned(mean.shares).fingerprint == mean.plan.fingerprint
    assert mean.planned([*mean.shares[:2], 9.0]).fingerprint != mean.plan.fingerprint


def test_every_source_has_to_be_whole(mean: Mean) -> None:
    first, second, third = mean.sources
    rows = np.arange(len(second.catalogue.shards.tensor)) > 0
    torn = second.catalogue.select(lambda name: True)
    torn.shards = type(torn.shards)(
        torn.shards.tensor[rows], torn.shards.boxes[rows], torn.shards.owner[rows]
    )
    mean.sources = [first, PlanSource(catalogue=torn, placements=second.placements), third]
    with pytest.raises(CoverageError, match="would be written"):
        mean.planned(mean.shares)
    mean.sources = [
        PlanSource(catalogue=s.catalogue, placements={}) for s in (first, second, third)
    ]
    with raises(MappingError, id="missing-tensors"):
        mean.planned(mean.shares)
