"""Read flattened optimizer state of cores up to 0.15 in its original shapes.

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

from megtool.errors import FormatError
from megtool.tensors.box import Boxes, Ints, concatenate, from_flat, numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor, widest
from megtool.transport.rechunk import Rechunking, rechunk

_SHAPE = "nd_reformulated_orig_global_shape"
_CHAIN = re.compile(r"chained_\d+\.(?=optimizer\.state\.)")


@dataclass(frozen=True, slots=True)
class _CellRuns:
    """Runs of one tensor: boxes, the shards that have them, and their first elements there."""

    lo: Ints
    hi: Ints
    shard: Ints
    start: Ints


def has_flattened_cells(catalogue: Catalogue) -> bool:
    """Whether the checkpoint has flattened optimizer state."""
    return bool(_original_shapes(catalogue))


def read_fully_sharded_model_space(catalogue: Catalogue) -> Catalogue:
    """The catalogue with flattened tensors in their original shapes, over the same bytes.

    They keep their names, except for the number of the optimizer in a chain.

    Raises:
        FormatError: a stored shape is no grid of cells of the shape that the metadata gives.
    """
    shapes = _original_shapes(catalogue)
    used_names = {t.name for t in catalogue.tensors} - shapes.keys()
    tensors: list[GlobalTensor] = []
    runs: list[_CellRuns] = []
    for name, shape in shapes.items():
        new = _CHAIN.sub("", name)
        if new in used_names:
            new = name
        used_names.add(new)
        tensors.append(replace(catalogue[name], name=new, shape=shape))
        runs.append(_find_runs(catalogue, name, shape))
    ndim = widest(tensors)
    regrouping = Rechunking(
        tensors,
        np.repeat(np.arange(len(runs)), [len(p.shard) for p in runs]),
        concatenate([Boxes(p.lo, p.hi) for p in runs], ndim),
        np.concatenate([p.shard for p in runs]),
        np.concatenate([p.start for p in runs]),
        np.zeros(sum(len(p.shard) for p in runs), bool),
    )
    out = rechunk(catalogue, lambda name: name not in shapes, regrouping)
    out.metadata = {k: v for k, v in catalogue.metadata.items() if k != "mcore_data"}
    return out


def _original_shapes(catalogue: Catalogue) -> dict[str, tuple[int, ...]]:
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


def _find_runs(catalogue: Catalogue, name: str, shape: tuple[int, ...]) -> _CellRuns:
    stored = catalogue[name].shape
    cell = _cell_shape(stored, shape)
    if cell is None:
        raise FormatError(
            f"{list(stored)} is no grid of flattened cells of the shape {list(shape)} it had",
            file=catalogue.root / ".metadata",
            tensor=name,
            hint="--optimizer-format none leaves the optimizer out",
        )
    size, ndim = stored[-1], len(shape)
    rows = catalogue.shards.of(catalogue.index[name])
    boxes = catalogue.shards.boxes[np.arange(rows.start, rows.stop)]
    lo, hi = boxes.lo[:, : ndim + 1], boxes.hi[:, : ndim + 1]
    single = ((hi - lo)[:, :ndim] == 1).all(axis=1)
    whole = single & (lo[:, ndim] == 0) & (hi[:, ndim] == size)
    corner = lo[whole][:, :ndim] * np.array(cell, np.int64)
    out = [
        _CellRuns(
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
        for number, index in enumerate(_cell_indices(lo[k, :ndim].tolist(), hi[k, :ndim].tolist())):
            corner = np.array(index, np.int64) * np.array(cell, np.int64)
            row = np.full(len(begin), rows.start + k, np.int64)
            out.append(_CellRuns(cut.lo + corner, cut.hi + corner, row, begin + number * (b - a)))
    return _CellRuns(
        np.concatenate([p.lo for p in out]),
        np.concatenate([p.hi for p in out]),
        np.concatenate([p.shard for p in out]),
        np.concatenate([p.start for p in out]),
    )


def _cell_shape(stored: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a cell; None if the stored shape is not a grid of cells."""
    grid = stored[:-1]
    if len(grid) != len(shape) or min((*grid, *shape), default=1) < 1:
        return None
    if any(n % g for n, g in zip(shape, grid, strict=True)):
        return None
    cell = tuple(n // g for n, g in zip(shape, grid, strict=True))
    return cell if numel(cell) == stored[-1] else None


def _cell_indices(lo: list[int], hi: list[int]) -> Iterator[tuple[int, ...]]:
    """Indices in the grid from `lo` to before `hi`, the last dimension fastest."""
    shape = [h - x for x, h in zip(lo, hi, strict=True)]
    for index in np.ndindex(*shape):
        yield tuple(x + i for x, i in zip(lo, index, strict=True))
