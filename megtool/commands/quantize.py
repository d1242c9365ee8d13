"""Quantize: a checkpoint and a recipe in, what an engine loads out, with the proof that it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megtool.console import Progress, silent
from megtool.inference.runtime import Manner
from megtool.quant.pipeline.calibration_data import Samples, Wanted, read_samples
from megtool.quant.pipeline.pipeline import carry_out
from megtool.quant.pipeline.request import USUAL_EVALUATED, Calibrating, Job, Writing
from megtool.quant.pipeline.solve import (
    check_choosing,
    check_given,
    check_modelopt,
    choose_from_files,
)
from megtool.quant.pipeline.unused_options import check_options, options_of
from megtool.quant.resolve import Decided, decide
from megtool.reshard.parse_size import parse_size

if TYPE_CHECKING:
    from megtool.kernels.dispatch import Implementation
    from megtool.quant.pipeline.plan import QuantizePlan
    from megtool.quant.pipeline.report import QuantizeReport

_LOG = logging.getLogger(__name__)


def quantize(
    source: str | Path,
    destination: str | Path,
    *,
    recipe: str | Path,
    target: str | None = None,
    group_size: int | None = None,
    bits: float | None = None,
    data: str | Path | None = None,
    field: str | None = None,
    split: str | None = None,
    tokenizer: str | Path | None = None,
    iteration: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    synthetic: bool = False,
    unseen: Literal["share", "weights", "none"] | None = None,
    route_all: bool = False,
    resident: bool = False,
    spill: bool = False,
    backend: Literal["megtool", "modelopt"] = "megtool",
    calibration: Sequence[str | Path] = (),
    save_calibration: str | Path | None = None,
    calibrate_only: bool = False,
    work: str | Path | None = None,
    evaluate: str | Path | None = None,
    evaluate_tokens: int | None = None,
    page: str | Path | None = None,
    max_shard_size: str | None = None,
    memory: str = "256MiB",
    dtype: str | None = None,
    device: str | None = None,
    kernels: Implementation = "auto",
    threads: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    fsync: bool = True,
    progress: Progress = silent,
) -> QuantizeReport | QuantizePlan:
    """Quantize the checkpoint `source` by a recipe, and write it to the folder `destination`.

    The recipe is a shipped one's name or a file in any dialect; `target`, `group_size` and `bits`
    (the budget of a recipe that chooses) are as in `explain_recipe`. Where it needs data, `samples`
    rows of `length` tokens of `data` (a text that comes with megtool, or with `synthetic` random
    tokens) go through the model, layer by layer or `resident`; finished layers are kept in the
    folder `work` until all is done, and a run that was killed goes on there. `unseen` says what
    experts get that saw too little (None: as in `calibration`, else "share"), `route_all` shows
    them everything. `calibration` are files that an earlier run kept by `save_calibration` or wrote
    by `calibrate_only`, used instead of data; those of a recipe that chooses serve any `bits`.

    What was written is read again and compared with the source before it appears at `destination`.
    On `evaluate`, a text, perplexity and divergence are measured before and after; `page` is where
    the report is written as HTML. Of several processes (torchrun) the first writes.

    Raises:
        RecipeError: with all that is wrong with the recipe, for this model, and for the engine.
        CalibrationError: activations are no numbers, or a calibration is of another model.
        UsageError: options that could have no effect; see `quantizing.unheeded`.
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    given, began = dict(locals()), time.monotonic()
    decided = decide(
        source,
        recipe,
        target=target,
        group_size=group_size,
        iteration=iteration,
        family=family,
        like=like,
    )
    if decided.doubt:
        _LOG.warning("%s", decided.doubt)
    job = _job(decided, began, given)
    check_options(job, options_of(given, quantize))
    if job.asks_data and job.calibrating.backend == "modelopt":
        check_modelopt(job)
    choose_from_files(job)
    check_choosing(job)
    job.check_storable()
    check_given(job)
    texts = _samples(job)
    job.check_evaluation()
    if dry_run:
        return job.planned(texts)
    job.check_free()
    return carry_out(job, texts, progress)


def _job(decided: Decided, began: float, given: Mapping[str, Any]) -> Job:
    """The job that the arguments of `quantize` ask for."""

    def path(name: str) -> Path | None:
        return None if given[name] is None else Path(given[name])

    def named(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    size, text = given["max_shard_size"], given["evaluate"]
    return Job(
        decided=decided,
        destination=Path(given["destination"]),
        recipe=str(given["recipe"]),
        bits=given["bits"],
        group_size=given["group_size"] or 0,
        began=began,
        manner=Manner(**named("device", "dtype", "kernels", "tp", "pp", "ep", "etp", "threads")),
        calibrating=Calibrating(
            wanted=Wanted(
                **named("data", "field", "split", "samples", "length", "seed", "synthetic")
            ),
            **named("tokenizer", "unseen", "route_all", "resident", "spill", "backend"),
            given=tuple(Path(p) for p in given["calibration"]),
            keep=path("save_calibration"),
            only=given["calibrate_only"],
            work=path("work"),
        ),
        writing=Writing(
            memory_bytes=parse_size(given["memory"], "memory"),
            max_shard_bytes=parse_size(size, "max shard size") if size else None,
            **named("overwrite", "fsync"),
            evaluate_tokens=given["evaluate_tokens"] or USUAL_EVALUATED,
            evaluate=None if text is None else str(text),
            page=path("page"),
        ),
    )


def _samples(job: Job) -> Samples | None:
    """The samples, where any are needed."""
    if not job.asks_data or job.calibrating.given:
        return None
    wanted, config = job.calibrating.wanted, job.runnable.config
    found = read_samples(
        wanted,
        None if wanted.synthetic else job.runnable.tokenizer(job.calibrating.tokenizer),
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
    )
    if found.note:
        _LOG.warning("%s", found.note)
    return found
