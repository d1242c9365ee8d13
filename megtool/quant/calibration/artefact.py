"""The calibration artefact: statistics and decisions of a run, in a small file that adds up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megtool.checkpoint.storage.files import Files
from megtool.errors import CalibrationError
from megtool.quant.calibration import artefact_file
from megtool.quant.calibration.artefact_parts import (
    settlement_facts,
    settlement_of,
    statistics_facts,
    statistics_of,
)
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.points import Point
from megtool.quant.calibration.statistics import Statistics
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.settle import needs
from megtool.quant.treatment import Settlement

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """What calibration has found: statistics by point, and what became of every module.

    `num_samples` are rows of tokens, `num_tokens` those of them that are no padding. Statistics are
    as they were seen (nothing filled in), of all points of the model. With `needs_settling`, which
    is so after a merge, `settlement` is empty: see `calibrate.settled_anew`.
    """

    fingerprint: Fingerprint
    num_samples: int
    num_tokens: int
    statistics: dict[str, Statistics] = field(default_factory=dict)
    settlement: Settlement = field(default_factory=Settlement)
    needs_settling: bool = False

    def save(self, path: Path, files: Files | None = None) -> None:
        """Write it to a file, which is there whole or not, and replaces one that was.

        Raises:
            StorageError: the disk is full, or refuses otherwise.
        """
        arrays: dict[str, artefact_file.Array] = {}
        facts = {
            "version": _VERSION,
            "fingerprint": {
                "model": self.fingerprint.model,
                "recipe": self.fingerprint.recipe,
                "data": self.fingerprint.data,
                "seed": self.fingerprint.seed,
                "version": self.fingerprint.version,
            },
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "needs_settling": self.needs_settling,
            "statistics": statistics_facts(self.statistics, arrays),
            "settlement": settlement_facts(self.settlement, arrays),
        }
        artefact_file.write(path, arrays, facts, files)

    @classmethod
    def load(cls, path: Path) -> Artefact:
        """Read a file; large arrays stay on disk until they are looked at.

        Raises:
            CalibrationError: it is no artefact, a damaged one, or one of a later version.
        """
        facts, arrays = artefact_file.read(path)
        try:
            if facts["version"] != _VERSION:
                raise CalibrationError(
                    f"the calibration is of version {facts['version']!r}, and {_VERSION} is known",
                    file=path,
                    hint="a later megtool wrote it: update, or calibrate again",
                )
            said = facts["fingerprint"]
            texts = {k: _text(said[k]) for k in ("model", "recipe", "data", "version")}
            return cls(
                fingerprint=Fingerprint(**texts, seed=_whole(said["seed"], least=None)),
                num_samples=_whole(facts["num_samples"]),
                num_tokens=_whole(facts["num_tokens"]),
                statistics=statistics_of(facts["statistics"], arrays),
                settlement=settlement_of(facts["settlement"], arrays),
                needs_settling=facts["needs_settling"] is True,
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
            raise CalibrationError(
                f"a damaged calibration: {type(e).__name__}: {e}",
                file=path,
                hint="calibrate again, or take another file",
            ) from e


def merged(artefacts: Sequence[Artefact]) -> Artefact:
    """One of several machines' artefacts, as if one had seen all of their data.

    The result needs settling: statistics add up, and what follows from them does not.

    Raises:
        CalibrationError: there is none, or they are of different models or recipes, or two have
            seen the same data.
    """
    if not artefacts:
        raise CalibrationError("no calibrations to merge", hint="name at least one file")
    first = artefacts[0]
    for number, other in enumerate(artefacts[1:], 2):
        apart = {"model", "recipe"} & set(first.fingerprint.differences(other.fingerprint))
        if apart:
            raise CalibrationError(
                f"the first calibration and number {number} are of different "
                + " and ".join(f"{name}s" for name in sorted(apart)),
                hint="only calibrations of the same model with the same recipe add up",
            )
        if set(first.statistics) != set(other.statistics):
            name = sorted(set(first.statistics) ^ set(other.statistics))[0]
            raise CalibrationError(
                f"the first calibration and number {number} do not know the same points: one of "
                f"them has no {name!r}",
                hint="calibrate again with one version of megtool",
            )
    seen = [a.fingerprint.data for a in artefacts]
    if len(set(seen)) < len(seen):
        raise CalibrationError(
            "two calibrations have seen the same data, which would count twice",
            hint="name each file once, and give every machine its own part of the data",
        )
    if len(artefacts) == 1:
        return first
    statistics = dict(first.statistics)
    for other in artefacts[1:]:
        statistics = {n: s.merged(other.statistics[n]) for n, s in statistics.items()}
    data = hashlib.sha256("\n".join(sorted(seen)).encode()).hexdigest()
    seeds = {a.fingerprint.seed for a in artefacts}
    return Artefact(
        fingerprint=replace(
            first.fingerprint, data=data, seed=seeds.pop() if len(seeds) == 1 else 0
        ),
        num_samples=sum(a.num_samples for a in artefacts),
        num_tokens=sum(a.num_tokens for a in artefacts),
        statistics=statistics,
        needs_settling=True,
    )


def check_fits(
    artefact: Artefact,
    fingerprint: Fingerprint,
    recipe: Recipe,
    decisions: Iterable[Decision],
    points: Iterable[Point],
) -> bool:
    """Whether what an artefact has settled can be used as it is; else it is settled anew.

    `fingerprint` is that of the model and recipe at hand; its data do not count.

    Raises:
        CalibrationError: the artefact is of another model, or of another recipe or several runs,
            and an algorithm needs more than statistics; says which.
    """
    if artefact.fingerprint.model != fingerprint.model:
        raise CalibrationError(
            f"the calibration is of another model ({artefact.fingerprint.model[:12]}, and this one "
            f"is {fingerprint.model[:12]})",
            hint="calibrate this model: leave out --calibration, and give --data",
        )
    if artefact.fingerprint.recipe == fingerprint.recipe and not artefact.needs_settling:
        return True
    seen = {module for p in points if p.name in artefact.statistics for module in p.modules}
    for d in decisions:
        if d.format is None:
            continue
        asked = needs(recipe, d)
        if asked.data and d.module.name not in seen:
            raise CalibrationError(
                f"the calibration knows nothing about the inputs of {d.module.name}",
                tensor=d.module.name,
                hint="calibrate with this recipe: leave out --calibration, and give --data",
            )
        if asked.gram or asked.sample or asked.sequential:
            method = d.format.method or recipe.method
            why = "several runs" if artefact.needs_settling else "another recipe"
            raise CalibrationError(
                f"the calibration is of {why}, and {method} needs the inputs of {d.module.name} "
                "themselves, which no calibration keeps",
                tensor=d.module.name,
                hint="calibrate with this recipe: leave out --calibration, and give --data",
            )
    return False


def _whole(value: Any, least: int | None = 0) -> int:
    if type(value) is not int or (least is not None and value < least):
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise ValueError(f"{value!r} is no text")
    return value
