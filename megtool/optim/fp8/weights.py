"""Weights that exist as FP8 bytes alone, in the buffers of the optimizer.

The parameter of such a weight keeps its shape and dtype, for autograd and for whoever counts, but
has no memory: all of its elements are one NaN. `weight_values` gives its values, rounded to its
dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megtool.kernels.fp8.cast import (
    DTYPES,
    LARGEST,
    Kind,
    Quantized,
    block_amax,
    dequantize,
    scale_from_amax,
    spread_scale,
)

KIND: Kind = "e4m3"
_MARK = "gathered_as_fp8"
_FP8 = "values_in_fp8"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Weight:
    """A weight in FP8, and the largest magnitudes that its scales come from.

    A matrix has one scale, or one for each block; a stack of experts' matrices has those of each
    (`amax` is `[E]` without blocks). All tensors stay where they are while their contents change.
    """

    values: Quantized
    amax: Tensor
    placeholder: Tensor


def mark_for_gather(weight: nn.Parameter, block: tuple[int, int] = (0, 0)) -> None:
    """Mark a weight that is used in FP8, with one scale or one for each `block` (as powers of two),
    so that it can be FP8 alone."""
    setattr(weight, _MARK, block)


def marked_block(weight: Tensor) -> tuple[int, int] | None:
    """The blocks of a marked weight, (0, 0) for one scale; None if it is not marked."""
    block: tuple[int, int] | None = getattr(weight, _MARK, None)
    return block


def find_fp8_weight(weight: Tensor) -> Fp8Weight | None:
    """The FP8 bytes of a weight that has no other values; None if it has."""
    fp8_weight: Fp8Weight | None = getattr(weight, _FP8, None)
    if fp8_weight is None or fp8_weight.placeholder.data_ptr() != weight.data_ptr():
        return None
    return fp8_weight


def weight_values(weight: Tensor) -> Tensor:
    """The values of any parameter, in its dtype: its own, or those of its FP8 bytes."""
    fp8_weight = find_fp8_weight(weight)
    return weight.detach() if fp8_weight is None else dequantize(fp8_weight.values, weight.dtype)


def make_fp8_weight(weight: Tensor, data: Tensor) -> Fp8Weight:
    """FP8 bytes (uint8, of the weight's size) as those of a weight, with scales of their own."""
    block, shape = marked_block(weight) or (0, 0), weight.shape
    scales = scales_shape(shape, block)
    plain = scales[:1] if len(shape) == 3 else ()
    one_scale = (*plain, 1, 1) if plain else ()
    return Fp8Weight(
        values=Quantized(
            data=data.view(DTYPES[KIND]).view(shape),
            scale_inv=torch.ones(
                one_scale if block == (0, 0) else _squeezed(scales, shape), device=data.device
            ),
            block=block,
        ),
        amax=torch.zeros(
            plain if block == (0, 0) else _squeezed(scales, shape), device=data.device
        ),
        placeholder=torch.full((), torch.nan, dtype=weight.dtype, device=data.device),
    )


def hold(weight: nn.Parameter, fp8_weight: Fp8Weight) -> None:
    """Let a weight have no values but its FP8 bytes."""
    if find_fp8_weight(weight) is not fp8_weight:
        setattr(weight, _FP8, fp8_weight)
        weight.data = fp8_weight.placeholder.expand(weight.shape)


def release(weight: nn.Parameter) -> None:
    """Give a weight its values again, in its own dtype."""
    if find_fp8_weight(weight) is not None:
        weight.data = weight_values(weight)
    if hasattr(weight, _FP8):
        delattr(weight, _FP8)


# ---- scales of parts of a weight, of which the ranks of a group have the elements


def scales_shape(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int, int]:
    """Scales of a weight as `[experts, blocks of rows, blocks of columns]`."""
    experts = shape[0] if len(shape) == 3 else 1
    if block == (0, 0):
        return experts, 1, 1
    return experts, -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def _squeezed(scales: tuple[int, int, int], shape: torch.Size) -> tuple[int, ...]:
    return scales if len(shape) == 3 else scales[1:]


def scale_of_amax(amax: Tensor, block: tuple[int, int]) -> Tensor:
    """The scales that weights are cast with."""
    return scale_from_amax(amax, KIND, power_of_two=block != (0, 0))


def part_amaxes(values: Tensor, first: int, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """The amaxes of elements `first` and on of a flattened weight: fp32, of `scales_shape`; 0 for
    blocks without any of them."""
    out = torch.zeros(scales_shape(shape, block), device=values.device)
    for part in _parts(values, first, shape, block):
        if block == (0, 0):
            out[part.expert] = torch.maximum(out[part.expert], part.slab.abs().amax())
        else:
            amaxes = block_amax(part.slab, block)
            rows = out[part.expert, part.block_row : part.block_row + amaxes.shape[0]]
            torch.maximum(rows, amaxes, out=rows)
    return out


def cast_part(
    values: Tensor, first: int, shape: torch.Size, block: tuple[int, int], scale: Tensor
) -> Tensor:
    """The same elements in FP8 as bytes (uint8), by scales of `scales_shape`."""
    scale, codes = scale.to(values.device), []
    for part in _parts(values, first, shape, block):
        if block == (0, 0):
            scaled = part.slab.float() * scale[part.expert, 0, 0]
        else:
            rows = scale[part.expert, part.block_row :]
            scaled = part.slab.float() * spread_scale(rows, block, part.slab.shape)
        scaled = scaled.clamp(-LARGEST[KIND], LARGEST[KIND]).to(DTYPES[KIND]).view(torch.uint8)
        codes.append(scaled.view(-1)[part.begin : part.end])
    return codes[0] if len(codes) == 1 else torch.cat(codes)


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements of one matrix: `begin` to `end` of a slab, whose other elements are zeros."""

    expert: int
    slab: Tensor
    block_row: int
    begin: int
    end: int


def _parts(
    values: Tensor, first: int, shape: torch.Size, block: tuple[int, int]
) -> Iterator[_Part]:
    """Divide elements by matrices; with blocks, into whole rows of blocks."""
    size, columns = shape[-2] * shape[-1], shape[-1]
    last = first + values.numel()
    for expert in range(first // size, -(-last // size)):
        low, high = max(first, expert * size), min(last, (expert + 1) * size)
        part = values[low - first : high - first]
        low, high = low - expert * size, high - expert * size
        if block == (0, 0):
            yield _Part(expert, part, 0, 0, part.numel())
            continue
        row = low // columns // block[0] * block[0]
        rows = min(-(-high // columns) - row, shape[-2] - row)
        slab = part.new_zeros(rows, columns)
        begin = low - row * columns
        slab.view(-1)[begin : begin + part.numel()] = part
        yield _Part(expert, slab, row // block[0], begin, begin + part.numel())
