"""Copies: are the tensors that are left out as copies of another really equal to it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.values import numbers
from megtool.commands.opened import Opened
from megtool.tensors.box import numel
from megtool.tensors.relation import Placement

PROBE_ELEMENTS = 64
"""Elements compared at the beginning, in the middle and at the end, unless all are."""

_BAND_ELEMENTS = 1 << 20

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first index of a part of a tensor, and the part's shape."""

_SAME_AS = {"head.weight": "embed.weight"}
"""Where embeddings are tied the one is not there, and is the other."""


def no_copies(source: Opened, *, whole: bool = False) -> dict[str, str]:
    """Stored tensors that are said to repeat another one and do not, each with what differs.

    Some elements of each are compared, all with `whole`. What they repeat may not have been
    selected: then there is nothing to compare.
    """
    side = source.side
    out: dict[str, str] = {}
    if not side.copies:
        return out
    with Reader(source.catalogue, Files()) as reader:
        for name, canonical in side.copies.items():
            if canonical not in side.placements:
                canonical = _SAME_AS.get(canonical, canonical)
            original = side.placements.get(canonical)
            if original is None:
                continue
            found = _difference(reader, name, original, whole=whole)
            if found is not None:
                out[name] = f"no copy of {original.stored}, though it should be: {found}"
    return out


def _difference(reader: Reader, name: str, original: Placement, *, whole: bool) -> str | None:
    """How a stored tensor differs from a canonical one (which may be the longer by padding)."""
    stored = reader.catalogue[name]
    copy = replace(original, stored=name)
    if not original.is_identity:
        return f"{original.stored} is laid out in another way"
    shape = original.shape
    if len(stored.shape) != len(shape) or any(
        n < m if d == 0 else n != m
        for d, (n, m) in enumerate(zip(stored.shape, shape, strict=True))
    ):
        return f"its shape is {list(stored.shape)}, not {list(shape)}"
    if not numel(shape):
        return None
    one, other = reader.catalogue[original.stored].dtype, stored.dtype
    for lo, size in _bands(shape) if whole else _probes(shape):
        a, b = (
            reader.canonical(replace(p, shape=size, base=lo)).read().reshape(-1)
            for p in (original, copy)
        )
        x, y = numbers(a, one), numbers(b, other)
        differ = np.flatnonzero(~np.isclose(x, y, rtol=0.0, atol=0.0, equal_nan=True))
        if len(differ):
            at = int(differ[0])
            index = [int(i) + k for i, k in zip(np.unravel_index(at, size), lo, strict=True)]
            return f"{float(y[at]):g} where that has {float(x[at]):g}, at {index}"
    return None


def _probes(shape: tuple[int, ...]) -> Iterator[Box]:
    """Runs of a few elements along the last dimension."""
    size = (*[1] * (len(shape) - 1), min(shape[-1], PROBE_ELEMENTS))
    for share in (0.0, 0.5, 1.0):
        yield tuple(int((n - m) * share) for n, m in zip(shape, size, strict=True)), size


def _bands(shape: tuple[int, ...]) -> Iterator[Box]:
    """The whole in bands of the first dimension that fit into memory."""
    rows = max(_BAND_ELEMENTS // max(numel(shape[1:]), 1), 1)
    rest = tuple(0 for _ in shape[1:])
    for first in range(0, shape[0], rows):
        yield (first, *rest), (min(rows, shape[0] - first), *shape[1:])
