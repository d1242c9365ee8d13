"""Quantize job: settled from data, files or weights alone; written, proved, and told about."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.commands.decided import Decided
from megtool.commands.quantizing.samples import Samples, Wanted
from megtool.commands.reshard import reshard
from megtool.commands.running import Manner, Runnable, on_ranks, runnable_of
from megtool.errors import DestinationError, UsageError
from megtool.log import Progress
from megtool.quant.calibration.points import Point, list_points
from megtool.quant.recipes.match import Decision

if TYPE_CHECKING:
    from megtool.commands.quantizing.plan import QuantizePlan
    from megtool.commands.quantizing.report import QuantizeReport
    from megtool.inference.weights import Source
    from megtool.quant.calibration.artefact import Artefact
    from megtool.quant.calibration.fingerprint import Fingerprint
    from megtool.quant.choosing.auto import Choice
    from megtool.quant.treatment import Settlement

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrating:
    """How scales that depend on inputs are found; see `quantize`."""

    wanted: Wanted
    tokenizer: str | Path | None
    unseen: str
    route_all: bool
    resident: bool
    spill: bool
    backend: str
    given: tuple[Path, ...]
    keep: Path | None
    only: bool
    work: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How the result is written, measured and shown; see `quantize`."""

    memory_bytes: int
    max_shard_bytes: int | None
    overwrite: bool
    fsync: bool
    evaluate: str | None
    evaluate_tokens: int
    page: Path | None


@dataclass(kw_only=True)
class Job:
    """One run of `quantize`."""

    decided: Decided
    destination: Path
    recipe: str
    bits: float | None
    group_size: int
    began: float
    manner: Manner
    calibrating: Calibrating
    writing: Writing

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What becomes of every module."""
        return self.decided.matched.decisions

    @cached_property
    def runnable(self) -> Runnable:
        """The source as a model that runs."""
        return runnable_of(self.decided.opened)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Where inputs are looked at."""
        return list_points(self.decided.modules.modules, self.runnable.config)

    @cached_property
    def wants_data(self) -> list[Decision]:
        """The decisions that no weight alone can settle."""
        from megtool.quant.settle import needs

        recipe = self.decided.recipe
        return [d for d in self.decisions if d.choices or needs(recipe, d).data]

    @property
    def asks_data(self) -> bool:
        """The model has to be run."""
        return bool(self.wants_data)

    @property
    def work(self) -> Path:
        """Where finished layers are kept until the end."""
        given = self.calibrating.work
        return given or self.destination.parent / f".{self.destination.name}.calibration"

    def source(self) -> Source:
        """The source for those that run it."""
        from megtool.inference.weights import Source

        opened = self.decided.opened
        return Source(catalogue=opened.catalogue, side=opened.side, config=self.runnable.config)

    def fingerprint(self, samples: Samples | None) -> Fingerprint:
        """What the calibration depends on."""
        from megtool.quant.calibration.fingerprint import fingerprint_of

        opened = self.decided.opened
        return fingerprint_of(
            opened.catalogue,
            opened.side,
            self.decided.recipe,
            self.decisions,
            samples.batches() if samples else (),
            seed=self.calibrating.wanted.seed or 0,
        )

    def check_storable(self) -> None:
        """Refuse before any work what cannot be stored as the recipe says.

        Raises:
            MappingError: a weight of this family is stored in a way that no engine loads so.
        """
        from megtool.commands.quantizing.write import check_storable

        check_storable(self.decided.opened, self.decisions)

    def planned(self, samples: Samples | None) -> QuantizePlan:
        """What would be done."""
        from megtool.checkpoint.sweep import usual_threads
        from megtool.commands.quantizing.plan import plan_of

        self.check_free()
        return plan_of(
            self.decided,
            str(self.destination),
            wants_data=self.wants_data,
            samples=samples,
            threads=usual_threads(self.manner.threads),
        )

    def check_free(self) -> None:
        """Refuse a destination that must not be written, before any work.

        Raises:
            DestinationError: it exists, is inside the source, or cannot be written.
        """
        from megtool.checkpoint.commit import Stage
        from megtool.checkpoint.storage.files import Files

        opened = self.decided.opened
        Stage(
            self.destination,
            files=Files(),
            fingerprint="",
            overwrite=self.writing.overwrite,
            is_file=self.calibrating.only,
            sources=[opened.path, opened.catalogue.root],
        ).check()
        for path in (self.calibrating.keep, self.writing.page):
            if path is not None and path.is_dir():
                raise DestinationError("a folder stands where a file is to be written", file=path)


def carry_out(job: Job, samples: Samples | None, progress: Progress) -> QuantizeReport:
    """Calibrate if need be, write, prove and measure.

    Raises:
        MegtoolError: see `quantize`.
    """
    from megtool.commands.quantizing.finish import artefact_report, finish
    from megtool.commands.quantizing.report import QuantizeReport

    seconds: dict[str, float] = {"plan": time.monotonic() - job.began}
    auto = None
    if any(d.choices for d in job.decisions):
        with _timed(seconds, "measure"):
            auto = _choose(job, samples, progress)
    with _timed(seconds, "calibrate"):
        found = settled(job, samples, progress)
    if found is None:  # another process writes
        return QuantizeReport.elsewhere(str(job.decided.opened.path), str(job.destination))
    if found.artefact is not None:
        if job.calibrating.only:
            found.artefact.save(job.destination)
        if job.calibrating.keep is not None:
            found.artefact.save(job.calibrating.keep)
    report = (
        artefact_report(job, found, samples, seconds)
        if job.calibrating.only
        else finish(job, found, samples, auto, seconds, progress)
    )
    if job.calibrating.work is None:
        shutil.rmtree(job.work, ignore_errors=True)
    return report


def _choose(job: Job, samples: Samples | None, progress: Progress) -> Choice:
    """Formats for what the recipe leaves open; the job's decisions are these from now on."""
    from megtool.quant.choosing.auto import choose
    from megtool.quant.choosing.sensitivity import measure

    if samples is None:
        raise UsageError(
            "a recipe that chooses formats with --calibration",
            hint="what each format costs has to be measured: give --data",
        )
    decided = job.decided
    with on_ranks(job.manner) as groups:
        sensitivities = measure(
            job.source(),
            job.decisions,
            decided.recipe,
            job.points,
            samples.batches(),
            group_size=job.group_size,
            groups=groups,
            dtype=job.manner.dtype or "float32",
            device=groups.device,
            resident=job.calibrating.resident,
            threads=job.manner.threads,
            progress=progress,
        )
    choice = choose(
        job.decisions,
        decided.recipe,
        sensitivities,
        target=decided.target,
        bits=job.bits or 0.0,
        group_size=job.group_size,
    )
    job.decided = replace(decided, matched=replace(decided.matched, decisions=choice.decisions))
    job.__dict__.pop("wants_data", None)
    return choice


@dataclass(slots=True, kw_only=True)
class Settled:
    """What becomes of the model, and what that was found by (None where weights said all)."""

    settlement: Settlement
    artefact: Artefact | None
    ranks: int = 1


def settled(job: Job, samples: Samples | None, progress: Progress) -> Settled | None:
    """Settle all modules; None in every process but the first.

    Raises:
        CalibrationError: see `calibrate` and `check_fits`.
    """
    from megtool.quant.settle import settle
    from megtool.quant.treatment import Settlement, Treatment

    done: Settled | None
    if not job.asks_data:
        settlement = Settlement()
        done = Settled(settlement=settlement, artefact=None)
        with _weights(job) as weights:
            decided = {d.module.name: d for d in job.decisions}
            settlement.add(
                settle(
                    job.points,
                    {},
                    decided,
                    job.decided.recipe,
                    weights,
                    config=job.runnable.config,
                )
            )
    elif job.calibrating.given:
        done = _from_files(job)
    else:
        done = _calibrated(job, samples, progress)
    if done is None:
        return None
    for d in job.decisions:  # what has no point: an embedding, layers that draft
        name, found = d.module.name, d.format
        if found is not None and found.algo and name not in done.settlement.treatments:
            done.settlement.treatments[name] = Treatment(module=name, format=found)
    return done


@contextmanager
def _weights(job: Job) -> Iterator[Any]:
    from megtool.quant.calibration.canonical_weights import CanonicalWeights

    with CanonicalWeights(job.source()) as weights:
        yield weights


def _from_files(job: Job) -> Settled:
    """What calibration files say, settled anew where this recipe is another one."""
    from megtool.quant.calibration.artefact import Artefact, check_fits, merged
    from megtool.quant.calibration.calibrate import settled_anew

    artefact = merged([Artefact.load(path) for path in job.calibrating.given])
    fingerprint = job.fingerprint(None)
    recipe, decisions = job.decided.recipe, job.decisions
    if not check_fits(artefact, fingerprint, recipe, decisions, job.points):
        artefact = settled_anew(
            artefact,
            job.source(),
            decisions,
            recipe,
            job.points,
            fingerprint=fingerprint,
            policy=job.calibrating.unseen,
        )
    return Settled(settlement=artefact.settlement, artefact=artefact)


def _calibrated(job: Job, samples: Samples | None, progress: Progress) -> Settled | None:
    """The model shown the samples, on all processes."""
    from megtool.quant.calibration.calibrate import calibrate

    if samples is None:
        raise ValueError("a recipe that asks for data is given some")
    c = job.calibrating
    if c.backend == "modelopt":
        return _by_modelopt(job, samples, progress)
    with on_ranks(job.manner) as groups:
        artefact = calibrate(
            job.source(),
            job.decisions,
            job.decided.recipe,
            job.points,
            samples.batches(),
            groups=groups,
            dtype=job.manner.dtype or "float32",
            device=groups.device,
            resident=c.resident,
            policy=c.unseen,
            route_all=c.route_all,
            work=job.work,
            fingerprint=job.fingerprint(samples),
            spill=c.spill,
            threads=job.manner.threads,
            progress=progress,
        )
        first, world = groups.rank == 0, groups.parallel.world_size
    if not first:
        return None
    return Settled(settlement=artefact.settlement, artefact=artefact, ranks=world)


def _by_modelopt(job: Job, samples: Samples, progress: Progress) -> Settled:
    """ModelOpt shown the samples: in a Hugging Face folder, made for it where there is none."""
    from megtool.quant.backend_modelopt import calibrate_with_modelopt

    if job.manner.layout.world_size > 1:
        raise UsageError(
            "--backend modelopt in several processes", hint="it runs a whole model in one"
        )
    opened = job.decided.opened
    with tempfile.TemporaryDirectory(prefix="megtool-") as made:
        folder = opened.path
        if opened.catalogue.format != "hf":
            folder = Path(made) / "hf"
            reshard(
                opened.path,
                folder,
                to="hf",
                like=opened.like,
                family=job.decided.family,
                optimizer="none",
                fsync=False,
            )
        settlement = calibrate_with_modelopt(
            folder,
            job.decided.recipe,
            job.decisions,
            job.points,
            samples.batches(),
            dtype=job.manner.dtype or "float32",
            device=job.manner.device or "cpu",
            progress=progress,
        )
    return Settled(settlement=settlement, artefact=None)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = time.monotonic() - began
