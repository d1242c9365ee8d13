"""Plan which tensors of one checkpoint, or of two, are read and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from megtool.commands.reports.verify import Difference
from megtool.commands.verification.digest_check import DigestIndex
from megtool.commands.verification.findings import Deltas, Findings, describe_delta
from megtool.convert.language.binding import missing
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel
from megtool.digests.compare import ComparedSource, TensorPair, count_pair_bytes
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.tensors.placement import Placement
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.replicas import pair_replicas

_TIED = "a copy of the tied embedding"
_EMBEDDING = "embed.weight"
_STATELESS = ("hf", "gguf")
"""Dialects that have no place for optimizer state."""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Some pairs to be compared, and what to do with the outcome."""

    pairs: list[TensorPair]
    a: ComparedSource
    b: ComparedSource
    report: Callable[[Deltas], None]

    @property
    def num_bytes(self) -> int:
        """What the progress will count."""
        return sum(count_pair_bytes(pair, self.a, self.b) for pair in self.pairs)


def find_missing(source: CheckpointSource) -> Iterator[Difference]:
    """Tensors that the model should have and the checkpoint has not."""
    model, side = source.model, source.view
    if not source.is_canonical or model is None:
        return
    more = model.family.vocabulary if model.family else {}
    for name in missing(side.canonical, CanonicalModel(model.config, {**VOCABULARY, **more}))[0]:
        yield Difference(tensor=name, stored=name, kind="missing", text="the model has it")


def match_tensors(
    a: CheckpointSource,
    b: CheckpointSource,
    compared_sources: Sequence[ComparedSource],
    has_tolerance: bool,
    findings: Findings,
    excluded: Collection[str] = (),
) -> Iterator[TensorPair]:
    """Pairs of tensors to compare; those that cannot be compared are differences, and are paired
    with nothing, so that their digests are checked all the same. So are those `excluded`, which are
    compared in another way."""
    num_unmatched: Counter[tuple[str, str, str]] = Counter()
    x, y = a.view, b.view
    for name in (*x.placements, *(n for n in y.placements if n not in x.placements)):
        p, q = x.placements.get(name), y.placements.get(name)
        if p is None or q is None:
            has, lacks, place = (a, b, p) if p is not None else (b, a, q)
            state = name.rpartition(":")[0] if has.is_canonical else ""
            if state and lacks.view.dialect in _STATELESS:
                num_unmatched[state, str(has.path), lacks.catalogue.format] += 1
            elif place is not None:
                text = f"is not in {lacks.path}"
                findings.differences.append(
                    Difference(tensor=name, stored=place.stored, kind="missing", text=text)
                )
        elif x.canonical[name].shape != y.canonical[name].shape:
            shape_a, shape_b = list(x.canonical[name].shape), list(y.canonical[name].shape)
            text = f"{shape_a} in {a.path}, {shape_b} in {b.path}"
            findings.differences.append(
                Difference(tensor=name, stored=p.stored, kind="shape", text=text)
            )
        elif name in excluded:
            pass
        elif not has_tolerance and compared_sources[0].dtype(p) != compared_sources[1].dtype(q):
            dtypes = [s.dtype(x) for s, x in zip(compared_sources, (p, q), strict=True)]
            text = f"{dtypes[0]} in {a.path}, {dtypes[1]} in {b.path}"
            findings.differences.append(
                Difference(tensor=name, stored=p.stored, kind="dtype", text=text)
            )
        else:
            yield TensorPair(name=name, a=p, b=q)
            continue
        if name in compared_sources[0].sizes and p is not None:
            yield TensorPair(name=name, a=p, b=None)
        if name in compared_sources[1].sizes and q is not None:
            yield TensorPair(name=name, a=None, b=q)
    yield from _match_false_copies(a, b, findings)
    for (state, path, kind), n in num_unmatched.items():
        reason = f"{path} alone has it, and {kind!r} has no place for it"
        findings.uncompared[f"{state} of {n} tensors"] = reason
        findings.notes.append(
            f"{state} of {n} tensors is in {path} alone, for {kind!r} has no place for it"
        )


def _match_false_copies(
    a: CheckpointSource, b: CheckpointSource, findings: Findings
) -> Iterator[TensorPair]:
    """Pairs of stored tensors that the model takes for copies of others, and that are none."""
    if not (a.is_canonical and b.is_canonical):
        return  # all stored names are compared
    false = {c.name: (s, c) for s in (b, a) for c in s.false_copies}
    stored = [{t.name: t for t in s.catalogue.tensors if t.name in false} for s in (a, b)]
    for name, (source, copy) in false.items():
        x, y = (tensors.get(name) for tensors in stored)
        if x is not None and y is not None and (x.shape, x.dtype) == (y.shape, y.dtype):
            yield TensorPair(name=name, a=(place := Placement.identity(name, x.shape)), b=place)
            continue
        lacks = b if source is a else a
        has_other = "has another" if x is not None and y is not None else "does not have it"
        text = f"in {source.path} it is {copy}; {lacks.path} {has_other}"
        findings.differences.append(Difference(tensor=name, stored=name, kind="values", text=text))


def plan_own_checks(
    source: CheckpointSource,
    digests: DigestIndex,
    reader: CheckpointReader,
    findings: Findings,
    stack: ExitStack,
) -> Iterator[ReadTask]:
    """What is checked in each checkpoint by itself: digests of tensors that are not compared as
    they are, replicas, and copies of the tied embedding."""
    pairs, compared_source = digests.plan_stored_reads(reader)
    yield ReadTask(
        pairs,
        compared_source,
        compared_source,
        lambda deltas: digests.check_computed(compared_source),
    )
    if source.catalogue.replicas:
        first, second = (
            ComparedSource(reader=stack.enter_context(CheckpointReader(c, Files())))
            for c in pair_replicas(source.catalogue)
        )
        yield _compare_replicas(first, second, findings)
    yield _compare_tied_copies(source, ComparedSource(reader=reader), findings)


def _compare_replicas(
    first: ComparedSource, second: ComparedSource, findings: Findings
) -> ReadTask:
    tensors = first.reader.catalogue.tensors
    placements = {t.name: Placement.identity(t.name, t.shape) for t in tensors}

    def report(deltas: Deltas) -> None:
        findings.differences += [
            describe_delta(name, placements[name], d, "replica")
            for name, d in sorted(deltas.items())
        ]

    return ReadTask(
        [TensorPair(name=n, a=p, b=p) for n, p in placements.items()], first, second, report
    )


def _compare_tied_copies(
    source: CheckpointSource, compared_source: ComparedSource, findings: Findings
) -> ReadTask:
    """Output matrices that are no part of the model, because they repeat its embedding: do they?"""
    pairs = []
    place = source.view.placements.get(_EMBEDDING)
    false = {c.name: c for c in source.false_copies}
    for stored, reason in source.view.dropped:
        tensor = source.catalogue[stored]
        if (copy_fault := false.get(stored)) is not None:
            findings.notes.append(f"{stored} of {source.path} is {copy_fault}")
            continue
        if reason != _TIED or place is None:
            findings.notes.append(f"{stored} of {source.path} is not compared: {reason}")
            continue
        embedding = source.view.canonical[_EMBEDDING]
        if tensor.dtype != embedding.dtype or tensor.shape[1:] != embedding.shape[1:]:
            findings.notes.append(f"{stored} of {source.path} is not like the embedding it repeats")
            continue
        copy = Placement.identity(_EMBEDDING, embedding.shape, stored=stored)
        pairs.append(TensorPair(name=stored, a=place, b=copy))

    def report(deltas: Deltas) -> None:
        for name, delta in deltas.items():
            text = describe_delta(name, pairs[0].a or copy, delta).text
            findings.notes.append(f"{name} of {source.path} does not repeat the embedding: {text}")

    return ReadTask(pairs, compared_source, compared_source, report)
