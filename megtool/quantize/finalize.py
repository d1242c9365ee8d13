"""The last stage of `quantize`: write the files, verify them, and build the report."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from megtool import __version__
from megtool.console import Progress
from megtool.formats.safetensors.reader import open_as_stored
from megtool.inference.runtime import load_forward, on_ranks
from megtool.lint.context import read_context
from megtool.lint.engines import EngineTarget
from megtool.lint.folder_view import open_folder
from megtool.lint.rules import apply_rules, load_rules
from megtool.options.target import TargetOptions
from megtool.quant.qparams import QParams
from megtool.quant.recipes.modules import is_in_expert_blocks
from megtool.quantize.calibration_data import CalibrationSamples
from megtool.quantize.layout.write import VerificationError, WriteReport, write
from megtool.quantize.report import (
    AutoChoice,
    CalibrationFacts,
    ParetoPoint,
    QuantizeEvaluation,
    QuantizeReport,
    UnitSensitivity,
    coverage_rows,
    format_rows,
    histograms,
    input_rows,
    kv_format,
)
from megtool.quantize.verification.verify_folder import FolderVerification, verify_folder
from megtool.reshard.execute import peak_rss_bytes
from megtool.reshard.target import make_target
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_decoder, require_decoder
from megtool.transport.reading.parallel_scan import default_threads
from megtool.transport.reading.stored_numbers import StoredNumbers

if TYPE_CHECKING:
    from megtool.quant.mixed_precision.auto_quantize import FormatChoice
    from megtool.quantize.obtain_qparams import SolvedQParams
    from megtool.quantize.request import QuantizeRun

_WINDOW = 2048


def finalize(
    request: QuantizeRun,
    solved: SolvedQParams,
    samples: CalibrationSamples | None,
    seconds: dict[str, float],
    progress: Progress,
) -> QuantizeReport:
    """Write, verify and evaluate, and build the report. Nothing is committed before it is verified.

    Raises:
        MegtoolError: see `write`.
    """
    source = request.resolved.source
    proofs: list[FolderVerification] = []
    proving = 0.0

    to = request.output.to

    def check(tree: Path) -> None:
        nonlocal proving
        began = time.monotonic()
        if to == "torch_dist":
            from megtool.quantize.layout.megatron_source import check_readable_again

            check_readable_again(tree, request.decisions, solved.qparams, source)
            proving = time.monotonic() - began
            return
        proofs.append(
            verify_folder(
                source,
                tree,
                request.decisions,
                solved.qparams,
                auxiliary_files=make_target(
                    source, TargetOptions(destination=tree, to="hf")
                ).destination.small_files,
                threads=default_threads(request.runtime.threads, source.path),
                progress=progress,
            )
        )
        missing.extend(_find_missing_copies(request, tree))
        proving = time.monotonic() - began
        if proofs[-1].num_errors:
            raise VerificationError("the written files do not hold what they should")

    began = time.monotonic()
    notes = list(solved.qparams.notes)
    missing: list[str] = []
    written: WriteReport | None = None
    with suppress(VerificationError):
        written = write(
            source,
            request.decisions,
            solved.qparams,
            TargetOptions(
                to=to,
                layout=request.output.layout,
                optimizer_format="none" if to == "torch_dist" else None,
                max_shard_size=request.output.max_shard_size,
                destination=request.destination,
            ),
            replace(
                request.execution,
                threads=default_threads(
                    request.execution.threads, source.path, request.destination
                ),
                worker=None if request.worker is None else request.execution.worker,
            ),
            before_commit=check,
            progress=progress,
        )
        notes += written.warnings + tuple(missing)
    worker = written.copied.worker if written and written.copied else None
    if worker is not None and not (proofs or proving):
        report = _report(request, solved, samples, seconds)
        return replace(report, worker=worker, notes=tuple(notes))
    seconds["write"] = time.monotonic() - began - proving
    seconds["prove"] = proving
    if written is not None and to == "torch_dist":
        return _report_megatron(request, solved, samples, seconds, written, notes)
    proof = replace(proofs[-1], path=str(request.destination))
    report = _report(
        request,
        solved,
        samples,
        seconds,
        proof=proof,
        num_bytes=proof.num_bytes,
    )
    if written is not None:
        report = _with_written(report, written)
    if proof.num_errors:
        notes.insert(0, f"nothing was written to {request.destination}: the proof found errors")
    elif request.output.eval_data is not None:
        began = time.monotonic()
        evaluation = _evaluate(request, solved, request.output.eval_data, progress)
        seconds["evaluate"] = time.monotonic() - began
        report = replace(report, evaluation=evaluation)
    notes += request.auto.notes if request.auto else ()
    report = replace(
        report,
        seconds=seconds,
        notes=tuple(dict.fromkeys(notes)),
        peak_rss_bytes=peak_rss_bytes(),
    )
    return report


def _find_missing_copies(request: QuantizeRun, folder: Path) -> Iterator[str]:
    """What the engine needs of a folder that no decision of a recipe is about."""
    if (engine := request.resolved.target) is None:
        return
    rules = [rule for rule in load_rules() if rule.id == "mtp-copies"]
    with open_folder(folder) as view:
        for finding in apply_rules(rules, read_context(view), EngineTarget(target=engine)):
            yield f"{finding.module} {finding.message}: {finding.effect}"


def _report_megatron(
    request: QuantizeRun,
    solved: SolvedQParams,
    samples: CalibrationSamples | None,
    seconds: dict[str, float],
    written: WriteReport,
    notes: list[str],
) -> QuantizeReport:
    """The report of a Megatron checkpoint, whose weights keep their dtype."""
    export = f"megtool export {request.destination} FOLDER --to unified"
    notes = [*notes, *(request.auto.notes if request.auto else ())]
    notes.append(f"its weights are fake-quantized by ModelOpt when it is loaded; {export}")
    report = _report(request, solved, samples, seconds, num_bytes=written.num_bytes)
    return replace(
        _with_written(report, written),
        notes=tuple(dict.fromkeys(notes)),
        peak_rss_bytes=peak_rss_bytes(),
    )


def _with_written(report: QuantizeReport, written: WriteReport) -> QuantizeReport:
    return replace(
        report,
        resumed_units=written.copied.verified if written.copied else 0,
        digested=written.digests.tensors,
        tensors=written.tensors,
        digested_files=written.digests.files,
        worker=written.copied.worker if written.copied else None,
    )


def build_calibration_report(
    request: QuantizeRun,
    solved: SolvedQParams,
    samples: CalibrationSamples | None,
    seconds: Mapping[str, float],
) -> QuantizeReport:
    """The report of a run that only calibrates."""
    report = _report(request, solved, samples, seconds)
    return replace(
        report,
        calibration_file=str(request.destination),
        formats=(),
        source_bytes=0,
        notes=tuple(solved.qparams.notes),
        peak_rss_bytes=peak_rss_bytes(),
    )


def _report(
    request: QuantizeRun,
    solved: SolvedQParams,
    samples: CalibrationSamples | None,
    seconds: Mapping[str, float],
    *,
    proof: FolderVerification | None = None,
    num_bytes: int = 0,
    resumed_units: int = 0,
) -> QuantizeReport:
    resolved, source = request.resolved, request.resolved.source
    weights = [d for d in request.decisions if d.module.kind != "kv_cache"]
    keep = request.calibration.save_calibration
    return QuantizeReport(
        source=str(source.path),
        destination=str(request.destination),
        source_format=source.catalogue.format,
        family=resolved.family,
        recipe=resolved.recipe.name,
        method=resolved.recipe.method,
        rotation=resolved.rotation,
        target=resolved.target.name if resolved.target else None,
        doubt=resolved.doubt,
        formats=format_rows(request.decisions),
        source_bytes=sum(d.module.num_bytes for d in weights) + resolved.modules.other_bytes,
        num_bytes=num_bytes,
        kv_format=kv_format(request.decisions),
        calibration=_facts(request, solved, samples, seconds),
        calibration_file=None if keep is None or solved.calibration_file is None else str(keep),
        proof=proof,
        auto=None if request.auto is None else _chosen(request.auto),
        seconds=seconds,
        resumed_units=resumed_units,
        reproduction=_reproduction(solved),
    )


def _facts(
    request: QuantizeRun,
    solved: SolvedQParams,
    samples: CalibrationSamples | None,
    seconds: Mapping[str, float],
) -> CalibrationFacts | None:
    from megtool.quant.calibration.expert_coverage import measure_coverage

    calibration_file = solved.calibration_file
    if calibration_file is None:
        if samples is None:
            return None
        return CalibrationFacts(
            data=f"{samples.name} (by ModelOpt)",
            num_samples=len(samples),
            num_tokens=samples.num_tokens,
            seconds=seconds.get("calibrate", 0.0),
        )
    data = samples.name if samples else ", ".join(map(str, request.calibration.calibration))
    return CalibrationFacts(
        data=data,
        num_samples=calibration_file.num_samples,
        num_tokens=calibration_file.num_tokens,
        seconds=seconds.get("calibrate", 0.0),
        inputs=input_rows(calibration_file.statistics),
        histograms=histograms(calibration_file.statistics),
        coverage=coverage_rows(measure_coverage(request.sites, calibration_file.statistics)),
    )


def _chosen(auto: FormatChoice) -> AutoChoice:
    return AutoChoice(
        method=auto.method,
        budget=8 * auto.budget_bytes / max(auto.weights, 1),
        chosen=ParetoPoint(bits=auto.bits, loss=auto.loss),
        curve=tuple(ParetoPoint(bits=p.bits, loss=p.loss) for p in auto.curve),
        units=tuple(
            UnitSensitivity(
                name=unit.name,
                format=unit.label,
                losses={label: loss for label, _, loss in unit.options},
            )
            for unit in sorted(auto.units, key=lambda u: -max((x[2] for x in u.options), default=0))
        ),
    )


def _reproduction(solved: SolvedQParams) -> dict[str, str]:
    """The versions and hashes that are needed to get the same bytes again."""
    out = {"megtool": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        with suppress(PackageNotFoundError):
            out[name] = version(name)
    if solved.calibration_file is not None:
        f = solved.calibration_file.fingerprint
        out |= {"model": f.model, "recipe": f.recipe, "data": f.data, "seed": str(f.seed)}
    if "megtool" in Path(sys.argv[0]).name or Path(sys.argv[0]).name == "__main__.py":
        out["command"] = " ".join(["megtool", *sys.argv[1:]])
    return out


def _evaluate(
    request: QuantizeRun, solved: SolvedQParams, data: str, progress: Progress
) -> QuantizeEvaluation:
    """Evaluate both models on the same text; the quantized one computes like its engine."""
    from megtool.inference.evaluation.compare import compare
    from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel, StoredQuantization

    source = require_decoder(request.resolved.original)
    written = open_decoder(request.destination)
    texts = request.evaluation
    window = min(_WINDOW, source.config.positions.max_positions)
    total = sum(max(len(t.tokens) - 1, 0) for t in texts)
    runtime = replace(
        request.runtime,
        tp=None,
        pp=None,
        ep=None,
        etp=None,
    )
    progress("evaluate", 0, total)
    with on_ranks(runtime, alone=True) as groups:
        before = load_forward(source, runtime, groups, progress)
        after = load_forward(written, runtime, groups, progress)
        stored = StoredQuantization.of(
            _as_engines_run(request, solved), _read_fp8_scales(request, written)
        )
        simulation = FakeQuantModel(after.decoder, request.sites, stored)
        with simulation:
            comparison = compare(
                before,
                after,
                texts,
                window=window,
                stride=window,
                counted=partial(_report_progress, progress, total),
            )
    return QuantizeEvaluation(
        data=data,
        tokens=comparison.ours.num_tokens,
        perplexity_before=comparison.ours.perplexity,
        perplexity_after=comparison.reference.perplexity,
        kl_mean=comparison.kl_mean,
        kl_99=comparison.kl_percentiles[2],
        kl_max=comparison.kl_max,
        agreement=comparison.agreement,
    )


def _as_engines_run(request: QuantizeRun, solved: SolvedQParams) -> QParams:
    """The parameters without those of experts in MXFP4 blocks, whose inputs engines do not quantize
    (vLLM's and SGLang's mxfp4.py multiply codes with 16-bit inputs)."""
    blocks = {d.module.name for d in request.decisions if is_in_expert_blocks(d.module)}
    weight_qparams = solved.qparams.weights
    return replace(
        solved.qparams, weights={m: t for m, t in weight_qparams.items() if m not in blocks}
    )


def _read_fp8_scales(request: QuantizeRun, written: CheckpointSource) -> dict[str, float]:
    """The scales of FP8 weights that have one each, as they were written."""
    catalogue = open_as_stored(written.catalogue.root)
    names = {
        d.module.name: written.placement_of(f"{d.module.name}.weight").stored + "_scale"
        for d in request.decisions
        if d.format is not None and d.format.algo == "FP8"
    }
    with StoredNumbers(catalogue) as numbers:
        return {m: float(numbers.read(n)) for m, n in names.items()}


def _report_progress(progress: Progress, total: int, count: int) -> None:
    progress("evaluate", count, total)
