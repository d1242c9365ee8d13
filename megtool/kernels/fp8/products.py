"""Products of FP8 operands: of two matrices, and of stacks of experts' matrices.

On CUDA they are FP8 products where the device and PyTorch have one for the scales of the operands:
one scale each (`torch._scaled_mm`), 1 x 128 and 128 x 128 blocks on Hopper, 1 x 32 blocks on
Blackwell (`F.scaled_mm`), and one scale for each row of experts on Hopper
(`torch._scaled_grouped_mm`). All others are multiplied as bfloat16, which represents FP8 times a
power of two exactly (other scales multiply the product): the numbers of the recipe, not its speed.
On a CPU all operands are multiplied as float32.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.kernels.fp8.cast import Quantized, dequantize
from megtool.kernels.wgrad_accumulation import GradientSum

_MULTIPLE = 16  # what FP8 products on CUDA need rows, columns and sums to be
_BLOCK, _MX_BLOCK = 128, 32
_SCALE_ROWS, _SCALE_COLUMNS = 128, 4  # a tile of 1 x 32 scales

Arithmetic = Literal["float32", "bfloat16", "fp8"]


def dense_arithmetic(a_MK: Quantized, b_NK: Quantized) -> Arithmetic:
    """How `multiply` computes on the device of the operands."""
    device = a_MK.data.device
    if device.type == "cpu":
        return "float32"
    if a_MK.block == b_NK.block == (0, 0) and a_MK.scale_inv.dim() == b_NK.scale_inv.dim() == 0:
        return "fp8"
    return "fp8" if _has_blocks(device, a_MK.block, b_NK.block) else "bfloat16"


def _has_blocks(device: torch.device, a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether the device multiplies FP8 with scales for blocks (cuBLAS 12.9)."""
    if not hasattr(F, "scaled_mm"):
        return False
    major = torch.cuda.get_device_capability(device)[0]
    cuda = tuple(int(n) for n in (torch.version.cuda or "0.0").split(".")[:2])
    wide = ((1, _BLOCK), (_BLOCK, _BLOCK))
    if a in wide and b in wide and (a, b) != (wide[1], wide[1]):
        return major == 9 and cuda >= (12, 9)
    return a == b == (1, _MX_BLOCK) and major >= 10


def multiply(a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """`a b^T`, `[M, N]`, of FP8 operands, summed in fp32 and rounded to `dtype`.

    `fast` lets CUDA sum with fewer bits, as Transformer Engine does in the forward pass.
    """
    arithmetic = dense_arithmetic(a_MK, b_NK)
    if arithmetic != "fp8":
        wide = (
            torch.float32 if arithmetic == "float32" or dtype == torch.float32 else torch.bfloat16
        )
        return (dequantize(a_MK, wide) @ dequantize(b_NK, wide).t()).to(dtype)
    m, n = a_MK.data.shape[0], b_NK.data.shape[0]
    a, b = _padded(a_MK.data), _padded(b_NK.data)
    if a_MK.block == (0, 0):
        product = torch._scaled_mm(
            a,
            b.t(),
            scale_a=a_MK.scale_inv,
            scale_b=b_NK.scale_inv,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
        return product[:m, :n]
    return _multiply_blocks(a_MK, b_NK, (a, b), dtype)[:m, :n]


def add_product(total: GradientSum, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> None:
    """Add `a b^T` to the sum of a weight's gradients.

    cuBLAS's FP8 products as PyTorch calls them write their output and do not add to it. The first
    one of a step with one scale each is written to the sum itself, in its dtype; others are rounded
    to `dtype`, and added by one more pass.
    """
    main_MN, overwrite = total.begin()
    sides = (*a_MK.data.shape, *b_NK.data.shape)
    is_direct = (
        overwrite
        and dense_arithmetic(a_MK, b_NK) == "fp8"
        and a_MK.block == (0, 0)
        and main_MN.is_contiguous()
        and all(n % _MULTIPLE == 0 for n in sides)
    )
    if is_direct:
        torch._scaled_mm(
            a_MK.data.contiguous(),
            b_NK.data.contiguous().t(),
            scale_a=a_MK.scale_inv,
            scale_b=b_NK.scale_inv,
            out_dtype=main_MN.dtype,
            out=main_MN,
        )
    else:
        put = main_MN.copy_ if overwrite else main_MN.add_
        put(multiply(a_MK, b_NK, dtype))
    total.end()


def _multiply_blocks(
    a_MK: Quantized, b_NK: Quantized, data: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """The product of padded data with scales for blocks along the summed dim."""
    a, b = data
    kinds: list[Any] = []
    scales: list[Tensor] = []
    swizzles: list[Any] | None = None
    for q, rows in ((a_MK, a.shape[0]), (b_NK, b.shape[0])):
        if q.block == (1, _MX_BLOCK):
            kinds.append(F.ScalingType.BlockWise1x32)
            scales.append(tiled_exponents(q.scale_inv, rows))
            swizzles = [F.SwizzleType.SWIZZLE_32_4_4] * 2
        elif q.block == (1, _BLOCK):
            kinds.append(F.ScalingType.BlockWise1x128)
            # Along the rows first, and one for every padded row.
            scales.append(_filled(q.scale_inv, rows, q.scale_inv.shape[1]).t().contiguous().t())
        else:
            kinds.append(F.ScalingType.BlockWise128x128)
            blocks = q.scale_inv.shape[1]
            scales.append(_filled(q.scale_inv, -(-rows // _BLOCK), blocks + -blocks % 4))
    if kinds[1] is F.ScalingType.BlockWise128x128:
        scales[1] = scales[1].t()
    product: Tensor = F.scaled_mm(
        a,
        b.t(),
        scale_a=scales[0],
        scale_recipe_a=kinds[0],
        scale_b=scales[1],
        scale_recipe_b=kinds[1],
        swizzle_a=swizzles[0] if swizzles else None,
        swizzle_b=swizzles[1] if swizzles else None,
        output_dtype=dtype,
    )
    return product


def tiled_exponents(scale_inv_MG: Tensor, rows: int) -> Tensor:
    """Powers of two as E8M0 in the order of Blackwell's tiles of 128 rows and 4 columns, flat.

    Row r and column c of a tile are at byte `r % 32 * 16 + r // 32 * 4 + c` of its 512. Source:
    cuBLAS 12.9's documentation, "1D block scaling factors layout".
    """
    columns = scale_inv_MG.shape[1]
    padded = _filled(scale_inv_MG, rows + -rows % _SCALE_ROWS, columns + -columns % _SCALE_COLUMNS)
    exponents = padded.to(torch.float8_e8m0fnu)
    tiles = exponents.view(torch.uint8).view(
        padded.shape[0] // _SCALE_ROWS, 4, 32, padded.shape[1] // _SCALE_COLUMNS, _SCALE_COLUMNS
    )
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(torch.float8_e8m0fnu).flatten()


def _filled(scale_inv: Tensor, rows: int, columns: int) -> Tensor:
    """Scales of more rows and columns, of ones."""
    more = (0, columns - scale_inv.shape[1], 0, rows - scale_inv.shape[0])
    if not any(more):
        return scale_inv
    return F.pad(scale_inv, more, value=1.0)


def _padded(data: Tensor) -> Tensor:
    """Pad rows and columns with zeros to multiples of 16; the result is contiguous."""
    rows, columns = data.shape
    if rows % _MULTIPLE == 0 and columns % _MULTIPLE == 0:
        return data.contiguous()
    pad = (0, -columns % _MULTIPLE, 0, -rows % _MULTIPLE)
    return F.pad(data.contiguous().view(torch.uint8), pad).view(data.dtype)


# ---- experts: rows sorted by expert, ends_E of them each; a scale for each row, or blocks


def grouped_arithmetic(a: Quantized, b: Quantized) -> Arithmetic:
    """How `multiply_groups` and `multiply_rows` compute on the device of the operands."""
    device = a.data.device
    if device.type == "cpu":
        return "float32"
    e4m3 = torch.float8_e4m3fn
    is_plain = a.data.dtype == b.data.dtype == e4m3 and hasattr(torch, "_scaled_grouped_mm")
    sides = (*a.data.shape, *b.data.shape[-2:])
    is_aligned = all(n % _MULTIPLE == 0 for n in sides)
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    has_rows = a.block == b.block == (0, 0)
    return "fp8" if is_plain and is_aligned and has_rows and is_hopper else "bfloat16"


def multiply_groups(
    a_RK: Quantized,
    b_ENK: Quantized,
    ends_E: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """`a b[e]^T` for the rows of each expert e: `[R, N]`.

    Rows of `a` end at `ends_E` (int32, on the device). `a` has a scale for each row (`[R, 1]`) and
    `b` one for each matrix (`[E, 1, 1]`), or both have blocks.
    """
    arithmetic = grouped_arithmetic(a_RK, b_ENK)
    a, b = a_RK.data, b_ENK.data
    if arithmetic == "fp8":
        product = torch._scaled_grouped_mm(
            a.contiguous(),
            b.contiguous().transpose(1, 2),
            a_RK.scale_inv.squeeze(1).contiguous(),
            b_ENK.scale_inv.expand(-1, b.shape[1], 1).squeeze(2).contiguous(),
            offs=ends_E,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
        return product.to(dtype)
    if arithmetic == "bfloat16" and a_RK.block == (0, 0):
        product = _groups(a.bfloat16(), b.bfloat16(), ends_E).float()
        rows_R = torch.arange(a.shape[0], device=a.device)
        ids_R = torch.searchsorted(ends_E, rows_R, right=True).clamp_max(b.shape[0] - 1)
        return (product * a_RK.scale_inv * b_ENK.scale_inv[ids_R, 0]).to(dtype)
    wide = torch.float32 if arithmetic == "float32" else torch.bfloat16
    return _groups(dequantize(a_RK, wide), dequantize(b_ENK, wide), ends_E).to(dtype)


def multiply_rows(a_MR: Quantized, b_NR: Quantized, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """`a b^T` summed over the rows of each expert alone: `[E, M, N]`.

    Both have a scale for each summed row (`[1, R]`), the same for all rows of an expert, or blocks.
    """
    arithmetic = grouped_arithmetic(a_MR, b_NR)
    a, b = a_MR.data, b_NR.data
    if arithmetic == "float32" or a_MR.block != (0, 0):
        wide = torch.float32 if arithmetic == "float32" else torch.bfloat16
        return _rows(dequantize(a_MR, wide), dequantize(b_NR, wide), ends_E).to(dtype)
    last_E = (ends_E.long() - 1).clamp_min(0)
    scale_a_E, scale_b_E = a_MR.scale_inv[0, last_E], b_NR.scale_inv[0, last_E]
    if arithmetic == "fp8":
        product = torch._scaled_grouped_mm(
            a.contiguous(),
            b.contiguous().t(),
            # Those of every output row, expert by expert.
            scale_a_E.repeat_interleave(a.shape[0]),
            scale_b_E.repeat_interleave(b.shape[0]),
            offs=ends_E,
            out_dtype=torch.bfloat16,
        )
        return product.to(dtype)
    product = _rows(a.bfloat16(), b.bfloat16(), ends_E).float()
    return (product * (scale_a_E * scale_b_E).view(-1, 1, 1)).to(dtype)


def _rows(a_MR: Tensor, b_NR: Tensor, ends_E: Tensor) -> Tensor:
    if a_MR.is_cuda or (_takes_groups(a_MR) and _takes_groups(b_NR)):
        return F.grouped_mm(a_MR.contiguous(), b_NR.t(), offs=ends_E)
    stops = ends_E.tolist()
    spans = zip([0, *stops[:-1]], stops, strict=True)
    return torch.stack([a_MR[:, i:j] @ b_NR[:, i:j].t() for i, j in spans])


def _groups(a_RK: Tensor, b_ENK: Tensor, ends_E: Tensor) -> Tensor:
    if a_RK.shape[0] and (a_RK.is_cuda or (_takes_groups(a_RK) and _takes_groups(b_ENK))):
        return F.grouped_mm(a_RK.contiguous(), b_ENK.transpose(1, 2), offs=ends_E)
    stops = ends_E.tolist()
    starts = [0, *stops[:-1]]
    # Rows behind the last expert's are filler, as `F.grouped_mm` has it.
    parts = [a_RK[i:j] @ b.t() for i, j, b in zip(starts, stops, b_ENK, strict=True)]
    filler = a_RK.new_zeros(a_RK.shape[0] - stops[-1], b_ENK.shape[1])
    return torch.cat([*parts, filler])


def _takes_groups(x: Tensor) -> bool:
    """Whether `F.grouped_mm` takes it on a CPU: rows of 16 bytes."""
    is_aligned = all(n * x.element_size() % 16 == 0 for n in x.shape[-2:])
    return hasattr(F, "grouped_mm") and is_aligned
