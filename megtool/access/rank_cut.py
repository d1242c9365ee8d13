"""What one rank has of tensors under names that say nothing of ranks.

Megatron's rules say which part of every canonical tensor a rank has, and the names' own table where
that part lies: so a fused `qkv_proj` is cut head by head, and a stack of experts by expert.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from math import prod

from megtool.convert.canonical_view import CanonicalView, TargetView
from megtool.convert.dialects import DialectNaming, write_side
from megtool.convert.megatron.rank_parameters import rank_parameters
from megtool.convert.rank_tensors import (
    IndexedTarget,
    LocalTensor,
    RankCoordinates,
    local_tensors,
)
from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.spec.model_config import ModelConfig
from megtool.tensors.box import Boxes
from megtool.tensors.placement import Placement, narrow, pieces, refine

Interval = tuple[int, int]

MAX_INTERVALS = 1 << 16
"""Limit on the separate rows that a rank has of one tensor."""


def cut_for_rank(
    source: CanonicalView,
    target: TargetView,
    config: ModelConfig,
    parallel: ParallelConfig,
    seat: RankCoordinates,
) -> dict[str, LocalTensor]:
    """The parts of `target`'s tensors that a rank has, by name.

    They are those that Megatron cuts for the rank; a vocabulary that `tp` does not divide is cut as
    `torch.chunk` does.

    Raises:
        LayoutError: the layout does not divide the model, or a tensor mixes what ranks have apart.
    """
    megatron = write_side(
        source,
        dialect="megatron",
        config=config,
        parallel=parallel,
        per_layer=True,
        options=DialectNaming(divisible_by=1),
    )
    ranks = rank_parameters(megatron.tensors, megatron.config or config, parallel)
    index = IndexedTarget.of(megatron)
    boxes_of: dict[str, dict[tuple[Interval, ...], None]] = defaultdict(dict)
    for local in local_tensors(ranks, seat, num_chunks=parallel.vpp).values():
        boxes = Boxes.of([(list(lo), list(hi)) for lo, hi in local.boxes], len(local.boxes[0][0]))
        for p in index.parts.get(local.key, ()):
            there = target.placements.get(p.canonical)
            if there is None:
                continue
            if 0 in p.shape:
                boxes_of[there.stored][()] = None
                continue
            here, there = refine(p, there)
            _, views = pieces(here, boxes)
            for lo, hi in zip(views.lo.tolist(), views.hi.tolist(), strict=True):
                for box in _image(narrow(there, lo, hi)):
                    boxes_of[there.stored][box] = None
    return {
        t.name: _joined(t.name, t.shape, list(boxes_of[t.name]))
        for t in target.tensors
        if t.name in boxes_of
    }


def _image(p: Placement) -> list[tuple[Interval, ...]]:
    """The boxes of the stored tensor that a placement covers."""
    axes = []
    for d, start in enumerate(p.base):
        steps = sorted((p.mults[j], p.shape[j]) for j in range(len(p.shape)) if p.dims[j] == d)
        length, starts = 1, [start]
        for mult, size in steps:
            if size == 1:
                continue
            if mult == length and len(starts) == 1:
                length *= size
            else:
                starts = [s + i * mult for i in range(size) for s in starts]
        if len(starts) > MAX_INTERVALS:
            raise LayoutError(
                f"a rank has {len(starts)} separate rows of it",
                tensor=p.stored,
                hint="read it with tp=1, or under Megatron's names",
            )
        axes.append(_merged([(s, s + length) for s in starts]))
    return list(itertools.product(*axes))


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Intervals in ascending order, with those that touch joined."""
    out: list[Interval] = []
    for lo, hi in sorted(intervals):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(hi, out[-1][1]))
        else:
            out.append((lo, hi))
    return out


def _joined(name: str, shape: Sequence[int], boxes: Sequence[tuple[Interval, ...]]) -> LocalTensor:
    """The tensor that the boxes make, each moved up to the ones before it.

    Raises:
        LayoutError: they make no tensor.
    """
    if not shape or 0 in shape:
        start = (0,) * len(shape)
        whole = (start, tuple(shape))
        return LocalTensor(
            name=name, key=name, shape=tuple(shape), boxes=(whole,), offsets=(start,)
        )
    axes = [_merged([box[d] for box in boxes]) for d in range(len(shape))]
    shape_of_rank = tuple(sum(hi - lo for lo, hi in axis) for axis in axes)
    if sum(prod(hi - lo for lo, hi in box) for box in boxes) != prod(shape_of_rank):
        raise LayoutError(
            "a rank has other columns of some of its rows than of others",
            tensor=name,
            hint="read it with tp=1 and ep=1, or under Megatron's names",
        )
    offsets = [list(itertools.accumulate((hi - lo for lo, hi in axis), initial=0)) for axis in axes]
    grid = list(itertools.product(*(range(len(axis)) for axis in axes)))
    return LocalTensor(
        name=name,
        key=name,
        shape=shape_of_rank,
        boxes=tuple(
            (
                tuple(axes[d][i][0] for d, i in enumerate(index)),
                tuple(axes[d][i][1] for d, i in enumerate(index)),
            )
            for index in grid
        ),
        offsets=tuple(tuple(offsets[d][i] for d, i in enumerate(index)) for index in grid),
    )
