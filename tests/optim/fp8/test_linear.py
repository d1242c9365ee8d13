"""FP8 products, forward and backward, against plain references of the documented recipes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megtool.kernels.dispatch import requested_implementation, use
from megtool.kernels.fp8.cast import Quantized
from megtool.kernels.fp8.products import multiply
from megtool.kernels.wgrad_accumulation import set_gradient_sum
from megtool.optim.fp8.amax_history import AmaxHistories
from megtool.optim.fp8.config import Fp8Config, Recipe
from megtool.optim.fp8.linear import fp8_product
from megtool.optim.fp8.scaling import (
    Fp8Scaling,
    Operand,
    StepScope,
    TensorwiseScaling,
    make_scaling,
)
from megtool.parallel.process_groups import ProcessGroups

RECIPES: tuple[Recipe, ...] = ("delayed", "tensorwise", "blockwise", "mxfp8")
MOST = {"e4m3": (448.0, torch.float8_e4m3fn), "e5m2": (57344.0, torch.float8_e5m2)}


def made(settings: Fp8Config, device: str = "cpu") -> tuple[Fp8Scaling, AmaxHistories | None]:
    """The scaling of one linear layer, and its history."""
    histories = AmaxHistories(1, settings, device) if settings.fp8_recipe == "delayed" else None
    return make_scaling(settings, histories=histories), histories


def rounded(x: Tensor, scale: Tensor | float, kind: str) -> Tensor:
    """What FP8 makes of x, as fp32: scaled, saturated, cast, and scaled back."""
    most, dtype = MOST[kind]
    return (x.float() * scale).clamp(-most, most).to(dtype).float() / scale


def by_tensor(x: Tensor, kind: str, amax: float | None = None) -> Tensor:
    largest = x.float().abs().max() if amax is None else torch.tensor(amax)
    return rounded(x, MOST[kind][0] / largest, kind)


def by_blocks(x: Tensor, kind: str, rows: int, columns: int) -> Tensor:
    """Block by block, each with a power of two: the largest that does not saturate it."""
    out = torch.empty_like(x, dtype=torch.float32)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns].float()
            most = MOST[kind][0] / block.abs().max()
            scale = 2.0 ** torch.floor(torch.log2(most)) if most.isfinite() else torch.tensor(1.0)
            out[i : i + rows, j : j + columns] = rounded(block, scale, kind)
    return out


def reference(
    x: Tensor, w: Tensor, g: Tensor, recipe: str, grad_kind: str, amaxes: list[float] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The three products of a linear layer, each of operands rounded for it."""
    if recipe == "mxfp8":
        y = by_blocks(x, "e4m3", 1, 32) @ by_blocks(w, "e4m3", 1, 32).T
        gx = by_blocks(g, grad_kind, 1, 32) @ by_blocks(w, "e4m3", 32, 1)
        gw = by_blocks(g, grad_kind, 32, 1).T @ by_blocks(x, "e4m3", 32, 1)
        return y, gx, gw
    if recipe == "blockwise":
        y = by_blocks(x, "e4m3", 1, 128) @ by_blocks(w, "e4m3", 128, 128).T
        gx = by_blocks(g, grad_kind, 1, 128) @ by_blocks(w, "e4m3", 128, 128)
        gw = by_blocks(g, grad_kind, 128, 1).T @ by_blocks(x, "e4m3", 128, 1)
        return y, gx, gw
    of = amaxes or [None, None, None]
    qx, qw = by_tensor(x, "e4m3", of[0]), by_tensor(w, "e4m3", of[1])
    qg = by_tensor(g, grad_kind, of[2])
    return qx @ qw.T, qg @ qw, qg.T @ qx


def tensors(seed: int, t: int, i: int, o: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(t, i, generator=generator) * torch.rand(t, 1, generator=generator).exp()
    w = torch.randn(o, i, generator=generator) * 0.02
    g = torch.randn(t, o, generator=generator) * 1e-3
    return x.to(dtype), w.to(dtype), g.to(dtype)


def passed(x: Tensor, w: Tensor, g: Tensor, scaling: Fp8Scaling) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp8_product(x, w, scaling)
    y.backward(g)
    assert x.grad is not None
    assert w.grad is not None
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(7, 24, 40), (150, 260, 129)])
def test_all_three_products_are_the_recipes(
    shape: tuple[int, int, int], recipe: Recipe, format: Any, dtype: torch.dtype
) -> None:
    """In the second step the delayed recipe uses what the first has seen."""
    settings = Fp8Config(fp8_recipe=recipe, fp8_format=format, fp8_amax_history_len=4)
    scaling, histories = made(settings)
    kind = "e5m2" if format == "hybrid" else "e4m3"
    amaxes = None
    for step in range(2):
        x, w, g = tensors(step, *shape, dtype)
        got = passed(x, w, g, scaling)
        want = reference(x, w, g, recipe, kind, amaxes if recipe == "delayed" else None)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 5e-3
            torch.testing.assert_close(
                ours.float(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())
            )
        amaxes = [float(t.abs().max()) for t in (x, w, g)]
        if histories is not None:
            histories.end_step(ProcessGroups.alone())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_error_is_that_of_eight_bits(recipe: Recipe) -> None:
    """Relative errors of sums are near 2^-4 / sqrt(3) for e4m3's three bits; gradients have two."""
    x, w, g = tensors(0, 256, 256, 256, torch.float32)
    scaling, _ = made(Fp8Config(fp8_recipe=recipe))
    got = passed(x, w, g, scaling)
    exact = x @ w.T, g @ w, g.T @ x
    for ours, true, bound in zip(got, exact, (0.05, 0.08, 0.08), strict=True):
        assert float((ours - true).norm() / true.norm()) < bound
        assert float((ours - true).norm() / true.norm()) > 0.01  # it is FP8


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_saved_for_backward_is_bytes(recipe: Recipe) -> None:
    kept: list[Tensor] = []
    x, w, _ = tensors(0, 64, 128, 256, torch.bfloat16)
    scaling, _ = made(Fp8Config(fp8_recipe=recipe))

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fp8_product(x.requires_grad_(), w.requires_grad_(), scaling)
    most = 1.13 if recipe == "mxfp8" else 1.1  # a scale in fp32 for every 32
    assert sum(t.nbytes for t in kept) <= (x.numel() + w.numel()) * most


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    x, w, g = tensors(0, 8, 16, 24, torch.float32)
    scaling, _ = made(Fp8Config(fp8_recipe="tensorwise"))
    want = passed(x, w, g, scaling)
    frozen, rows = w.clone(), x.clone().requires_grad_()
    fp8_product(rows, frozen, scaling).backward(g)
    assert frozen.grad is None
    assert rows.grad is not None
    assert torch.equal(rows.grad, want[1])
    weight = w.clone().requires_grad_()
    fp8_product(x, weight, scaling).backward(g)
    assert weight.grad is not None
    assert torch.equal(weight.grad, want[2])


@pytest.mark.parametrize("recipe", RECIPES)
def test_leading_dimensions_stay(recipe: Recipe) -> None:
    x, w, g = tensors(0, 12, 16, 24, torch.float32)
    scaling, _ = made(Fp8Config(fp8_recipe=recipe))
    want = passed(x, w, g, scaling)
    got = passed(x.view(3, 4, 16), w, g.view(3, 4, 24), scaling)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours.view(theirs.shape), theirs)


def test_magnitudes_are_noted_in_training_alone_and_once_for_recomputed_rows() -> None:
    x, w, g = tensors(0, 12, 16, 24, torch.float32)
    ends = []
    for again in (False, True):
        scaling, histories = made(Fp8Config(fp8_amax_history_len=3, fp8_recipe="delayed"))
        assert histories is not None
        with torch.no_grad():
            fp8_product(x * 100, w, scaling)
        rows, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        if again:
            y = checkpoint(fp8_product, rows, weight, scaling, use_reentrant=False)
        else:
            y = fp8_product(rows, weight, scaling)
        y.backward(g)
        seen = torch.cat([histories.history[d][0, 0] for d in ("fwd", "bwd")])
        want = torch.stack([x.abs().max(), w.abs().max(), torch.zeros(()), g.abs().max()])
        assert torch.equal(seen[:4], want)
        ends.append((y.detach(), rows.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))  # type: ignore[arg-type]


def test_zeros_stay_zeros() -> None:
    for recipe in RECIPES:
        scaling, _ = made(Fp8Config(fp8_recipe=recipe))
        y, gx, gw = passed(torch.zeros(3, 16), torch.zeros(8, 16), torch.zeros(3, 8), scaling)
        assert not y.any()
        assert not gx.any()
        assert not gw.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device with FP8")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(7, 24, 40), (256, 512, 384)])
def test_cuda_products_are_those_of_the_cpu(shape: tuple[int, int, int], recipe: Recipe) -> None:
    x, w, g = tensors(0, *shape, torch.bfloat16)
    settings = Fp8Config(fp8_recipe=recipe)
    here = passed(x, w, g, made(settings)[0])
    there = passed(x.cuda(), w.cuda(), g.cuda(), made(settings, "cuda")[0])
    for ours, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(
            ours.cpu().float(), theirs.float(), rtol=1e-2, atol=1e-2 * float(theirs.abs().max())
        )


def test_products_are_rounded_once_to_the_type() -> None:
    one = Quantized(data=torch.ones(1, 3).to(torch.float8_e4m3fn), scale_inv=torch.tensor(1 / 3))
    assert multiply(one, one, torch.bfloat16).dtype == torch.bfloat16
    assert float(multiply(one, one, torch.float32)) == pytest.approx(1 / 3, rel=1e-6)


def test_gradients_are_rounded_by_the_kernels_of_the_forward_pass() -> None:
    """On a GPU a backward pass runs in a thread that has not asked for any."""
    seen: list[str] = []

    class Noted(TensorwiseScaling):
        """Says which kernels it takes."""

        def gradient(self, g_TO: Tensor) -> Operand:
            """See `Fp8Scaling.gradient`."""
            seen.append(requested_implementation())
            return super().gradient(g_TO)

    x, w, _ = tensors(0, 16, 32, 16, torch.float32)
    with use("torch"):
        y = fp8_product(
            x.requires_grad_(), w.requires_grad_(), Noted(Fp8Config(fp8_recipe="delayed"))
        )
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    assert seen == ["torch"]


class Sum:
    """A sum of gradients in fp32."""

    def __init__(self, weight: Tensor) -> None:
        self.main, self.count = torch.full(weight.shape, torch.nan), 0

    def begin(self) -> tuple[Tensor, bool]:
        """The sum, and whether it is to be overwritten."""
        return self.main, self.count == 0

    def end(self) -> None:
        """A gradient was added."""
        self.count += 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_weights_go_straight_to_their_sum(recipe: Recipe) -> None:
    weight = nn.Parameter(tensors(0, 8, 48, 32, torch.bfloat16)[1])
    batches = [tensors(seed, 40, 48, 32, torch.bfloat16) for seed in (1, 2)]
    expected = torch.zeros(32, 48)
    for x, _, g in batches:
        scaling, _ = made(Fp8Config(fp8_recipe=recipe))
        (gw,) = torch.autograd.grad(fp8_product(x, weight, scaling), weight, g)
        expected += gw
    total = Sum(weight)
    set_gradient_sum(weight, total)  # type: ignore[arg-type]
    for x, _, g in batches:
        scaling, _ = made(Fp8Config(fp8_recipe=recipe))
        fp8_product(x, weight, scaling).backward(g)
    assert weight.grad is None
    assert total.count == 2
    assert torch.equal(total.main, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_cast_once_a_step(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, g = tensors(0, 24, 48, 32, torch.float32)
    settings, scope = Fp8Config(fp8_recipe=recipe), StepScope()
    histories = AmaxHistories(1, settings) if recipe == "delayed" else None
    scaling = make_scaling(settings, histories=histories, scope=scope)
    casts: list[int] = []
    cast = scaling.cast_weight

    def counted(w_OI: Tensor, *, is_training: bool) -> Operand:
        casts.append(1)
        return cast(w_OI, is_training=is_training)

    monkeypatch.setattr(scaling, "cast_weight", counted)
    counts, products = [], []
    for step in range(2):
        weight = weight * 1.5 if step else weight
        scope.begin()
        products.append([passed(x, weight, g, scaling) for _ in range(3)])
        scope.end()
        counts.append(len(casts))
        if histories is not None:
            histories.end_step(ProcessGroups.alone())
    assert counts == [1, 2]
    for first, *others in products:
        for one in others:
            for ours, theirs in zip(one, first, strict=True):
                assert torch.equal(ours, theirs)
    # The second step has the second step's weight.
    assert not torch.equal(products[0][0][0], products[1][0][0])
    passed(x, weight, g, scaling)
    passed(x, weight, g, scaling)
    assert len(casts) == 4, "outside of a step every pass casts"
