"""Products of experts in FP8: every expert as a linear layer of its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megtool.model.moe.experts import ExpertLinear
from megtool.optim.fp8.amax_history import AmaxHistories
from megtool.optim.fp8.config import Fp8Config, Recipe
from megtool.optim.fp8.experts import (
    ExpertRows,
    ExpertScaling,
    expert_linear,
    expert_product,
    make_expert_scaling,
)
from megtool.optim.fp8.linear import fp8_product
from megtool.optim.fp8.scaling import Fp8Scaling, make_scaling
from megtool.parallel.process_groups import ALONE, ProcessGroups

RECIPES: tuple[Recipe, ...] = ("delayed", "tensorwise", "blockwise", "mxfp8")
COUNTS = [5, 0, 150, 1]


def tensors(seed: int, dtype: torch.dtype, i: int = 40, o: int = 24) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    rows, experts = sum(COUNTS), len(COUNTS)
    x = torch.randn(rows, i, generator=made) * torch.rand(rows, 1, generator=made).exp()
    w = torch.randn(experts, o, i, generator=made) * torch.tensor([0.02, 1, 3, 0.5]).view(-1, 1, 1)
    g = torch.randn(rows, o, generator=made) * 1e-3
    return x.to(dtype), w.to(dtype), g.to(dtype)


def passed(
    x: Tensor, w: Tensor, g: Tensor, scaling: ExpertScaling, counts_E: Tensor
) -> tuple[Tensor, ...]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = expert_product(x, w, counts_E, scaling)
    y.backward(g)
    assert x.grad is not None
    assert w.grad is not None
    return y.detach(), x.grad, w.grad


def one_by_one(x: Tensor, w: Tensor, g: Tensor, scalings: list[Fp8Scaling]) -> tuple[Tensor, ...]:
    """The products of linear layers, one for each expert."""
    ys, gxs, gws = [], [], []
    for e, (rows, grads) in enumerate(zip(x.split(COUNTS), g.split(COUNTS), strict=True)):
        if not len(rows):
            gws.append(torch.zeros_like(w[e]))
            continue
        xe, we = rows.clone().requires_grad_(), w[e].clone().requires_grad_()
        y = fp8_product(xe, we, scalings[e])
        y.backward(grads)
        assert xe.grad is not None
        assert we.grad is not None
        ys.append(y.detach())
        gxs.append(xe.grad)
        gws.append(we.grad)
    return torch.cat(ys), torch.cat(gxs), torch.stack(gws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiple", [0, 16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_expert_is_a_linear_layer(recipe: Recipe, multiple: int, dtype: torch.dtype) -> None:
    """With the layout of a GPU as well, and with delayed scaling over two steps."""
    settings, experts = Fp8Config(fp8_recipe=recipe, fp8_amax_history_len=3), len(COUNTS)
    histories = AmaxHistories(experts, settings, num_dense=0) if recipe == "delayed" else None
    alone = AmaxHistories(experts, settings) if recipe == "delayed" else None
    scaling = make_expert_scaling(settings, experts, "cpu", histories=histories)
    scaling.multiple = max(scaling.multiple, multiple)
    scalings = [make_scaling(settings, histories=alone, module=e) for e in range(experts)]
    for step in range(2):
        x, w, g = tensors(step, dtype)
        got = passed(x, w, g, scaling, torch.tensor(COUNTS))
        want = one_by_one(x, w, g, scalings)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == dtype
            most = 1e-5 if dtype == torch.float32 else 1e-2
            atol = most * float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=most, atol=atol)
        if histories is not None and alone is not None:
            histories.end_step(ProcessGroups.alone())
            alone.end_step(ProcessGroups.alone())
            used = [e for e, n in enumerate(COUNTS) if n]
            for d, scale in histories.scale.items():
                assert torch.equal(scale[used], alone.scale[d][used])


def test_an_expert_that_was_never_given_rows_is_scaled_by_its_own() -> None:
    settings = Fp8Config(fp8_recipe="delayed", fp8_amax_history_len=2)
    histories = AmaxHistories(4, settings, num_dense=0)
    scaling = make_expert_scaling(settings, 4, "cpu", histories=histories)
    x, w, g = tensors(0, torch.float32)
    passed(x, w, g, scaling, torch.tensor(COUNTS))
    histories.end_step(ProcessGroups.alone())
    assert histories.is_known["bwd"][:, 0].tolist() == [True, False, True, True]
    x, w, g = tensors(1, torch.float32)
    got = passed(x, w, g, scaling, torch.tensor([0, 156, 0, 0]))
    exact = x @ w[1].T, g @ w[1], g.T @ x
    for ours, true in zip((got[0], got[1], got[2][1]), exact, strict=True):
        assert 0.01 < (ours - true).norm() / true.norm() < 0.08  # FP8, and not lost below it


def test_a_layout_has_a_size_that_no_count_decides() -> None:
    sizes = set()
    for counts in ([5, 0, 150, 1], [39, 39, 39, 39], [0, 0, 0, 156]):
        layout = ExpertRows.of(torch.tensor(counts), 156, 16)
        sizes.add(layout.ids_P.shape[0])
        rows_RI = torch.arange(156.0).view(-1, 1)
        spread = layout.spread(rows_RI)
        assert torch.equal(layout.collect(spread), rows_RI)
        ends = layout.ends_E.tolist()
        for e, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            assert end % 16 == 0
            assert end > begin
            assert int((layout.ids_P[begin:end] == e).sum()) == counts[e]
    assert sizes == {(10 + 4) * 16}


def test_the_bias_of_experts_is_added() -> None:
    linear = ExpertLinear(
        4, 40, 24, ALONE, bias=True, split_dim=1, dtype=torch.float32, device="cpu"
    )
    x, w, _ = tensors(0, torch.float32)
    assert linear.bias is not None
    with torch.no_grad():
        linear.weight.copy_(w)
        linear.bias.copy_(torch.arange(4.0).view(-1, 1).expand(4, 24))
    counts_E = torch.tensor(COUNTS)
    scaling = make_expert_scaling(Fp8Config(fp8_recipe="tensorwise"), 4, "cpu")
    linear.product = partial(expert_linear, scaling=scaling)
    y = linear(x, counts_E)
    ids = torch.arange(4.0).repeat_interleave(counts_E)
    torch.testing.assert_close(y - ids.view(-1, 1), expert_product(x, w, counts_E, scaling))
