"""Copies: are the tensors that are left out as copies of another really equal to it?"""

from __future__ import annotations

import numpy as np

from megtool.checkpoint.numeric_values import numbers
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.reshard.megatron.bucket_order_check import box_of, index_of, parts, probes
from megtool.reshard.source import CheckpointSource
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement

_SAME_AS = {"head.weight": "embed.weight"}
"""Where embeddings are tied the one is not there, and is the other."""


def no_copies(source: CheckpointSource, *, whole: bool = False) -> dict[str, str]:
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
    lo, hi = [0] * len(shape), list(shape)
    for box in parts(lo, hi) if whole else probes(lo, hi, (0.0, 0.5, 1.0)):
        a, b = (
            reader.canonical(box_of(held, *box)).read().reshape(-1)
            for held in (original.stored, name)
        )
        x, y = numbers(a, one), numbers(b, other)
        differ = np.flatnonzero(~np.isclose(x, y, rtol=0.0, atol=0.0, equal_nan=True))
        if len(differ):
            at = int(differ[0])
            there = list(index_of(at, *box))
            return f"{float(y[at]):g} where that has {float(x[at]):g}, at {there}"
    return None
