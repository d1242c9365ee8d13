"""Findings of a verification, and the text of a difference between two tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megtool.commands.reports.verify import Difference, DifferenceKind
from megtool.commands.verification.digest_check import describe_mismatch
from megtool.digests.compare import TensorDelta, TensorPair
from megtool.formats.torch_dist.integrity import check_integrity
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement

Deltas = Mapping[str, TensorDelta]


class Findings:
    """Differences and notes of a comparison so far, and what it left out."""

    def __init__(self) -> None:
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.uncompared: dict[str, str] = {}
        self.within = 0.0

    def add(self, differences: Sequence[Difference], notes: Sequence[str]) -> None:
        """Take in what was found elsewhere."""
        self.differences += differences
        self.notes += notes

    def check_files(self, catalogue: Catalogue, threads: int) -> None:
        """Hold whole files against the checksums that Megatron wrote, where it did."""
        if catalogue.format != "torch_dist":
            return
        damaged = check_integrity(catalogue.root, threads=threads)
        if damaged is None:
            return
        self.differences += [describe_mismatch(m) for m in damaged]
        if not damaged:
            self.notes.append("every file is what integrity.json says")

    def add_values(self, pairs: Sequence[TensorPair], deltas: Deltas) -> None:
        """Take in the tensors that differ, in the order of the pairs."""
        for pair in pairs:
            delta = deltas.get(pair.name)
            if delta is None or pair.a is None:
                continue
            self.within = max(self.within, delta.within)
            if delta.num_differing:
                self.differences.append(describe_delta(pair.name, pair.a, delta))


def describe_delta(
    name: str, place: Placement, delta: TensorDelta, kind: DifferenceKind = "values"
) -> Difference:
    """Return how a tensor differs: how many elements, by how much, and where the largest are."""
    shape = place.shape

    def index(flat: int | None) -> tuple[int, ...] | None:
        return None if flat is None else tuple(int(i) for i in np.unravel_index(flat, shape))

    total = numel(shape)
    text = f"{delta.num_differing:,} of {total:,} elements differ"
    if delta.num_nan:
        text += f", {delta.num_nan:,} of them NaN on one side alone"
    if delta.largest_abs:
        text += f", by {delta.largest_abs:.4g} at most, at {_at(index(delta.abs_index))}"
    elif delta.largest_abs is not None and not delta.num_nan:
        text += " in their bits alone (-0.0 and 0.0, or two kinds of NaN)"
    if delta.largest_rel:
        text += f", relative to B by {delta.largest_rel:.4g}, at {_at(index(delta.rel_index))}"
    return Difference(
        tensor=name,
        stored=place.stored,
        kind=kind,
        text=text,
        num_elements=total,
        num_differing=delta.num_differing,
        largest_abs=delta.largest_abs,
        largest_abs_at=index(delta.abs_index),
        largest_rel=delta.largest_rel,
        largest_rel_at=index(delta.rel_index),
        samples=tuple((index(int(flat)) or (), a, b) for flat, a, b in delta.samples),
    )


def _at(index: tuple[int, ...] | None) -> str:
    return str(list(index or ()))
