"""Placed: placements of one canonical tensor, said shortly."""

from __future__ import annotations

from collections.abc import Iterable

from megtool.tensors.placement import Placement


def place(
    shape: Iterable[int],
    dims: Iterable[int],
    mults: Iterable[int],
    base: Iterable[int],
    stored: str = "s",
) -> Placement:
    """Where the canonical tensor `c` lies in a stored one."""
    return Placement(
        canonical="c",
        stored=stored,
        shape=tuple(shape),
        dims=tuple(dims),
        mults=tuple(mults),
        base=tuple(base),
    )
