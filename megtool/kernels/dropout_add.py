"""The end of a residual branch: bias, dropout, scale and residual addition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megtool.kernels import dropout_add_triton
from megtool.kernels.dispatch import Chosen, Kernel


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    *,
    seed: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """`residual + scale * dropout(x + bias)`, in the wider one of the dtypes of x and residual.

    Dropout zeroes an element with probability `p` and divides the others by `1 - p`. Which ones
    `seed` (below 2**63) decides, on a device and in an implementation, and no state of torch's.
    """
    # torch.compile takes no generators.
    cannot: tuple[Chosen, ...] = ("compile",) if p else ()
    run = _BIAS_DROPOUT_ADD.on(x.device, without=cannot)
    return run(x, bias, residual, p, seed, scale)


def drop(x: Tensor, p: float, seed: int) -> Tensor:
    """Dropout of `x`, determined by `seed`."""
    generator = torch.Generator(x.device).manual_seed(seed)
    keep_mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    keep_mask.bernoulli_(1 - p, generator=generator)
    # The factor is no tensor: in 16 bits it would be rounded.
    return x * keep_mask * (1 / (1 - p) if p < 1 else 0.0)


@contextmanager
def drawn_by(seed: int, device: torch.device) -> Iterator[None]:
    """In the block, torch's generator of a device begins at `seed`; then it is where it was."""
    generator = torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int, scale: float
) -> Tensor:
    if bias is not None:
        x = x + bias
    if p:
        x = drop(x, p, seed)
    return torch.add(residual, x, alpha=scale)


_BIAS_DROPOUT_ADD = Kernel(
    "bias_dropout_add", _bias_dropout_add, triton=dropout_add_triton.bias_dropout_add
)
