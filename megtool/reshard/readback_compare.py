"""Compare a staged checkpoint with its source, tensor by tensor, before its commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megtool.digests.compare import (
    ComparedSource,
    ReadableView,
    TensorDelta,
    TensorPair,
    compare,
)
from megtool.dtypes import DType
from megtool.errors import DigestError
from megtool.plan.copies import Op, ReshardPlan
from megtool.reshard.readback import find_written, open_tree
from megtool.reshard.staged_headers import READBACK_HINT
from megtool.reshard.writers.target_spec import Target
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.tensors.box import numel, strides
from megtool.tensors.placement import Placement, narrow, refine
from megtool.transport.cast import add_shift, cast, limit_torch_threads
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reduce import sum_dtype
from megtool.transport.replicas import pair_replicas
from megtool.transport.strided import Array
from megtool.transport.tile import Index
from megtool.transport.weight_update import UpdateAdder, WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadbackReport:
    """What was read back and is equal: tensors, and small files that hold no tensors."""

    num_tensors: int
    num_bytes: int
    num_files: int


def compare_with_source(
    source: CheckpointSource,
    target: Target,
    plan: ReshardPlan,
    tree: Path,
    *,
    threads: int,
    progress: Callable[[int, int], None],
) -> ReadbackReport:
    """Open what was written to `tree` as any checkpoint is opened, and compare it bit by bit.

    Every tensor has to equal the source's, cast to the dtype that is written, or its sum with an
    update, or the mean of all sources. Small files have to hold what was planned. Copies of one
    tensor in several files are compared with each other. Padding is not compared.

    Raises:
        DigestError: the first difference, or it cannot be read at all.
    """
    num_files = _compare_files(target, plan, tree)
    written, raw = open_tree(tree, source)
    placements = find_written(source, target, plan, written, raw)
    expected = _ExpectedTensors(plan)
    num_bytes = expected.num_bytes
    progress(0, num_bytes)
    total = 0

    def count(n: int) -> None:
        nonlocal total
        total += n
        progress(min(total, num_bytes), num_bytes)

    with limit_torch_threads(bool(expected.updates)), ExitStack() as stack:
        files = Files()
        readers = [stack.enter_context(CheckpointReader(c, files)) for c in plan.sources]
        a = _ExpectedSource(reader=readers[0], expected=expected, readers=readers)
        for number, catalogue in enumerate((written.catalogue, raw)):
            b = ComparedSource(reader=stack.enter_context(CheckpointReader(catalogue, files)))
            pairs = [
                TensorPair(name=name, a=expected.placements[name], b=w.placement)
                for name, w in placements.items()
                if w.catalogue == number and numel(w.placement.shape)
            ]
            deltas = compare(pairs, a, b, threads=threads, progress=count)
            _refuse(pairs, deltas, "differ from the source")
        if written.catalogue.replicas:
            first, second = (
                ComparedSource(reader=stack.enter_context(CheckpointReader(c, files)))
                for c in pair_replicas(written.catalogue)
            )
            same = [Placement.identity(t.name, t.shape) for t in first.reader.catalogue.tensors]
            pairs = [TensorPair(name=p.stored, a=p, b=p) for p in same]
            deltas = compare(pairs, first, second, threads=threads)
            _refuse(pairs, deltas, "differ from another copy of the same tensor")
    return ReadbackReport(num_tensors=len(placements), num_bytes=num_bytes, num_files=num_files)


def _refuse(pairs: Sequence[TensorPair], deltas: Mapping[str, TensorDelta], what: str) -> None:
    for pair in pairs:
        delta = deltas.get(pair.name)
        if delta is None or pair.b is None:
            continue
        first = [int(i) for i in np.unravel_index(delta.first or 0, pair.b.shape)]
        raise DigestError(
            f"{delta.num_differing:,} of {numel(pair.b.shape):,} elements that were read back "
            f"{what}, the first at {first}; {len(deltas)} tensors differ",
            tensor=pair.name,
            hint=READBACK_HINT,
        )


def _compare_files(target: Target, plan: ReshardPlan, tree: Path) -> int:
    """The number of small files, all of which hold what was planned.

    Those that `target.finish` has packed into a database are compared as tensors only.
    """
    number = 0
    for name, data in plan.target.iter_small_files():
        try:
            actual = (tree / name).read_bytes()
        except FileNotFoundError:
            if target.finish is not None:
                continue
            raise DigestError(
                "it is missing when it is read back", file=name, hint=READBACK_HINT
            ) from None
        except OSError as e:
            raise DigestError(
                f"it was written, and cannot be read back: {e.strerror}",
                file=name,
                hint=READBACK_HINT,
            ) from e
        if actual != data:
            raise DigestError(
                "what was read back is not what was written", file=name, hint=READBACK_HINT
            )
        number += 1
    return number


class _ExpectedTensors:
    """What a plan should have written, by canonical name: dtypes, and where it is read.

    `terms` are sources by number, each with its placement; a mean has several, and `shares`.
    `shifts` is what the target adds to the elements that it stores, and `updates` what is added to
    those of the source.
    """

    def __init__(self, plan: ReshardPlan) -> None:
        self.placements: dict[str, Placement] = {}
        self.dtypes: dict[str, DType] = {}
        self.terms: dict[str, list[tuple[int, Placement]]] = {}
        self.shares: dict[str, list[float]] = {}
        self.shifts: dict[str, float] = {}
        self.updates: dict[str, tuple[WeightUpdate, ...]] = {}
        self.num_bytes = 0
        for number, entry in enumerate(plan.entries):
            if entry.op is Op.FILL or not entry.writes or entry.source is None:
                continue
            name = entry.canonical
            self.placements[name] = replace(entry.source, canonical=name)
            self.dtypes[name] = plan.target_tensor(entry).dtype
            self.shifts[name] = entry.target.shift
            self.num_bytes += numel(entry.shape) * self.dtypes[name].itemsize
            entries = [plan.entries[n] for n in plan.terms(number)]
            self.terms[name] = [(t.source_index, t.source) for t in entries if t.source]
            if entry.op is Op.REDUCE:
                self.shares[name] = [t.share for t in entries]
            if entry.updates:
                self.updates[name] = entry.updates


@dataclass(slots=True, kw_only=True)
class _ExpectedSource(ComparedSource):
    """The source as the target should have it: cast, averaged and updated as it is read."""

    expected: _ExpectedTensors
    readers: Sequence[CheckpointReader]

    def dtype(self, placement: Placement) -> DType:
        """The dtype that was to be written."""
        return self.expected.dtypes[placement.canonical]

    def whole_row_depth(self, placement: Placement) -> int | None:
        """The dimension from which any packed tensor is read whole; None if all may be cut."""
        depths = []
        for index, term in self._terms(placement):
            depth = ComparedSource(reader=self.readers[index]).whole_row_depth(term)
            depths += [] if depth is None else [depth]
        return min(depths, default=None)

    def open_box(self, placement: Placement, lo: Index, hi: Index) -> ReadableView:
        """Open the box `lo:hi` of a tensor's view."""
        dtype = self.expected.dtypes[placement.canonical]
        shares = self.expected.shares.get(placement.canonical)
        updates = self.expected.updates.get(placement.canonical)
        kind = dtype if shares is None and updates is None else sum_dtype(dtype)
        views = [
            self.readers[index].open_canonical(narrow(term, lo, hi), kind)
            for index, term in self._terms(placement)
        ]
        if shares is not None:
            return _MeanView(list(zip(shares, views, strict=True)), dtype)
        if updates is not None:
            first = sum(i * s for i, s in zip(lo, strides(placement.shape), strict=True))
            return _MergedView(views[0], dtype, updates, first)
        by = self.expected.shifts[placement.canonical]
        return _ShiftedView(views[0], dtype, by) if by else views[0]

    def _terms(self, placement: Placement) -> list[tuple[int, Placement]]:
        """The sources of a tensor, by number, each with its placement over the same view."""
        terms = self.expected.terms[placement.canonical]
        return [(index, refine(term, placement)[0]) for index, term in terms]


class _ShiftedView:
    """Elements as they are after they were stored with `by` added to them."""

    def __init__(self, view: ReadableView, dtype: DType, by: float) -> None:
        self._view, self.dtype, self._by = view, dtype, by

    def tiles(self, max_bytes: int) -> Generator[tuple[int, Array], None, None]:
        """Consecutive elements, each tile with the flat index of its first."""
        with closing(self._view.tiles(max_bytes)) as stream:
            for offset, part in stream:
                out = np.empty_like(part)
                for values, by in ((part, self._by), (out, -self._by)):
                    add_shift(values, self.dtype, out, self.dtype, by)
                yield offset, out


class _MergedView:
    """Elements of float32 or float64, from number `first` on, with updates added, as `dtype`."""

    def __init__(
        self, view: ReadableView, dtype: DType, updates: Sequence[WeightUpdate], first: int
    ) -> None:
        self._view, self.dtype, self._first = view, dtype, first
        self._adder = UpdateAdder(updates)

    def tiles(self, max_bytes: int) -> Generator[tuple[int, Array], None, None]:
        """Consecutive elements, each tile with the flat index of its first."""
        kind = sum_dtype(self.dtype)
        with closing(self._view.tiles(max_bytes)) as stream:
            for offset, part in stream:
                with np.errstate(all="ignore"):  # weights may contain Inf and NaN
                    self._adder.add(part.view(kind.view), self._first + offset)
                out = np.empty(part.size, self.dtype.view)
                cast(part, kind, out, self.dtype)
                yield offset, out


class _MeanView:
    """The weighted sum of several tensors of float32 or float64, rounded once to `dtype`."""

    def __init__(self, terms: Sequence[tuple[float, ReadableView]], dtype: DType) -> None:
        self._terms = terms
        self.dtype = dtype

    def tiles(self, max_bytes: int) -> Generator[tuple[int, Array], None, None]:
        """Consecutive elements, each tile with the flat index of its first."""
        kind = sum_dtype(self.dtype)
        with ExitStack() as stack:
            streams = [
                stack.enter_context(closing(view.tiles(max_bytes))) for _, view in self._terms
            ]
            parts = [np.empty(0, kind.view) for _ in streams]
            offset = 0
            while True:
                for k, stream in enumerate(streams):
                    if not parts[k].size:
                        _, parts[k] = next(stream, (0, parts[k]))
                n = min(part.size for part in parts)
                if not n:
                    return
                yield offset, self._sum([part[:n] for part in parts])
                parts = [part[n:] for part in parts]
                offset += n

    def _sum(self, parts: Sequence[Array]) -> Array:
        kind = sum_dtype(self.dtype)
        total = np.zeros(0, kind.view)
        with np.errstate(all="ignore"):  # weights may contain Inf and NaN
            for number, ((share, _), part) in enumerate(zip(self._terms, parts, strict=True)):
                term = np.multiply(part, kind.view.type(share), dtype=kind.view)
                total = term if number == 0 else np.add(total, term, out=total)
        out = np.empty(total.size, self.dtype.view)
        cast(total, kind, out, self.dtype)
        return out
