"""Convert small state inside legacy rank files to the objects of other formats, and back.

Extra states are entries of each rank's model, by the names of its own modules; random state and
ModelOpt's are entries of each rank's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from megtool.convert.megatron.sharding import layers_of_stage
from megtool.megatron_state.extra_states.merge_ranks import RankStateCollector, StateMerge
from megtool.megatron_state.extra_states.names import Site, StateNaming
from megtool.megatron_state.random_state import RNG, rng_object_name
from megtool.options.layout import ParallelConfig
from megtool.pickles.reader import dict_items
from megtool.spec.model_config import ModelConfig
from megtool.tensors.catalogue import Catalogue, StoredObject

MODELOPT = re.compile(r"modelopt_state(?:_\d+)?")
_MODELOPT_OF_RANK = re.compile(r"(mp_rank_[\d_]+)/(modelopt_state(?:_\d+)?)")
_OLD_RNG = (
    "random_rng_state",
    "np_rng_state",
    "torch_rng_state",
    "cuda_rng_state",
    "rng_tracker_states",
)


class RankPosition(Protocol):
    """The position of a rank in the layout."""

    @property
    def tp(self) -> int:
        """Its tensor rank."""

    @property
    def pp(self) -> int:
        """Its pipeline stage."""

    @property
    def ep(self) -> int:
        """Its expert rank."""


def read_rank_objects(
    catalogue: Catalogue,
    ranks: Mapping[str, RankPosition],
    config: ModelConfig,
    parallel: ParallelConfig,
) -> tuple[dict[str, StoredObject], StateMerge]:
    """The objects in the files of `ranks` (by folder), at the layout they were saved at.

    Extra states that are None are left out. Those of one module in
    several files are merged; the second value says how.
    """
    from megtool.formats.megatron_legacy.rank_file import MODEL_KEY

    values_by_name: dict[str, Any] = {}
    states = RankStateCollector()
    trees = catalogue.metadata.get("rank_trees")
    experts_per_rank = config.moe.num_experts // parallel.ep
    for folder, rank in ranks.items():
        top = dict_items(trees[folder]) if isinstance(trees, dict) and folder in trees else None
        top_level = {k: v for k, v in top or () if isinstance(k, str)}
        if rank.ep == 0 and (state := _random_state(top_level)) is not None:
            values_by_name[rng_object_name(rank.pp, rank.tp, parallel)] = state
        for key, value in top_level.items():
            if MODELOPT.fullmatch(key):
                values_by_name[f"{folder}/{key}"] = value
            elif MODEL_KEY.fullmatch(key):
                chunk = int(key.removeprefix("model") or 0)
                layers = layers_of_stage(config, parallel, rank.pp, chunk)
                states.add(
                    value,
                    f"{folder}/{key}",
                    first_layer=layers.start,
                    first_expert=rank.ep * experts_per_rank,
                    experts=experts_per_rank,
                )
    spelling = StateNaming(0, config.moe.num_experts, frozenset())
    values = states.values()
    for site, value in values.items():
        values_by_name[spelling.name(site) if isinstance(site, Site) else site] = value
    objects = {n: StoredObject(name=n, kind="object", value=v) for n, v in values_by_name.items()}
    return objects, states.summarize_merge(values)


def _random_state(entries_by_key: Mapping[str, Any]) -> Any:
    """A rank's random state; old files store its parts separately."""
    if entries_by_key.get(RNG) is not None:
        return entries_by_key[RNG]
    parts = {k: entries_by_key[k] for k in _OLD_RNG if k in entries_by_key}
    return [parts] if parts else None


def select_chunk_sites(
    sites: Iterable[Site], layers: range, experts: range, modules: Iterable[str]
) -> list[Site]:
    """The sites that a rank's chunk has: of its layers and experts, and of its other `modules`."""
    module_names = set(modules)
    parents = {m.rpartition(".")[0] for m in module_names}
    stacks = {m.partition(".")[0] for m in module_names}
    out = []
    for site in sites:
        inner = site.module.removesuffix(".core_attention")
        if site.expert is not None and site.expert not in experts:
            continue
        if site.layer is not None:
            # Layers of an encoder and of its decoder have the same numbers.
            if site.layer in layers and site.module.partition(".")[0] in stacks:
                out.append(site)
        elif site.module in module_names or (inner != site.module and inner in parents):
            out.append(site)
    return out


def select_rank_state(
    objects: Mapping[str, Any], folder: str, rank: tuple[int, int], parallel: ParallelConfig
) -> dict[str, Any]:
    """The state other than its model of the rank of a `folder`, at (tensor rank, stage)."""
    out: dict[str, Any] = {}
    tp, pp = rank
    if (name := rng_object_name(pp, tp, parallel)) in objects:
        out[RNG] = objects[name]
    for name, value in objects.items():
        match = _MODELOPT_OF_RANK.fullmatch(name)
        if match and match[1] == folder:
            out[match[2]] = value
    return out


def is_rank_object(name: str) -> bool:
    """Whether the object is ModelOpt's state of one rank's modules."""
    return _MODELOPT_OF_RANK.fullmatch(name) is not None
