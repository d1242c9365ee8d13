"""Objects: what a checkpoint holds beside its tensors, and which of it goes where."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megtool.checkpoint.catalogue import Catalogue, StoredObject
from megtool.checkpoint.containers.te_extra_state import decode, to_tree
from megtool.checkpoint.containers.te_grouped_state import join
from megtool.checkpoint.containers.zip_reader import load_object
from megtool.checkpoint.containers.zip_writer import object_item
from megtool.checkpoint.formats.header_reader import read_exact
from megtool.checkpoint.megatron_metadata import object_value
from megtool.checkpoint.param_groups import is_group_object
from megtool.checkpoint.plan import Dropped
from megtool.checkpoint.random_state import (
    NO_RNG,
    is_rerun,
    is_rerun_idle,
    is_rng,
    rerun_obstacle,
    rng_obstacle,
)
from megtool.config import ParallelConfig
from megtool.convert.dialects import is_optimizer_state
from megtool.number_formats.delayed_scaling import Columns
from megtool.reshard.megatron.amax_report import AmaxFinding
from megtool.reshard.megatron.extra_state_names import (
    EMPTY,
    Site,
    Spelling,
    asked_for,
    holds_nothing,
    is_empty_state,
    is_extra_state,
    site_of,
)
from megtool.reshard.megatron.model_space import saved_layout
from megtool.reshard.megatron.rank_objects import is_of_rank
from megtool.reshard.open_source import CheckpointSource
from megtool.tensors.sharded import GlobalTensor

_IN_COMMON = ("args", "checkpoint_version", "iteration", "num_floating", "opt_param_scheduler.")
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Carried:
    """Objects on their way.

    `kept` holds, by its name in the target, where each that travels lies in the source. The others
    are lists of names in the source: `moved` as they are, `derived` written anew, or dropped.
    """

    kept: dict[str, StoredObject] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)

    def drop(self, name: str, reason: str, *, is_lost: bool = True) -> None:
        """List an object as dropped."""
        self.dropped.append(Dropped(name=name, reason=reason, is_lost=is_lost))


def carried_objects(
    source: CheckpointSource, tensors: Sequence[GlobalTensor], parallel: ParallelConfig, target: str
) -> Carried:
    """What becomes of every object in a `target` of Megatron's that stores `tensors`.

    Extra states follow their layers and experts to the names that the target has for them; random
    and rerun state stay while their ranks do, with a warning where they do not.
    """
    out = Carried()
    held = source.catalogue
    spelling = Spelling.of(tensors)
    has_state = any(is_optimizer_state(t.name) for t in tensors)
    obstacle = _obstacles(held, parallel, target)
    for name in held.objects:
        if is_group_object(name) and target != "dcp":
            _place_group(out, source, name, target, has_state)
        elif held.format == "dcp" and target != "dcp" and name.startswith(_IN_COMMON):
            out.derived.append(name)
        elif (reason := obstacle(name)) is not None:
            idle = is_rerun(name) and is_rerun_idle(held)
            out.drop(name, f"{reason}; none was pending" if idle else reason, is_lost=not idle)
        elif is_extra_state(name) and source.is_canonical:
            _place_state(out, source, name, spelling)
        else:
            _keep(out, held, name, name)
    if any(is_rng(d.name) for d in out.dropped):
        _LOG.warning("random state is left out, it belongs to other ranks: %s", NO_RNG)
    return out


def _keep(out: Carried, held: Catalogue, name: str, new: str) -> None:
    if new in out.kept:
        out.drop(name, f"another object becomes {new!r}")
        return
    out.kept[new] = held.objects[name]
    out.moved.append(name)


def _place_group(
    out: Carried, source: CheckpointSource, name: str, target: str, has_state: bool
) -> None:
    if has_state:
        out.derived.append(name)
    elif source.side.states:
        out.drop(name, f"optimizer state has no place in {target!r}")
    else:
        out.drop(name, "its optimizer state is left out", is_lost=False)


def _place_state(out: Carried, source: CheckpointSource, name: str, spelling: Spelling) -> None:
    """An extra state under the name the target has for it."""
    site = site_of(name)
    if site is not None and spelling.has(site):
        _keep(out, source.catalogue, name, spelling.name(site))
    elif is_empty_state(source.catalogue, name):
        out.drop(name, EMPTY, is_lost=False)
    elif site is not None:
        out.drop(name, "the target lacks its layer or expert")
    else:
        out.drop(name, "an extra state of several modules together, which is not taken apart")


def _obstacles(
    held: Catalogue, parallel: ParallelConfig, target: str
) -> Callable[[str], str | None]:
    """Why an object cannot travel; None where it can, or is an extra state."""

    def reason(name: str) -> str | None:
        if target == "dcp":
            return None
        if is_rng(name):
            return rng_obstacle(held, name, parallel)
        if is_rerun(name):
            if target != "torch_dist":
                return f"rerun state has no place in {target!r}"
            return rerun_obstacle(held, name, parallel)
        if is_of_rank(name):
            if target != "megatron":
                return f"ModelOpt's state of a rank has no place in {target!r}"
            return _rank_obstacle(held, parallel)
        if is_extra_state(name):
            return None
        foreign = target == "megatron" or "/shard_" not in name
        return f"nothing in {target!r} reads it" if foreign else None

    return reason


def _rank_obstacle(held: Catalogue, want: ParallelConfig) -> str | None:
    """Why what belongs to the modules of single ranks cannot go to a layout."""
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
    )
    have = saved_layout(held)
    moved = [a for a in axes if getattr(have, a) != getattr(want, a)]
    return f"ModelOpt's state of the old layout's ranks ({', '.join(moved)})" if moved else None


def written_objects(
    source: CheckpointSource,
    carried: Carried,
    tensors: Sequence[GlobalTensor],
    *,
    megatron: bool,
    nothing: Any = None,
) -> dict[str, Any]:
    """The objects of a `torch_dist` checkpoint (or, unless `megatron`, a plain one), as bytes.

    Extra states that Megatron may ask for and the source lacks are `nothing`, unless the source is
    a checkpoint of the same kind that has some: its own run did not ask for more.
    """
    held = source.catalogue
    out: dict[str, Any] = {n: item_of(held, o) for n, o in carried.kept.items()}
    has_own = held.format == "torch_dist" and any(map(is_extra_state, held.objects))
    if megatron and not has_own:
        out |= dict.fromkeys(asked_for(tensors, out), nothing)
    return out


def item_of(catalogue: Catalogue, held: StoredObject) -> bytes:
    """An object as torch_dist keeps one, a saved list of it alone; its own bytes if it is that."""
    if held.extent is None:
        return object_item([held.value])
    data = read_exact(catalogue.path(held.extent[0]), *held.extent[1:])
    if held.kind != "object":
        return data
    path = catalogue.path(held.extent[0])
    with open(path, "rb") as f:
        return object_item([load_object(f.fileno(), *held.extent[1:], file=path)])


def values_of(source: CheckpointSource, carried: Carried) -> dict[str, Any]:
    """The objects on their way by their new names, as inert trees."""
    return {n: object_value(source.catalogue, o) for n, o in carried.kept.items()}


def join_grouped(
    source: CheckpointSource,
    carried: Carried,
    experts: int,
    findings: list[AmaxFinding],
    *,
    columns: Columns,
) -> dict[Site, Any]:
    """The states of experts that share one module, `experts` of them, each as that of the first.

    Transformer Engine keeps one state for all of them together, with its `columns` as the release
    that will read it has them. They are taken out of what is carried; those that hold nothing need
    no place, or have seen nothing where others have, which is added to `findings`, and those that
    do not fit together are dropped.
    """
    if experts == 1:
        return {}
    found: dict[Site, list[str]] = {}
    for name in carried.kept:
        if (site := site_of(name)) is not None and site.expert is not None:
            first = site.expert // experts * experts
            found.setdefault(Site(site.module, first), []).append(name)
    out: dict[Site, Any] = {}
    for site, names in found.items():
        held = {_expert(name) - (site.expert or 0): carried.kept.pop(name) for name in names}
        values = [
            object_value(source.catalogue, held[k]) if k in held else None for k in range(experts)
        ]
        gone = {o.name for o in held.values()}
        carried.moved = [name for name in carried.moved if name not in gone]
        joined = _joined(values, columns)
        if all(map(holds_nothing, values)):
            for name in sorted(gone):
                carried.drop(name, EMPTY, is_lost=False)
        elif joined is None:
            for name in sorted(gone):
                carried.drop(name, "the extra states of these experts do not fit together")
        else:
            out[site] = joined
            carried.derived += sorted(gone)
            if few := [k for k, v in enumerate(values) if holds_nothing(v)]:
                text = f"of expert {few[0] + (site.expert or 0)}, though others have one"
                findings.append(AmaxFinding(module=site.module, kind="missing", text=text))
    return out


def _expert(name: str) -> int:
    site = site_of(name)
    return site.expert or 0 if site is not None else 0


def _joined(values: Sequence[Any], columns: Columns) -> Any:
    """One extra state of several modules', in the order of their experts; None if there is none."""
    states = [None if holds_nothing(v) else decode(v) for v in values]
    if any(s is None and not holds_nothing(v) for s, v in zip(states, values, strict=True)):
        return None
    whole = join(states, columns)
    return None if whole is None else to_tree(whole)
