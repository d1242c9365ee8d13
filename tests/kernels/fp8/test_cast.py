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
    cast_fp8,
    dequantize,
    quantize_blocks,
    quantize_tensor,
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
