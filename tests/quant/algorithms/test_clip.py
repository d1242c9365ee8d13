"""The search for block scales: no worse than the amax, and as good as trying every scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megtool.quant.algorithms import clip
from megtool.quant.algorithms.weight_grid import Grid, make_grid
from megtool.quant.fake_quant.rounding_torch import to_e2m1
from megtool.quant.recipes.formats import RecipeFormat
from tests.support.quant import algorithm_inputs

ROOM = 448 / 256
NVFP4 = make_grid(RecipeFormat(name="f", algo="NVFP4", group_size=16))
MXFP4 = make_grid(RecipeFormat(name="f", algo="MXFP4", group_size=32))
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def block_errors(weight: Tensor, grid: Grid, amax: Tensor, second: float) -> Tensor:
    off = (grid.fake_quantize(weight, amax, second) - weight).square()
    return off.reshape(len(weight), -1, grid.columns).sum(dim=2)


def searched(weight: Tensor, grid: Grid, second: float, **options: bool) -> Tensor:
    ratios = clip.propose_ratios(grid, **options)
    return clip.search_by_weight(weight, grid, second, ratios)


def test_four_over_six_takes_the_better_of_two() -> None:
    weight = algorithm_inputs.weight(32, 128)
    second = float(weight.abs().max()) * ROOM
    amax = NVFP4.amax(weight)
    six, four = (block_errors(weight, NVFP4, amax * r, second) for r in (1.0, 1.5))
    found = searched(weight, NVFP4, second, four_over_six=True)
    assert torch.equal(block_errors(weight, NVFP4, found, second), torch.minimum(six, four))
    assert 0.1 < float((four < six).float().mean()) < 0.9


def test_the_search_is_as_good_as_every_scale_of_fp8() -> None:
    weight = algorithm_inputs.weight(16, 64)
    second = float(weight.abs().max()) * ROOM
    blocks = weight.reshape(16, 4, 16)
    errors = []
    for code in E4M3:
        scale = code * (second / (6 * 448))
        off = to_e2m1(blocks / scale) * scale - blocks
        errors.append(off.square().sum(dim=2))
    best = torch.stack(errors).amin(dim=0)
    found = block_errors(weight, NVFP4, searched(weight, NVFP4, second, scale_search=True), second)
    six = block_errors(weight, NVFP4, searched(weight, NVFP4, second, four_over_six=True), second)
    assert float(found.sum()) <= float(best.sum()) * 1.02
    assert (
        float(found.sum())
        < float(six.sum())
        < float(block_errors(weight, NVFP4, NVFP4.amax(weight), second).sum())
    )


@pytest.mark.parametrize("search", [False, True])
def test_powers_of_two(search: bool) -> None:
    weight = algorithm_inputs.weight(16, 128)
    amax = MXFP4.amax(weight)
    found = searched(weight, MXFP4, 0.0, scale_search=search)
    powers = (MXFP4.scale(found) / MXFP4.scale(amax)).unique()
    assert set(powers.tolist()) <= ({0.5, 1.0, 2.0} if search else {0.5, 1.0})
    exhaustive = torch.stack(
        [block_errors(weight, MXFP4, amax * 2.0**n, 0.0) for n in range(-4, 2 if search else 1)]
    ).amin(dim=0)
    errors = block_errors(weight, MXFP4, found, 0.0)
    torch.testing.assert_close(errors, exhaustive)
    assert float(errors.sum()) < float(block_errors(weight, MXFP4, amax, 0.0).sum())


def test_other_formats_have_the_thresholds_that_clip() -> None:
    grid = make_grid(RecipeFormat(name="f", algo="W4A16_AWQ", group_size=32))
    for options in ({}, {"four_over_six": True}, {"scale_search": True}):
        assert clip.propose_ratios(grid, **options) is clip.CLIP_RATIOS
