"""Searches: factors of columns, clips of weights and of inputs, against trying them by hand."""

from __future__ import annotations

import pytest
import torch

from megtool.quant.algorithms import awq, clip, smoothquant
from megtool.quant.algorithms.algorithm_config import AlgorithmConfig
from megtool.quant.algorithms.fused_group import solve_fused_group
from megtool.quant.algorithms.weight_grid import fake_quantize_inputs, make_grid
from megtool.quant.recipes.formats import RecipeFormat
from tests.support.quant import algorithm_inputs

INT4 = RecipeFormat(name="f", algo="W4A16_AWQ", group_size=32)
INT8 = RecipeFormat(name="f", algo="W8A8_SQ_PER_CHANNEL")
NVFP4 = RecipeFormat(name="f", algo="NVFP4", group_size=16)


def test_smoothing_is_the_papers() -> None:
    weights = [algorithm_inputs.weight(16, 64), algorithm_inputs.weight(8, 64, seed=2)]
    amax = algorithm_inputs.rows(64, 64).abs().amax(dim=0)
    found = smoothquant.compute_scale(amax, weights, 0.5)
    top = torch.cat(weights).abs().amax(dim=0)
    torch.testing.assert_close(found, (amax / top).sqrt())
    amax[3] = 0
    assert smoothquant.compute_scale(amax, weights, 0.5)[3] == 1


@pytest.mark.parametrize("found", [INT8, NVFP4], ids=["int8", "nvfp4"])
def test_the_best_alpha_is_at_least_as_good_as_any_and_none(found: RecipeFormat) -> None:
    x, weights = (
        algorithm_inputs.rows(128, 64),
        [algorithm_inputs.weight(32, 64), algorithm_inputs.weight(16, 64, seed=2)],
    )
    amax, grid = x.abs().amax(dim=0), make_grid(found)
    trial = smoothquant.OutputErrorTrial(x, amax, weights)

    def lost(columns: torch.Tensor) -> float:
        top = trial.input_amax(columns, found)
        rounded = [grid.fake_quantize(w * columns) for w in weights]
        return trial.error(columns, rounded, found, top)

    tried = list(smoothquant.propose_scales([amax], weights, 0.1))
    best, top = smoothquant.search_scale(trial, found, grid, iter(tried))
    assert lost(best) == min(lost(c) for c in tried) < lost(torch.ones(64))
    assert 0 < top <= float((amax / best).max())


@pytest.mark.parametrize("alpha", [None, 0.8])
@pytest.mark.parametrize("seed", range(4))
def test_robust_factors_lose_less_on_other_tokens(seed: int, alpha: float | None) -> None:
    of = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(256, generator=of))

    def rows(count: int) -> torch.Tensor:  # now and then an input far above its column's usual one
        usual = torch.randn(count, 256, generator=of) * sizes
        return usual * torch.exp(1.2 * torch.randn(count, 256, generator=of))

    seen, other = algorithm_inputs.statistics(rows(512)), rows(1024)
    weight = algorithm_inputs.weight(64, 256, seed=seed)

    def lost(method: AlgorithmConfig) -> float:
        found = solve_fused_group({"w": weight}, INT8, method, seen, stores_pre_quant_scale=True)
        assert found.smoothing_scale is not None
        columns = torch.from_numpy(found.smoothing_scale)
        if method.robust:
            top = float((torch.from_numpy(seen.amax) / columns).max())
            assert found.input_amax == pytest.approx(top)  # nothing that was seen is cut off
        x = fake_quantize_inputs(other / columns, INT8, found.input_amax)
        wrong = x @ make_grid(INT8).fake_quantize(weight * columns).T - other @ weight.T
        return float(wrong.square().sum())

    plain = AlgorithmConfig(smoothing="smoothquant", alpha=alpha, clip=alpha is None)
    assert lost(AlgorithmConfig(smoothing="smoothquant", alpha=alpha, robust=True)) < lost(plain)


def test_inputs_are_clipped_where_that_loses_less() -> None:
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 40.0
    trial = smoothquant.OutputErrorTrial(x, x.abs().amax(dim=0), [torch.eye(32)])
    top = trial.input_amax(torch.ones(32), INT8)
    assert top < 40.0
    shares = (
        (x - fake_quantize_inputs(x, INT8, top)).square().sum(1),
        (x - fake_quantize_inputs(x, INT8, 40.0)).square().sum(1),
    )
    assert (shares[0] * trial.share_T1[:, 0]).sum() < (shares[1] * trial.share_T1[:, 0]).sum()


def test_awq_weighs_inputs_against_weights() -> None:
    x, weights = algorithm_inputs.rows(300, 64), [algorithm_inputs.weight(32, 64)]
    gram, grid = x.T @ x, make_grid(INT4)
    share = awq.measure_weight_share(weights, 32)
    tried = list(awq.propose_scales([x.abs().mean(dim=0)], share, 0.1))
    best = awq.search_scale(weights, gram, grid, iter(tried))

    def lost(columns: torch.Tensor) -> float:
        return float(
            (x @ (grid.fake_quantize(weights[0] * columns) / columns - weights[0]).T).square().sum()
        )

    assert lost(best) == pytest.approx(min(lost(c) for c in tried), rel=1e-4)
    assert lost(best) < 0.9 * lost(torch.ones(64))
    exact = awq.compute_scale(x.abs().mean(dim=0), share, 0.5)
    assert float(exact.max() * exact.min()) == pytest.approx(1)


@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W8A16", "NVFP4", "FP8", "FP8_PB_WO", "MXFP4"])
def test_clips_are_the_best_of_those_tried(algo: str) -> None:
    groups = {"W4A16_AWQ": 32, "NVFP4": 16, "FP8_PB_WO": 128, "MXFP4": 32}
    grid = make_grid(RecipeFormat(name="f", algo=algo, group_size=groups.get(algo, 0)))
    weight, x = algorithm_inputs.weight(128, 128), algorithm_inputs.rows(200, 128)
    gram = x.T @ x
    second = float(weight.abs().max())
    amax = clip.search_by_output(weight, gram, grid, second)
    plain = clip.search_by_weight(weight, grid, second)
    assert amax.shape == plain.shape == grid.amax(weight).shape

    def left(amax: torch.Tensor) -> torch.Tensor:
        return grid.fake_quantize(weight, amax, second) - weight

    assert left(plain).square().sum() <= left(grid.amax(weight)).square().sum()
    per = grid.columns or 128
    blocks = torch.block_diag(*[gram[i : i + per, i : i + per] for i in range(0, 128, per)])
    found, whole = (float(((left(a) @ blocks) * left(a)).sum()) for a in (amax, grid.amax(weight)))
    assert found <= whole * (1 + 1e-5)
