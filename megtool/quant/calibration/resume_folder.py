"""The folder from which an interrupted calibration resumes.

It has one file per finished unit (a layer, or the head) with its statistics and quantization
parameters, and files of the activations that enter the next unit, one per data-parallel rank. Files
are renamed into place when complete and have digests: a run resumes after the last valid unit. With
several hosts the folder must be on shared storage.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megtool.errors import CalibrationError
from megtool.quant.calibration import calibration_file_io
from megtool.quant.calibration.calibration_encoding import (
    decode_qparams,
    decode_statistics,
    encode_qparams,
    encode_statistics,
)
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.qparams import QParams
from megtool.quant.statistics.site_statistics import ActivationStatistics
from megtool.storage.files import Files
from megtool.storage.lock import LockFile

_LOG = logging.getLogger(__name__)

SENSITIVITY_FOLDER = "sensitivity"
"""The subfolder with sensitivities, which are measured before formats are chosen."""

_METADATA_FILE = "calibration.json"
_MAX_METADATA_BYTES = 1 << 20


class ResumeFolder:
    """The resume folder of one calibration. `settings` are those that change its results.

    The process with `is_leader` locks the folder and writes its metadata; every process reads it.
    Use `claim` before anything else.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: Fingerprint,
        settings: Mapping[str, Any],
        is_leader: bool = True,
        files: Files | None = None,
    ) -> None:
        self.folder, self.is_leader = folder, is_leader
        self.files = Files() if files is None else files
        self._metadata = {"fingerprint": asdict(fingerprint), "settings": dict(settings)}

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Lock the folder; creates it if missing.

        Raises:
            CalibrationError: it belongs to another calibration; names the differences.
            DestinationError: another run uses it, or it cannot be written.
            StorageError: an I/O error.
        """
        if not self.is_leader:
            yield
            return

        def make() -> None:
            missing = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
            for path in reversed(missing):
                self.files.mkdir(path)

        lock = LockFile(self.files, self.folder / "lock", make)
        try:
            self._check()
            yield
        finally:
            lock.release()

    def _check(self) -> None:
        path = self.folder / _METADATA_FILE
        data = self.files.read_whole(path, at_most=_MAX_METADATA_BYTES)
        if data is None:
            unknown = [
                n for n in self.files.names(self.folder) if n not in ("lock", SENSITIVITY_FOLDER)
            ]
            if unknown:
                raise CalibrationError(
                    f"the resume folder contains {unknown[0]!r}, which no calibration writes",
                    file=self.folder,
                    hint="--work-dir NAME: an empty folder, or one that does not exist yet",
                )
            text = json.dumps(self._metadata, indent=1, sort_keys=True).encode()
            self.files.replace_file(path, text, f".{_METADATA_FILE}.tmp", fsync=True)
            return
        try:
            stored = json.loads(data)
            differences = [
                key
                for part, values in self._metadata.items()
                for key, value in values.items()
                if stored[part][key] != value
            ]
        except (ValueError, KeyError, TypeError, RecursionError):
            differences = ["kind"]
        if differences:
            raise CalibrationError(
                "the resume folder belongs to another calibration: different "
                + " and ".join(differences),
                file=self.folder,
                hint="remove the folder, or choose another (--work-dir NAME)",
                error_id="foreign-calibration",
            )

    # ---- units

    def write_unit(
        self, unit: int, statistics: Mapping[str, ActivationStatistics], qparams: QParams
    ) -> None:
        """Write the results of a unit.

        Raises:
            StorageError: the file cannot be written, as when the disk is full.
        """
        arrays: dict[str, calibration_file_io.Array] = {}
        facts = {
            "unit": unit,
            "statistics": encode_statistics(statistics, arrays),
            "qparams": encode_qparams(qparams, arrays),
        }
        calibration_file_io.write(self._unit_file(unit), arrays, facts, self.files)

    def read_unit(self, unit: int) -> tuple[dict[str, ActivationStatistics], QParams] | None:
        """Read the results of a unit; None if it is not finished or its file is damaged."""
        path = self._unit_file(unit)
        if self.files.stat(path) is None:
            return None
        try:
            facts, arrays = calibration_file_io.read(path)
            if facts["unit"] != unit:
                raise ValueError(f"it is of unit {facts['unit']}")
            statistics = decode_statistics(facts["statistics"], arrays)
            return statistics, decode_qparams(facts["qparams"], arrays)
        except (CalibrationError, KeyError, TypeError, ValueError, IndexError) as e:
            _LOG.warning("%s is damaged and will be computed again: %s", path, e)
            return None

    def num_finished(self, num_units: int) -> int:
        """The number of finished units, counted from the first without a gap."""
        for unit in range(num_units):
            if self.read_unit(unit) is None:
                return unit
        return num_units

    # ---- activations

    def activations_file(self, unit: int, part: int, *, unquantized: bool = False) -> Path:
        """The file of the activations that enter a unit on a data-parallel rank: in the model as it
        is quantized, or in the `unquantized` one, which learned rounding runs beside it."""
        name = "unquantized-into" if unquantized else "into"
        return self.folder / f"{name}-{unit:05d}-{part:04d}.bin"

    def remove_activations(self, unit: int, part: int) -> None:
        """Remove the activations that entered a unit."""
        for unquantized in (False, True):
            self.files.remove(self.activations_file(unit, part, unquantized=unquantized))

    def _unit_file(self, unit: int) -> Path:
        return self.folder / f"unit-{unit:05d}.safetensors"
