"""Scales whose values cannot be right: zero, NaN or Inf, negative, or far from similar ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from megtool.lint.folder_view import (
    KV_CACHE_SCALES,
    FolderView,
    ScaleStatistics,
    StoredTensor,
)
from megtool.report.finding import Finding, error, warning

OUTLIER_RATIO = 1000.0
"""A scale so many times above or below the median of similar ones is reported."""

SCALE_NAMES: tuple[str, ...] = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
    "pre_quant_scale",
)

_TINY = float(np.finfo(np.float32).tiny)
_LEAST = _TINY / 512
"""No exporter makes smaller scales: FP8's is at least the smallest normal float32 over 448."""

LARGEST_SCALE = 65504.0
"""Weights and inputs under a larger scale overflow float16, and soon float32."""

_MULTIPLIERS = ("weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale")
_SMALLEST_E4M3 = 2.0**-9
_DAMAGED = "calibration saw unusual data here, or the value is damaged"


def check_values(
    module: str, last: str, tensor: StoredTensor, s: ScaleStatistics
) -> Iterator[Finding]:
    """What is wrong with the values of one scale, by its statistics."""
    if not s.count:
        yield error("scale-missing", module, f"{last} is empty", "no engine loads it")
    nan_effect = "the output of every engine is NaN"
    cases = (
        (s.zeros, "zero", "zero", "engines multiply or divide by it: the output is zero or NaN"),
        (s.nan, "nan", "NaN", nan_effect),
        (s.inf, "inf", "infinite", f"{nan_effect} or infinite"),
        (
            0 if last == "pre_quant_scale" else s.negative,
            "negative",
            "negative" if s.count > 1 else f"{s.first:.3g}",
            "scales are magnitudes; kernels that use only their exponent drop the sign",
        ),
    )
    for count, id, text, effect in cases:
        if count:
            values = (
                f"{count:,} of {s.count:,} values of {last} are" if s.count > 1 else f"{last} is"
            )
            yield error(f"scale-{id}", module, f"{values} {text}", effect)
    yield from _check_range(module, last, tensor, s)


def _check_range(
    module: str, last: str, tensor: StoredTensor, s: ScaleStatistics
) -> Iterator[Finding]:
    if last in (*_MULTIPLIERS, *KV_CACHE_SCALES) and s.largest > LARGEST_SCALE:
        yield error(
            "scale-overflow",
            module,
            f"the largest value of {last} is {s.largest:.3g}",
            "no weight or input is so large: the value is damaged",
        )
    is_wide = tensor.dtype in ("float32", "bfloat16")
    if is_wide and last in _MULTIPLIERS and 0 < s.smallest < _LEAST:
        yield error(
            "scale-underflow",
            module,
            f"the smallest value of {last} is {s.smallest:.3g}, of which GPUs may make zero",
            "no weight or input is so small: the value is damaged",
        )
    elif is_wide and 0 < s.smallest < _TINY:
        yield warning(
            "scale-underflow",
            module,
            f"the smallest value of {last} is {s.smallest:.3g}, a subnormal float32",
            "GPUs may flush it to zero",
        )
    lowest = s.num_smallest if s.smallest <= _SMALLEST_E4M3 else 0
    if tensor.dtype == "float8_e4m3fn" and s.count > 1 and lowest > s.count / 2:
        yield warning(
            "scale-underflow",
            module,
            f"{lowest:,} of {s.count:,} values of {last} are the smallest that FP8 has",
            "their blocks are coarser than necessary: weight_scale_2 is too large",
        )
    if s.count < 2 or not s.median or tensor.dtype == "uint8":
        return
    for value, word in ((s.largest, "above"), (s.smallest, "below")):
        ratio = value / s.median if word == "above" else s.median / value
        if ratio > OUTLIER_RATIO:
            yield warning(
                "scale-outlier",
                module,
                f"{last} has a value of {value:.3g}, {ratio:,.0f} times {word} the median "
                f"{s.median:.3g}",
                "one row or block is unlike all others: a damaged weight, or a true outlier",
            )


class LayerOutliers:
    """Single scales, compared with those of the same module in other layers and experts."""

    def __init__(self) -> None:
        self._scales: dict[tuple[str, str], list[tuple[str, ScaleStatistics]]] = defaultdict(list)

    def add(self, module: str, last: str, statistics: ScaleStatistics) -> None:
        """Take in one scale of one value; what is zero or no number is not compared."""
        if statistics.count == 1 and statistics.largest:
            name = ".".join("#" if p.isdecimal() else p for p in module.split("."))
            self._scales[name, last].append((module, statistics))

    def check(self) -> Iterator[Finding]:
        """The scales that are far from the median of at least three."""
        for (_, last), scales in self._scales.items():
            if len(scales) < 3:
                continue
            median = float(np.median([s.largest for _, s in scales]))
            for module, s in scales:
                ratio = max(s.largest / median, median / s.largest)
                if ratio > OUTLIER_RATIO:
                    text = (
                        f"{last} is {s.largest:.3g}, {ratio:,.0f} times from {median:.3g}, the "
                        "median of the same module in other layers"
                    )
                    yield warning("scale-outlier", module, text, _DAMAGED)


def describe_difference(
    folder: FolderView, modules: Sequence[tuple[str, StoredTensor | None]]
) -> str:
    """How a scale differs among the parts of one matrix, as `q 0.1, k 0.2`; empty if all are equal.

    `modules` are names of the parts, each with the tensor of that scale (None: it has none).
    """
    values = {name: folder.read_values(t) for name, t in modules if t is not None}
    if len({v.tobytes() for v in values.values()}) < 2:
        return ""
    shown = (f"{n} {v.flat[0]:.6g}" if v.size else f"{n} none" for n, v in values.items())
    return ", ".join(shown)


def check_scales(folder: FolderView, canonical: dict[str, str]) -> Iterator[Finding]:
    """What is wrong with the values of all scales, each read once.

    `canonical` are the canonical names of modules by their stored names.
    """
    outliers = LayerOutliers()
    for stored, tensors in folder.modules.items():
        module = canonical.get(stored, stored)
        for last, tensor in tensors.items():
            if last in (*SCALE_NAMES, *KV_CACHE_SCALES):
                statistics = folder.read_statistics(tensor)
                yield from check_values(module, last, tensor, statistics)
                outliers.add(module, last, statistics)
    yield from outliers.check()
