"""FP8 products: the calls that CUDA gets, by what PyTorch says of their operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.kernels.fp8 import products as fp8_products
from megtool.kernels.fp8.cast import Quantized, dequantize, quantize_blocks, quantize_tensor
from megtool.kernels.fp8.products import (
    multiply,
    multiply_groups,
    multiply_rows,
    tiled_exponents,
)

GROUPED = hasattr(torch, "_scaled_grouped_mm")


class Calls:
    """Reference implementations of PyTorch's products on CUDA, which check what they are given."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def scaled_mm(
        self,
        a: Tensor,
        b: Tensor,
        *,
        scale_a: Tensor,
        scale_recipe_a: Any,
        scale_b: Tensor,
        scale_recipe_b: Any,
        swizzle_a: Any,
        swizzle_b: Any,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """`F.scaled_mm`, as PyTorch's test_scaled_matmul_cuda.py calls it."""
        self.names.append(f"{scale_recipe_a.name} {scale_recipe_b.name}")
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert all(n % 16 == 0 for n in (*a.shape, *b.shape))
        wide_a = self._spread(scale_a, scale_recipe_a, a.shape, swizzle_a)
        of_b = scale_b.t() if "128x128" in scale_recipe_b.name else scale_b
        wide_b = self._spread(of_b, scale_recipe_b, b.t().shape, swizzle_b)
        out = (a.float() * wide_a) @ (b.t().float() * wide_b).t()
        return out.to(output_dtype)

    def _spread(self, scale: Tensor, kind: Any, shape: torch.Size, swizzle: Any) -> Tensor:
        rows, columns = shape
        if kind is F.ScalingType.BlockWise1x32:
            assert swizzle is F.SwizzleType.SWIZZLE_32_4_4
            assert scale.dtype == torch.float8_e8m0fnu
            groups = -(-columns // 32)
            tiles = scale.view(torch.uint8).view(-1, -(-groups // 4), 32, 4, 4)
            plain = torch.empty(tiles.shape[0] * 128, tiles.shape[1] * 4, dtype=torch.uint8)
            for r in range(plain.shape[0]):
                for c in range(plain.shape[1]):
                    at = tiles[r // 128, c // 4, r % 32, r % 128 // 32, c % 4]
                    plain[r, c] = at
            values = plain.view(torch.float8_e8m0fnu).float()[:rows, :groups]
            return values.repeat_interleave(32, 1)[:, :columns]
        if kind is F.ScalingType.BlockWise1x128:
            assert scale.shape == (rows, -(-columns // 128))
            assert scale.stride(0) == 1
            return scale.repeat_interleave(128, 1)[:, :columns]
        blocks = -(-rows // 128), -(-columns // 128)
        assert scale.shape == (blocks[0], blocks[1] + -blocks[1] % 4)
        assert scale.is_contiguous()
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
        return wide[:, :columns]

    def grouped(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        *,
        offs: Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool = False,
    ) -> Tensor:
        """`torch._scaled_grouped_mm`: a scale for each row, those of sums over rows by group."""
        self.names.append(f"grouped {a.dim()}d {b.dim()}d")
        checked = torch.ops.aten._scaled_grouped_mm(  # its shapes and strides
            *(t.to("meta") for t in (a, b, scale_a, scale_b)),
            offs=offs.to("meta"),
            out_dtype=out_dtype,
        )
        starts = [0, *offs.tolist()[:-1]]
        parts = []
        for e, (i, j) in enumerate(zip(starts, offs.tolist(), strict=True)):
            if b.dim() == 3:
                wide = (b[e].float().t() * scale_b[e].unsqueeze(1)).t()
                parts.append((a[i:j].float() * scale_a[i:j].unsqueeze(1)) @ wide)
            else:
                assert i % 16 == j % 16 == 0
                m, n = a.shape[0], b.shape[1]
                left = a[:, i:j].float() * scale_a[e * m : (e + 1) * m].unsqueeze(1)
                parts.append(left @ (b[i:j].float() * scale_b[e * n : (e + 1) * n]))
        out = torch.cat(parts) if b.dim() == 3 else torch.stack(parts)
        if b.dim() == 3:
            out = torch.cat([out, out.new_zeros(a.shape[0] - len(out), out.shape[1])])
        assert out.shape == checked.shape
        return out.to(out_dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Products as on a GPU that has all of them."""
    made = Calls()
    monkeypatch.setattr(fp8_products, "dense_arithmetic", lambda a, b: "fp8")
    monkeypatch.setattr(fp8_products, "grouped_arithmetic", lambda a, b: "fp8")
    monkeypatch.setattr(F, "scaled_mm", made.scaled_mm)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", made.grouped)
    return made


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this PyTorch has no F.scaled_mm")
@pytest.mark.parametrize(
    ("blocks", "name"),
    [
        (((1, 128), (128, 128)), "BlockWise1x128 BlockWise128x128"),
        (((1, 128), (1, 128)), "BlockWise1x128 BlockWise1x128"),
        (((1, 32), (1, 32)), "BlockWise1x32 BlockWise1x32"),
    ],
)
@pytest.mark.parametrize("shape", [(7, 260, 129), (256, 128, 384), (130, 640, 40)])
def test_blocks(
    calls: Calls, blocks: tuple[tuple[int, int], ...], name: str, shape: tuple[int, ...]
) -> None:
    m, k, n = shape
    a, b = torch.randn(m, k) * torch.rand(m, 1).exp(), torch.randn(n, k) * 0.02
    qa, qb = (
        quantize_blocks(x, "e4m3", block=block, power_of_two=True)
        for x, block in zip((a, b), blocks, strict=True)
    )
    got = multiply(qa, qb, torch.float32)
    assert calls.names == [name]
    torch.testing.assert_close(got, dequantize(qa) @ dequantize(qb).t(), rtol=1e-4, atol=1e-4)


def test_one_scale_each_is_torchs_own_product() -> None:
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    qa, qb = quantize_tensor(a, "e4m3"), quantize_tensor(b, "e4m3")
    want = torch._scaled_mm(
        qa.data, qb.data.t(), scale_a=qa.scale_inv, scale_b=qb.scale_inv, out_dtype=torch.float32
    )
    torch.testing.assert_close(multiply(qa, qb, torch.float32), want, rtol=1e-5, atol=1e-5)


def test_tiles_of_exponents() -> None:
    """Two rows by hand: row 33 is the second of a tile's four rows of 32, at byte 1 * 16 + 4."""
    scale_inv = torch.ones(40, 3)
    scale_inv[33, 2] = 2.0**5
    flat = tiled_exponents(scale_inv, 48).view(torch.uint8)
    assert flat.shape == (512,)
    assert int(flat[1 * 16 + 1 * 4 + 2]) == 127 + 5
    assert int((flat != 127).sum()) == 1


def rowwise(x_RI: Tensor, ends: list[int]) -> Quantized:
    """Rows with the scale of their group."""
    scale = torch.ones(len(x_RI), 1)
    for i, j in zip([0, *ends[:-1]], ends, strict=True):
        if j > i:
            scale[i:j] = 448 / x_RI[i:j].abs().max()
    data = (x_RI * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Quantized(data=data, scale_inv=1 / scale)


@pytest.mark.skipif(not GROUPED, reason="this PyTorch has no torch._scaled_grouped_mm")
@pytest.mark.parametrize("arithmetic", ["fp8", "bfloat16"])
def test_groups(calls: Calls, arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_products, "grouped_arithmetic", lambda a, b: arithmetic)
    ends = [16, 64, 80]
    x, g = torch.randn(96, 32), torch.randn(96, 48)
    x[80:], g[80:] = 0, 0  # filler
    w = torch.randn(3, 48, 32) * 0.02
    scale = (448 / w.abs().amax((1, 2))).view(-1, 1, 1)
    qw = Quantized(data=(w * scale).to(torch.float8_e4m3fn), scale_inv=1 / scale)
    qx, qg = rowwise(x, ends), rowwise(g, ends)
    ends_E = torch.tensor(ends, dtype=torch.int32)
    got = multiply_groups(qx, qw, ends_E, torch.float32, fast=True)
    turned = [Quantized(data=q.data.t(), scale_inv=q.scale_inv.t()) for q in (qg, qx)]
    got_w = multiply_rows(turned[0], turned[1], ends_E, torch.float32)
    assert calls.names == (["grouped 2d 3d", "grouped 2d 2d"] if arithmetic == "fp8" else [])
    for e, (i, j) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        close(got[i:j], dequantize(qx)[i:j] @ dequantize(qw)[e].t())
        close(got_w[e], dequantize(qg)[i:j].t() @ dequantize(qx)[i:j])
