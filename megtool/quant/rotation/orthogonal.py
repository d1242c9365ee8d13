"""Orthogonal matrices for rotations, kept as Kronecker factors and signs.

A Hadamard matrix of order 2^k is Sylvester's, as in compressed-tensors. For other orders it is the
Kronecker product of one of Paley's and Sylvester's. Paley's have order q + 1 for a prime q = 3 mod
4, and order 2 (q + 1) for a prime q = 1 mod 4. Random signs in front make it random.
Source: R. Paley, On orthogonal matrices, Journal of Mathematics and Physics 12 (1933).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.quant.recipes.rotation import HADAMARD, RANDOM

MAX_RANDOM_SIZE = 16384
"""A random matrix has no factors: beyond this size it would not fit into 2 GiB."""

_LARGEST_FACTOR = 64

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrthogonalMatrix:
    """The matrix Q = diag(`signs`) (F_1 x F_2 x ...), `size` by `size`, orthogonal.

    Matrices of a multiple of the size are block-diagonal with this block. `is_sylvester` says that
    it is the Hadamard matrix of compressed-tensors.
    """

    size: int
    factors: tuple[Floats, ...]
    signs: Floats | None = None
    is_sylvester: bool = False

    def multiply(self, x: NDArray[Any]) -> Floats:
        """`x Q` along the last dimension, in float64; it is a multiple of `size`."""
        out = np.asarray(x, np.float64).reshape(-1, self.size)
        if self.signs is not None:
            out = out * self.signs
        after = self.size
        for factor in self.factors:
            n = len(factor)
            after //= n
            if after == 1:
                out = out.reshape(-1, n) @ factor
            else:
                out = np.matmul(factor.T, out.reshape(-1, n, after))
        return out.reshape(x.shape)

    def multiply_rows(self, x: NDArray[Any]) -> Floats:
        """`Q^T x` along the first dimension."""
        return np.ascontiguousarray(self.multiply(np.ascontiguousarray(np.moveaxis(x, 0, -1))).T)


def make_rotation(kind: str, size: int, seed: tuple[int, ...]) -> OrthogonalMatrix | None:
    """The rotation of a kind and size; None if it cannot be constructed.

    The same seed gives the same matrix everywhere, up to the last bits of a `random-matrix`.
    """
    rng = np.random.default_rng(seed)
    if kind == RANDOM:
        if size > MAX_RANDOM_SIZE:
            return None
        q, r = np.linalg.qr(rng.standard_normal((size, size)))
        factor: Floats = q * np.sign(np.diag(r))
        return OrthogonalMatrix(size=size, factors=(factor,))
    factors = _hadamard_factors(size)
    if factors is None:
        return None
    is_sylvester = size & (size - 1) == 0
    if kind == HADAMARD:
        return OrthogonalMatrix(size=size, factors=factors, is_sylvester=is_sylvester)
    signs = (rng.integers(0, 2, size) * 2 - 1).astype(np.float64)
    return OrthogonalMatrix(size=size, factors=factors, signs=signs)


def _hadamard_factors(size: int) -> tuple[Floats, ...] | None:
    """Factors of an orthogonal Hadamard matrix; None if none is known here."""
    twos = size & -size
    order, factors = size // twos, list[Floats]()
    if order > 1:
        base = None
        while twos > 1 and base is None:
            order, twos = 2 * order, twos // 2
            base = _paley(order)
        if base is None:
            return None
        factors.append(base / np.sqrt(order))
    while twos > 1:
        n = min(twos, _LARGEST_FACTOR)
        factors.append(_sylvester(n) / np.sqrt(n))
        twos //= n
    return tuple(factors) or (np.ones((1, 1)),)


def _sylvester(order: int) -> Floats:
    out = np.ones((1, 1))
    while len(out) < order:
        out = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), out)
    return out


def _paley(order: int) -> Floats | None:
    """A Hadamard matrix by one of Paley's constructions over a prime field, if there is one."""
    q = order - 1
    if q % 4 == 3 and _is_prime(q):
        core = _conference(q, -1.0)
        return core + np.eye(order)
    q = order // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        core = _conference(q, 1.0)
        plus, minus = np.array([[1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, -1.0]])
        return np.kron(core, plus) + np.kron(np.eye(q + 1), minus)
    return None


def _conference(q: int, sign: float) -> Floats:
    """The conference matrix of order q + 1: quadratic residues modulo q, with a border."""
    character = np.full(q, -1.0)
    character[(np.arange(1, q, dtype=np.int64) ** 2) % q] = 1.0
    character[0] = 0.0
    index = np.arange(q)
    out = np.zeros((q + 1, q + 1))
    out[0, 1:], out[1:, 0] = 1.0, sign
    out[1:, 1:] = character[(index[:, None] - index[None, :]) % q]
    return out


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
