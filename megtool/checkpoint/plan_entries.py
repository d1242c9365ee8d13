"""Entries: what stands in the target paired with what sources hold, over one view of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.plan import Entry, Fill, Op, Source
from megtool.errors import MappingError
from megtool.tensors.placement import Placement, refine

View = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_Refined = dict[tuple[View, View], tuple[View, View]]


def entries_of(
    sources: Sequence[Source],
    target: Catalogue,
    placements: Mapping[str, Placement],
    fills: Sequence[Fill],
    copies: Mapping[str, str],
    shares: Sequence[float],
) -> list[Entry]:
    """The entries of a plan, fills last; arguments and errors are those of `planner.build`."""
    refined: _Refined = {}
    out: list[Entry] = []
    for name, p in placements.items():
        held_as = copies.get(name, name)
        if shares and _is_float(p, target):
            out += _terms(name, held_as, p, sources, target, shares, len(out))
        else:
            out.append(_entry(name, held_as, p, sources, target, refined))
    return out + [_fill_entry(f, target) for f in fills]


def view_of(p: Placement) -> View:
    """The view of a placement, which many placements share."""
    return p.shape, p.dims, p.mults


def _over(p: Placement, view: View) -> Placement:
    shape, dims, mults = view
    return Placement(
        canonical=p.canonical, stored=p.stored, shape=shape, dims=dims, mults=mults, base=p.base
    )


def _entry(
    name: str,
    held_as: str,
    to: Placement,
    sources: Sequence[Source],
    target: Catalogue,
    refined: _Refined,
) -> Entry:
    """One tensor's entry: called `name`, and read from what the sources call `held_as`."""
    index = next((i for i, s in enumerate(sources) if held_as in s.placements), None)
    if index is None:
        raise MappingError(
            f"the target needs {name!r}, which the source does not hold",
            tensor=to.stored,
        )
    source, at = sources[index].catalogue, sources[index].placements[held_as]
    source_tensor, target_tensor = _stored(at, source), _stored(to, target)
    a, b = source.tensors[source_tensor], target.tensors[target_tensor]
    if b.packing:
        raise MappingError(f"elements are not encoded to {b.packing!r}", tensor=b.name)
    held: Placement | None = at
    if 0 in to.shape:
        if 0 not in at.shape:
            raise MappingError(
                f"{name!r} has shape {list(at.shape)} as {a.name!r} and {list(to.shape)} as "
                f"{b.name!r}",
                tensor=b.name,
            )
        held = None
    elif at.shape != to.shape:
        views = view_of(at), view_of(to)
        if views not in refined:
            held, moved = refine(at, to)
            refined[views] = view_of(held), view_of(moved)
        held, to = _over(at, refined[views][0]), _over(to, refined[views][1])
    op = Op.DECODE if a.packing else Op.COPY if a.dtype == b.dtype else Op.CAST
    return Entry(
        canonical=name,
        op=op,
        shape=to.shape,
        source_index=index,
        source_tensor=source_tensor,
        target_tensor=target_tensor,
        source=held,
        target=to,
    )


def _is_float(p: Placement, target: Catalogue) -> bool:
    """The target's elements are numbers that have a mean."""
    return target.tensors[_stored(p, target)].dtype.is_float


def _terms(
    name: str,
    held_as: str,
    to: Placement,
    sources: Sequence[Source],
    target: Catalogue,
    shares: Sequence[float],
    first: int,
) -> list[Entry]:
    """The entries of a reduction, numbered from `first`, over a view that all sources share."""
    held = [(i, s) for i, s in enumerate(sources) if held_as in s.placements]
    for _, s in held:
        at = s.placements[held_as]
        if 0 not in to.shape and at.shape != to.shape:
            _, to = refine(at, to)
    found = [_entry(name, held_as, to, [s], target, {}) for _, s in held] or [
        _entry(name, held_as, to, sources, target, {})  # which says that it is missing
    ]
    return [
        replace(
            entry,
            op=Op.REDUCE,
            source_index=index,
            share=shares[index],
            adds_to=first if k else -1,
        )
        for k, ((index, _), entry) in enumerate(zip(held, found, strict=True))
    ]


def _stored(p: Placement, catalogue: Catalogue) -> int:
    """The number of the tensor a placement lies in."""
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


def _fill_entry(fill: Fill, target: Catalogue) -> Entry:
    shape = tuple(h - x for x, h in zip(fill.lo, fill.hi, strict=True))
    placement = Placement(
        canonical="",
        stored=fill.stored,
        shape=shape,
        dims=tuple(range(len(shape))),
        mults=(1,) * len(shape),
        base=fill.lo,
    )
    return Entry(
        canonical="",
        op=Op.FILL,
        shape=shape,
        source_index=-1,
        source_tensor=-1,
        target_tensor=_stored(placement, target),
        source=None,
        target=placement,
        fill=fill.value,
    )
