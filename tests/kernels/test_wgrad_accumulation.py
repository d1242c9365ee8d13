"""Weight gradients added in place: in fp32, or with the bits of a whole product."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.kernels import wgrad_accumulation
from megtool.kernels.experts.grouped_gemm import grouped_linear
from megtool.kernels.vocabulary.cross_entropy import linear_cross_entropy
from megtool.kernels.wgrad_accumulation import (
    accumulate_product,
    add_weight_gradient,
    remove_gradient_sums,
    set_gradient_sum,
)
from megtool.model.layers.linear import linear


class Sum:
    """A sum in a buffer of its own."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.main = torch.full(tuple(shape), torch.nan, dtype=dtype)
        self.count = 0

    def begin(self) -> tuple[Tensor, bool]:
        return self.main, self.count == 0

    def end(self) -> None:
        self.count += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (0,)])
def test_the_sum_is_exact_to_fp32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g, x = torch.randn(*shape, 5).to(dtype), torch.randn(*shape, 7).to(dtype)
    start = torch.randn(5, 7)
    main = start.clone()
    accumulate_product(main, g.flatten(0, -2).t(), x.flatten(0, -2))
    exact = start.double() + g.double().reshape(-1, 5).t() @ x.double().reshape(-1, 7)
    torch.testing.assert_close(main.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_sums_the_products_unrounded(dtype: torch.dtype) -> None:
    total = Sum((32, 48), torch.float32)
    total.main = total.main.cuda()
    exact = torch.zeros(32, 48, dtype=torch.float64, device="cuda")
    for _ in range(2):
        g = torch.randn(64, 32, device="cuda").to(dtype)
        x = torch.randn(64, 48, device="cuda").to(dtype)
        exact += g.double().t() @ x.double()
        add_weight_gradient(total, g, x)
    torch.testing.assert_close(total.main.double(), exact, rtol=1e-5, atol=1e-5)


def test_parameters_stay_out_of_autograd() -> None:
    main, weight = torch.zeros(3, 3), torch.randn(3, 3, requires_grad=True)
    accumulate_product(main, weight, weight)
    assert not main.requires_grad


@pytest.mark.parametrize(
    ("main", "factor"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)]
)
def test_a_narrow_sum_is_refused(main: torch.dtype, factor: torch.dtype) -> None:
    with pytest.raises(UsageError, match=str(factor)):
        accumulate_product(
            torch.zeros(2, 2, dtype=main),
            torch.zeros(2, 2, dtype=factor),
            torch.zeros(2, 2, dtype=factor),
        )


def by_autograd(weight: Tensor, losses: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of autograd's gradients, each rounded to the weight's dtype."""
    total = torch.zeros_like(weight, dtype=dtype)
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, weight)
        total += gradient
    return total


@pytest.mark.parametrize(
    ("weights", "main"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_sums_of_products_have_the_bits_of_autograd(
    weights: torch.dtype, main: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear layer, experts (one without rows), and the output layer with its cross entropy."""
    monkeypatch.setattr(wgrad_accumulation, "TILE_ELEMENTS", 100)
    torch.manual_seed(0)
    x_TI = torch.randn(2, 9, 24).to(weights).requires_grad_()
    counts_E = torch.tensor([7, 0, 11])
    labels_T = torch.randint(0, 60, (18,))

    def dense(weight: Tensor) -> Tensor:
        bias = torch.ones(64, dtype=weights, requires_grad=True)
        return linear(x_TI, weight, bias).square().sum()

    def experts(weight: Tensor) -> Tensor:
        return grouped_linear(x_TI.flatten(0, 1), weight, counts_E).square().sum()

    def head(weight: Tensor) -> Tensor:
        return linear_cross_entropy(x_TI.flatten(0, 1), weight, labels_T, vocab_size=60).sum()

    for layer, shape in ((dense, (64, 24)), (experts, (3, 16, 24)), (head, (64, 24))):
        if layer is experts and weights == torch.float64:
            continue  # one expert after the other, by autograd
        weight = nn.Parameter(torch.randn(*shape).to(weights))
        want = by_autograd(weight, [layer(weight) for _ in range(3)], main)
        (input_gradient,) = torch.autograd.grad(layer(weight), x_TI)
        total = Sum(shape, main)
        set_gradient_sum(weight, total)
        for n in range(3):
            x_TI.grad = None
            layer(weight).backward()
            assert torch.equal(x_TI.grad, input_gradient)
            assert total.count == n + 1
        assert torch.equal(total.main, want), layer
        assert weight.grad is None
        with torch.no_grad():
            layer(weight)
        assert total.count == 3
        remove_gradient_sums([(weight, Sum(shape, main))])  # of another optimizer
        assert hasattr(weight, "gradient_sum")
        remove_gradient_sums([(weight, total)])
        layer(weight).backward()
        assert weight.grad is not None


def test_hooks_of_a_weight_see_its_gradient() -> None:
    weight, total = nn.Parameter(torch.ones(2, 3)), Sum((2, 3), torch.float32)
    set_gradient_sum(weight, total)
    seen: list[Tensor] = []
    handle = weight.register_hook(seen.append)
    linear(torch.ones(4, 3), weight).sum().backward()
    assert torch.equal(seen[0], torch.full((2, 3), 4.0))
    assert total.count == 0
    handle.remove()
    linear(torch.ones(4, 3), weight).sum().backward()
    assert total.count == len(seen) == 1


def test_embeddings_stay_with_autograd_off_cuda() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    weight.is_embedding_parameter = True
    set_gradient_sum(weight, Sum((4, 4), torch.float32))
    assert not hasattr(weight, "gradient_sum")


def test_a_parameter_can_be_sent_to_another_process() -> None:
    from megtool.optim.config import OptimizerConfig
    from megtool.optim.replicated import ReplicatedOptimizer
    from megtool.parallel.process_groups import ProcessGroups

    model = nn.Linear(3, 3)
    optimizer = ReplicatedOptimizer(
        model.named_parameters(), OptimizerConfig(), ProcessGroups.alone()
    )
    assert model.weight.gradient_sum is not None
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy.weight, model.weight)
    assert getattr(copy.weight, "gradient_sum", None) is None
    del optimizer
    assert not hasattr(model.weight, "gradient_sum")
