"""Slices of whole tensors that a rank owns."""

from __future__ import annotations

from typing import Any

import numpy as np

from megtool.convert.dialects import TargetView
from megtool.convert.megatron.rank_parameters import RankPlace, rank_parameters
from megtool.convert.rank_tensors import RankCoordinates
from megtool.options.layout import ParallelConfig
from megtool.spec.model_config import ModelConfig

Arrays = dict[str, np.ndarray[Any, Any]]


def slice_tensors(
    target: TargetView,
    whole: Arrays,
    model: ModelConfig,
    parallel: ParallelConfig,
    seat: RankCoordinates,
) -> Arrays:
    """The rank's boxes cut out of the whole, gate and up one after the other, experts stacked."""
    out: dict[str, list[np.ndarray[Any, Any]]] = {}
    ranks = rank_parameters(target.tensors, model, parallel)
    dense = ranks.get(RankPlace(seat.stage, 0, 0, seat.tp), [])
    experts = ranks.get(RankPlace(seat.stage, 0, seat.ep, seat.etp), [])
    for p in [*(p for p in dense if not p.is_expert), *(p for p in experts if p.is_expert)]:
        boxes = [whole[p.key][tuple(map(slice, lo, hi))] for lo, hi in p.boxes]
        out.setdefault(p.key, []).append(np.concatenate(boxes, axis=int(p.is_expert)))
    return {key: np.concatenate(found) for key, found in out.items()}
