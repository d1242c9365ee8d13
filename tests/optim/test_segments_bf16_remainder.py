"""Remainders: a bf16 parameter and 16 bits give back every fp32 value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megtool.optim.segments import join_float32, split_float32

EDGES = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38]
INFINITE = [float("inf"), -float("inf")]


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    high = torch.empty_like(values, dtype=torch.bfloat16)
    low = torch.empty_like(values, dtype=torch.int16)
    split_float32(values, high=high, low=low)
    return high, low


def any_bits(numel: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=g).to(torch.int32)
    return bits.view(torch.float32)


def test_a_million_random_bit_patterns_come_back() -> None:
    values = any_bits(1_000_000)
    assert values.isnan().any()
    high, low = halves(values)
    back = join_float32(high, low)
    number = ~values.isnan()
    assert torch.equal(back[number].view(torch.int32), values[number].view(torch.int32))
    assert back[~number].isnan().all()
    assert high[~number].isnan().all()
    assert torch.equal(back.signbit(), values.signbit())


def test_zeros_denormals_infinities_and_the_largest_come_back() -> None:
    values = torch.tensor([*EDGES, *INFINITE])
    high, low = halves(values)
    assert torch.equal(join_float32(high, low).view(torch.int32), values.view(torch.int32))
    assert high[len(EDGES) :].tolist() == INFINITE


def test_the_parameter_is_the_nearest_bf16_value_ties_away_from_zero() -> None:
    values = any_bits(1_000_000, seed=1)
    values = values[~values.isnan()]
    high, low = halves(values)
    tie = low == -(2**15)
    assert tie.any()
    assert torch.equal(high[~tie], values[~tie].bfloat16())
    assert (high[tie].float().abs() >= values[tie].abs()).all()


@pytest.mark.parametrize("stride", [1, 3])
def test_parts_of_larger_tensors_are_written_in_place(stride: int) -> None:
    values = torch.randn(30)[::stride]
    high = torch.zeros(40, dtype=torch.bfloat16)
    low = torch.zeros(40, dtype=torch.int16)
    n = len(values)
    split_float32(values, high=high[5 : 5 + n], low=low[5 : 5 + n])
    assert torch.equal(join_float32(high[5 : 5 + n], low[5 : 5 + n]), values)
    assert not high[:5].any()
    assert not low[5 + n :].any()
