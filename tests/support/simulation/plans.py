"""Tiny plans, the bytes they must produce, and the files they read: built once per process."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from megtool.errors import SourceChangedError
from megtool.options.execution import DigestMode
from megtool.plan.copies import PlanSource, ReshardPlan
from megtool.plan.planner import build_plan
from megtool.process.worker_identity import WorkerIdentity
from megtool.tensors.catalogue import Catalogue, StoredFile
from tests.support.checkpoints import raw_checkpoints
from tests.support.checkpoints.plan_layouts import LAYOUTS, build_layout, place
from tests.support.simulation.disk import SimulatedDisk

HOME = "/tmp"
"""A folder that exists on the real machine too: a check asks the real one whether it can be
written. Nothing is written there."""

MARKER = ".metadata"
"""The file that makes a checkpoint complete: it appears last."""

NUM_PLANS = 24

Tree = dict[str, bytes]


class CurrentDisk:
    """The disk on which sources are compared with what the plan saw."""

    disk: SimulatedDisk | None = None


class SimulatedCatalogue(Catalogue):
    """A catalogue whose files are on the simulated disk."""

    def check_unchanged(self, files: object = None) -> None:
        """See `Catalogue.check_unchanged`."""
        for f in self.files:
            inode = CurrentDisk.disk.find(str(self.root / f.path)) if CurrentDisk.disk else None
            if inode is not None and len(inode.data) != f.size:
                raise SourceChangedError("the source changed while it was read", file=self.root)


@dataclass(slots=True, kw_only=True)
class TinyPlan:
    """A plan, the source files it reads by absolute path, and the tree that it must write.

    `calls` is the number of system calls of a run without faults, `share` plans that of a worker.
    """

    number: int
    plan: ReshardPlan
    digest: DigestMode
    source: Tree
    share: Callable[[WorkerIdentity], ReshardPlan]
    is_file: bool = False
    tree: Tree = field(default_factory=dict)
    calls: int = 0


def tiny_plan(number: int, *, is_fresh: bool = False) -> TinyPlan:
    """Plan number `number`, without what it must write (`tree`)."""
    tiny = _tiny_plan(number)
    return replace(tiny, tree={}) if is_fresh else tiny


@functools.cache
def _tiny_plan(number: int) -> TinyPlan:
    rng = random.Random(number)
    raw = raw_checkpoints
    is_file = number % 6 == 5
    names = ["a", "b", "c"][: rng.choice([2, 3])]
    rows, cols = 2 * rng.randint(2, 8), rng.randint(3, 12)
    here = place(rng.choice(LAYOUTS), names, rows, cols)
    there = place(rng.choice(LAYOUTS), names, rows, cols)
    root = Path(HOME) / f"source{number}"
    source = build_layout(raw, root, rng, here, "float32")
    generator = np.random.default_rng(number)
    stored = {t.name: np.zeros(t.shape, t.dtype.view) for t in source.tensors}
    values = {n: generator.integers(1, 1 << 31, (rows, cols)).astype(np.uint32) for n in names}
    for name, p in here.items():
        raw.put(p, values[name].view(stored[p.stored].dtype), stored[p.stored])
    if is_file:
        target = _one_file(raw, rng, there)
        destination = raw.destination(target)
    else:
        target = build_layout(raw, Path("/tree"), rng, there, "float32")
        more = {"deep/config.json": b"{%d}" % number, f"only{number}.txt": b"x" * number}
        destination = raw.destination(target, small_files=more, final_files={MARKER: b"1"})
    catalogue = SimulatedCatalogue(**{f.name: getattr(source, f.name) for f in fields(source)})
    sources = [PlanSource(catalogue=catalogue, placements=here)]

    @functools.cache
    def build(worker: WorkerIdentity | None) -> ReshardPlan:
        return build_plan(sources, destination, there, options=str(number), worker=worker)

    plan = build(None)
    data = encode(source, stored)
    return TinyPlan(
        number=number,
        plan=plan,
        digest=(DigestMode.ALL, DigestMode.ALL, DigestMode.NONE)[number % 3],
        source={str(root / f.path): d for f, d in zip(source.files, data, strict=True)},
        share=build,
        is_file=is_file,
    )


def _one_file(raw: object, rng: random.Random, placements: dict) -> Catalogue:  # type: ignore[type-arg]
    from tests.support.checkpoints.plan_layouts import tensors

    stored = tensors(placements, "float32")
    grids = [raw_checkpoints.random_grid(rng, t.shape, 1) for t in stored]
    catalogue = raw_checkpoints.lay_out(Path("/tree"), stored, grids)
    catalogue.files[:] = [StoredFile(path="out", size=f.size) for f in catalogue.files]
    return catalogue


def encode(catalogue: Catalogue, arrays: dict[str, np.ndarray]) -> list[bytes]:
    """The bytes of raw files that hold whole stored tensors."""
    data = [bytearray(f.size) for f in catalogue.files]
    for i, tensor in enumerate(catalogue.shards.tensor.tolist()):
        array = arrays[catalogue.tensors[tensor].name]
        raw = np.ascontiguousarray(array[raw_checkpoints.box(catalogue, i, array.ndim)]).tobytes()
        at = int(catalogue.extents.offset[i])
        data[int(catalogue.extents.file[i])][at : at + len(raw)] = raw
    return [bytes(d) for d in data]


def reference(number: int) -> Tree:
    """The data files of a plan by numpy alone, without headers of a sidecar."""
    tiny = tiny_plan(number)
    plan = tiny.plan
    target = plan.target.catalogue
    source = plan.sources[0]
    stored = {t.name: np.zeros(t.shape, t.dtype.view) for t in source.tensors}
    for i, tensor in enumerate(source.shards.tensor.tolist()):
        array = stored[source.tensors[tensor].name]
        where = raw_checkpoints.box(source, i, array.ndim)
        data = tiny.source[str(source.path(int(source.extents.file[i])))]
        at = int(source.extents.offset[i])
        array[where] = np.frombuffer(data[at : at + array[where].nbytes], array.dtype).reshape(
            array[where].shape
        )
    out = {t.name: np.zeros(t.shape, t.dtype.view) for t in target.tensors}
    for entry in plan.entries:
        assert entry.source is not None
        index = np.indices(entry.shape).reshape(len(entry.shape), -1)
        here, there = (_where(p, index) for p in (entry.source, entry.target))
        out[entry.target.stored][there] = stored[entry.source.stored][here]
    files = [bytearray(d) for d in encode(target, out)]
    for file, offset, data in plan.target.fragments:
        files[file][offset : offset + len(data)] = data
    tree = {f.path: bytes(d) for f, d in zip(target.files, files, strict=True)}
    return {**tree, **plan.target.small_files, **plan.target.final_files}


def _where(p: object, index: np.ndarray) -> tuple[np.ndarray, ...]:
    where = [np.full(index.shape[1], b) for b in p.base]  # type: ignore[attr-defined]
    for j, (d, m) in enumerate(zip(p.dims, p.mults, strict=True)):  # type: ignore[attr-defined]
        where[d] = where[d] + index[j] * m
    return tuple(where)
