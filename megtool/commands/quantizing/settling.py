"""Settling: what becomes of every module, from weights alone, from data, or from files."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.commands.quantizing.samples import Samples
from megtool.commands.reshard import reshard
from megtool.commands.running import on_ranks
from megtool.errors import UsageError
from megtool.log import Progress

if TYPE_CHECKING:
    from megtool.quant.calibration.artefact import Artefact
    from megtool.quant.treatment import Settlement

from megtool.commands.quantizing.job import Job


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
    from megtool.quant.needs import is_plain
    from megtool.quant.treatment import Settlement, Treatment

    done: Settled | None
    if not job.asks_data:
        done = Settled(settlement=Settlement(), artefact=None)
        if not all(is_plain(job.decided.recipe, d) for d in job.decisions):
            done.settlement.add(_by_weights(job))
    elif job.calibrating.given:
        done = _from_files(job)
    else:
        done = _calibrated(job, samples, progress)
    if done is None:
        return None
    for d in job.decisions:  # what has no point: an embedding, layers that draft
        name, found = d.module.name, d.format
        if found is not None and found.algo and name not in done.settlement.treatments:
            done.settlement.treatments[name] = Treatment(
                module=name, format=found, input_amax=found.input_amax
            )
    return done


def _by_weights(job: Job) -> Settlement:
    """What looking at weights alone finds."""
    from megtool.quant.calibration.canonical_weights import CanonicalWeights
    from megtool.quant.settle import settle

    decided = {d.module.name: d for d in job.decisions}
    with CanonicalWeights(job.source()) as weights:
        recipe, config = job.decided.recipe, job.runnable.config
        return settle(job.points, {}, decided, recipe, weights, config=config)


def _from_files(job: Job) -> Settled:
    """What calibration files say, settled anew where this recipe is another one."""
    from megtool.quant.calibration.artefact import check_fits
    from megtool.quant.calibration.calibrate import settled_anew

    c, artefact = job.calibrating, _given(job)
    fingerprint = job.fingerprint(None)
    recipe, decisions = job.decided.recipe, job.decisions
    if not check_fits(
        artefact,
        fingerprint,
        recipe,
        decisions,
        job.points,
        policy=c.unseen,
        route_all=c.route_all,
    ):
        artefact = settled_anew(
            artefact,
            job.source(),
            decisions,
            recipe,
            job.points,
            fingerprint=fingerprint,
            policy=c.unseen,
        )
    return Settled(settlement=artefact.settlement, artefact=artefact)


def _given(job: Job) -> Artefact:
    """The calibration files that were named, added up."""
    from megtool.quant.calibration.artefact import Artefact, merged

    return merged([Artefact.load(path) for path in job.calibrating.given])


def check_given(job: Job) -> None:
    """Refuse calibration files that are none, or of another model, whoever needs them.

    Raises:
        CalibrationError: they are; says which.
    """
    from megtool.quant.calibration.artefact import check_model

    if job.calibrating.given:
        check_model(_given(job), job.fingerprint(None))


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
            policy=c.unseen or "share",
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
