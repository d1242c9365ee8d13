"""Folders of torch_checkpointing: a file per item and rank."""

from __future__ import annotations

from typing import Any

from megtool.dtypes import DType
from megtool.formats.auxiliary_files import MODELOPT_FOLDER
from megtool.formats.torch_checkpointing.item_files import is_leaf
from megtool.formats.torch_checkpointing.layout import (
    plan_torch_checkpointing_layout as lay_out_items,
)
from megtool.formats.torch_checkpointing.metadata import NestedPath
from megtool.megatron_state.extra_states.names import is_empty_value
from megtool.megatron_state.saved_objects import read_object
from megtool.options.layout import ParallelConfig
from megtool.options.target import TargetOptions
from megtool.pickles.zip_reader import load_object
from megtool.reshard.writers.target_spec import Target
from megtool.reshard.writers.torch_dist import shard_rows
from megtool.run_state.checkpoint_objects import CarriedObjects, plan_objects
from megtool.run_state.common_state import account_for_common
from megtool.run_state.state_dict_groups import make_group_entries
from megtool.source.checkpoint import CheckpointSource, collect_small_files
from megtool.storage.files import opened
from megtool.tensors.catalogue import Catalogue, StoredObject


def plan_layout(
    source: CheckpointSource, options: TargetOptions, out: Target, dtype: DType | None
) -> None:
    """Plan `--dp` ranks' files, with all objects at the places where the source has them."""
    catalogue = source.catalogue
    parallel = out.parallel or ParallelConfig()
    tensors = out.side.tensors
    carried = plan_objects(source, tensors, parallel, out.format)
    objects = _select_objects(catalogue, carried)
    out.account(carried.moved, carried.derived, carried.dropped)
    entries = {
        name: entry
        for name, entry in make_group_entries(catalogue, tensors).items()
        if is_leaf(entry[1])
    }
    objects |= {name: value for name, (_, value) in entries.items()}
    out.account(*account_for_common(source, None, out.format, has_groups=bool(entries)))
    paths = _paths(catalogue) | {name: path for name, (path, _) in entries.items()}
    out.destination = lay_out_items(
        tensors,
        shard_rows(tensors, parallel.dp),
        ranks=parallel.dp,
        paths=paths,
        sequences=catalogue.metadata.get("sequences") or _find_lists(paths),
        aliases=_aliases(catalogue),
        objects=objects,
        small_files=collect_small_files(source, dtype, (f"{MODELOPT_FOLDER}/",)),
    )


def _select_objects(catalogue: Catalogue, carried: CarriedObjects) -> dict[str, Any]:
    """The values of objects that have a place in a state dict; the others are dropped."""
    out: dict[str, Any] = {}
    for name, stored in carried.objects.items():
        value = _read_value(catalogue, stored)
        reason = None
        if "/shard_" in name:
            reason = "nothing in 'torch_checkpointing' reads it"
        elif not is_leaf(value):
            reason = "it holds tensors or dicts, which would be other entries of the state dict"
        if reason is None:
            out[name] = value
        else:
            carried.drop(name, reason, is_lost=not is_empty_value(value))
    carried.moved = [n for n in carried.moved if n not in {d.name for d in carried.dropped}]
    return out


def _paths(catalogue: Catalogue) -> dict[str, NestedPath]:
    """Where each name is in a nested state dict, for names that the source has at such a place.

    A state dict that is not nested is one model's.
    """
    nested = catalogue.metadata.get("nested_paths")
    if nested is not None:
        return dict(nested)
    planned = catalogue.metadata.get("planner_data")
    if not isinstance(planned, dict):
        return {}
    return {n: tuple(p) for n, p in planned.items() if len(p) > 1}


def _find_lists(paths: dict[str, NestedPath]) -> dict[NestedPath, str]:
    """The paths that a number follows: torch.distributed.checkpoint has numbers in lists only."""
    return {
        path[:k]: "list"
        for path in paths.values()
        for k, key in enumerate(path)
        if k and isinstance(key, int)
    }


def _aliases(catalogue: Catalogue) -> dict[str, str]:
    aliases = catalogue.metadata.get("aliases")
    if catalogue.format != "torch_checkpointing" or not isinstance(aliases, dict):
        return {}
    return dict(aliases)


def _read_value(catalogue: Catalogue, stored: StoredObject) -> Any:
    if catalogue.format != "dcp" or stored.extent is None:
        return read_object(catalogue, stored)
    path = catalogue.path(stored.extent[0])
    with opened(path) as fd:  # what is a list of one there is such a list
        return load_object(fd, *stored.extent[1:], file=path)
