"""Scale checks: scales that are zero, no numbers, too small, or apart from their siblings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import numpy as np

from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import fused_with
from megtool.quant.verification.findings import Finding, error, warning
from megtool.quant.verification.stored_folder import CACHE_SCALES, Folder, Numbers, StoredTensor

APART = 1000.0
"""A scale so many times above or below the median of its neighbors is worth a look."""

_TINY = float(np.finfo(np.float32).tiny)
_LOWEST_BLOCK = 2.0**-9  # of E4M3
_SECONDS = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "W4A8_AWQ")
_SHARED = ("weight_scale_2", "input_scale", "pre_quant_scale")


def check_scales(
    folder: Folder, decisions: Sequence[Decision], names: Mapping[str, str]
) -> Iterator[Finding]:
    """All that is wrong with the values of scales, each read once.

    `names` are the stored names of modules by their canonical ones.
    """
    canonical = {stored: name for name, stored in names.items()}
    alike: dict[str, list[tuple[str, Numbers]]] = defaultdict(list)
    for stored, tensors in folder.modules.items():
        module = canonical.get(stored, stored)
        for last, tensor in tensors.items():
            if last in (*SCALE_NAMES, *CACHE_SCALES):
                numbers = folder.numbers(tensor)
                yield from check_values(module, last, tensor, numbers)
                if numbers.count == 1 and numbers.largest:
                    alike[f"{without_numbers(module)} {last}"].append((module, numbers))
    for role, some in alike.items():
        yield from apart_from_layers(role.rpartition(" ")[2], some)
    yield from check_siblings(folder, decisions, names)


SCALE_NAMES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
    "pre_quant_scale",
)


def check_values(module: str, last: str, tensor: StoredTensor, n: Numbers) -> Iterator[Finding]:
    """What is wrong with the values of one scale, by its counts and extremes."""
    total = f"of {n.count:,} values of {last}" if n.count > 1 else f"{last}, the only one,"
    if not n.count:
        yield error("scale-missing", module, f"{last} is empty", "no engine loads it")
    if n.zeros:
        yield error(
            "scale-zero",
            module,
            f"{n.zeros:,} {total} are zero" if n.count > 1 else f"{last} is zero",
            "engines multiply by it, or divide by it: the output is zero or NaN",
        )
    if n.nan:
        yield error(
            "scale-nan",
            module,
            f"{n.nan:,} {total} are NaN" if n.count > 1 else f"{last} is NaN",
            "every engine's output is NaN",
        )
    if n.inf:
        yield error(
            "scale-inf",
            module,
            f"{n.inf:,} {total} are infinite" if n.count > 1 else f"{last} is infinite",
            "every engine's output is NaN or infinite",
        )
    if n.negative and last != "pre_quant_scale":
        yield error(
            "scale-negative",
            module,
            f"{n.negative:,} {total} are below zero" if n.count > 1 else f"{last} is {n.first:.3g}",
            "scales are magnitudes; kernels that use their exponent alone drop the sign",
        )
    yield from _small(module, last, tensor, n)


def _small(module: str, last: str, tensor: StoredTensor, n: Numbers) -> Iterator[Finding]:
    if tensor.dtype in ("float32", "bfloat16") and 0 < n.smallest < _TINY:
        yield warning(
            "scale-underflow",
            module,
            f"{last} goes down to {n.smallest:.3g}, below the normal numbers of float32",
            "GPUs may take it for zero",
        )
    lowest = n.num_lowest if n.smallest <= _LOWEST_BLOCK else 0
    if tensor.dtype == "float8_e4m3fn" and n.count > 1 and lowest > n.count / 2:
        yield warning(
            "scale-underflow",
            module,
            f"{lowest:,} of {n.count:,} values of {last} are the smallest that FP8 has",
            "blocks under them are coarser than they need be: weight_scale_2 is too large",
        )
    if n.count < 2 or not n.median or tensor.dtype == "uint8":
        return
    for value, word in ((n.largest, "above"), (n.smallest, "below")):
        apart = value / n.median if word == "above" else n.median / value
        if apart > APART:
            yield warning(
                "scale-outlier",
                module,
                f"{last} has a value of {value:.3g}, {apart:,.0f} times {word} the median "
                f"{n.median:.3g}",
                "one row or block is unlike all others: a damaged weight, or a true outlier",
            )


def apart_from_layers(last: str, some: Sequence[tuple[str, Numbers]]) -> Iterator[Finding]:
    """Single scales against those of the same module in other layers and experts."""
    if len(some) < 3:
        return
    median = float(np.median([n.largest for _, n in some]))
    for module, n in some:
        apart = max(n.largest / median, median / n.largest)
        if apart > APART:
            yield warning(
                "scale-outlier",
                module,
                f"{last} is {n.largest:.3g}, {apart:,.0f} times from {median:.3g}, the median of "
                f"the same module elsewhere",
                "calibration saw something else here, or the value is damaged",
            )


def without_numbers(module: str) -> str:
    """The name that a module has in all layers and experts alike."""
    return ".".join("#" if p.isdecimal() else p for p in module.split("."))


def check_siblings(
    folder: Folder, decisions: Sequence[Decision], names: Mapping[str, str]
) -> Iterator[Finding]:
    """What engines run as one (q, k, v; gate and up) has the same scales of scales and inputs."""
    groups: dict[str, list[Decision]] = defaultdict(list)
    for d in decisions:
        if d.module.kind == "linear" and d.format is not None and d.format.algo:
            groups[fused_with(d.module)].append(d)
    for some in groups.values():
        if len(some) < 2 or len({d.label for d in some}) > 1:
            continue
        for last in _SHARED:
            yield from _agree(folder, some, names, last)


def _agree(
    folder: Folder, some: Sequence[Decision], names: Mapping[str, str], last: str
) -> Iterator[Finding]:
    held: dict[str, bytes] = {}
    shown: dict[str, str] = {}
    for d in some:
        name = d.module.name
        tensor = folder.modules.get(names.get(name, ""), {}).get(last)
        if tensor is None:
            continue
        values = folder.values(tensor)
        held[name] = values.tobytes()
        shown[name] = f"{float(values.reshape(-1)[0]):.6g}" if values.size else "none"
    if len(set(held.values())) < 2:
        return
    first, *others = held
    odd = next(n for n in others if held[n] != held[first])
    parts = ", ".join(f"{PurePath(n).name.rpartition('.')[2]} {v}" for n, v in shown.items())
    severe = last != "input_scale" or some[0].label in _SECONDS
    make = error if severe else warning
    yield make(
        "siblings",
        odd,
        f"{last} differs from that of {first} ({parts})",
        "vLLM, TensorRT-LLM and SGLang run them as one and keep a single value: "
        + ("the others come out wrong" if severe else "the largest, so that some lose precision"),
    )
