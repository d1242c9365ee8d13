"""Verify: one checkpoint against its digests, or two against each other in any format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.compare import Delta, Half, Pair, compare, num_bytes
from megtool.checkpoint.formats.torch_dist_integrity import check_integrity
from megtool.checkpoint.parallel_scan import usual_threads
from megtool.checkpoint.read import Reader
from megtool.checkpoint.replicas import as_pair
from megtool.checkpoint.storage.files import Files
from megtool.commands.digest_check import Kept
from megtool.commands.verify_metadata import check_configs, check_words
from megtool.commands.verify_quantized import QuantizedPair, packings_differ
from megtool.commands.verify_report import Difference, Kind, VerifyReport
from megtool.console import Progress, silent
from megtool.convert.binding import missing
from megtool.convert.canonical import VOCABULARY, CanonicalModel
from megtool.errors import UsageError
from megtool.reshard.align import Choice, open_both, open_one
from megtool.reshard.open_source import CheckpointSource
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement

_TIED = "a copy of the tied embedding"
_EMBEDDING = "embed.weight"
_STATELESS = ("hf", "gguf")
"""Dialects that have no place for optimizer state."""


def verify(
    a: str | Path,
    b: str | Path | None = None,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    sqnr: float | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    iteration: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> VerifyReport:
    """Check that a checkpoint is sound and complete and that its digests hold; or that two are
    equal in content, whatever their formats and layouts, and that the digests of both hold.

    Elements are compared bit by bit, and types must agree; with `atol` or `rtol` they are compared
    as numbers, of whatever types: `|a - b| <= atol + rtol * |b|`. Padding is left out, and so is
    optimizer state that the other format has no place for. `iteration` chooses one of a save
    folder, whichever of the two is one. Memory is bounded by a few buffers a thread.

    Where one of the two is quantized and the other is not, or otherwise, weights are compared by
    signal over noise instead: each format has its threshold (`quant.proofs.closeness.LEAST`), or
    `sqnr` (dB) stands for all of them. Factors of columns that a norm has taken, or that lie beside
    a weight, are undone; config files are held against the tensors.

    Raises:
        MegtoolError: one cannot be opened or located, or the two have no tensor in common.
    """
    began = time.monotonic()
    if b is None and (atol or rtol):
        raise UsageError("a tolerance needs two checkpoints", hint="megtool verify A B --atol X")
    if sqnr is not None and (b is None or atol or rtol):
        raise UsageError("--sqnr needs two checkpoints, and no other tolerance")
    choice = Choice(family=family, like=None if like is None else Path(like), iteration=iteration)
    opened = [open_one(Path(a), choice)] if b is None else [*open_both(Path(a), Path(b), choice)]
    found = _Found()
    near: QuantizedPair | None = None
    kept = [Kept(o) for o in opened]
    with ExitStack() as stack:
        readers = [stack.enter_context(Reader(o.catalogue, Files())) for o in opened]
        for reader in readers:  # finds every shard, whether or not its bytes will be read
            reader.locator.offsets(np.arange(len(reader.catalogue.shards)))
        halves = [k.half(r) for k, r in zip(kept, readers, strict=True)]
        if b is None:
            found.differences += _incomplete(opened[0])
            found.check_files(opened[0].catalogue, usual_threads(threads))
            pairs = list(kept[0].alone())
        else:
            if not (atol or rtol) and packings_differ(opened[0], opened[1]):
                near = QuantizedPair.of(opened[0], opened[1], readers, sqnr)
            apart = near.apart() if near else set()
            pairs = list(_matched(opened[0], opened[1], halves, bool(atol or rtol), found, apart))
        for o in opened:
            found.take(*check_words(o))
        if b is not None and any(o.catalogue.packed for o in opened):
            found.take(list(check_configs(opened[0], opened[1])), ())
        tasks = [_Task(pairs, halves[0], halves[-1], lambda d: found.values(pairs, d))]
        for side in range(len(opened)):
            tasks += _asides(opened[side], kept[side], readers[side], found, stack)
        total = sum(task.num_bytes for task in tasks) + 4 * (near.num_elements if near else 0)
        progress("verify", 0, total)
        for number, task in enumerate(tasks):
            deltas = compare(
                task.pairs,
                task.a,
                task.b,
                atol=0.0 if number else atol,
                rtol=0.0 if number else rtol,
                threads=usual_threads(threads),
                progress=lambda n: progress("verify", n, total),
            )
            task.settle(deltas)
        if near is not None:
            near.run(
                threads=usual_threads(threads),
                progress=lambda n: progress("verify", 4 * n, total),
            )
            found.take(near.differences, near.notes)
    for k, half in zip(kept, halves, strict=True):
        k.hold(half)
        k.opened.catalogue.check_unchanged()
    families = [o.model.family.name for o in opened if o.model and o.model.family]
    return VerifyReport(
        a=str(a),
        b=None if b is None else str(b),
        a_format=opened[0].catalogue.format,
        b_format=None if b is None else opened[1].catalogue.format,
        family=families[0] if families and opened[0].is_canonical else None,
        matched_by="canonical" if opened[0].is_canonical else "stored",
        atol=atol,
        rtol=rtol,
        num_tensors=sum(b is None or (p.a is not None and p.b is not None) for p in pairs)
        + (len(near.apart()) if near else 0),
        num_bytes=tasks[0].num_bytes + (near.num_bytes if near else 0),
        num_replicas=sum(len(o.catalogue.replicas) for o in opened),
        seconds=time.monotonic() - began,
        within=found.within,
        digests=tuple(k.check() for k in kept),
        differences=(*found.differences, *(d for k in kept for d in k.differences)),
        notes=(*found.notes, *(n for k in kept for n in k.notes)),
        weights=tuple(near.rows) if near else (),
    )


class _Found:
    """What has been found so far."""

    def __init__(self) -> None:
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.within = 0.0

    def take(self, differences: Sequence[Difference], notes: Sequence[str]) -> None:
        """Take in what was found elsewhere."""
        self.differences += differences
        self.notes += notes

    def check_files(self, catalogue: Catalogue, threads: int) -> None:
        """Hold whole files against the checksums that Megatron wrote, where it did."""
        if catalogue.format != "torch_dist":
            return
        unsound = check_integrity(catalogue.root, threads=threads)
        if unsound is None:
            return
        for one in unsound:
            self.differences.append(
                Difference(tensor=one.file, stored=one.file, kind="file", text=one.reason)
            )
        if not unsound:
            self.notes.append("every file is what integrity.json says")

    def values(self, pairs: Sequence[Pair], deltas: Deltas) -> None:
        """Take in the tensors that differ, in the order of the pairs."""
        for pair in pairs:
            delta = deltas.get(pair.name)
            if delta is None or pair.a is None:
                continue
            self.within = max(self.within, delta.within)
            if delta.num_differing:
                self.differences.append(_difference(pair.name, pair.a, delta))


Deltas = Mapping[str, Delta]


@dataclass(frozen=True, slots=True)
class _Task:
    """Some pairs to be compared, and what to do with the outcome."""

    pairs: list[Pair]
    a: Half
    b: Half
    settle: Callable[[Deltas], None]

    @property
    def num_bytes(self) -> int:
        """What the progress will count."""
        return sum(num_bytes(pair, self.a, self.b) for pair in self.pairs)


def _difference(name: str, place: Placement, delta: Delta, kind: Kind = "values") -> Difference:
    shape = place.shape

    def index(flat: int | None) -> tuple[int, ...] | None:
        return None if flat is None else tuple(int(i) for i in np.unravel_index(flat, shape))

    total = numel(shape)
    text = f"{delta.num_differing:,} of {total:,} elements differ"
    if delta.num_nan:
        text += f", {delta.num_nan:,} of them NaN on one side alone"
    if delta.largest_abs:
        text += f", by {delta.largest_abs:.4g} at most, at {_at(index(delta.abs_at))}"
    elif delta.largest_abs is not None and not delta.num_nan:
        text += " in their bits alone (-0.0 and 0.0, or two kinds of NaN)"
    if delta.largest_rel:
        text += f", relative to B by {delta.largest_rel:.4g}, at {_at(index(delta.rel_at))}"
    return Difference(
        tensor=name,
        stored=place.stored,
        kind=kind,
        text=text,
        num_elements=total,
        num_differing=delta.num_differing,
        largest_abs=delta.largest_abs,
        largest_abs_at=index(delta.abs_at),
        largest_rel=delta.largest_rel,
        largest_rel_at=index(delta.rel_at),
    )


def _at(index: tuple[int, ...] | None) -> str:
    return str(list(index or ()))


def _incomplete(opened: CheckpointSource) -> Iterator[Difference]:
    """Tensors that the model should have and the checkpoint has not."""
    model, side = opened.model, opened.side
    if not opened.is_canonical or model is None:
        return
    more = model.family.vocabulary if model.family else {}
    for name in missing(side.canonical, CanonicalModel(model.config, {**VOCABULARY, **more}))[0]:
        yield Difference(tensor=name, stored=name, kind="missing", text="the model has it")


def _matched(
    a: CheckpointSource,
    b: CheckpointSource,
    halves: Sequence[Half],
    loosely: bool,
    found: _Found,
    apart: Collection[str] = (),
) -> Iterator[Pair]:
    """Pairs of tensors to compare; those that cannot be compared are differences, and are paired
    with nothing, so that their digests are checked all the same. So are those `apart`, which are
    compared in another way."""
    alone: Counter[tuple[str, str, str]] = Counter()
    x, y = a.side, b.side
    for name in (*x.placements, *(n for n in y.placements if n not in x.placements)):
        p, q = x.placements.get(name), y.placements.get(name)
        if p is None or q is None:
            has, lacks, place = (a, b, p) if p is not None else (b, a, q)
            state = name.rpartition(":")[0] if has.is_canonical else ""
            if state and lacks.side.dialect in _STATELESS:
                alone[state, str(has.path), lacks.catalogue.format] += 1
            elif place is not None:
                text = f"is not in {lacks.path}"
                found.differences.append(
                    Difference(tensor=name, stored=place.stored, kind="missing", text=text)
                )
        elif x.canonical[name].shape != y.canonical[name].shape:
            one, other = list(x.canonical[name].shape), list(y.canonical[name].shape)
            text = f"{one} in {a.path}, {other} in {b.path}"
            found.differences.append(
                Difference(tensor=name, stored=p.stored, kind="shape", text=text)
            )
        elif name in apart:
            pass
        elif not loosely and halves[0].dtype(p) != halves[1].dtype(q):
            text = f"{halves[0].dtype(p)} in {a.path}, {halves[1].dtype(q)} in {b.path}"
            found.differences.append(
                Difference(tensor=name, stored=p.stored, kind="dtype", text=text)
            )
        else:
            yield Pair(name=name, a=p, b=q)
            continue
        if name in halves[0].sizes and p is not None:
            yield Pair(name=name, a=p, b=None)
        if name in halves[1].sizes and q is not None:
            yield Pair(name=name, a=None, b=q)
    for (state, path, kind), n in alone.items():
        found.notes.append(
            f"{state} of {n} tensors is in {path} alone, for {kind!r} has no place for it"
        )


def _asides(
    opened: CheckpointSource, kept: Kept, reader: Reader, found: _Found, stack: ExitStack
) -> Iterator[_Task]:
    """What is checked in each checkpoint by itself: digests of tensors that are not compared as
    they are, replicas, and copies of the tied embedding."""
    pairs, half = kept.rest(reader)
    yield _Task(pairs, half, half, lambda deltas: kept.hold(half))
    if opened.catalogue.replicas:
        one, other = (
            Half(reader=stack.enter_context(Reader(c, Files()))) for c in as_pair(opened.catalogue)
        )
        yield _replicas(one, other, found)
    yield _tied_copies(opened, Half(reader=reader), found)


def _replicas(one: Half, other: Half, found: _Found) -> _Task:
    tensors = one.reader.catalogue.tensors
    places = {t.name: Placement.identity(t.name, t.shape) for t in tensors}

    def settle(deltas: Deltas) -> None:
        found.differences += [
            _difference(name, places[name], d, "replica") for name, d in sorted(deltas.items())
        ]

    return _Task([Pair(name=n, a=p, b=p) for n, p in places.items()], one, other, settle)


def _tied_copies(opened: CheckpointSource, half: Half, found: _Found) -> _Task:
    """Output matrices that are no part of the model, because they repeat its embedding: do they?"""
    pairs = []
    place = opened.side.placements.get(_EMBEDDING)
    for stored, reason in opened.side.dropped:
        tensor = opened.catalogue[stored]
        if reason != _TIED or place is None:
            found.notes.append(f"{stored} of {opened.path} is not compared: {reason}")
            continue
        want = opened.side.canonical[_EMBEDDING]
        if tensor.dtype != want.dtype or tensor.shape[1:] != want.shape[1:]:
            found.notes.append(f"{stored} of {opened.path} is not like the embedding it repeats")
            continue
        copy = Placement.identity(_EMBEDDING, want.shape, stored=stored)
        pairs.append(Pair(name=stored, a=place, b=copy))

    def settle(deltas: Deltas) -> None:
        for name, delta in deltas.items():
            text = _difference(name, pairs[0].a or copy, delta).text
            found.notes.append(f"{name} of {opened.path} does not repeat the embedding: {text}")

    return _Task(pairs, half, half, settle)
