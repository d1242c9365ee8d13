"""From fragments: optimizer state that cores up to 0.15 stored flattened, read in model space.

`fully_sharded_model_space` cut every parameter into a grid of equal cells (one a tensor-parallel
rank, layer or expert), and stored each cell flattened: a parameter of shape `[X, Y]` in cells of
`[x, y]` is a tensor of shape `[X/x, Y/y, x*y]` on disk, whose last dimension is cut anywhere. The
metadata keeps the first shape. Source: megatron-core 0.12 to 0.15, `dist_checkpointing/strategies/
resharding.py`; later ones refuse such a checkpoint. One-dimensional parameters of still older
cores are stored as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.rechunk import Regrouping, regroup
from megtool.errors import FormatError
from megtool.tensors.box import Boxes, Ints, from_flat, numel
from megtool.tensors.sharded import GlobalTensor, widest

_SHAPE = "nd_reformulated_orig_global_shape"
_CHAIN = re.compile(r"chained_\d+\.(?=optimizer\.state\.)")


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of one tensor: boxes, the shards that hold them, and where in these they begin."""

    lo: Ints
    hi: Ints
    shard: Ints
    start: Ints


def has_fragments(catalogue: Catalogue) -> bool:
    """The checkpoint holds flattened state of the old kind."""
    return bool(_shapes(catalogue))


def from_fragments(catalogue: Catalogue) -> Catalogue:
    """The catalogue with flattened tensors in their own shapes, over the same bytes.

    They keep their names, but for the number of the optimizer in a chain.

    Raises:
        FormatError: a stored shape is no grid of cells of the shape that the metadata gives.
    """
    shapes = _shapes(catalogue)
    rest = {t.name for t in catalogue.tensors} - shapes.keys()
    tensors: list[GlobalTensor] = []
    found: list[_Pieces] = []
    for name, shape in shapes.items():
        new = _CHAIN.sub("", name)
        if new in rest:
            new = name
        rest.add(new)
        tensors.append(replace(catalogue[name], name=new, shape=shape))
        found.append(_pieces(catalogue, name, shape))
    ndim = widest(tensors)
    regrouping = Regrouping(
        tensors,
        np.repeat(np.arange(len(found)), [len(p.shard) for p in found]),
        Boxes(
            np.concatenate([_wide(p.lo, ndim, 0) for p in found]),
            np.concatenate([_wide(p.hi, ndim, 1) for p in found]),
        ),
        np.concatenate([p.shard for p in found]),
        np.concatenate([p.start for p in found]),
        np.zeros(sum(len(p.shard) for p in found), bool),
    )
    out = regroup(catalogue, lambda name: name not in shapes, regrouping)
    out.metadata = {k: v for k, v in catalogue.metadata.items() if k != "mcore_data"}
    return out


def _shapes(catalogue: Catalogue) -> dict[str, tuple[int, ...]]:
    """The shapes that flattened tensors had, in the order of the tensors."""
    data = catalogue.metadata.get("mcore_data")
    if not isinstance(data, dict):
        return {}
    out: dict[str, tuple[int, ...]] = {}
    for t in catalogue.tensors:
        facts = data.get(t.name)
        shape = facts.get(_SHAPE) if isinstance(facts, dict) else None
        if shape is None:
            continue
        if not isinstance(shape, list | tuple) or not all(type(n) is int for n in shape):
            raise FormatError(
                f"the shape it had is {shape!r:.60}",
                file=catalogue.root / ".metadata",
                tensor=t.name,
            )
        out[t.name] = tuple(shape)
    return out


def _pieces(catalogue: Catalogue, name: str, shape: tuple[int, ...]) -> _Pieces:
    """Where the elements of one tensor lie."""
    stored = catalogue[name].shape
    cell = _cell(stored, shape)
    if cell is None:
        raise FormatError(
            f"{list(stored)} is no grid of flattened cells of the shape {list(shape)} it had",
            file=catalogue.root / ".metadata",
            tensor=name,
            hint="--optimizer none leaves the optimizer out",
        )
    size, ndim = stored[-1], len(shape)
    rows = catalogue.shards.of(catalogue.index[name])
    boxes = catalogue.shards.boxes[np.arange(rows.start, rows.stop)]
    lo, hi = boxes.lo[:, : ndim + 1], boxes.hi[:, : ndim + 1]
    single = ((hi - lo)[:, :ndim] == 1).all(axis=1)
    whole = single & (lo[:, ndim] == 0) & (hi[:, ndim] == size)
    corner = lo[whole][:, :ndim] * np.array(cell, np.int64)
    out = [
        _Pieces(
            corner,
            corner + np.array(cell, np.int64),
            np.flatnonzero(whole) + rows.start,
            np.zeros(int(whole.sum()), np.int64),
        )
    ]
    for k in np.flatnonzero(~whole).tolist():
        a, b = int(lo[k, ndim]), int(hi[k, ndim])
        cut = from_flat(cell, a, b)
        begin = np.cumsum(cut.volume()) - cut.volume()
        for number, at in enumerate(_cells(lo[k, :ndim].tolist(), hi[k, :ndim].tolist())):
            corner = np.array(at, np.int64) * np.array(cell, np.int64)
            row = np.full(len(begin), rows.start + k, np.int64)
            out.append(_Pieces(cut.lo + corner, cut.hi + corner, row, begin + number * (b - a)))
    return _Pieces(
        np.concatenate([p.lo for p in out]),
        np.concatenate([p.hi for p in out]),
        np.concatenate([p.shard for p in out]),
        np.concatenate([p.start for p in out]),
    )


def _cell(stored: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a cell; None where the stored shape is no grid of such."""
    grid = stored[:-1]
    if len(grid) != len(shape) or min((*grid, *shape), default=1) < 1:
        return None
    if any(n % g for n, g in zip(shape, grid, strict=True)):
        return None
    cell = tuple(n // g for n, g in zip(shape, grid, strict=True))
    return cell if numel(cell) == stored[-1] else None


def _cells(lo: list[int], hi: list[int]) -> Iterator[tuple[int, ...]]:
    """Places in the grid from `lo` to before `hi`, the last dimension fastest."""
    shape = [h - x for x, h in zip(lo, hi, strict=True)]
    for at in np.ndindex(*shape):
        yield tuple(x + i for x, i in zip(lo, at, strict=True))


def _wide(array: Ints, ndim: int, value: int) -> Ints:
    """Columns padded to `ndim` with `value`."""
    more = np.full((len(array), ndim - array.shape[1]), value, np.int64)
    return np.concatenate([array, more], axis=1)
