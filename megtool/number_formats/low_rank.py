"""The 16-bit product of two thin matrices that SVDQuant adds to a weight of four bits.

The sums must not depend on the box that is decoded, nor on the library that multiplies. Each row of
`up` and each column of `down` is a power of two, above its largest element, times integers of
`BITS` bits. Products of these are integers, and their sums over `RANKS` columns stay below 2^53,
which float64 holds exactly in any order. An element of bfloat16 that is at least 2^-14 of the
largest one in its row is such an integer without rounding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BITS, RANKS = 22, 512


def low_rank_product(
    up_OR: NDArray[np.float32], down_RI: NDArray[np.float32]
) -> NDArray[np.float32]:
    """`up @ down`, float32 `[out, in]`: any rows and columns of it have the same bits alone."""
    up, up_power = _integers(up_OR)
    down, down_power = _integers(down_RI.T)
    down = down.T
    out = np.zeros((len(up), down.shape[1]))
    for first in range(0, up.shape[1], RANKS):
        ranks = slice(first, first + RANKS)
        out += np.ldexp(up[:, ranks] @ down[ranks], up_power[:, None] + down_power)
    return out.astype(np.float32)


def _integers(rows: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Rows as integers, and the exponent of the power of two that each row is multiplied by."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    power = np.asarray(np.frexp(largest)[1] - BITS, np.int32)
    return np.rint(np.ldexp(rows.astype(np.float64), -power[:, None])), power
