"""Raw checkpoints in several layouts, as sources and destinations of a plan."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from megtool.dtypes import dtype
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

LAYOUTS = ("apart", "stacked", "rows", "columns", "woven rows", "woven columns", "turned", "mixed")


def place(layout: str, names: list[str], rows: int, cols: int) -> dict[str, Placement]:
    """Tensors `[rows, cols]` (rows even), laid into one stored tensor or one each."""
    n, out = len(names), {}
    for i, name in enumerate(names):
        shape, dims, mults, base, stored = (rows, cols), (0, 1), (1, 1), (0, 0), "s"
        if layout == "apart":
            stored = name
        elif layout == "stacked":
            dims, base = (1, 2), (i, 0, 0)
        elif layout == "rows":
            base = (i * rows, 0)
        elif layout == "columns":
            base = (0, i * cols)
        elif layout == "woven rows":
            mults, base = (n, 1), (i, 0)
        elif layout == "woven columns":
            mults, base = (1, n), (0, i)
        elif layout == "turned":
            dims, base = (1, 0), (0, i * rows)
        elif layout == "mixed":
            shape, dims, mults = (2, rows // 2, cols), (0, 0, 1), (1, 2, 1)
            base = (i * rows, 0)
        out[name] = Placement(
            canonical=name, stored=stored, shape=shape, dims=dims, mults=mults, base=base
        )
    return out


def tensors(placements: dict[str, Placement], kind: str) -> list[GlobalTensor]:
    """The stored tensors, just large enough."""
    shapes: dict[str, list[int]] = {}
    for p in placements.values():
        shape = shapes.setdefault(p.stored, [0] * len(p.base))
        for d, b in enumerate(p.base):
            pairs = zip(p.shape, p.dims, p.mults, strict=True)
            reach = b + 1 + sum((n - 1) * m for n, e, m in pairs if e == d)
            shape[d] = max(shape[d], reach)
    return [GlobalTensor(name=n, shape=tuple(s), dtype=dtype(kind)) for n, s in shapes.items()]


def build_layout(
    raw: Any, folder: Path, rng: random.Random, placements: dict[str, Placement], kind: str
) -> Catalogue:
    """Those tensors in raw files, cut at random."""
    found = tensors(placements, kind)
    grids = [raw.random_grid(rng, t.shape, 3) for t in found]
    return raw.lay_out(folder, found, grids, align=rng.choice([1, 8]))


def cast_arrays(array, kind, source="float32"):
    """What torch makes of elements cast from one type to another, as the bits numpy can carry."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8))
    tensor = tensor.view(getattr(torch, source)).to(getattr(torch, kind))
    return tensor.view(torch.uint8).numpy().view(dtype(kind).view).reshape(array.shape)
