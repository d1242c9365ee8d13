"""Casts to FP8: torch's own rounding, saturation, scales and blocks, by torch and by Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megtool.errors import UsageError
from megtool.kernels.dispatch import use
from megtool.kernels.fp8.cast import (
    DTYPES,
    LARGEST,
    Kind,
    cast_both,
    cast_fp8,
    current_scale,
    dequantize,
    quantize_blocks,
    quantize_both,
    quantize_squares,
    quantize_tensor,
    record_amax,
    scale_from_amax,
)

ONE = torch.tensor(1.0)
KINDS: tuple[Kind, ...] = ("e4m3", "e5m2")


def hard_numbers(kind: Kind) -> torch.Tensor:
    """Every value of the format, every midpoint, their neighbors, and what is no such number."""
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[kind]).float()
    values = values[values.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    far = torch.tensor(1e9)
    beside = [torch.nextafter(middles, far), torch.nextafter(middles, -far)]
    odd = torch.tensor([0.0, -0.0, 1e-30, 465, 1e9, torch.inf, -torch.inf, torch.nan])
    return torch.cat([values, middles, *beside, odd])


@pytest.mark.parametrize("by", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cast_is_torchs_and_saturates(by: Any, kind: Kind, dtype: torch.dtype) -> None:
    x = hard_numbers(kind).to(dtype)
    with use(by):
        data, amax = cast_fp8(x, ONE, kind)
    top = LARGEST[kind]
    expected = x.float().clamp(-top, top).to(DTYPES[kind])
    assert data.dtype == DTYPES[kind]
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert amax.isnan()
    with use(by):
        data, amax = cast_fp8(x[:-3].view(1, -1), torch.tensor(0.5), kind)
    assert data.shape == (1, x.numel() - 3)
    assert torch.equal(amax, x[:-3].float().abs().max())
    exact = (x[:-3].float() * 0.5).clamp(-top, top).to(DTYPES[kind])
    assert torch.equal(data.view(torch.uint8)[0], exact.view(torch.uint8))


@pytest.mark.parametrize("by", ["torch", "triton"])
def test_nothing_has_no_amax(by: Any) -> None:
    with use(by):
        data, amax = cast_fp8(torch.zeros(0, 4), ONE, "e4m3")
    assert data.shape == (0, 4)
    assert amax == 0


@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from(KINDS), st.booleans())
def test_a_scale_takes_amax_to_the_top(largest: float, kind: Kind, power: bool) -> None:
    amax = torch.tensor(largest)
    scale = scale_from_amax(amax, kind, power_of_two=power)
    reached = float(amax * scale) / LARGEST[kind]
    assert reached <= 1.000001
    assert reached > (0.4999 if power else 0.99999)
    if power:
        assert torch.frexp(scale).mantissa == 0.5
    half = scale_from_amax(amax, kind, power_of_two=power, margin=1)
    assert float(half / scale) == pytest.approx(0.5)


@pytest.mark.parametrize("amax", [0.0, torch.inf, torch.nan])
def test_no_scale_is_made_of_no_number(amax: float) -> None:
    assert scale_from_amax(torch.tensor(amax), "e4m3") == 1


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(1, 4), (4, 4), (3, 2)]))
def test_blocks_are_scaled_on_their_own(m: int, n: int, block: tuple[int, int]) -> None:
    x = torch.randn(m, n) * torch.logspace(-6, 6, m).unsqueeze(1)
    q = quantize_blocks(x, "e4m3", block=block)
    rows, columns = block
    assert q.scale_inv.shape == (-(-m // rows), -(-n // columns))
    for i in range(0, m, rows):
        for j in range(0, n, columns):
            part = (slice(i, i + rows), slice(j, j + columns))
            whole = quantize_tensor(x[part], "e4m3")
            assert torch.equal(q.data[part].view(torch.uint8), whole.data.view(torch.uint8))
            assert q.scale_inv[i // rows, j // columns] == whole.scale_inv
    # Half a step of three bits of mantissa, or of the smallest number.
    room = x.abs() / 16 + q.scale_inv.max() * 2**-10
    assert ((dequantize(q) - x).abs() <= room * 1.0001).all()


def test_powers_of_two_lose_nothing_beside_the_rounding() -> None:
    x = torch.randn(130, 260).to(torch.float8_e4m3fn).float()
    q = quantize_blocks(x, "e4m3", power_of_two=True)
    assert q.scale_inv.shape == (2, 3)
    assert torch.equal(dequantize(q), x)


def test_unknown_kinds_and_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="e3m4"):
        cast_fp8(torch.zeros(1), ONE, "e3m4")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"\(0, 1\)"):
        quantize_blocks(torch.zeros(2, 2), "e4m3", block=(0, 1))


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same bits; NaN equals NaN."""
    if ours.element_size() == 1:
        ours, theirs = ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def wild(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of very different magnitudes."""
    torch.manual_seed(3)
    return (torch.randn(shape) * torch.rand(*shape[:-1], 1).mul(20).exp()).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(70, 130), (2, 33, 64), (1, 1), (128, 16)], ids=str)
def test_one_pass_gives_the_codes_of_the_reference_both_ways(
    shape: tuple[int, ...], kind: Kind
) -> None:
    x, matrices = wild(*shape), shape[0] if len(shape) == 3 else 1
    scale = torch.rand(matrices) * 3 if len(shape) == 3 else torch.tensor(0.37)
    expected = (x.float() * scale.view(-1, 1, 1)).view(shape)
    expected = expected.clamp(-LARGEST[kind], LARGEST[kind]).to(DTYPES[kind])
    with use("triton"):
        rows, columns, parts = cast_both(x, scale, kind)
        found = current_scale(x, kind, margin=1)
    same(rows, expected)
    same(columns, expected.transpose(-1, -2))
    assert columns.is_contiguous()
    amaxes = x.float().view(matrices, -1).abs().amax(1)
    same(parts.amax(1), amaxes)
    want = scale_from_amax(amaxes, kind, margin=1)
    for ours, theirs in zip(found, (amaxes, want, want.reciprocal()), strict=True):
        same(ours.view(-1), theirs)


def test_rows_have_scales_of_their_own() -> None:
    x, scale = wild(70, 40), torch.arange(1, 71).float().unsqueeze(1)
    expected = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    for by in ("torch", "triton"):
        with use(by):  # type: ignore[arg-type]
            rows, columns, _ = cast_both(x, scale, "e4m3")
        same(rows, expected)
        same(columns, expected.t())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(70, 130), (2, 33, 64), (1, 1), (129, 256)], ids=str)
def test_groups_and_squares_have_the_codes_and_scales_of_blocks(
    shape: tuple[int, ...], kind: Kind
) -> None:
    x = wild(*shape)
    x.view(-1)[0] = torch.nan  # whose block is scaled by 1
    with use("triton"):
        pairs = [quantize_both(x, kind, group=group) for group in (128, 32)]
        square = quantize_squares(x, kind, block=128)
    turned = x.transpose(-1, -2)
    for group, (rows, columns) in zip((128, 32), pairs, strict=True):
        assert rows.block == columns.block == (1, group)
        for ours, value in ((rows, x), (columns, turned)):
            want = quantize_blocks(value, kind, block=(1, group), power_of_two=True)
            same(ours.data, want.data)
            same(ours.scale_inv, want.scale_inv)
    want = quantize_blocks(x, kind, block=(128, 128), power_of_two=True)
    for ours, data, scale_inv in (
        (square[0], want.data, want.scale_inv),
        (square[1], want.data.transpose(-1, -2), want.scale_inv.transpose(-1, -2)),
    ):
        assert ours.block == (128, 128)
        same(ours.data, data)
        same(ours.scale_inv, scale_inv)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0])
def test_one_pass_keeps_what_is_no_number(bad: float) -> None:
    x = torch.zeros(70, 70)
    x[65, 66] = bad
    for by in ("torch", "triton"):
        with use(by):  # type: ignore[arg-type]
            amax, scale, scale_inv = current_scale(x, "e4m3")
            _, _, parts = cast_both(x, ONE, "e4m3")
        same(amax, torch.tensor(bad))
        same(parts.amax(), torch.tensor(bad))
        assert scale == scale_inv == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_codes_of_the_cpu(kind: Kind) -> None:
    x = wild(1000, 700)
    for group in (128, 32):
        here, there = (
            quantize_both(x, kind, group=group),
            quantize_both(x.cuda(), kind, group=group),
        )
        for one, two in zip(here, there, strict=True):
            same(two.data.cpu(), one.data)
            same(two.scale_inv.cpu(), one.scale_inv)
    scale = current_scale(x, kind)[1]
    for one, two in zip(
        cast_both(x, scale, kind), cast_both(x.cuda(), scale.cuda(), kind), strict=True
    ):
        if one.dtype == DTYPES[kind]:
            same(two.cpu(), one)


@pytest.mark.parametrize("by", ["torch", "triton"])
def test_an_amax_raises_its_history_and_a_scale_is_inverted(by: Any) -> None:
    parts, scale = torch.rand(1, 3000), torch.tensor(3.0)
    for before, after in ((0.5, float(parts.max())), (7.0, 7.0), (torch.nan, torch.nan)):
        history = torch.full((2, 3), before)[:, 1]
        with use(by):
            assert record_amax(parts, scale, history[1]) == scale.reciprocal()
            assert record_amax(parts, scale, None) == scale.reciprocal()
        same(history, torch.tensor([before, after]))
    parts[0, 2999] = torch.nan
    history = torch.ones(())
    with use(by):
        record_amax(parts, scale, history)
    assert history.isnan()
