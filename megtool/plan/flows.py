"""How many bytes of a plan go from which source file to which target file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megtool.plan.copies import Op, ReshardPlan
from megtool.tensors.box import Ints
from megtool.tensors.grouping import distinct

MAX_NODES = 32
"""Files of each side that are counted alone; of more, neighbors are counted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFlows:
    """Bytes that the target gets, from `sources` to `targets`.

    Both are files, or several neighboring ones (`first to last`); the last source may be what is
    filled. A flow is `(index of the source, index of the target, bytes, bytes in long runs)`.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    flows: tuple[tuple[int, int, int, int], ...]

    def to_json(self) -> dict[str, Any]:
        """The flows as plain data."""
        return {"sources": self.sources, "targets": self.targets, "flows": self.flows}


def sum_flows(plan: ReshardPlan) -> FileFlows:
    """Sum up the steps of a plan by the files that they read and write.

    Files are ranks where ranks write files of their own. Of several sources the files follow one
    another. Long runs are those that the kernel can move.
    """
    steps, target = plan.steps, plan.target.catalogue
    item = np.array([plan.target_tensor(e).dtype.itemsize for e in plan.entries], np.int64)
    counts = np.array([e.writes and e.op is not Op.ENCODE for e in plan.entries], bool)
    num_bytes = steps.boxes.volume() * item[steps.entry] * counts[steps.entry]
    _, is_plain = plan.step_runs()
    names, first = list[str](), list[int]()
    for catalogue in plan.sources:
        first.append(len(names))
        names += [f.path or catalogue.root.name for f in catalogue.files]
    names.append("filled")
    source = np.full(len(steps), len(names) - 1, np.int64)
    index = np.array([e.source_index for e in plan.entries], np.int64)[steps.entry]
    for number, catalogue in enumerate(plan.sources):
        rows = np.flatnonzero((index == number) & (steps.source_piece >= 0))
        shards = plan.source_pieces.shard[steps.source_piece[rows]]
        source[rows] = catalogue.extents.file[shards].astype(np.int64) + first[number]
    shards = plan.target_pieces.shard[steps.target_piece]
    written = target.extents.file[shards].astype(np.int64)
    source_group, sources = _group(names, source)
    target_group, targets = _group([f.path or target.root.name for f in target.files], written)
    pair = source_group * max(len(targets), 1) + target_group
    size = max(len(sources) * len(targets), 1)
    total = np.bincount(pair, num_bytes, size).astype(np.int64)
    plain = np.bincount(pair, num_bytes * is_plain, size).astype(np.int64)
    flows = [
        (*divmod(number, len(targets)), int(total[number]), int(plain[number]))
        for number in np.flatnonzero(total).tolist()
    ]
    return FileFlows(sources=tuple(sources), targets=tuple(targets), flows=tuple(flows))


def _group(names: Sequence[str], used: Ints) -> tuple[Ints, list[str]]:
    """The group of each file that is used, and the names of groups."""
    files = distinct(used)
    each = -(-len(files) // MAX_NODES) if len(files) else 1
    labels = []
    for start in range(0, len(files), each):
        members = [names[n] for n in files[start : start + each].tolist()]
        labels.append(members[0] if len(members) == 1 else f"{members[0]} to {members[-1]}")
    return np.searchsorted(files, used) // each, labels
