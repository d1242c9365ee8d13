"""Random state and rerun state, which belong to single ranks, and the layouts that accept them.

Random state is one object per pipeline and tensor rank, `rng_state/shard_<pp>.<tp>_<PP>.<TP>`, a
list with one entry, or with one per data-parallel rank (`--data-parallel-random-init`). With
expert parallelism there may be an object per data-parallel rank (`<pp>.<tp>.<dp>`). The rerun
state machine has one object per rank of the world.
"""

from __future__ import annotations

import re

from megtool.megatron_state.saved_objects import read_object, saved_args
from megtool.options.layout import ParallelConfig
from megtool.pickles.reader import Inert
from megtool.tensors.catalogue import Catalogue

RNG = "rng_state"
RERUN = "rerun_state_machine"
NO_RNG_HINT = "start with --no-load-rng; the run then uses new random seeds"

_RNG = re.compile(r"(?:.*\.)?rng_state/shard_(\d+(?:\.\d+)+)_(\d+(?:\.\d+)+)")
_RERUN = re.compile(r"rerun_state_machine_state/shard_(\d+)_(\d+)")


def rng_object_name(pp: int, tp: int, parallel: ParallelConfig) -> str:
    """The object name of the random state of a pipeline and tensor rank."""
    return f"{RNG}/shard_{pp}.{tp}_{parallel.pp}.{parallel.tp}"


def is_rng_object(name: str) -> bool:
    """Whether the object is random state."""
    return _RNG.fullmatch(name) is not None


def is_rerun_object(name: str) -> bool:
    """Whether the object is a rank's part of the rerun state machine."""
    return _RERUN.fullmatch(name) is not None


def find_rng_obstacle(catalogue: Catalogue, name: str, parallel: ParallelConfig) -> str | None:
    """Why random state cannot be used in a layout; None if it can.

    Ranks of the new layout take the state of their pipeline and tensor rank, so pp and tp must not
    change, nor dp if the state differs between data-parallel ranks.
    """
    match = _RNG.fullmatch(name)
    sizes = [int(n) for n in match[2].split(".")] if match else []
    saved, expected = sizes[:2], [parallel.pp, parallel.tp]
    if saved != expected:
        return (
            f"random state of {_format_sizes(saved)} ranks (pp, tp) in a layout of "
            f"{_format_sizes(expected)}: {NO_RNG_HINT}"
        )
    replicas = parallel.dp * parallel.cp
    for count in sizes[2:]:
        if count not in (replicas, parallel.dp):
            return (
                f"random state of {count} data-parallel ranks in a layout of {parallel.dp}: "
                f"{NO_RNG_HINT}"
            )
    entries = read_object(catalogue, catalogue.objects[name])
    if isinstance(entries, list) and len(entries) not in (1, parallel.dp):
        return (
            f"random state of {len(entries)} data-parallel ranks in a layout of {parallel.dp}: "
            f"{NO_RNG_HINT}"
        )
    return None


def find_rerun_obstacle(catalogue: Catalogue, name: str, parallel: ParallelConfig) -> str | None:
    """Why a rank's rerun state cannot be used in a layout; None if it can.

    Megatron loads it only in the same layout.
    """
    match = _RERUN.fullmatch(name)
    count = int(match[2]) if match else 0
    args = saved_args(catalogue)
    axes = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "data_parallel_size": parallel.dp,
    }
    if count != parallel.world_size or any(args.get(k, n) != n for k, n in axes.items()):
        return f"rerun state of a world of {count} ranks, in another layout"
    return None


def is_rerun_idle(catalogue: Catalogue) -> bool:
    """Whether no step is waiting to be run again, so the rerun state carries no information."""
    common = catalogue.metadata.get("common")
    rerun = common.get(RERUN) if isinstance(common, dict) else None
    state = rerun.get("state") if isinstance(rerun, dict) else None
    return isinstance(state, Inert) and bool(state.args) and state.args[-1] == 0


def _format_sizes(sizes: list[int]) -> str:
    return " x ".join(map(str, sizes))
