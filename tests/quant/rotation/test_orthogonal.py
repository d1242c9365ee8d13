"""Orthogonal matrices: orders, factors, and the library's own matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megtool.quant.recipes.rotation import HADAMARD, RANDOM, RANDOM_HADAMARD, ROTATIONS
from megtool.quant.rotation.orthogonal import MAX_RANDOM_SIZE, OrthogonalMatrix, make_rotation

HIDDEN_SIZES = (576, 640, 896, 960, 1152, 1536, 2304, 2560, 2880, 3072, 3584, 5120, 6656, 7168)
"""Of published models, none of them a power of two."""


def dense(matrix: OrthogonalMatrix) -> np.ndarray:
    return matrix.multiply(np.eye(matrix.size))


@pytest.mark.parametrize("kind", ROTATIONS)
@pytest.mark.parametrize("size", [1, 2, 8, 12, 20, 28, 36, 64, 80, 96, 128, 192, 576])
def test_products_are_those_of_an_orthogonal_matrix(kind: str, size: int) -> None:
    matrix = make_rotation(kind, size, (3, 1))
    assert matrix is not None
    q = dense(matrix)
    np.testing.assert_allclose(q @ q.T, np.eye(size), atol=1e-12)
    if kind != RANDOM:
        np.testing.assert_allclose(np.abs(q) * size**0.5, 1.0)
    x = np.random.default_rng(0).standard_normal((5, 2 * size))
    blocks = np.kron(np.eye(2), q)
    np.testing.assert_allclose(matrix.multiply(x), x @ blocks, atol=1e-12)
    np.testing.assert_allclose(matrix.multiply_rows(x.T), blocks.T @ x.T, atol=1e-12)


@pytest.mark.parametrize("size", HIDDEN_SIZES)
def test_hidden_sizes_of_models_have_a_hadamard_matrix(size: int) -> None:
    matrix = make_rotation(HADAMARD, size, (0,))
    assert matrix is not None
    assert not matrix.is_sylvester
    assert np.prod([len(f) for f in matrix.factors]) == size
    for factor in matrix.factors:
        np.testing.assert_allclose(factor @ factor.T, np.eye(len(factor)), atol=1e-12)


@pytest.mark.peers
@pytest.mark.parametrize("size", [1, 2, 64, 128, 1024])
def test_powers_of_two_are_the_librarys(size: int) -> None:
    from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix

    matrix = make_rotation(HADAMARD, size, (0,))
    assert matrix is not None
    assert matrix.is_sylvester
    theirs = deterministic_hadamard_matrix(size, torch.float64) / size**0.5
    np.testing.assert_allclose(dense(matrix), theirs.numpy(), atol=1e-14)


def test_seeds_tell_random_matrices_apart() -> None:
    for kind in (RANDOM_HADAMARD, RANDOM):
        a, again, b = (make_rotation(kind, 32, (seed, 1)) for seed in (0, 0, 1))
        assert a is not None
        assert again is not None
        assert b is not None
        np.testing.assert_array_equal(dense(a), dense(again))
        assert not np.allclose(dense(a), dense(b))


@pytest.mark.parametrize(
    ("kind", "size"),
    [(HADAMARD, 3), (HADAMARD, 6), (RANDOM_HADAMARD, 94), (RANDOM, MAX_RANDOM_SIZE + 1)],
)
def test_orders_without_a_matrix(kind: str, size: int) -> None:
    assert make_rotation(kind, size, (0,)) is None
