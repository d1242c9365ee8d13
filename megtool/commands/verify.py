"""Verify one checkpoint against its digests, or two against each other in any format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from megtool.commands.options.checkpoints import VerifyOptions
from megtool.commands.reports.verify import Difference, DifferenceKind, VerifyReport
from megtool.commands.verification.digest_check import (
    DigestIndex,
    FileCheck,
    describe_mismatch,
    find_damage,
)
from megtool.commands.verification.files import verify_files
from megtool.commands.verification.metadata import check_configs, check_objects, check_quant_config
from megtool.commands.verification.quantized import QuantizedPair, packings_differ
from megtool.commands.worker_scan import ShareReport, run_shared
from megtool.console import Progress, silent
from megtool.convert.language.binding import missing
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel
from megtool.digests.compare import (
    ComparedSource,
    TensorDelta,
    TensorPair,
    compare,
    count_pair_bytes,
)
from megtool.errors import CheckpointError, MappingError
from megtool.formats.save_folder import (
    TRACKER,
    describe_tracker_fault,
    is_save_folder,
)
from megtool.formats.torch_dist.integrity import check_integrity
from megtool.options.effects import check_effects
from megtool.quant.rotation.rotate import as_rotated
from megtool.source.align import open_aligned, open_for_digests
from megtool.source.checkpoint import CheckpointSource
from megtool.source.subset.widths import as_pruned
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement
from megtool.transport.reading.parallel_scan import default_threads
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reading.shared_scan import SharedScan
from megtool.transport.replicas import pair_replicas

_TIED = "a copy of the tied embedding"
_EMBEDDING = "embed.weight"
_STATELESS = ("hf", "gguf")
"""Dialects that have no place for optimizer state."""


def verify(options: VerifyOptions, *, progress: Progress = silent) -> VerifyReport | ShareReport:
    """Check one checkpoint against its digests, or that two are equal in content.

    Of one, it is also checked that it is complete. Two may have any formats and layouts; the
    digests of both are checked. Elements are compared bit by bit, and dtypes have to agree; with
    `atol` or `rtol` they are compared as numbers of any dtype: `|a - b| <= atol + rtol * |b|`.
    If one was pruned from the other, that one's parts that its record lists are compared; if one is
    rotated, the other is compared as if it were.
    Padding is left out, and so is optimizer state that the other format has no place for.
    `iteration` applies to whichever of the two is a save folder. Memory is bounded by a few
    buffers per thread.

    If one of the two is quantized and the other is not, or differently, weights are compared by
    signal-to-noise ratio instead: each format has its threshold
    (`quant.verification.sqnr_thresholds`), or `sqnr` (dB) replaces all of them. Smoothing scales
    that a norm has absorbed, or that are stored with a weight, are undone; config files are
    compared with the tensors.

    Raises:
        UsageError: an option has no effect here.
        MegtoolError: one cannot be opened or located, or the two have no tensor in common.
    """
    check_effects(options)
    locations = [options.a] if options.b is None else [options.a, options.b]
    return run_shared(options, "verify", locations, lambda scan: _verify(options, progress, scan))


def _verify(options: VerifyOptions, progress: Progress, scan: SharedScan | None) -> VerifyReport:
    start = time.monotonic()
    b, has_tolerance = options.b, bool(options.atol or options.rtol)
    threads = default_threads(options.threads, options.a, *([options.b] if options.b else ()))
    if b is None and (
        report := verify_files(options.a, threads=threads, progress=progress, scan=scan)
    ):
        return report
    is_last = scan is None or not scan.is_partial  # does what is not shared out
    sources = _open_sources(options)
    findings = _Findings()
    if b is not None:
        *sources, text = as_pruned(sources[0], sources[1])
        findings.notes += [] if text is None else [text]
        *sources, text = as_rotated(sources[0], sources[1])
        findings.notes += [] if text is None else [text]
    quantized: QuantizedPair | None = None
    digests = [DigestIndex(o) for o in sources]
    file_checks = [FileCheck(o, is_alone=b is None) for o in sources]
    _check_files(file_checks, digests, findings, threads, progress, scan)
    file_bytes = sum(check.num_bytes for check in file_checks)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(CheckpointReader(o.catalogue, Files(), is_strict=False))
            for o in sources
        ]
        for reader in readers:  # finds every shard, whether or not its bytes will be read
            reader.locator.offsets(np.arange(len(reader.catalogue.shards)))
        compared_sources = [
            index.compared_source(r) for index, r in zip(digests, readers, strict=True)
        ]
        if b is None:
            findings.differences += [*_find_missing(sources[0]), *check_objects(sources[0])]
            if is_last:
                findings.check_files(sources[0].catalogue, threads)
            findings.differences += _check_tracker(sources[0], options.iteration)
            pairs = list(digests[0].plan_reads())
        else:
            if not has_tolerance and packings_differ(sources[0], sources[1]):
                quantized = QuantizedPair.of(sources[0], sources[1], readers, options.sqnr)
            excluded = quantized.names() if quantized else set()
            pairs = list(
                _match_tensors(
                    sources[0], sources[1], compared_sources, has_tolerance, findings, excluded
                )
            )
        for o in sources:
            findings.add(*check_quant_config(o, is_alone=b is None))
        if b is not None and any(o.catalogue.packed for o in sources):
            findings.add(list(check_configs(sources[0], sources[1])), ())
        tasks = [
            _Task(
                pairs,
                compared_sources[0],
                compared_sources[-1],
                lambda d: findings.add_values(pairs, d),
            )
        ]
        for side in range(len(sources)):
            tasks += _plan_own_checks(sources[side], digests[side], readers[side], findings, stack)
        total = sum(task.num_bytes for task in tasks) + 4 * (
            quantized.num_elements if quantized else 0
        )
        if total:
            progress("verify", 0, total)
        for number, task in enumerate(tasks):
            deltas = compare(
                task.pairs,
                task.a,
                task.b,
                atol=0.0 if number else options.atol,
                rtol=0.0 if number else options.rtol,
                threads=threads,
                progress=lambda n: progress("verify", n, total),
                scan=scan.part(f"tensors {number}") if scan else None,
            )
            task.report(deltas)
        if quantized is not None and is_last:
            quantized.run(
                threads=threads,
                progress=lambda n: progress("verify", 4 * n, total),
            )
            findings.add(quantized.differences, quantized.notes)
    for index, compared_source in zip(digests, compared_sources, strict=True):
        index.check_computed(compared_source)
        index.source.catalogue.check_unchanged()
    families = [o.model.family.name for o in sources if o.model and o.model.family]
    return VerifyReport(
        a=str(options.a),
        b=None if b is None else str(b),
        a_format=sources[0].catalogue.format,
        b_format=None if b is None else sources[1].catalogue.format,
        family=families[0] if families and sources[0].is_canonical else None,
        matched_by="canonical" if sources[0].is_canonical else "stored",
        atol=options.atol,
        rtol=options.rtol,
        num_tensors=sum(b is None or (p.a is not None and p.b is not None) for p in pairs)
        + (len(digests[0].by_file) if b is None else 0)
        + (len(quantized.names()) if quantized else 0),
        num_bytes=tasks[0].num_bytes
        + (quantized.num_bytes if quantized else 0)
        + (file_bytes if b is None else 0),
        num_replicas=sum(len(o.catalogue.replicas) for o in sources),
        seconds=time.monotonic() - start,
        within=findings.within,
        digests=tuple(i.summarize(c) for i, c in zip(digests, file_checks, strict=True)),
        differences=(*findings.differences, *(d for k in digests for d in k.differences)),
        notes=(*findings.notes, *(n for k in digests for n in k.notes)),
        weights=tuple(quantized.rows) if quantized else (),
        compared=tuple(p.name for p in pairs if p.a is not None and p.b is not None),
    )


def _open_sources(options: VerifyOptions) -> list[CheckpointSource]:
    """One checkpoint, or two under the same names.

    Raises:
        MegtoolError: it cannot be opened; the hint names a file that is not as it was written.
    """
    try:
        if options.b is None:
            return [open_for_digests(options.a, options)]
        return [*open_aligned(options.a, options.b, options)]
    except (CheckpointError, MappingError) as e:
        for path in filter(None, (options.a, options.b)):
            for damaged in find_damage(path, options.iteration):
                e.hint = f"{damaged.file} of {path} is not as it was written: it {damaged.reason}"
                raise
        raise


def _check_files(
    checks: Sequence[FileCheck],
    digests: Sequence[DigestIndex],
    findings: _Findings,
    threads: int,
    progress: Progress,
    scan: SharedScan | None,
) -> None:
    """Compare files with their digests.

    What differs in a single checkpoint is a difference, and a note if there are two: these are
    compared by their contents.
    """
    total, is_alone = sum(check.num_bytes for check in checks), len(checks) == 1
    if total:
        progress("verify files", 0, total)
    for number, (check, index) in enumerate(zip(checks, digests, strict=True)):
        check.run(
            threads=threads,
            progress=lambda n: progress("verify files", n, total),
            scan=scan.part(f"files {number}") if scan else None,
        )
        index.use_files(check.verified, is_alone=is_alone)
        if is_alone:
            findings.differences += check.differences()
            continue
        findings.notes += [
            f"{d.stored} of {index.source.path} is not as it was written: it {d.text}"
            for d in check.differences()
        ]


def _check_tracker(source: CheckpointSource, iteration: object) -> Iterator[Difference]:
    """Whether the tracker of a save folder that megtool wrote names its last iteration."""
    if iteration is not None or source.sidecar is None or not is_save_folder(source.path):
        return
    text = describe_tracker_fault(source.path)
    if text is not None:
        yield Difference(tensor=TRACKER, stored=TRACKER, kind="file", text=text)


class _Findings:
    """What has been found so far."""

    def __init__(self) -> None:
        self.differences: list[Difference] = []
        self.notes: list[str] = []
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
                self.differences.append(_difference(pair.name, pair.a, delta))


Deltas = Mapping[str, TensorDelta]


@dataclass(frozen=True, slots=True)
class _Task:
    """Some pairs to be compared, and what to do with the outcome."""

    pairs: list[TensorPair]
    a: ComparedSource
    b: ComparedSource
    report: Callable[[Deltas], None]

    @property
    def num_bytes(self) -> int:
        """What the progress will count."""
        return sum(count_pair_bytes(pair, self.a, self.b) for pair in self.pairs)


def _difference(
    name: str, place: Placement, delta: TensorDelta, kind: DifferenceKind = "values"
) -> Difference:
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


def _find_missing(source: CheckpointSource) -> Iterator[Difference]:
    """Tensors that the model should have and the checkpoint has not."""
    model, side = source.model, source.view
    if not source.is_canonical or model is None:
        return
    more = model.family.vocabulary if model.family else {}
    for name in missing(side.canonical, CanonicalModel(model.config, {**VOCABULARY, **more}))[0]:
        yield Difference(tensor=name, stored=name, kind="missing", text="the model has it")


def _match_tensors(
    a: CheckpointSource,
    b: CheckpointSource,
    compared_sources: Sequence[ComparedSource],
    has_tolerance: bool,
    findings: _Findings,
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
    for (state, path, kind), n in num_unmatched.items():
        findings.notes.append(
            f"{state} of {n} tensors is in {path} alone, for {kind!r} has no place for it"
        )


def _plan_own_checks(
    source: CheckpointSource,
    digests: DigestIndex,
    reader: CheckpointReader,
    findings: _Findings,
    stack: ExitStack,
) -> Iterator[_Task]:
    """What is checked in each checkpoint by itself: digests of tensors that are not compared as
    they are, replicas, and copies of the tied embedding."""
    pairs, compared_source = digests.plan_stored_reads(reader)
    yield _Task(
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


def _compare_replicas(first: ComparedSource, second: ComparedSource, findings: _Findings) -> _Task:
    tensors = first.reader.catalogue.tensors
    placements = {t.name: Placement.identity(t.name, t.shape) for t in tensors}

    def report(deltas: Deltas) -> None:
        findings.differences += [
            _difference(name, placements[name], d, "replica") for name, d in sorted(deltas.items())
        ]

    return _Task(
        [TensorPair(name=n, a=p, b=p) for n, p in placements.items()], first, second, report
    )


def _compare_tied_copies(
    source: CheckpointSource, compared_source: ComparedSource, findings: _Findings
) -> _Task:
    """Output matrices that are no part of the model, because they repeat its embedding: do they?"""
    pairs = []
    place = source.view.placements.get(_EMBEDDING)
    for stored, reason in source.view.dropped:
        tensor = source.catalogue[stored]
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
            text = _difference(name, pairs[0].a or copy, delta).text
            findings.notes.append(f"{name} of {source.path} does not repeat the embedding: {text}")

    return _Task(pairs, compared_source, compared_source, report)
