"""Plan what becomes of a checkpoint's objects: everything that is not a tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megtool.convert.config.hybrid import from_hybrid, to_hybrid
from megtool.convert.dialects import is_optimizer_state
from megtool.formats import STATE_DICT_FORMATS
from megtool.megatron_state.extra_states.amax_report import AmaxFinding
from megtool.megatron_state.extra_states.names import (
    EMPTY,
    Site,
    StateNaming,
    is_empty_state,
    is_empty_value,
    is_extra_state,
    list_required_states,
    parse_site,
)
from megtool.megatron_state.extra_states.te_grouped_state import join_gemms
from megtool.megatron_state.extra_states.te_state import decode, to_tree
from megtool.megatron_state.model_space import read_saved_layout
from megtool.megatron_state.param_groups import is_group_object
from megtool.megatron_state.random_state import (
    NO_RNG_HINT,
    find_rerun_obstacle,
    find_rng_obstacle,
    is_rerun_idle,
    is_rerun_object,
    is_rng_object,
)
from megtool.megatron_state.ranks.objects import is_rank_object
from megtool.megatron_state.saved_objects import read_object
from megtool.number_formats.delayed_scaling import Columns
from megtool.options.layout import ParallelConfig
from megtool.pickles.zip_reader import load_object
from megtool.pickles.zip_writer import encode_object
from megtool.plan.copies import DroppedItem
from megtool.run_state.state_dict_groups import is_group_entry
from megtool.source.checkpoint import CheckpointSource
from megtool.spec import layer_sets
from megtool.storage.files import opened
from megtool.tensors.catalogue import Catalogue, StoredObject
from megtool.tensors.sharded import GlobalTensor

_MEGATRON = ("torch_dist", "megatron")
_IN_COMMON = ("args", "checkpoint_version", "iteration", "num_floating", "opt_param_scheduler.")
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CarriedObjects:
    """Objects that are carried from a source to a target.

    `objects` maps names in the target to the source's objects. The lists have names in the source:
    objects that are `moved` unchanged, `derived`, or dropped.
    """

    objects: dict[str, StoredObject] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    dropped: list[DroppedItem] = field(default_factory=list)

    def drop(self, name: str, reason: str, *, is_lost: bool = True) -> None:
        """Record an object as dropped."""
        self.dropped.append(DroppedItem(name=name, reason=reason, is_lost=is_lost))


def plan_objects(
    source: CheckpointSource, tensors: Sequence[GlobalTensor], parallel: ParallelConfig, target: str
) -> CarriedObjects:
    """Plan what becomes of every object in a `target` format that stores `tensors`.

    Extra states get the target's names for their layers and experts; random and rerun state is
    kept if its ranks stay, else dropped with a warning.
    """
    out = CarriedObjects()
    catalogue = source.catalogue
    spelling, renumber = StateNaming.of(tensors), _renumbering(source, tensors)
    has_state = any(is_optimizer_state(t.name) for t in tensors)
    obstacle = _obstacle_finder(catalogue, parallel, target)
    is_state_dict = {target, catalogue.format} <= {*STATE_DICT_FORMATS}
    for name in catalogue.objects:
        if is_group_object(name) and not is_state_dict:
            _place_group(out, source, name, target, has_state)
        elif _is_in_common(catalogue, name, target, has_state):
            out.derived.append(name)
        elif (reason := obstacle(name)) is not None:
            idle = is_rerun_object(name) and is_rerun_idle(catalogue)
            unused = is_rng_object(name) and not source.view.states
            reason = f"{reason}; none was pending" if idle else reason
            out.drop(name, reason, is_lost=not (idle or unused))
        elif is_extra_state(name) and source.is_canonical:
            _place_state(out, source, name, spelling, renumber)
        else:
            _carry(out, catalogue, name, name)
    if any(is_rng_object(d.name) for d in out.dropped):
        _LOG.warning("random state is left out, it belongs to other ranks: %s", NO_RNG_HINT)
    return out


def _is_in_common(catalogue: Catalogue, name: str, target: str, has_state: bool) -> bool:
    """Whether an object of a state dict becomes part of the common state."""
    if target in _MEGATRON and has_state and is_group_entry(name):
        return True
    is_other = catalogue.format == "dcp" and target not in STATE_DICT_FORMATS
    return is_other and name.startswith(_IN_COMMON)


def _carry(out: CarriedObjects, catalogue: Catalogue, name: str, new: str) -> None:
    if new in out.objects:
        out.drop(name, f"another object becomes {new!r}")
        return
    out.objects[new] = catalogue.objects[name]
    out.moved.append(name)


def _place_group(
    out: CarriedObjects, source: CheckpointSource, name: str, target: str, has_state: bool
) -> None:
    if has_state:
        out.derived.append(name)
    elif source.view.states:
        out.drop(name, f"optimizer state has no place in {target!r}")
    else:
        out.drop(name, "its optimizer state is left out", is_lost=False)


def _place_state(
    out: CarriedObjects,
    source: CheckpointSource,
    name: str,
    spelling: StateNaming,
    renumber: Callable[[str], str],
) -> None:
    """Carry an extra state under the target's name for it, or drop it."""
    site = parse_site(name)
    if site is not None:
        site = replace(site, module=renumber(site.module))
    if site is not None and spelling.has(site):
        _carry(out, source.catalogue, name, spelling.name(site))
    elif is_empty_state(source.catalogue, name):
        out.drop(name, EMPTY, is_lost=False)
    elif site is not None:
        out.drop(name, "the target lacks its layer or expert")
    else:
        out.drop(name, "an extra state of several modules, which cannot be separated")


def _renumbering(source: CheckpointSource, tensors: Sequence[GlobalTensor]) -> Callable[[str], str]:
    """From the source's modules to those of the target's class of models."""
    is_hybrid = _are_hybrid(tensors)
    config = source.known_config
    if config is None or layer_sets.parallel_layers(config) or is_hybrid == source.view.is_hybrid:
        return str
    rename = to_hybrid(config) if is_hybrid else from_hybrid(config)
    return lambda module: rename(f"{module}.").removesuffix(".")


def _are_hybrid(tensors: Sequence[GlobalTensor]) -> bool:
    return any(t.name.endswith("decoder.final_norm.weight") for t in tensors)


def _obstacle_finder(
    catalogue: Catalogue, parallel: ParallelConfig, target: str
) -> Callable[[str], str | None]:
    """A function that says why an object cannot be carried, None if it can or is an extra state."""

    def reason(name: str) -> str | None:
        if target in STATE_DICT_FORMATS:
            return None
        if is_rng_object(name):
            return find_rng_obstacle(catalogue, name, parallel)
        if is_rerun_object(name):
            if target != "torch_dist":
                return f"rerun state has no place in {target!r}"
            return find_rerun_obstacle(catalogue, name, parallel)
        if is_rank_object(name):
            if target != "megatron":
                return f"ModelOpt's state of a rank has no place in {target!r}"
            return _rank_obstacle(catalogue, parallel)
        if is_extra_state(name):
            return None
        foreign = target == "megatron" or "/shard_" not in name
        return f"nothing in {target!r} reads it" if foreign else None

    return reason


def _rank_obstacle(catalogue: Catalogue, target: ParallelConfig) -> str | None:
    """Why the state of single ranks' modules cannot be carried to a layout."""
    axes = (
        "tp",
        "pp",
        "vpp",
        "ep",
        "etp",
        "first_stage_layers",
        "last_stage_layers",
        "account_for_embedding",
        "account_for_loss",
        "pipeline_layout",
        "encoder_pp",
    )
    saved = read_saved_layout(catalogue)
    changed = [a for a in axes if getattr(saved, a) != getattr(target, a)]
    return f"ModelOpt's state of the old layout's ranks ({', '.join(changed)})" if changed else None


def encode_objects(
    source: CheckpointSource,
    carried: CarriedObjects,
    tensors: Sequence[GlobalTensor],
    *,
    megatron: bool,
    empty_state: Any = None,
) -> dict[str, Any]:
    """The objects of a `torch_dist` checkpoint (or, unless `megatron`, a plain one), as bytes.

    Extra states that Megatron may load and the source lacks are `empty_state`, unless the source
    has the same format and some extra states: then its run does not load more, but for those of
    experts some of which were pruned.
    """
    catalogue = source.catalogue
    out: dict[str, Any] = {
        n: encode_stored_object(catalogue, o) for n, o in carried.objects.items()
    }
    has_states = catalogue.format == "torch_dist" and any(map(is_extra_state, catalogue.objects))
    if not megatron:
        return out
    required = list_required_states(tensors, out)
    if has_states and _are_hybrid(tensors) and not source.view.is_hybrid:
        required = {n: None for n in required if "output_layer." in n}  # GPTModel saves none
    elif has_states:
        # Pruning leaves out the states of all experts, and a run loads one for each that stays.
        is_pruned = "experts" in (source.pruning or {})
        required = {n: None for n in required if is_pruned and ".experts." in n}
    return out | dict.fromkeys(required, empty_state)


def encode_stored_object(catalogue: Catalogue, stored: StoredObject) -> bytes:
    """An object as torch_dist stores it, a saved list of one; decoded and encoded again.

    Raises:
        FormatError: it is damaged, or names what no checkpoint needs.
    """
    if stored.extent is None:
        return encode_object(stored.value if stored.kind == "leaf" else [stored.value])
    path = catalogue.path(stored.extent[0])
    with opened(path) as fd:
        tree = load_object(fd, *stored.extent[1:], file=path)
    return encode_object(tree if stored.kind == "bytes" else [tree])


def read_objects(source: CheckpointSource, carried: CarriedObjects) -> dict[str, Any]:
    """The carried objects by their new names, as inert trees."""
    return {n: read_object(source.catalogue, o) for n, o in carried.objects.items()}


def join_expert_states(
    source: CheckpointSource,
    carried: CarriedObjects,
    experts: int,
    findings: list[AmaxFinding],
    *,
    columns: Columns,
) -> dict[Site, Any]:
    """Join the states of the `experts` that share a module, by the site of the first of them.

    Transformer Engine keeps one state for all of them, with the `columns` of the release that will
    load it. The states are removed from `carried`. Empty ones are dropped; if only some are empty,
    that is added to `findings`. States that do not fit together are dropped.
    """
    if experts == 1:
        return {}
    names_of: dict[Site, list[str]] = {}
    for name in carried.objects:
        if (site := parse_site(name)) is not None and site.expert is not None:
            first = site.expert // experts * experts
            names_of.setdefault(Site(site.module, first), []).append(name)
    out: dict[Site, Any] = {}
    for site, names in names_of.items():
        stored = {
            _expert_index(name) - (site.expert or 0): carried.objects.pop(name) for name in names
        }
        values = [
            read_object(source.catalogue, stored[k]) if k in stored else None
            for k in range(experts)
        ]
        joined_names = {o.name for o in stored.values()}
        carried.moved = [name for name in carried.moved if name not in joined_names]
        joined = _join_states(values, columns)
        if all(map(is_empty_value, values)):
            for name in sorted(joined_names):
                carried.drop(name, EMPTY, is_lost=False)
        elif joined is None:
            for name in sorted(joined_names):
                carried.drop(name, "the extra states of these experts do not fit together")
        else:
            out[site] = joined
            carried.derived += sorted(joined_names)
            if missing := [k for k, v in enumerate(values) if is_empty_value(v)]:
                text = f"of expert {missing[0] + (site.expert or 0)}, though others have one"
                findings.append(AmaxFinding(module=site.module, kind="missing", text=text))
    return out


def _expert_index(name: str) -> int:
    site = parse_site(name)
    return site.expert or 0 if site is not None else 0


def _join_states(values: Sequence[Any], columns: Columns) -> Any:
    """One extra state of several experts, in their order; None if they do not fit or are empty."""
    states = [None if is_empty_value(v) else decode(v) for v in values]
    if any(s is None and not is_empty_value(v) for s, v in zip(states, values, strict=True)):
        return None
    joined = join_gemms(states, columns)
    return None if joined is None else to_tree(joined)
