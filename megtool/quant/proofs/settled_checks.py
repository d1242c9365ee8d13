"""Settled checks: stored scales of inputs and factors of columns are those calibration settled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megtool.quant.proofs.findings import Finding, error
from megtool.quant.proofs.folder import Folder
from megtool.quant.recipes.match import Decision
from megtool.quant.treatment import INPUTS, Floats, Settlement, Treatment

_LARGEST: Mapping[str, float] = {"fp8": 448.0, "int8": 127.0, "nvfp4": 6.0 * 448.0}
_NEAR = 2.0**-7  # factors may be stored in bfloat16


def check_settled(
    folder: Folder,
    decisions: Sequence[Decision],
    names: Mapping[str, str],
    settlement: Settlement,
) -> Iterator[Finding]:
    """Where stored values are not those settled; what is missing is told by other checks."""
    for d in decisions:
        treatment = settlement.treatments.get(d.module.name)
        tensors = folder.modules.get(names.get(d.module.name, ""), {})
        if treatment is None or d.format is None or not d.format.algo:
            continue
        if (scale := tensors.get("input_scale")) is not None and treatment.input_amax > 0:
            yield from _input(treatment, float(folder.values(scale).reshape(-1)[0]))
        stored = tensors.get("pre_quant_scale")
        if treatment.stores_columns and treatment.columns is not None:
            if stored is None:
                yield error(
                    "pre-quant-scale",
                    treatment.module,
                    "its columns were scaled, and pre_quant_scale is missing",
                    "inputs are not divided by the factors: outputs are wrong in every engine",
                )
            else:
                wanted = np.float32(1) / treatment.columns
                yield from _columns(treatment.module, wanted, folder.values(stored).reshape(-1))
        elif stored is not None:
            yield error(
                "pre-quant-scale",
                treatment.module,
                "has a pre_quant_scale, and its columns were not to be scaled by the engine",
                "inputs are scaled twice, or for nothing",
            )


def _input(treatment: Treatment, stored: float) -> Iterator[Finding]:
    kind = INPUTS.get(treatment.format.algo, "").partition(":")[0]
    if kind not in _LARGEST:
        return
    wanted = treatment.input_amax / _LARGEST[kind]
    if not abs(stored - wanted) <= 1e-5 * wanted:
        yield error(
            "input-scale",
            treatment.module,
            f"input_scale is {stored:.6g}, and calibration settled {wanted:.6g}",
            "inputs are cut off, or rounded more than need be, in every engine",
        )


def _columns(module: str, wanted: Floats, stored: Floats) -> Iterator[Finding]:
    if stored.shape != wanted.shape:
        return  # told with the other shapes
    off = ~(np.abs(stored - wanted) <= _NEAR * np.abs(wanted))
    if off.any():
        column = int(off.argmax())
        yield error(
            "columns",
            module,
            f"pre_quant_scale of {int(off.sum()):,} of {off.size:,} columns is not what was "
            f"settled: column {column} is {stored[column]:.6g}, not {wanted[column]:.6g}",
            "inputs of these columns are scaled wrongly in every engine",
        )
