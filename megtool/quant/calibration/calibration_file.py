"""The calibration file: activation statistics and quantization parameters of one or more runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megtool.errors import CalibrationError, FormatError
from megtool.quant.calibration import calibration_file_io, sensitivities
from megtool.quant.calibration.calibration_encoding import (
    decode_qparams,
    decode_statistics,
    encode_qparams,
    encode_statistics,
)
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.requirements import derive_requirements
from megtool.quant.calibration.sensitivities import Sensitivities
from megtool.quant.qparams import QParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quant.statistics.site_statistics import ActivationStatistics
from megtool.storage.files import Files

_VERSION = 4

_RECALIBRATE_HINT = "calibrate with this recipe: give --data instead of --calibration"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFile:
    """Result of a calibration: statistics by activation site, and quantization parameters.

    Args:
        num_samples: rows of tokens.
        num_tokens: tokens without padding.
        data_hashes: sorted hashes of all merged data.
        sequential: layers saw the quantized outputs of the layers before them.
        uncalibrated_experts: how experts without data were handled.
        calibrate_all_experts: every expert saw every token.
        statistics: as measured (nothing filled in), for all sites of the model.
        needs_solving: `qparams` is empty, as after a merge: see `calibrate.resolve_calibration`.
        sensitivities: for recipes that choose formats; another budget can choose again from them.
        solved_recipe: hash of the recipe with the chosen formats. `fingerprint` has the hash of the
            recipe before the choice, which is the same on every machine.
    """

    fingerprint: Fingerprint
    num_samples: int
    num_tokens: int
    data_hashes: tuple[str, ...] = ()
    sequential: bool = False
    uncalibrated_experts: str = "share"
    calibrate_all_experts: bool = False
    statistics: dict[str, ActivationStatistics] = field(default_factory=dict)
    qparams: QParams = field(default_factory=QParams)
    needs_solving: bool = False
    sensitivities: Sensitivities | None = None
    solved_recipe: str = ""

    def __post_init__(self) -> None:
        if not self.solved_recipe:
            object.__setattr__(self, "solved_recipe", self.fingerprint.recipe)
        if not self.data_hashes:
            object.__setattr__(self, "data_hashes", (self.fingerprint.data,))

    def save(self, path: Path, files: Files | None = None) -> None:
        """Write to a file atomically; replaces an existing file.

        Raises:
            StorageError: the file cannot be written, as when the disk is full.
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
            "data_hashes": list(self.data_hashes),
            "sequential": self.sequential,
            "policy": self.uncalibrated_experts,
            "route_all": self.calibrate_all_experts,
            "needs_solving": self.needs_solving,
            "solved_recipe": self.solved_recipe,
            "sensitivities": None if self.sensitivities is None else self.sensitivities.to_json(),
            "statistics": encode_statistics(self.statistics, arrays),
            "qparams": encode_qparams(self.qparams, arrays),
        }
        calibration_file_io.write(path, arrays, facts, files)

    @classmethod
    def load(cls, path: Path) -> CalibrationFile:
        """Read a file; large arrays are memory-mapped.

        Raises:
            CalibrationError: not a calibration file, a damaged one, or one of another version.
        """
        facts, arrays = calibration_file_io.read(path)
        try:
            if facts["version"] != _VERSION:
                raise CalibrationError(
                    f"the calibration file has version {facts['version']!r}, not {_VERSION}",
                    file=path,
                    hint="calibrate again with this version of megtool",
                )
            fingerprint = facts["fingerprint"]
            texts = {k: _text(fingerprint[k]) for k in ("model", "recipe", "data", "version")}
            losses = facts.get("sensitivities")
            return cls(
                fingerprint=Fingerprint(**texts, seed=_count(fingerprint["seed"], minimum=None)),
                num_samples=_count(facts["num_samples"]),
                num_tokens=_count(facts["num_tokens"]),
                data_hashes=tuple(sorted(_text(d) for d in facts["data_hashes"])),
                sequential=_flag(facts["sequential"]),
                uncalibrated_experts=_text(facts["policy"]),
                calibrate_all_experts=_flag(facts["route_all"]),
                statistics=decode_statistics(facts["statistics"], arrays),
                qparams=decode_qparams(facts["qparams"], arrays),
                needs_solving=_flag(facts["needs_solving"]),
                solved_recipe=_text(facts.get("solved_recipe", "")),
                sensitivities=None if losses is None else Sensitivities.from_json(losses),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, FormatError) as e:
            raise CalibrationError(
                f"the calibration file is damaged: {type(e).__name__}: {e}",
                file=path,
                hint="calibrate again, or use another file",
            ) from e


def merge_calibrations(calibrations: Sequence[CalibrationFile]) -> CalibrationFile:
    """Merge the calibration files of several machines into one.

    Statistics are combined; quantization parameters have to be solved again. Sensitivities are
    averaged over all tokens if every file has them.

    Raises:
        CalibrationError: no files, different models or recipes, different handling of experts, or
            two files with the same data.
    """
    if not calibrations:
        raise CalibrationError(
            "there are no calibration files to merge", hint="give at least one file"
        )
    first = calibrations[0]
    for number, calibration in enumerate(calibrations[1:], 2):
        differences = {"model", "recipe"} & set(
            first.fingerprint.differences(calibration.fingerprint)
        )
        if differences:
            raise CalibrationError(
                f"calibration files 1 and {number} are of different "
                + " and ".join(f"{name}s" for name in sorted(differences)),
                hint="only calibrations of the same model with the same recipe can be merged",
                error_id="foreign-calibration",
            )
        if set(first.statistics) != set(calibration.statistics):
            name = sorted(set(first.statistics) ^ set(calibration.statistics))[0]
            raise CalibrationError(
                f"calibration files 1 and {number} have different sites: one has no {name!r}",
                hint="calibrate again with one version of megtool",
                error_id="foreign-calibration",
            )
        if first.calibrate_all_experts != calibration.calibrate_all_experts:
            raise CalibrationError(
                f"calibration files 1 and {number}: one was made with --calibrate-all-experts, the "
                "other without",
                hint="calibrate all parts with the same options",
                error_id="foreign-calibration",
            )
    data_hashes = sorted(data for a in calibrations for data in a.data_hashes)
    if len(set(data_hashes)) < len(data_hashes):
        raise CalibrationError(
            "two calibration files used the same data, which would count twice",
            hint="give each file once, and no file that is already part of another",
        )
    if len(calibrations) == 1:
        return first
    statistics = dict(first.statistics)
    for calibration in calibrations[1:]:
        statistics = {n: s.merge(calibration.statistics[n]) for n, s in statistics.items()}
    data = hashlib.sha256("\n".join(data_hashes).encode()).hexdigest()
    seeds = {a.fingerprint.seed for a in calibrations}
    policies = {a.uncalibrated_experts for a in calibrations}
    losses = [a.sensitivities for a in calibrations if a.sensitivities is not None]
    return CalibrationFile(
        fingerprint=replace(
            first.fingerprint, data=data, seed=seeds.pop() if len(seeds) == 1 else 0
        ),
        num_samples=sum(a.num_samples for a in calibrations),
        num_tokens=sum(a.num_tokens for a in calibrations),
        data_hashes=tuple(data_hashes),
        sequential=any(a.sequential for a in calibrations),
        uncalibrated_experts=policies.pop() if len(policies) == 1 else "share",
        calibrate_all_experts=first.calibrate_all_experts,
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
    uncalibrated_experts: str | None = None,
    calibrate_all_experts: bool = False,
) -> bool:
    """Return whether the stored parameters can be used as they are; if not, solve them again.

    `fingerprint` is that of the current model and recipe, with chosen formats; its data hash is
    ignored. `uncalibrated_experts` is how experts without data are handled (None: as in the file),
    and with `calibrate_all_experts` every expert must have seen every token.

    Raises:
        CalibrationError: the file is of another model; or of another recipe, another handling of
            experts, or of several runs while an algorithm needs more than statistics; or its
            statistics come from layers behind others that were quantized by another recipe.
    """
    check_model(calibration, fingerprint)
    listed = tuple(sites)
    experts = any(p.expert is not None for p in listed)
    if calibrate_all_experts and experts and not calibration.calibrate_all_experts:
        raise CalibrationError(
            "--calibrate-all-experts: the calibration file was made without this option",
            hint=_RECALIBRATE_HINT,
            error_id="foreign-calibration",
        )
    reason = "several runs" if calibration.needs_solving else ""
    if calibration.solved_recipe != fingerprint.recipe:
        reason = "another recipe"
    elif (
        experts
        and uncalibrated_experts not in (None, calibration.uncalibrated_experts)
        and not calibration.needs_solving
    ):
        reason = f"--uncalibrated-experts {calibration.uncalibrated_experts}"
    if not reason:
        return True
    if calibration.sequential and reason == "another recipe":
        raise CalibrationError(
            "the calibration file is of another recipe, whose algorithm quantized each layer "
            "before the next one was measured: its statistics cannot be used",
            hint=_RECALIBRATE_HINT,
            error_id="foreign-calibration",
        )
    measured = {module for p in listed if p.name in calibration.statistics for module in p.modules}
    for d in decisions:
        if d.format is None:
            continue
        requirements = derive_requirements(recipe, d)
        if requirements.data and d.module.name not in measured:
            raise CalibrationError(
                f"the calibration file has no statistics of the inputs of {d.module.name}",
                tensor=d.module.name,
                hint=_RECALIBRATE_HINT,
                error_id="missing-statistics",
            )
        if requirements.gram or requirements.sample or requirements.sequential:
            method = d.format.method or recipe.method
            raise CalibrationError(
                f"the calibration is of {reason}, and {method} needs the inputs of {d.module.name} "
                "themselves, which no calibration keeps",
                tensor=d.module.name,
                hint=_RECALIBRATE_HINT,
                error_id="missing-statistics",
            )
    return False


def check_model(calibration: CalibrationFile, fingerprint: Fingerprint) -> None:
    """Check that a calibration file is of the model of `fingerprint`.

    Raises:
        CalibrationError: it is of another model.
    """
    if calibration.fingerprint.model != fingerprint.model:
        raise CalibrationError(
            "the calibration file is of another model "
            f"({calibration.fingerprint.model[:12]}, this model is {fingerprint.model[:12]})",
            hint="calibrate this model: give --data instead of --calibration",
            error_id="foreign-calibration",
        )


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def _count(value: Any, minimum: int | None = 0) -> int:
    if type(value) is not int or (minimum is not None and value < minimum):
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise ValueError(f"{value!r} is not a string")
    return value
