"""How a fused kernel is held against its reference: one rounding apart, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.kernels.dispatch import use
from megtool.options.kernels import Implementation

Agree = Callable[..., None]


@pytest.fixture(scope="session")
def device() -> str:
    """Triton's kernels run here: compiled on a GPU, interpreted without one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def agree() -> Agree:
    """Hold an implementation in some dtype against the reference in fp64, on the same numbers.

    `run` takes the tensors and returns one or several. Results in 16 bits may differ by `ulps`
    units in the last place, in fp32 by 1e-5 of themselves; and all by `noise`, which is 1e-6 but
    where something is rounded before the end, or terms cancel.
    """

    def check(
        run: Callable[..., Any],
        tensors: Sequence[Tensor | None],
        *,
        by: Implementation = "triton",
        noise: float = 0.0,
        ulps: int = 1,
    ) -> None:
        dtype = next(t.dtype for t in tensors if t is not None)
        results = []
        for name, kind in ((by, dtype), ("torch", torch.float64)):
            given = [None if t is None else t.detach().to(kind).requires_grad_() for t in tensors]
            with use(name):
                out = run(*given)
            outs = out if isinstance(out, tuple) else (out,)
            generator = torch.Generator(device="cpu").manual_seed(1)
            pulls = [torch.randn(o.shape, generator=generator).to(dtype) for o in outs]
            wanted = [t for t in given if t is not None]
            pulled = [p.to(o) for p, o in zip(pulls, outs, strict=True)]
            grads = torch.autograd.grad(outs, wanted, pulled)
            assert all(o.dtype == kind for o in outs)
            assert all(g.dtype == kind for g in grads)
            results.append([o.detach().double().cpu() for o in (*outs, *grads)])
            with use(name), torch.no_grad():
                again = run(*given)
            again = again if isinstance(again, tuple) else (again,)
            for one, two in zip(outs, again, strict=True):
                assert torch.equal(one, two), "with and without a backward pass"
        ulp = 1e-5 if dtype == torch.float32 else ulps * torch.finfo(dtype).eps
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=ulp, atol=max(noise, 1e-6))

    return check
