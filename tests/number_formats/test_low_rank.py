"""The product of SVDQuant's matrices: exact for bfloat16, and alike in every box and library."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megtool.number_formats.decode_torch import low_rank_product as in_torch
from megtool.number_formats.low_rank import low_rank_product

FACTORS = {
    "usual": (70, 32, 90),
    "beyond one block of exact sums": (20, 600, 33),
    "rank one": (3, 1, 5),
}


def factors(out: int, rank: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    up = torch.randn(out, rank, generator=generator).bfloat16().float()
    down = torch.randn(rank, inner, generator=generator).bfloat16().float()
    up[0] *= 1e-25
    up[1] = 0
    down[:, 2] *= 1e20
    return up, down


@pytest.mark.parametrize("case", FACTORS)
def test_the_product(case: str) -> None:
    up, down = factors(*FACTORS[case])
    got = low_rank_product(up.numpy(), down.numpy())
    want = (up.double() @ down.double()).numpy()
    scale = up.abs().double() @ down.abs().double()  # bounds what sums of rounded numbers lose
    assert (np.abs(got - want) <= 2.0**-21 * scale.numpy()).all()
    np.testing.assert_array_equal(in_torch(up, down).numpy(), got)
    rows, columns = slice(1, 3), slice(2, 5)
    part = low_rank_product(up.numpy()[rows], down.numpy()[:, columns])
    np.testing.assert_array_equal(part, got[rows, columns])


def test_what_is_no_number_stays_none() -> None:
    up, down = factors(4, 3, 5)
    up[2, 1] = float("nan")
    got = low_rank_product(up.numpy(), down.numpy())
    assert np.isnan(got[2]).all()
    assert np.isfinite(got[[0, 1, 3]]).all()
