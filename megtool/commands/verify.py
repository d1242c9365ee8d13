"""Verify one checkpoint against its digests, or two against each other in any format."""

from __future__ import annotations

import time

from megtool.commands.options.checkpoints import VerifyOptions
from megtool.commands.reports.verify import VerifyReport
from megtool.commands.verification.digest_check import find_damage
from megtool.commands.verification.files import verify_files
from megtool.commands.verification.findings import Findings
from megtool.commands.verification.parts import PartsReport, compare_parts, parse_parts
from megtool.commands.verification.tensor_check import TensorCheck
from megtool.commands.worker_scan import ShareReport, run_shared
from megtool.console import Progress, silent
from megtool.errors import CheckpointError, MappingError
from megtool.options.effects import check_effects
from megtool.quant.rotation.rotate import as_rotated
from megtool.source.align import open_aligned, open_for_digests
from megtool.source.checkpoint import CheckpointSource
from megtool.source.subset.widths import as_pruned
from megtool.transport.reading.parallel_scan import default_threads
from megtool.transport.reading.shared_scan import SharedScan


def verify(options: VerifyOptions, *, progress: Progress = silent) -> VerifyReport | ShareReport:
    """Check one checkpoint against its digests, or that two are equal in content.

    Of one, it is also checked that it is complete; tensors without a digest are read for NaN and
    Inf. Two may have any formats and layouts. They are compared in `parts`, each with a verdict:
    tensors; the settings of both models, as each family or Megatron's args mean them; training
    state; the files beside the tensors. The report names what was not compared, and why. With
    `logits` both models also run on so many fixed tokens.

    The digests of both are checked. Elements are compared bit by bit, and dtypes agree; with `atol`
    or `rtol` they are compared as numbers of any dtype: `|a - b| <= atol + rtol * |b|`.
    If one was pruned from the other, that one's parts that its record lists are compared; if one is
    rotated, the other is compared as if it were.
    Padding is left out, and so is optimizer state that the other format has no place for. State
    that only one of two checkpoints of one kind of format holds is a difference.
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
    a, b = options.a, options.b
    threads = default_threads(options.threads, a, *([b] if b else ()))
    if b is None and (report := verify_files(a, threads=threads, progress=progress, scan=scan)):
        return report
    names = parse_parts(options.parts)
    is_last = scan is None or not scan.is_partial  # does what is not shared out
    sources = _open_sources(options)
    findings = Findings()
    if b is not None:
        *sources, text = as_pruned(sources[0], sources[1])
        findings.notes += [] if text is None else [text]
        *sources, text = as_rotated(sources[0], sources[1])
        findings.notes += [] if text is None else [text]
    check = TensorCheck(
        options=options, sources=sources, findings=findings, threads=threads, progress=progress
    )
    if "tensors" in names:
        check.run(scan, is_last=is_last)
    parts = PartsReport()
    if b is not None and is_last:
        parts = compare_parts(options, sources, names, findings, progress=progress)
    if b is not None and "tensors" in names:
        parts.parts.insert(0, check.part())
    families = [o.model.family.name for o in sources if o.model and o.model.family]
    return VerifyReport(
        a=str(a),
        b=None if b is None else str(b),
        a_format=sources[0].catalogue.format,
        b_format=None if b is None else sources[1].catalogue.format,
        family=families[0] if families and sources[0].is_canonical else None,
        matched_by="canonical" if sources[0].is_canonical else "stored",
        atol=options.atol,
        rtol=options.rtol,
        num_tensors=check.num_tensors,
        num_bytes=check.num_bytes,
        num_replicas=sum(len(o.catalogue.replicas) for o in sources),
        seconds=time.monotonic() - start,
        within=findings.within,
        digests=check.digest_checks(),
        differences=tuple(findings.differences),
        notes=tuple(findings.notes),
        weights=check.weights,
        compared=check.compared,
        parts=tuple(parts.parts),
        settings=parts.settings,
        num_finite=check.num_finite,
        logits=parts.logits,
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
        paths = [path for path in (options.a, options.b) if path is not None]
        blamed = [path for path in paths if f"{e.file}/".startswith(f"{path}/")]
        for path in blamed or paths:
            for damaged in find_damage(path, options.iteration):
                e.hint = f"{damaged.file} of {path} is not as it was written: it {damaged.reason}"
                raise
        raise
