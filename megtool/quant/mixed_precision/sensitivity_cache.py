"""Finished measurements in a folder, from which an interrupted run resumes.

There is a file with the quantization parameters of each finished layer in all its formats, files
with the inputs of the next layer, and a file of finished losses. Files are renamed when they are
complete, and have digests; a damaged one is measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megtool.errors import CalibrationError
from megtool.quant.calibration import calibration_file_io
from megtool.quant.calibration.calibration_encoding import decode_qparams, encode_qparams
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.resume_folder import ResumeFolder
from megtool.quant.qparams import QParams
from megtool.quant.recipes.decision_units import DecisionUnit

_LOG = logging.getLogger(__name__)

_LOSSES = "losses.safetensors"

Key = tuple[str, str]
"""A decision unit and a format (`decision_units.key_of`)."""


class SensitivityCache:
    """The folder of one measurement. `settings` are those that change its numbers, besides the
    formats of `units`. Of several ranks only the leader writes. Call `work.claim` first."""

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: Fingerprint,
        units: Sequence[DecisionUnit],
        settings: Mapping[str, Any],
        is_leader: bool = True,
    ) -> None:
        formats = {u.name: [_plain(asdict(f)) for f in u.formats] for u in units}
        self.work = ResumeFolder(
            folder,
            fingerprint=fingerprint,
            settings={**settings, "formats": formats},
            is_leader=is_leader,
        )

    # ---- quantization parameters of layers, then of the head

    def record_qparams(self, layer: int, qparams: Mapping[Key, QParams]) -> None:
        """Store the quantization parameters of a layer's decision units.

        Raises:
            StorageError: the file cannot be written, as when the disk is full.
        """
        arrays: dict[str, calibration_file_io.Array] = {}
        entries = []
        for number, (key, solved) in enumerate(qparams.items()):
            unit_arrays: dict[str, calibration_file_io.Array] = {}
            entries.append([*key, encode_qparams(solved, unit_arrays)])
            arrays |= {f"{number}/{name}": array for name, array in unit_arrays.items()}
        facts = {"layer": layer, "qparams": entries}
        calibration_file_io.write(self._qparams_file(layer), arrays, facts, self.work.files)

    def read_qparams(self, layer: int) -> dict[Key, QParams] | None:
        """The quantization parameters of a layer's decision units; None if they are not stored."""
        path = self._qparams_file(layer)
        if self.work.files.stat(path) is None:
            return None
        try:
            facts, arrays = calibration_file_io.read(path)
            if facts["layer"] != layer:
                raise ValueError(f"it is of layer {facts['layer']}")
            out = {}
            for number, (unit, key, entry) in enumerate(facts["qparams"]):
                prefix = f"{number}/"
                unit_arrays = {
                    n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)
                }
                out[str(unit), str(key)] = decode_qparams(entry, unit_arrays)
        except (CalibrationError, KeyError, TypeError, ValueError, IndexError) as e:
            _LOG.warning("%s is damaged and is computed again: %s", path, e)
            return None
        return out

    def remove_qparams(self, layers: Iterable[int]) -> None:
        """Remove quantization parameters, which are not needed once all losses are finished."""
        for layer in layers:
            self.work.files.remove(self._qparams_file(layer))

    # ---- losses

    def record_losses(self, losses: Mapping[Key, float], num_micro_batches: int = 0) -> None:
        """Store the finished losses, or their sums over the first `num_micro_batches`
        micro-batches.

        Raises:
            StorageError: the file cannot be written, as when the disk is full.
        """
        arrays = {
            "losses": np.array(list(losses.values()), np.float64),
            "num_pieces": np.array([num_micro_batches], np.int64),
        }
        facts = {"keys": [list(key) for key in losses]}
        calibration_file_io.write(self.work.folder / _LOSSES, arrays, facts, self.work.files)

    def losses(self) -> tuple[dict[Key, float], int]:
        """The finished losses, and over how many micro-batches they are summed."""
        path = self.work.folder / _LOSSES
        if self.work.files.stat(path) is None:
            return {}, 0
        try:
            facts, arrays = calibration_file_io.read(path)
            keys = [(str(unit), str(key)) for unit, key in facts["keys"]]
            values = [float(x) for x in arrays["losses"]]
            by_key = dict(zip(keys, values, strict=True))
            count = int(arrays["num_pieces"][0])
            if not np.isfinite(values).all() or count < 0:
                raise ValueError("invalid losses")
        except (CalibrationError, KeyError, TypeError, ValueError, IndexError) as e:
            _LOG.warning("%s is damaged and is measured again: %s", path, e)
            return {}, 0
        return by_key, count

    def _qparams_file(self, layer: int) -> Path:
        return self.work.folder / f"qparams-{layer:05d}.safetensors"


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON returns them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in facts.items()}
