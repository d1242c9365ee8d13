"""What each model-parallel rank holds of a checkpoint, by the layout that it was saved at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megtool.convert.megatron.sharding import shard
from megtool.errors import MegtoolError
from megtool.formats import RANK_SHARDED_FORMATS
from megtool.megatron_state.model_space import read_saved_layout
from megtool.parallel.mesh import Mesh
from megtool.report.sections import number_span
from megtool.run_state.common_state import read_source_layout
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.box import Ints
from megtool.tensors.sharded import GlobalTensor

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.")
_NUM_LARGEST, _MANY_RANKS = 4, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContents:
    """What ranks of one position hold: bytes of tensors (each counted at one rank of its replicas),
    the number of tensors, and the layers as ranges. `num_ranks` share the position. `largest` are
    the tensors with the most bytes there; a single one if there are more than a thousand positions.
    """

    pp: int
    tp: int
    ep: int
    num_ranks: int
    num_bytes: int
    num_tensors: int
    layers: str
    expert_bytes: int
    largest: tuple[tuple[str, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The contents as plain data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def list_rank_contents(source: CheckpointSource) -> tuple[RankContents, ...]:
    """What the ranks of a Megatron checkpoint hold, by pp, ep and tp; nothing where that is not
    known: another format, no args, or tensors that are not those of a known model."""
    catalogue, config = source.catalogue, source.model.config if source.model else None
    if catalogue.format not in RANK_SHARDED_FORMATS or not read_source_layout(catalogue):
        return ()
    try:
        parallel = read_saved_layout(catalogue)
        tensors = [t for t in catalogue.tensors if t.shape]
        shards = shard(tensors, parallel, config=config)
        mesh = Mesh(parallel)
    except MegtoolError:
        return ()
    position = mesh.position(shards.owner.astype(np.int64))
    is_expert = np.array([bool(_EXPERT.search(t.name)) for t in tensors], bool)[shards.tensor]
    item = np.array([t.dtype.itemsize for t in tensors], np.int64)
    sizes = shards.boxes.volume() * item[shards.tensor]
    layer_of = _layers_of(tensors, shards.tensor.astype(np.int64), shards.boxes.lo)
    # Dense shards are the same in every expert-parallel rank, and counted at the first.
    tp = np.where(is_expert, position["etp"], position["tp"])
    width = max(parallel.tp, parallel.etp)
    cell = (position["pp"] * parallel.ep + position["ep"]) * width + tp
    count = parallel.pp * parallel.ep * width
    num_bytes = np.bincount(cell, sizes, count).astype(np.int64)
    expert_bytes = np.bincount(cell, sizes * is_expert, count).astype(np.int64)
    keys = cell * len(tensors) + shards.tensor.astype(np.int64)
    pairs, pair = np.unique(keys, return_inverse=True)
    cells, members = np.divmod(pairs, len(tensors))
    num_tensors = np.bincount(cells, minlength=count)
    pair_bytes = np.bincount(pair, sizes, len(pairs)).astype(np.int64)
    order = np.lexsort((-pair_bytes, cells))
    first = np.cumsum(num_tensors) - num_tensors
    shown = _NUM_LARGEST if count <= _MANY_RANKS else 1
    layers: list[list[str]] = [[] for _ in range(count)]
    for number, layer in np.unique(np.stack([cell, layer_of]), axis=1).T.tolist():
        if layer >= 0:
            layers[number].append(str(layer))
    return tuple(
        RankContents(
            pp=n // width // parallel.ep,
            tp=n % width,
            ep=n // width % parallel.ep,
            num_ranks=max(1, parallel.world_size // count),
            num_bytes=int(num_bytes[n]),
            num_tensors=int(num_tensors[n]),
            layers=number_span(layers[n]).strip("{}") if layers[n] else "",
            expert_bytes=int(expert_bytes[n]),
            largest=tuple(
                (tensors[int(members[i])].name, int(pair_bytes[i]))
                for i in order[first[n] : first[n] + min(shown, num_tensors[n])].tolist()
            ),
        )
        for n in range(count)
    )


def _layers_of(tensors: Sequence[GlobalTensor], tensor: Ints, lo: Ints) -> Ints:
    """The layer of each shard: by its tensor's name, or by its row of a tensor of all layers."""
    named, has_axis = [], []
    for t in tensors:
        match = _LAYER.search(t.name)
        named.append(int(match[1]) if match else -1)
        has_axis.append(match is None and ".layers." in t.name)
    layer = np.array(named, np.int64)[tensor]
    stacked = np.array(has_axis, bool)[tensor]
    return np.where(stacked, lo[:, 0], layer)
