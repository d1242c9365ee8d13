"""Verify one checkpoint against its digests, or two against each other in any format."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from megtool.commands.options.checkpoints import VerifyOptions
from megtool.commands.reports.verify import Difference, VerifyReport
from megtool.commands.verification.digest_check import (
    DigestIndex,
    FileCheck,
    find_damage,
)
from megtool.commands.verification.files import verify_files
from megtool.commands.verification.findings import Findings
from megtool.commands.verification.metadata import check_configs, check_objects, check_quant_config
from megtool.commands.verification.quantized import QuantizedPair, packings_differ
from megtool.commands.verification.tensor_checks import (
    ReadTask,
    find_missing,
    match_tensors,
    plan_own_checks,
)
from megtool.commands.worker_scan import ShareReport, run_shared
from megtool.console import Progress, silent
from megtool.digests.compare import (
    compare,
)
from megtool.errors import CheckpointError, MappingError
from megtool.formats.save_folder import (
    TRACKER,
    describe_tracker_fault,
    is_save_folder,
)
from megtool.options.effects import check_effects
from megtool.quant.rotation.rotate import as_rotated
from megtool.source.align import open_aligned, open_for_digests
from megtool.source.checkpoint import CheckpointSource
from megtool.source.subset.widths import as_pruned
from megtool.storage.files import Files
from megtool.transport.reading.parallel_scan import default_threads
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reading.shared_scan import SharedScan


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
    findings = Findings()
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
            findings.differences += [*find_missing(sources[0]), *check_objects(sources[0])]
            if is_last:
                findings.check_files(sources[0].catalogue, threads)
            findings.differences += _check_tracker(sources[0], options.iteration)
            pairs = list(digests[0].plan_reads())
        else:
            if not has_tolerance and packings_differ(sources[0], sources[1]):
                quantized = QuantizedPair.of(sources[0], sources[1], readers, options.sqnr)
            excluded = quantized.names() if quantized else set()
            pairs = list(
                match_tensors(
                    sources[0], sources[1], compared_sources, has_tolerance, findings, excluded
                )
            )
        for o in sources:
            findings.add(*check_quant_config(o, is_alone=b is None))
        if b is not None and any(o.catalogue.packed for o in sources):
            findings.add(list(check_configs(sources[0], sources[1])), ())
        tasks = [
            ReadTask(
                pairs,
                compared_sources[0],
                compared_sources[-1],
                lambda d: findings.add_values(pairs, d),
            )
        ]
        for side in range(len(sources)):
            tasks += plan_own_checks(sources[side], digests[side], readers[side], findings, stack)
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
    findings: Findings,
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
