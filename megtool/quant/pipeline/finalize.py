"""The last stage of `quantize`: write the files, verify them, and build the report."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from megtool import __version__
from megtool.checkpoint.parallel_scan import default_threads
from megtool.console import Progress
from megtool.errors import StorageError
from megtool.inference.runtime import load_forward, on_ranks
from megtool.quant.pipeline.calibration_data import CalibrationSamples
from megtool.quant.pipeline.html_report import page
from megtool.quant.pipeline.report import (
    AutoChoice,
    CalibrationFacts,
    ParetoPoint,
    QuantizeEvaluation,
    QuantizeReport,
    coverage_rows,
    format_rows,
    histograms,
    input_rows,
    kv_format,
)
from megtool.quant.pipeline.write import VerificationError, write
from megtool.quant.qparams import QParams
from megtool.quant.recipes.modules import is_in_expert_blocks
from megtool.quant.verification.verify_folder import FolderVerification, verify_folder
from megtool.reshard.execute import peak_rss_bytes
from megtool.reshard.open_source import open_decoder
from megtool.reshard.target import make_target
from megtool.reshard.writers.target_spec import TargetOptions

if TYPE_CHECKING:
    from megtool.quant.mixed_precision.auto_quantize import FormatChoice
    from megtool.quant.pipeline.request import QuantizeRequest
    from megtool.quant.pipeline.solve import SolvedQParams

_WINDOW = 2048


def finalize(
    job: QuantizeRequest,
    solved: SolvedQParams,
    samples: CalibrationSamples | None,
    seconds: dict[str, float],
    progress: Progress,
) -> QuantizeReport:
    """Write, prove, measure, and say what came of it. What is not proved is not committed.

    Raises:
        MegtoolError: see `write`.
    """
    opened = job.decided.source
    proofs: list[FolderVerification] = []
    proving = 0.0

    def check(tree: Path) -> None:
        nonlocal proving
        began = time.monotonic()
        proofs.append(
            verify_folder(
                opened,
                tree,
                job.decisions,
                solved.settlement,
                auxiliary_files=make_target(opened, TargetOptions(to="hf")).destination.small_files,
                threads=default_threads(job.manner.threads),
                progress=progress,
            )
        )
        proving = time.monotonic() - began
        if proofs[-1].num_errors:
            raise VerificationError("the written files do not hold what they should")

    began = time.monotonic()
    notes = list(solved.settlement.notes)
    resumed = 0
    with suppress(VerificationError):
        written = write(
            opened,
            job.decisions,
            solved.settlement,
            job.destination,
            threads=job.manner.threads,
            memory_bytes=job.writing.memory_bytes,
            max_shard_bytes=job.writing.max_shard_bytes,
            overwrite=job.writing.overwrite,
            fsync=job.writing.fsync,
            before_commit=check,
            progress=progress,
        )
        notes += written.warnings
        resumed = written.resumed_units
    seconds["write"] = time.monotonic() - began - proving
    seconds["prove"] = proving
    proof = replace(proofs[-1], path=str(job.destination))
    report = _report(
        job,
        solved,
        samples,
        seconds,
        proof=proof,
        num_bytes=proof.num_bytes,
        resumed_units=resumed,
    )
    if proof.num_errors:
        notes.insert(0, f"nothing was written to {job.destination}: the proof found errors")
    elif job.writing.evaluate is not None:
        began = time.monotonic()
        evaluation = _evaluate(job, solved, job.writing.evaluate, progress)
        seconds["evaluate"] = time.monotonic() - began
        report = replace(report, evaluation=evaluation)
    notes += job.auto.notes if job.auto else ()
    page_path = job.writing.page
    report = replace(
        report,
        seconds=seconds,
        notes=tuple(dict.fromkeys(notes)),
        peak_rss_bytes=peak_rss_bytes(),
        page=None if page_path is None else str(page_path),
    )
    if page_path is not None:
        try:
            page_path.write_text(page(report))
        except OSError as e:
            raise StorageError(f"cannot write the page: {e.strerror}", file=page_path) from e
    return report


def build_calibration_report(
    job: QuantizeRequest,
    solved: SolvedQParams,
    samples: CalibrationSamples | None,
    seconds: Mapping[str, float],
) -> QuantizeReport:
    """What a run told that calibrated alone."""
    report = _report(job, solved, samples, seconds)
    return replace(
        report,
        calibration_file=str(job.destination),
        formats=(),
        source_bytes=0,
        notes=tuple(solved.settlement.notes),
        peak_rss_bytes=peak_rss_bytes(),
    )


def _report(
    job: QuantizeRequest,
    solved: SolvedQParams,
    samples: CalibrationSamples | None,
    seconds: Mapping[str, float],
    *,
    proof: FolderVerification | None = None,
    num_bytes: int = 0,
    resumed_units: int = 0,
) -> QuantizeReport:
    decided, opened = job.decided, job.decided.source
    weights = [d for d in job.decisions if d.module.kind != "kv_cache"]
    keep = job.calibrating.keep
    return QuantizeReport(
        source=str(opened.path),
        destination=str(job.destination),
        source_format=opened.catalogue.format,
        family=decided.family,
        recipe=decided.recipe.name,
        method=decided.recipe.method,
        target=decided.target.name if decided.target else None,
        doubt=decided.doubt,
        formats=format_rows(job.decisions),
        source_bytes=sum(d.module.num_bytes for d in weights) + decided.modules.other_bytes,
        num_bytes=num_bytes,
        kv_format=kv_format(job.decisions),
        calibration=_facts(job, solved, samples, seconds),
        calibration_file=None if keep is None or solved.artefact is None else str(keep),
        proof=proof,
        auto=None if job.auto is None else _chosen(job.auto),
        seconds=seconds,
        resumed_units=resumed_units,
        reproduction=_reproduction(solved),
    )


def _facts(
    job: QuantizeRequest,
    solved: SolvedQParams,
    samples: CalibrationSamples | None,
    seconds: Mapping[str, float],
) -> CalibrationFacts | None:
    from megtool.quant.calibration.expert_coverage import measure_coverage

    artefact = solved.artefact
    if artefact is None:
        if samples is None:
            return None
        return CalibrationFacts(
            data=f"{samples.name} (by ModelOpt)",
            num_samples=len(samples),
            num_tokens=samples.num_tokens,
            seconds=seconds.get("calibrate", 0.0),
        )
    data = samples.name if samples else ", ".join(map(str, job.calibrating.files))
    return CalibrationFacts(
        data=data,
        num_samples=artefact.num_samples,
        num_tokens=artefact.num_tokens,
        seconds=seconds.get("calibrate", 0.0),
        inputs=input_rows(artefact.statistics),
        histograms=histograms(artefact.statistics),
        coverage=coverage_rows(measure_coverage(job.points, artefact.statistics)),
    )


def _chosen(auto: FormatChoice) -> AutoChoice:
    return AutoChoice(
        method=auto.method,
        budget=8 * auto.budget_bytes / max(auto.weights, 1),
        chosen=ParetoPoint(bits=auto.bits, loss=auto.loss),
        curve=tuple(ParetoPoint(bits=p.bits, loss=p.loss) for p in auto.curve),
    )


def _reproduction(solved: SolvedQParams) -> dict[str, str]:
    """What someone needs who wants the same bytes again."""
    out = {"megtool": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        with suppress(PackageNotFoundError):
            out[name] = version(name)
    if solved.artefact is not None:
        f = solved.artefact.fingerprint
        out |= {"model": f.model, "recipe": f.recipe, "data": f.data, "seed": str(f.seed)}
    if "megtool" in Path(sys.argv[0]).name or Path(sys.argv[0]).name == "__main__.py":
        out["command"] = " ".join(["megtool", *sys.argv[1:]])
    return out


def _evaluate(
    job: QuantizeRequest, solved: SolvedQParams, data: str, progress: Progress
) -> QuantizeEvaluation:
    """Both models on the same text, what was written as its engine computes."""
    from megtool.quant.fake_quant.evaluate_quantized import compare_quantized
    from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel

    source = job.runnable
    written = open_decoder(job.destination)
    texts = job.evaluation
    window = min(_WINDOW, source.config.max_positions)
    total = sum(max(len(t.tokens) - 1, 0) for t in texts)
    manner = replace(
        job.manner, tp=None, pp=None, ep=None, etp=None, on_demand=not job.calibrating.resident
    )
    progress("evaluate", 0, total)
    with on_ranks(manner, alone=True) as groups:
        before = load_forward(source, manner, groups, progress)
        after = load_forward(written, manner, groups, progress)
        quality = compare_quantized(
            before,
            after,
            FakeQuantModel(after.decoder, job.points, _as_engines_run(job, solved), weights=False),
            texts,
            window=window,
            stride=window,
            counted=partial(_report_progress, progress, total),
        )
    c = quality.comparison
    return QuantizeEvaluation(
        data=data,
        tokens=quality.num_tokens,
        perplexity_before=quality.perplexity_before,
        perplexity_after=quality.perplexity_after,
        kl_mean=quality.kl_mean,
        kl_99=c.kl_percentiles[2],
        kl_max=quality.kl_max,
        agreement=quality.agreement,
    )


def _as_engines_run(job: QuantizeRequest, solved: SolvedQParams) -> QParams:
    """What was settled, without the inputs of experts in blocks: engines leave these as they are
    (vLLM's and SGLang's mxfp4.py multiply the codes with 16-bit inputs)."""
    blocks = {d.module.name for d in job.decisions if is_in_expert_blocks(d.module)}
    treatments = solved.settlement.weights
    return replace(
        solved.settlement, treatments={m: t for m, t in treatments.items() if m not in blocks}
    )


def _report_progress(progress: Progress, total: int, count: int) -> None:
    progress("evaluate", count, total)
