"""Read modules of the method `fp8`: DeepSeek's blocks (`weight_scale_inv`) and its relatives."""

from __future__ import annotations

from megtool.export.hf.infer_format import (
    DECODE_HINT,
    QuantizedWeight,
    infer_group_size,
    infer_packing,
)
from megtool.export.quantized_module import QuantizedModule

_BY_REACH = ("FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN")


def read_module(weight: QuantizedWeight) -> QuantizedModule:
    """One module. A single scale with one for inputs is `FP8`; without one, inputs are scaled as
    they come, and so it is a scale a row that happens to be the same for all.

    Raises:
        FormatError: blocks other than 128 x 128, or weights in MXFP4.
    """
    inputs = weight.find_single("input_scale", "activation_scale")
    weight.find_tensor("input_scale_ub")
    if weight.numbers == "mxfp4":
        raise weight.error(
            "is in MXFP4 with inputs as they are or in FP8, and engines' MXFP4 rounds inputs to "
            "MXFP4 too",
            hint=DECODE_HINT,
        )
    if weight.numbers == "mxfp8":
        algo = "MXFP8"
    elif inputs and weight.fits("FP8", 0):
        algo = "FP8"
    else:
        algo = next((a for a in _BY_REACH if weight.fits(a, infer_group_size(weight, a))), "")
        is_per_tensor = weight.scale_block == weight.shape
        if not algo and is_per_tensor:
            algo = "FP8_PER_CHANNEL_PER_TOKEN"
    group = infer_group_size(weight, algo) if algo else 0
    if not algo or (algo.startswith("MX") and not weight.fits(algo, group)):
        rows, columns = weight.scale_block
        raise weight.error(
            f"has a scale for {rows} x {columns} elements, and engines' formats have one for "
            "128 x 128, for a row or for the whole tensor",
            hint=DECODE_HINT,
        )
    has_one_scale = algo == "FP8_PER_CHANNEL_PER_TOKEN" and not weight.fits(algo, 0)
    return QuantizedModule(
        name=weight.module,
        shape=weight.shape,
        algo=algo,
        group_size=group,
        packing="fp8:tensor" if has_one_scale else infer_packing(weight, algo, group),
        parts=weight.packed.parts,
        input_scale=inputs,
    )
