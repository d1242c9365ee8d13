"""The calibration artefact: statistics and decisions of a run, in a small file that adds up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megtool.checkpoint.storage.files import Files
from megtool.errors import CalibrationError, FormatError
from megtool.quant.calibration import calibration_file_io, sensitivities
from megtool.quant.calibration.activation_sites import ActivationSite
from megtool.quant.calibration.calibration_encoding import (
    decode_qparams,
    decode_statistics,
    encode_qparams,
    encode_statistics,
)
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.sensitivities import Sensitivities
from megtool.quant.calibration.statistics import ActivationStatistics
from megtool.quant.qparams import QParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.requirements import derive_requirements

_VERSION = 3
_READABLE_VERSIONS = (2, 3)
"""Version 2 knows nothing of sensitivities."""

_RECALIBRATE_HINT = "calibrate with this recipe: leave out --calibration, and give --data"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFile:
    """What calibration has found: statistics by point, and what became of every module.

    `num_samples` are rows of tokens, `num_tokens` those of them that are no padding. Statistics are
    as they were seen (nothing filled in), of all points of the model. With `needs_settling`, which
    is so after a merge, `settlement` is empty: see `calibrate.settled_anew`.

    `seen` are the hashes of all data that were added up, sorted. If `sequential`, layers saw what
    rounding had made of those before them. `policy` is what experts without data were settled by,
    and with `route_all` every expert saw every token.

    Of a recipe that chooses formats, `fingerprint` has the hash of what it leaves open, the same
    on every machine; `sensitivities` are what it was chosen by, from which another budget chooses
    anew; and `settled_for` is the hash of the recipe with what was chosen.
    """

    fingerprint: Fingerprint
    num_samples: int
    num_tokens: int
    data_hashes: tuple[str, ...] = ()
    sequential: bool = False
    policy: str = "share"
    route_all: bool = False
    statistics: dict[str, ActivationStatistics] = field(default_factory=dict)
    qparams: QParams = field(default_factory=QParams)
    needs_solving: bool = False
    sensitivities: Sensitivities | None = None
    solved_recipe: str = ""

    def __post_init__(self) -> None:
        if not self.solved_recipe:
            object.__setattr__(self, "settled_for", self.fingerprint.recipe)
        if not self.data_hashes:
            object.__setattr__(self, "seen", (self.fingerprint.data,))

    def save(self, path: Path, files: Files | None = None) -> None:
        """Write it to a file, which is there whole or not, and replaces one that was.

        Raises:
            StorageError: the disk is full, or refuses otherwise.
        """
        arrays: dict[str, calibration_file_io.Array] = {}
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
            "seen": list(self.data_hashes),
            "sequential": self.sequential,
            "policy": self.policy,
            "calibrate_all_experts": self.route_all,
            "needs_settling": self.needs_solving,
            "settled_for": self.solved_recipe,
            "sensitivities": None if self.sensitivities is None else self.sensitivities.to_json(),
            "statistics": encode_statistics(self.statistics, arrays),
            "settlement": encode_qparams(self.qparams, arrays),
        }
        calibration_file_io.write(path, arrays, facts, files)

    @classmethod
    def load(cls, path: Path) -> CalibrationFile:
        """Read a file; large arrays stay on disk until they are looked at.

        Raises:
            CalibrationError: it is no artefact, a damaged one, or one of a later version.
        """
        facts, arrays = calibration_file_io.read(path)
        try:
            if facts["version"] not in _READABLE_VERSIONS:
                raise CalibrationError(
                    f"the calibration is of version {facts['version']!r}, and {_VERSION} is known",
                    file=path,
                    hint="another megtool wrote it: calibrate again with this one",
                )
            fingerprint = facts["fingerprint"]
            texts = {k: _text(fingerprint[k]) for k in ("model", "recipe", "data", "version")}
            losses = facts.get("sensitivities")
            return cls(
                fingerprint=Fingerprint(**texts, seed=_count(fingerprint["seed"], minimum=None)),
                num_samples=_count(facts["num_samples"]),
                num_tokens=_count(facts["num_tokens"]),
                seen=tuple(sorted(_text(d) for d in facts["seen"])),
                sequential=_flag(facts["sequential"]),
                policy=_text(facts["policy"]),
                route_all=_flag(facts["route_all"]),
                statistics=decode_statistics(facts["statistics"], arrays),
                settlement=decode_qparams(facts["settlement"], arrays),
                needs_settling=_flag(facts["needs_settling"]),
                settled_for=_text(facts.get("settled_for", "")),
                sensitivities=None if losses is None else Sensitivities.from_json(losses),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, FormatError) as e:
            raise CalibrationError(
                f"a damaged calibration: {type(e).__name__}: {e}",
                file=path,
                hint="calibrate again, or take another file",
            ) from e


def merge_calibrations(calibrations: Sequence[CalibrationFile]) -> CalibrationFile:
    """One of several machines' artefacts, as if one had seen all of their data.

    The result needs settling: statistics add up, and what follows from them does not. It has
    sensitivities, the means over all tokens, if every one of them has.

    Raises:
        CalibrationError: there is none, or they are of different models or recipes, or two have
            seen the same data, or experts in different ways.
    """
    if not calibrations:
        raise CalibrationError("no calibrations to merge", hint="name at least one file")
    first = calibrations[0]
    for number, calibration in enumerate(calibrations[1:], 2):
        differences = {"model", "recipe"} & set(
            first.fingerprint.differences(calibration.fingerprint)
        )
        if differences:
            raise CalibrationError(
                f"the first calibration and number {number} are of different "
                + " and ".join(f"{name}s" for name in sorted(differences)),
                hint="only calibrations of the same model with the same recipe add up",
            )
        if set(first.statistics) != set(calibration.statistics):
            name = sorted(set(first.statistics) ^ set(calibration.statistics))[0]
            raise CalibrationError(
                f"the first calibration and number {number} do not know the same points: one of "
                f"them has no {name!r}",
                hint="calibrate again with one version of megtool",
            )
        if first.route_all != calibration.route_all:
            raise CalibrationError(
                f"the first calibration and number {number}: one was made with --calibrate-all-experts, and "
                "the other without",
                hint="calibrate all parts in the same way",
            )
    data_hashes = sorted(data for a in calibrations for data in a.data_hashes)
    if len(set(data_hashes)) < len(data_hashes):
        raise CalibrationError(
            "two calibrations have seen the same data, which would count twice",
            hint="name each file once, and none beside another that it was added to",
        )
    if len(calibrations) == 1:
        return first
    statistics = dict(first.statistics)
    for calibration in calibrations[1:]:
        statistics = {n: s.merge(calibration.statistics[n]) for n, s in statistics.items()}
    data = hashlib.sha256("\n".join(data_hashes).encode()).hexdigest()
    seeds = {a.fingerprint.seed for a in calibrations}
    policies = {a.policy for a in calibrations}
    losses = [a.sensitivities for a in calibrations if a.sensitivities is not None]
    return CalibrationFile(
        fingerprint=replace(
            first.fingerprint, data=data, seed=seeds.pop() if len(seeds) == 1 else 0
        ),
        num_samples=sum(a.num_samples for a in calibrations),
        num_tokens=sum(a.num_tokens for a in calibrations),
        data_hashes=tuple(data_hashes),
        sequential=any(a.sequential for a in calibrations),
        policy=policies.pop() if len(policies) == 1 else "share",
        route_all=first.route_all,
        statistics=statistics,
        needs_solving=True,
        sensitivities=sensitivities.merge_sensitivities(losses)
        if len(losses) == len(calibrations)
        else None,
    )


def check_fits(
    calibration: CalibrationFile,
    fingerprint: Fingerprint,
    recipe: Recipe,
    decisions: Iterable[Decision],
    sites: Iterable[ActivationSite],
    *,
    policy: str | None = None,
    route_all: bool = False,
) -> bool:
    """Whether what an artefact has settled can be used as it is; else it is settled anew.

    `fingerprint` is that of the model and recipe at hand, formats being chosen; its data do not
    count. `policy` is what
    experts without data are to be settled by (None: as the artefact was), and with `route_all`
    every expert is to have seen every token.

    Raises:
        CalibrationError: the artefact is of another model, or of another recipe, policy or several
            runs, and an algorithm needs more than statistics; says which. Or its statistics are
            those of layers behind others that were rounded by another recipe.
    """
    check_model(calibration, fingerprint)
    listed = tuple(sites)
    experts = any(p.expert is not None for p in listed)
    if route_all and experts and not calibration.route_all:
        raise CalibrationError(
            "--calibrate-all-experts, and in the calibration experts saw the tokens that were routed to them",
            hint=_RECALIBRATE_HINT,
        )
    reason = "several runs" if calibration.needs_solving else ""
    if calibration.solved_recipe != fingerprint.recipe:
        reason = "another recipe"
    elif experts and policy not in (None, calibration.policy) and not calibration.needs_solving:
        reason = f"--uncalibrated-experts {calibration.policy}"
    if not reason:
        return True
    if calibration.sequential and reason == "another recipe":
        raise CalibrationError(
            "the calibration is of another recipe, whose algorithm showed each layer what rounding "
            "had made of those before it: its statistics are of no use here",
            hint=_RECALIBRATE_HINT,
        )
    measured = {module for p in listed if p.name in calibration.statistics for module in p.modules}
    for d in decisions:
        if d.format is None:
            continue
        requirements = derive_requirements(recipe, d)
        if requirements.data and d.module.name not in measured:
            raise CalibrationError(
                f"the calibration knows nothing about the inputs of {d.module.name}",
                tensor=d.module.name,
                hint=_RECALIBRATE_HINT,
            )
        if requirements.gram or requirements.sample or requirements.sequential:
            method = d.format.method or recipe.method
            raise CalibrationError(
                f"the calibration is of {reason}, and {method} needs the inputs of {d.module.name} "
                "themselves, which no calibration keeps",
                tensor=d.module.name,
                hint=_RECALIBRATE_HINT,
            )
    return False


def check_model(calibration: CalibrationFile, fingerprint: Fingerprint) -> None:
    """Refuse an artefact of another model than `fingerprint` is of.

    Raises:
        CalibrationError: it is.
    """
    if calibration.fingerprint.model != fingerprint.model:
        raise CalibrationError(
            f"the calibration is of another model ({calibration.fingerprint.model[:12]}, and this one "
            f"is {fingerprint.model[:12]})",
            hint="calibrate this model: leave out --calibration, and give --data",
        )


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _count(value: Any, minimum: int | None = 0) -> int:
    if type(value) is not int or (minimum is not None and value < minimum):
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise ValueError(f"{value!r} is no text")
    return value
