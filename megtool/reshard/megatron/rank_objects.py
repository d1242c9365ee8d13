"""Rank objects: small state inside legacy rank files, as the objects other formats have, and back.

Extra states are entries of each rank's model, by the names of its own modules; random state and
ModelOpt's are entries of each rank's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from megtool.checkpoint.catalogue import Catalogue, StoredObject
from megtool.checkpoint.formats.megatron_legacy_file import MODEL_KEY, entries
from megtool.checkpoint.random_state import RNG, rng_name
from megtool.config import ModelConfig, ParallelConfig
from megtool.parallel.pipeline_split import Pipeline
from megtool.reshard.megatron.extra_state_names import Site, Spelling
from megtool.reshard.megatron.rank_extra_state import Merged, RankStates

MODELOPT = re.compile(r"modelopt_state(?:_\d+)?")
_OF_RANK = re.compile(r"(mp_rank_[\d_]+)/(modelopt_state(?:_\d+)?)")
_OLD_RNG = (
    "random_rng_state",
    "np_rng_state",
    "torch_rng_state",
    "cuda_rng_state",
    "rng_tracker_states",
)


class Rank(Protocol):
    """A rank's place."""

    @property
    def tp(self) -> int:
        """Its tensor rank."""

    @property
    def pp(self) -> int:
        """Its pipeline stage."""

    @property
    def ep(self) -> int:
        """Its expert rank."""


def rank_objects(
    catalogue: Catalogue,
    ranks: Mapping[str, Rank],
    config: ModelConfig,
    parallel: ParallelConfig,
) -> tuple[dict[str, StoredObject], Merged]:
    """The objects that the files of `ranks` (by folder) hold, at the layout they were saved at.

    Extra states that are None, as of layers that have none, are left out. Those of one module in
    several files are merged; the second value says how.
    """
    found: dict[str, Any] = {}
    states = RankStates()
    trees = catalogue.metadata.get("rank_trees")
    each = config.num_experts // parallel.ep
    for folder, rank in ranks.items():
        top = entries(trees[folder]) if isinstance(trees, dict) and folder in trees else None
        held = {k: v for k, v in top or () if isinstance(k, str)}
        if rank.ep == 0 and (state := _random_state(held)) is not None:
            found[rng_name(rank.pp, rank.tp, parallel)] = state
        for key, value in held.items():
            if MODELOPT.fullmatch(key):
                found[f"{folder}/{key}"] = value
            elif MODEL_KEY.fullmatch(key):
                chunk = int(key.removeprefix("model") or 0)
                layers = Pipeline.of(parallel).layers_of(config.num_layers, rank.pp, chunk)
                states.add(
                    value,
                    f"{folder}/{key}",
                    first_layer=layers.start,
                    first_expert=rank.ep * each,
                    experts=each,
                )
    spelling = Spelling(0, config.num_experts, frozenset())
    values = states.values()
    for site, value in values.items():
        found[spelling.name(site) if isinstance(site, Site) else site] = value
    objects = {n: StoredObject(name=n, kind="object", value=v) for n, v in found.items()}
    return objects, states.merged(values)


def _random_state(held: Mapping[str, Any]) -> Any:
    """A rank's random state; old files keep its parts by themselves."""
    if held.get(RNG) is not None:
        return held[RNG]
    parts = {k: held[k] for k in _OLD_RNG if k in held}
    return [parts] if parts else None


def of_chunk(
    sites: Iterable[Site], layers: range, experts: range, modules: Iterable[str]
) -> list[Site]:
    """The sites that a rank's chunk has: of its layers and experts, and of its other `modules`."""
    known = set(modules)
    parents = {m.rpartition(".")[0] for m in known}
    out = []
    for site in sites:
        inner = site.module.removesuffix(".core_attention")
        if site.expert is not None and site.expert not in experts:
            continue
        if site.layer is not None:
            if site.layer in layers:
                out.append(site)
        elif site.module in known or (inner != site.module and inner in parents):
            out.append(site)
    return out


def own_state(
    objects: Mapping[str, Any], folder: str, rank: tuple[int, int], parallel: ParallelConfig
) -> dict[str, Any]:
    """What the rank of a `folder`, at (tensor rank, stage), keeps beside its model."""
    out: dict[str, Any] = {}
    tp, pp = rank
    if (name := rng_name(pp, tp, parallel)) in objects:
        out[RNG] = objects[name]
    for name, value in objects.items():
        match = _OF_RANK.fullmatch(name)
        if match and match[1] == folder:
            out[match[2]] = value
    return out


def is_of_rank(name: str) -> bool:
    """The object is ModelOpt's state of one rank's modules."""
    return _OF_RANK.fullmatch(name) is not None
