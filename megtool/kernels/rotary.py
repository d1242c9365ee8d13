"""Rotary position embedding: pairs of elements of each head turned by an angle per position."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(
    x_BSND: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Rotate the first R elements of every head; the rest passes."""
    size = cos_BSR.shape[-1]
    cos, sin = cos_BSR.unsqueeze(2), sin_BSR.unsqueeze(2)
    x = x_BSND[..., :size]
    if interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = torch.stack((-odd, even), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    out = (x * cos + turned * sin).to(x_BSND.dtype)
    return out if size == x_BSND.shape[-1] else torch.cat((out, x_BSND[..., size:]), -1)
