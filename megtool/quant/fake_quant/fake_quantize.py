"""Fake quantization of weights, inputs and KV caches, in float32.

`fake_weight` returns the values of a packed weight; `rounded_input` rounds inputs and caches like
the engine. All of them take and return numbers as in the source model: smoothing
scales are applied and removed again. Only `fake_weight` synchronizes with the host, to look for
NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megtool.errors import CalibrationError, FormatError
from megtool.number_formats.decode_torch import low_rank_product
from megtool.number_formats.layout import layout
from megtool.quant.fake_quant.rounding_torch import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    block_scale,
    e2m1_values,
    group_amax,
    plain_scale,
    power_scale,
    round_e2m1_,
    round_e4m3_,
    to_e2m1,
    to_e4m3,
    to_integers,
)
from megtool.quant.qparams import KVCacheQParams, WeightQParams
from megtool.quant.recipes.formats import ENGINE_INPUTS, INPUT_PACKINGS, packing_of

CHUNK = 1 << 22
"""Elements of a weight that are rounded at a time."""

CHUNK_INPUT = 1 << 16
"""The same for inputs, and for weights on a CPU."""

SECOND_LARGEST = {"W4A8_NVFP4_FP8": E4M3_LARGEST}
"""Divisors of the amax of an entire tensor in two-level formats, if not NVFP4's 6 * 448: engines
convert these codes to FP8, so 6 times the largest block scale must be 448 (modelopt
`export/quant_utils.py` get_weight_scaling_factor_2)."""

_INTEGERS = {
    "int8": (-128, 127, 127.0),
    "int4rows": (-8, 7, 7.0),
    "int4": (-8, 7, 7.0),
}
_CACHE_BLOCK = 16


def second_scale(algo: str, amax: float) -> np.float32:
    """The global scale of two-level formats, as it is stored."""
    largest = SECOND_LARGEST.get(algo, E2M1_LARGEST * E4M3_LARGEST)
    return np.float32(amax) / np.float32(largest) or np.float32(1)


def input_scale(qparams: WeightQParams) -> np.float32:
    """The calibrated scale of inputs, as it is stored (`input_scale`).

    Raises:
        CalibrationError: the amax of the inputs is unknown.
    """
    kind = INPUT_PACKINGS[qparams.format.algo]
    if not qparams.input_amax:
        raise CalibrationError(
            f"{qparams.format.algo} needs a static input scale, but the calibrated input amax of "
            f"{qparams.module} is 0",
            hint="calibrate with data, or choose a format with dynamic input scales",
        )
    if kind.startswith("nvfp4"):
        return second_scale(qparams.format.algo, qparams.input_amax)
    largest = 127.0 if kind.startswith("int8") else E4M3_LARGEST
    return np.float32(qparams.input_amax) / np.float32(largest)


def fake_weight(
    weight_OI: Tensor, qparams: WeightQParams, *, dtype: str = "float32", as_run: bool = False
) -> Tensor:
    """The values of the packed weight, divided by the smoothing scales again: float32 `[out, in]`.
    A weight that `is_smoothed` is neither multiplied nor divided.

    Before that division they equal, bit by bit, what `number_formats` decodes after encoding (style
    modelopt) with the same scales. `dtype` is the stored dtype of the weight, from which it is
    encoded (`bfloat16`, whatever the dtype of `weight_OI`): per-tensor FP8 with `round_twice` is
    rounded to it first. With a `smoothing_scale` the product is float32 and `dtype` has no effect.
    `codes` of float formats are the bits of each number. The product of a `branch` is added.

    `as_run` adds what engines do when they run: under W4A8_AWQ they round the decoded INT4 weight
    to FP8, by `weight_scale_2` = amax / 448 of the entire weight, which is stored in addition to
    the group scales and does not change codes.

    Raises:
        FormatError: the weight has NaN or Inf.
        UsageError: groups do not divide it.
    """
    algo = qparams.format.algo
    packing = packing_of(qparams.format)
    layout(packing, tuple(weight_OI.shape))  # raises if groups do not divide the weight
    name, _, granularity = packing.partition(":")
    device = weight_OI.device
    smoothing_scale = _on(qparams.weight_factors, device)
    weight_amax = (
        _whole_amax(weight_OI, smoothing_scale)
        if granularity == "tensor" or name == "nvfp4" or as_run
        else None
    )
    codes = None if qparams.codes is None else torch.from_numpy(qparams.codes)
    amax = _on(qparams.amax, device)
    if amax is not None and granularity == "tensor":
        amax = amax.reshape(1, 1)
    second = None
    if name == "nvfp4" and weight_amax is not None:
        second_amax = qparams.global_amax or float(weight_amax)
        second = float(second_scale(algo, second_amax))
    branch = None
    if (b := qparams.branch) is not None:
        branch = tuple(torch.as_tensor(m, device=device) for m in (b.up, b.down))
    quotient = dtype if smoothing_scale is None and qparams.format.round_twice else "float32"
    run = None
    if as_run and algo == "W4A8_AWQ" and weight_amax is not None:
        run = plain_scale(torch.tensor(qparams.global_amax or float(weight_amax)), E4M3_LARGEST)
    out = torch.empty(weight_OI.shape, dtype=torch.float32, device=device)
    rows, width = weight_OI.shape
    most = CHUNK if device.type != "cpu" else CHUNK_INPUT
    step = max(128, most // max(width, 1) // 128 * 128)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        x = weight_OI[part].float()
        x = x if smoothing_scale is None else x * smoothing_scale
        view = _blocks(x, granularity)
        dims = _reduced(granularity)
        if amax is None:
            tensor_amax = (
                weight_amax.reshape(1, 1)
                if granularity == "tensor" and weight_amax is not None
                else None
            )
            if tensor_amax is None and dims == (2,):
                tensor_amax = group_amax(x, view.shape[2])
            elif tensor_amax is None:
                tensor_amax = view.abs().amax(dims, keepdim=True)
        else:
            tensor_amax = _part(amax, granularity, part).reshape(
                [1 if d in dims else n for d, n in enumerate(view.shape)]
            )
        scale = _scale(name, tensor_amax, second)
        if codes is None:
            view = _rounded(name, view / scale, quotient)
        else:
            view = _meaning(name, _blocks(codes[part].to(device), granularity))
        result = _unblocked(view * scale, granularity)[: len(x), :width]
        if run is not None:
            result = to_e4m3(result / run) * run
        if branch is not None:
            result = result + low_rank_product(branch[0][part], branch[1])
        out[part] = result if smoothing_scale is None else result / smoothing_scale
    check_finite(out, qparams.module)
    return out


def check_finite(weight_OI: Tensor, module: str) -> None:
    """Check the elements of a module's weight.

    Raises:
        FormatError: it has NaN or Inf.
    """
    if not bool(torch.isfinite(weight_OI).all()):
        raise FormatError(
            f"the weight of {module} is NaN or infinite in places",
            tensor=module,
            hint="it cannot be quantized",
            error_id="nan-weights",
        )


def run_weight(
    weight_OI: Tensor, scale: float = 0.0, *, smoothing_scale: Tensor | None = None
) -> Tensor:
    """The weight that engines compute from a W4A8_AWQ checkpoint.

    `weight_OI` is the decoded INT4 weight, divided by the stored smoothing scales. It is rounded to
    FP8 as in `fake_weight` with `as_run`, by `scale` (0: by its own amax).
    """
    columns = _on(smoothing_scale, weight_OI.device)
    if scale:
        run = torch.tensor(scale)
    else:
        run = plain_scale(_whole_amax(weight_OI, columns).cpu(), E4M3_LARGEST)
    scaled = weight_OI.float() if columns is None else weight_OI * columns
    rounded = to_e4m3(scaled / run) * run
    return rounded if columns is None else rounded / columns


def tensor_amax(weight_OI: Tensor, qparams: WeightQParams) -> float:
    """The amax for a weight's global scale: the calibrated one, or that of all its elements."""
    if qparams.amax is not None:
        return float(qparams.amax.max())
    return float(_whole_amax(weight_OI, _on(qparams.weight_factors, weight_OI.device)))


def _on(values: Any, device: torch.device) -> Tensor | None:
    return None if values is None else torch.as_tensor(values, dtype=torch.float32, device=device)


def _whole_amax(weight_OI: Tensor, smoothing_scale: Tensor | None) -> Tensor:
    """The amax of a weight times its smoothing scale."""
    if smoothing_scale is None:
        low, high = torch.aminmax(weight_OI)
        return torch.maximum(-low, high).float()
    low, high = torch.aminmax(weight_OI, dim=0)
    return (torch.maximum(-low, high).float() * smoothing_scale).max()


def _blocks(x: Tensor, granularity: str) -> Tensor:
    """`[out, in]` with separate dimensions for the elements that share a scale."""
    if granularity in ("tensor", "channel"):
        return x
    sizes = [int(n) for n in granularity.split("x")]
    rows, width = x.shape
    if len(sizes) == 1:
        return x.view(rows, width // sizes[0], sizes[0])
    over = -rows % sizes[0], -width % sizes[1]  # the last blocks may be cut
    if any(over):
        x = torch.nn.functional.pad(x, (0, over[1], 0, over[0]))
        rows, width = x.shape
    return x.view(rows // sizes[0], sizes[0], width // sizes[1], sizes[1])


def _unblocked(view: Tensor, granularity: str) -> Tensor:
    """The matrix from which `_blocks` made `view`, with the padding of the last blocks."""
    if "x" in granularity:
        return view.flatten(0, 1).flatten(1)
    return view.flatten(1)


def _reduced(granularity: str) -> tuple[int, ...]:
    """The dimensions of `_blocks` that share a scale."""
    if granularity in ("tensor", "channel"):
        return (0, 1) if granularity == "tensor" else (1,)
    return (1, 3) if "x" in granularity else (2,)


def _part(amax: Tensor, granularity: str, rows: slice) -> Tensor:
    if granularity == "tensor":
        return amax
    per = int(granularity.split("x")[0]) if "x" in granularity else 1
    return amax[rows.start // per : -(-rows.stop // per)]


def _scale(name: str, amax: Tensor, second: float | None) -> Tensor:
    """The scale: the divisor of elements and the multiplier of codes."""
    if name == "nvfp4":
        return block_scale(amax, second or 1.0) * (second or 1.0)
    if name.startswith("mx"):
        return power_scale(amax, E4M3_LARGEST if name == "mxfp8" else E2M1_LARGEST)
    return plain_scale(amax, _INTEGERS[name][2] if name in _INTEGERS else E4M3_LARGEST)


def _rounded(name: str, x: Tensor, quotient: str) -> Tensor:
    """The values of the codes of quotients, before scaling; overwrites `x`."""
    if name in _INTEGERS:
        return to_integers(x, *_INTEGERS[name][:2])
    if name in ("nvfp4", "mxfp4"):
        return to_e2m1(x, half_down=name == "mxfp4")
    if quotient != "float32":
        x = x.to(getattr(torch, quotient)).float()
    return to_e4m3(x)


def _meaning(name: str, codes: Tensor) -> Tensor:
    if name in _INTEGERS:
        return codes.float()
    if name in ("nvfp4", "mxfp4"):
        return e2m1_values(codes)
    return codes.view(torch.float8_e4m3fn).float()


def needs_scale(qparams: WeightQParams) -> bool:
    """Whether inputs are rounded with a calibrated scale."""
    kind = ENGINE_INPUTS.get(qparams.format.algo, "")
    return kind.endswith(":tensor") or kind.startswith("nvfp4")


def rescaled_weight(weight_OI: Tensor, scale: float) -> Tensor:
    """An FP8 weight rounded again with another scale for the whole tensor.

    Engines that run fused modules as one layer give all of them the largest of their scales (vLLM's
    `requantize_with_max_scale`).
    """
    out = weight_OI.float() / scale
    return to_e4m3(out).mul_(scale)


def rounded_input(
    x_TI: Tensor,
    kind: str,
    *,
    scale: Tensor | float = 0.0,
    smoothing_scale: Tensor | None = None,
    largest: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Round rows as `kind` of `formats.ENGINE_INPUTS` requires; `int8:token` and `int4:token` are
    what compressed-tensors has besides.

    `scale` (if the kind has a calibrated one) and `smoothing_scale` may differ between rows: `[T,
    1]` and `[T, in]`.
    """
    together = largest is not None and kind.endswith(":token")
    if x_TI.device.type != "cpu" or together or x_TI.numel() <= 2 * CHUNK_INPUT:
        return _rounded_rows(x_TI, kind, scale, smoothing_scale, largest)
    # In parts that stay in the processor's cache.
    flat = x_TI.reshape(-1, x_TI.shape[-1])
    step = max(1, CHUNK_INPUT // flat.shape[1])
    out = torch.empty_like(flat)
    for begin in range(0, len(flat), step):
        rows = slice(begin, begin + step)
        divisor = scale[rows] if isinstance(scale, Tensor) else scale
        factors = (
            smoothing_scale[rows]
            if smoothing_scale is not None and smoothing_scale.ndim > 1
            else smoothing_scale
        )
        out[rows] = _rounded_rows(flat[rows], kind, divisor, factors, None)
    return out.view(x_TI.shape)


def _rounded_rows(
    x_TI: Tensor,
    kind: str,
    scale: Tensor | float,
    smoothing_scale: Tensor | None,
    largest: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    x = x_TI.float()
    x = x / smoothing_scale if smoothing_scale is not None else x
    name, _, granularity = kind.partition(":")
    if granularity == "tensor":
        # Engines multiply by the reciprocal.
        inverse = 1 / scale if isinstance(scale, Tensor) else float(np.float32(1) / scale)
        x = x * inverse
        x = to_integers(x, -128, 127) if name == "int8" else round_e4m3_(x)
        x.mul_(scale)
    elif granularity == "token":
        top = x.abs().amax(-1, keepdim=True)
        low, high, most = _INTEGERS.get(name, (0, 0, E4M3_LARGEST))
        row_scale = plain_scale(largest(top) if largest is not None else top, most)
        x = x / row_scale
        x = (to_integers(x, low, high) if high else round_e4m3_(x)).mul_(row_scale)
    else:
        x = _rounded_groups(x, name, int(granularity), scale)
    if smoothing_scale is not None:
        x.mul_(smoothing_scale)
    return x.to(x_TI.dtype)


def _rounded_groups(x_TI: Tensor, name: str, per: int, second: Tensor | float) -> Tensor:
    """Rows in groups of columns, each with its own scale; the last group is padded with zeros."""
    width = x_TI.shape[-1]
    over = -width % per
    x = torch.nn.functional.pad(x_TI, (0, over)) if over else x_TI.contiguous()
    group_amaxes = group_amax(x, per)
    if name == "nvfp4":
        second = second.unsqueeze(-1) if isinstance(second, Tensor) else second
        scale = block_scale(group_amaxes, second) * second
    elif name == "fp8":
        scale = plain_scale(group_amaxes, E4M3_LARGEST)
    else:
        scale = power_scale(group_amaxes, E4M3_LARGEST if name == "mxfp8" else E2M1_LARGEST)
    x = x.view(*x.shape[:-1], x.shape[-1] // per, per) / scale
    x = (round_e2m1_(x) if name.endswith("fp4") else round_e4m3_(x)).mul_(scale)
    return x.flatten(-2)[..., :width]


def cache_kind(cache: KVCacheQParams) -> str:
    """How keys and values are cached: FP8 with one scale each, or NVFP4 in groups of 16 along a
    head, as `rounded_input` has it."""
    return "fp8:tensor" if cache.format.kv_algo == "FP8" else f"nvfp4:{_CACHE_BLOCK}"


def cache_scale(cache: KVCacheQParams, amax: float) -> float:
    """The scale of keys or values of a cache, as it is stored.

    Raises:
        CalibrationError: their amax is unknown.
    """
    if not amax > 0:
        raise CalibrationError(
            f"the amax of the KV cache {cache.module} is unknown", hint="calibrate with data"
        )
    if cache.format.kv_algo == "FP8":
        return float(np.float32(amax) / np.float32(E4M3_LARGEST))
    return float(second_scale("NVFP4", amax))
