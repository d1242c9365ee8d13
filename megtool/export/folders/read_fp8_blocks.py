"""Read fine-grained FP8: DeepSeek's blocks (`weight_scale_inv`) and others of the method `fp8`."""

from __future__ import annotations

from megtool.export.folders.infer_format import DECODE, Found, group_for, packing_for
from megtool.export.quantized_module import Coded

_BY_REACH = ("FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN")


def read_module(found: Found) -> Coded:
    """One module. A single scale with one for inputs is `FP8`; without one, inputs are scaled as
    they come, and so it is a scale a row that happens to be the same for all.

    Raises:
        FormatError: blocks other than 128 x 128, or weights in MXFP4.
    """
    inputs = found.single("input_scale", "activation_scale")
    found.beside("input_scale_ub")
    if found.numbers == "mxfp4":
        raise found.fault(
            "is in MXFP4 with inputs as they are or in FP8, and engines' MXFP4 rounds inputs to "
            "MXFP4 too",
            hint=DECODE,
        )
    if found.numbers == "mxfp8":
        algo = "MXFP8"
    elif inputs and found.suits("FP8", 0):
        algo = "FP8"
    else:
        algo = next((a for a in _BY_REACH if found.suits(a, group_for(found, a))), "")
        whole = found.reach == found.shape
        if not algo and whole:
            algo = "FP8_PER_CHANNEL_PER_TOKEN"
    group = group_for(found, algo) if algo else 0
    if not algo or (algo.startswith("MX") and not found.suits(algo, group)):
        rows, columns = found.reach
        raise found.fault(
            f"has a scale for {rows} x {columns} elements, and engines' formats have one for "
            "128 x 128, for a row or for the whole tensor",
            hint=DECODE,
        )
    one = algo == "FP8_PER_CHANNEL_PER_TOKEN" and not found.suits(algo, 0)
    return Coded(
        name=found.module,
        shape=found.shape,
        algo=algo,
        group_size=group,
        packing="fp8:tensor" if one else packing_for(found, algo, group),
        parts=found.folded.parts,
        input_scale=inputs,
    )
