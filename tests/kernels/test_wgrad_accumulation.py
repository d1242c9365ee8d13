"""Weight gradients are summed in fp32, whatever the factors' dtype."""

from __future__ import annotations

import pytest
import torch

from megtool.errors import UsageError
from megtool.kernels.wgrad_accumulation import accumulate_product, accumulate_weight_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (0,)])
def test_the_sum_is_exact_to_fp32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g, x = torch.randn(*shape, 5).to(dtype), torch.randn(*shape, 7).to(dtype)
    start = torch.randn(5, 7)
    main = start.clone()
    accumulate_weight_gradient(main, g, x)
    exact = start.double() + g.double().reshape(-1, 5).t() @ x.double().reshape(-1, 7)
    torch.testing.assert_close(main.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_sums_the_products_unrounded(dtype: torch.dtype) -> None:
    g, x = (
        torch.randn(64, 32, device="cuda").to(dtype),
        torch.randn(64, 48, device="cuda").to(dtype),
    )
    main = torch.randn(32, 48, device="cuda")
    exact = main.double() + g.double().t() @ x.double()
    accumulate_weight_gradient(main, g, x)
    torch.testing.assert_close(main.double(), exact, rtol=1e-5, atol=1e-5)


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
