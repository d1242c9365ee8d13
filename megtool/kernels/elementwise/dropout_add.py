"""The end of a residual branch: bias, dropout, scale and residual addition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megtool.kernels.dispatch import Kernel
from megtool.kernels.elementwise import dropout_add_triton


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    *,
    seed: int | Tensor = 0,
    scale: float = 1.0,
) -> Tensor:
    """`residual + scale * dropout(x + bias)`, in the wider one of the dtypes of x and residual.

    Dropout zeroes an element with probability `p` and divides the others by `1 - p`. Which ones
    `seed` (below 2**63; a tensor, int64 without dimensions, in a CUDA graph) decides, in an
    implementation, and no state of torch's.
    """
    run = _BIAS_DROPOUT_ADD.on(x.device)
    return run(x, bias, residual, p, seed_tensor(seed, x.device), scale)


def seed_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    """A seed as a tensor on a device."""
    if isinstance(seed, Tensor):
        return seed
    return torch.full((), seed, dtype=torch.int64, device=device)


def drop(x: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """Dropout of `x`, determined by `seed`, on any device alike."""
    keep_mask = _random_bits(x.numel(), seed_tensor(seed, x.device)) >= round(p * _RANGE)
    # The factor is no tensor: in 16 bits it would be rounded.
    return x * keep_mask.view(x.shape) * (1 / (1 - p) if p < 1 else 0.0)


_RANGE = 1 << 31
_STEPS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _random_bits(numel: int, seed: Tensor) -> Tensor:
    """31 random bits for each of so many elements, int64.

    Every element has its own, whatever was drawn before: SplitMix64 (Steele, Lea and Flood, "Fast
    Splittable Pseudorandom Number Generators", 2014) of the seed and the element's number, in
    integers that wrap around.
    """
    gamma, first, second = (n - (1 << 64) for n in _STEPS)
    z = torch.arange(1, numel + 1, device=seed.device).mul_(gamma).add_(seed)
    z.bitwise_xor_(_shifted(z, 30)).mul_(first)
    z.bitwise_xor_(_shifted(z, 27)).mul_(second)
    return _shifted(z, 33)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros, as of unsigned numbers."""
    return z.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


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
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor, scale: float
) -> Tensor:
    if bias is not None:
        x = x + bias
    if p:
        x = drop(x, p, seed)
    return torch.add(residual, x, alpha=scale)


_BIAS_DROPOUT_ADD = Kernel(
    "bias_dropout_add", _bias_dropout_add, triton=dropout_add_triton.bias_dropout_add
)
