"""Plan entries: each target tensor paired with its source, over one common view."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megtool.errors import LayoutError, MappingError
from megtool.plan.copies import Fill, Op, PlanEntry, PlanSource
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement, refine

if TYPE_CHECKING:
    from megtool.transport.weight_update import WeightUpdate

View = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_Refined = dict[tuple[View, View], tuple[View, View]]


@dataclass(frozen=True, slots=True)
class CopiedNames:
    """Further names of stored tensors, the canonical one of each, and where parts are read."""

    names: Mapping[str, str]
    parts: Mapping[str, Placement]


def build_entries(
    sources: Sequence[PlanSource],
    target: Catalogue,
    placements: Mapping[str, Placement],
    fills: Sequence[Fill],
    copies: CopiedNames,
    shares: Sequence[float],
) -> list[PlanEntry]:
    """The entries of a plan, fills last; see `planner.build_plan` for arguments and errors."""
    refined: _Refined = {}
    out: list[PlanEntry] = []
    for name, p in placements.items():
        source_name = copies.names.get(name, name)
        part = copies.parts.get(name)
        if part is not None and (shares or sources[0].updates.get(source_name)):
            if part.is_identity:  # another copy of all of it, and it is the original that is used
                part = None
            else:
                raise LayoutError(
                    "ranks of this layout hold parts of a tensor that is computed here",
                    tensor=source_name,
                    hint="write one that ranks divide evenly (--tp, --ep), or torch_dist",
                )
        if shares and _is_float_target(p, target):
            out += _reduction_entries(name, source_name, p, sources, target, shares, len(out))
        else:
            entry = _copy_entry(name, source_name, p, sources, target, refined, part)
            updates = sources[entry.source_index].updates.get(source_name)
            out.append(_merge_entry(entry, updates, sources, target) if updates else entry)
    return out + [_fill_entry(f, target) for f in fills]


def placement_view(p: Placement) -> View:
    """The view of a placement (shape, dims, mults), which many placements share."""
    return p.shape, p.dims, p.mults


def _with_view(p: Placement, view: View) -> Placement:
    shape, dims, mults = view
    return replace(p, shape=shape, dims=dims, mults=mults)


def _copy_entry(
    name: str,
    source_name: str,
    target_placement: Placement,
    sources: Sequence[PlanSource],
    target: Catalogue,
    refined: _Refined,
    part: Placement | None = None,
) -> PlanEntry:
    """One tensor's entry: named `name`, read from `source_name` of the sources, or a part of it."""
    index = next((i for i, s in enumerate(sources) if source_name in s.placements), None)
    if index is None:
        raise MappingError(
            f"the target needs {name!r}, which the source does not hold",
            tensor=target_placement.stored,
            error_id="missing-tensors",
        )
    source, source_placement = sources[index].catalogue, sources[index].placements[source_name]
    source_placement = part or source_placement
    source_tensor, target_tensor = (
        _tensor_number(source_placement, source),
        _tensor_number(target_placement, target),
    )
    a, b = source.tensors[source_tensor], target.tensors[target_tensor]
    if b.packing:
        raise MappingError(f"elements are not encoded to {b.packing!r}", tensor=b.name)
    placement: Placement | None = source_placement
    if 0 in target_placement.shape:
        if 0 not in source_placement.shape:
            raise MappingError(
                f"{name!r} has shape {list(source_placement.shape)} as {a.name!r} and "
                f"{list(target_placement.shape)} as {b.name!r}",
                tensor=b.name,
            )
        placement = None
    elif source_placement.shape != target_placement.shape:
        views = placement_view(source_placement), placement_view(target_placement)
        if views not in refined:
            placement, moved = refine(source_placement, target_placement)
            refined[views] = placement_view(placement), placement_view(moved)
        placement, target_placement = (
            _with_view(source_placement, refined[views][0]),
            _with_view(target_placement, refined[views][1]),
        )
    op = Op.DECODE if a.packing else Op.COPY if a.dtype == b.dtype else Op.CAST
    if target_placement.shift != source_placement.shift:
        if op is Op.DECODE:
            raise MappingError("quantized elements are not shifted", tensor=a.name)
        op = Op.CAST
    return PlanEntry(
        canonical=name,
        op=op,
        shape=target_placement.shape,
        source_index=index,
        source_tensor=source_tensor,
        target_tensor=target_tensor,
        source=placement,
        target=target_placement,
    )


def _merge_entry(
    entry: PlanEntry,
    updates: Sequence[WeightUpdate],
    sources: Sequence[PlanSource],
    target: Catalogue,
) -> PlanEntry:
    """The entry of a tensor to which updates are added.

    Raises:
        MappingError: the sum has no meaning: of another number of elements, of integers or of
            floats that have scales, which an update would leave wrong.
    """
    kinds = [
        sources[entry.source_index].catalogue.tensors[entry.source_tensor],
        target.tensors[entry.target_tensor],
    ]
    update = updates[0]
    coded = [t for t in kinds if not t.packing and (not t.dtype.is_float or t.dtype.itemsize == 1)]
    if coded or entry.shift or entry.target.shift or numel(entry.shape) != math.prod(update.shape):
        what = f"is of {coded[0].dtype}" if coded else f"is of view {list(entry.shape)}"
        raise MappingError(
            f"{entry.canonical!r} {what}, to which an update of {list(update.shape)} is not added",
            file=update.file,
            tensor=kinds[0].name,
            hint="an update is added to floats of 16 bits or more; --dtype bfloat16 writes them"
            if coded
            else "the adapter is of another model",
            error_id="foreign-adapter",
        )
    return replace(entry, op=Op.MERGE, updates=tuple(updates))


def _is_float_target(p: Placement, target: Catalogue) -> bool:
    """Whether the target's dtype is a float, which can be averaged."""
    return target.tensors[_tensor_number(p, target)].dtype.is_float


def _reduction_entries(
    name: str,
    source_name: str,
    target_placement: Placement,
    sources: Sequence[PlanSource],
    target: Catalogue,
    shares: Sequence[float],
    first: int,
) -> list[PlanEntry]:
    """The entries of a reduction, numbered from `first`, over a view that all sources share."""
    holders = [(i, s) for i, s in enumerate(sources) if source_name in s.placements]
    for _, s in holders:
        source_placement = s.placements[source_name]
        if 0 not in target_placement.shape and source_placement.shape != target_placement.shape:
            _, target_placement = refine(source_placement, target_placement)
    entries = [
        _copy_entry(name, source_name, target_placement, [s], target, {}) for _, s in holders
    ] or [
        _copy_entry(
            name, source_name, target_placement, sources, target, {}
        )  # raises the error that it is missing
    ]
    return [
        replace(
            entry,
            op=Op.REDUCE,
            source_index=index,
            share=shares[index],
            adds_to=first if k else -1,
        )
        for k, ((index, _), entry) in enumerate(zip(holders, entries, strict=True))
    ]


def _tensor_number(p: Placement, catalogue: Catalogue) -> int:
    """The number of the stored tensor of a placement."""
    number = catalogue.index.get(p.stored)
    if number is None:
        raise MappingError(
            f"the mapping places {p.canonical!r} in {p.stored!r}, which is not there",
            file=catalogue.root,
            tensor=p.stored,
        )
    shape = catalogue.tensors[number].shape
    if len(p.base) != len(shape):
        raise MappingError(
            f"the mapping places {p.canonical!r} at {list(p.base)} of a tensor of shape "
            f"{list(shape)}",
            file=catalogue.root,
            tensor=p.stored,
        )
    return number


def _fill_entry(fill: Fill, target: Catalogue) -> PlanEntry:
    shape = tuple(h - x for x, h in zip(fill.lo, fill.hi, strict=True))
    placement = Placement(
        canonical="",
        stored=fill.stored,
        shape=shape,
        dims=tuple(range(len(shape))),
        mults=(1,) * len(shape),
        base=fill.lo,
    )
    return PlanEntry(
        canonical="",
        op=Op.FILL,
        shape=shape,
        source_index=-1,
        source_tensor=-1,
        target_tensor=_tensor_number(placement, target),
        source=None,
        target=placement,
        fill=fill.value,
    )
