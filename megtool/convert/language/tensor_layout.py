"""The algebra of the mapping language: a stored tensor as strided views of canonical ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megtool.errors import MappingError
from megtool.tensors.box import strides
from megtool.tensors.placement import AffineView


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPart(AffineView):
    """The canonical tensor called `name`, of shape `size`, inside a stored one."""

    name: str
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A stored tensor: its shape, its parts, and the dimension that may be padded, if any."""

    shape: tuple[int, ...]
    parts: tuple[LayoutPart, ...]
    padded: int | None = None


def full_layout(name: str, shape: Sequence[int]) -> TensorLayout:
    """The stored tensor is the canonical one."""
    n, size = len(shape), tuple(shape)
    part = LayoutPart(
        name=name, size=size, shape=size, dims=tuple(range(n)), mults=(1,) * n, base=(0,) * n
    )
    return TensorLayout(size, (part,))


def transpose(layout: TensorLayout, order: Sequence[int]) -> TensorLayout:
    """The same tensor with its dimensions in another order (as `numpy.transpose`)."""
    to = {d: i for i, d in enumerate(order)}
    return TensorLayout(
        tuple(layout.shape[d] for d in order),
        tuple(
            replace(
                p,
                dims=tuple(to[d] for d in p.dims),
                base=tuple(p.base[d] for d in order),
            )
            for p in layout.parts
        ),
        None if layout.padded is None else to[layout.padded],
    )


def stack(layouts: Sequence[TensorLayout]) -> TensorLayout:
    """Equal layouts on a new leading dimension, in order."""
    first = layouts[0]
    parts = [
        replace(p, dims=tuple(d + 1 for d in p.dims), base=(i, *p.base))
        for i, layout in enumerate(layouts)
        for p in layout.parts
    ]
    padded = None if first.padded is None else first.padded + 1
    return TensorLayout((len(layouts), *first.shape), tuple(parts), padded)


def group(layouts: Sequence[TensorLayout], groups: int, dim: int) -> TensorLayout:
    """Layouts concatenated along `dim` within each of `groups` equal groups of rows.

    One group is plain concatenation; as many groups as rows is interleaving.
    """
    other_sizes = {(*layout.shape[:dim], *layout.shape[dim + 1 :]) for layout in layouts}
    if len(other_sizes) != 1:
        raise MappingError(
            f"{_names(layouts)} cannot be concatenated: {[layout.shape for layout in layouts]}"
        )
    if any(layout.shape[dim] % groups for layout in layouts):
        raise MappingError(
            f"{_names(layouts)} of {[layout.shape[dim] for layout in layouts]} rows "
            f"do not fall into {groups} groups"
        )
    widths = [layout.shape[dim] // groups for layout in layouts]
    total, offset, parts = sum(widths), 0, []
    for layout, width in zip(layouts, widths, strict=True):
        for p in layout.parts:
            parts.append(remap(p, dim, (groups, width), (total, 1), offset))
        offset += width
    shape = list(layouts[0].shape)
    shape[dim] = total * groups
    return TensorLayout(tuple(shape), tuple(parts))


def permute(
    layout: TensorLayout, dim: int, sizes: Sequence[int], order: Sequence[int]
) -> TensorLayout:
    """Rows of `dim`, seen as a grid of `sizes`, stored with that grid's axes in `order`."""
    product = 1
    for n in sizes:
        product *= n
    if product != layout.shape[dim]:
        raise MappingError(
            f"{_names([layout])} has {layout.shape[dim]} rows, which are not a grid of "
            f"{list(sizes)}"
        )
    steps = strides([sizes[k] for k in order])
    mults = [steps[list(order).index(k)] for k in range(len(sizes))]
    return TensorLayout(
        layout.shape,
        tuple(remap(p, dim, sizes, mults, 0) for p in layout.parts),
        layout.padded,
    )


def remap(
    p: LayoutPart, dim: int, sizes: Sequence[int], mults: Sequence[int], offset: int
) -> LayoutPart:
    """Move a part's indices along one stored dimension, digit by digit.

    An index along `dim` is a number whose digits run over `sizes`, most significant first; its
    new index is `offset + sum(digit * mult)`. View dimensions that span several digits are split.

    Raises:
        MappingError: a view dimension and a digit cut the rows in ways that do not nest.
    """
    steps = strides(sizes)
    base = [p.base[dim] // s % n for s, n in zip(steps, sizes, strict=True)]
    reach = list(base)
    shape: list[int] = []
    dims: list[int] = []
    new_mults: list[int] = []
    for n, d, m in zip(p.shape, p.dims, p.mults, strict=True):
        if d != dim or n == 1:
            shape.append(n)
            dims.append(d)
            new_mults.append(m)
            continue
        pieces: list[tuple[int, int]] = []
        while n > 1:
            digit = next(k for k, s in enumerate(steps) if s <= m and sizes[k] * s > m)
            span = steps[digit] * sizes[digit]
            count = min(n, span // m)
            if m % steps[digit] or n % count or (count < n and span % m):
                raise _not_nested(p, dim, sizes)
            pieces.append((count, mults[digit] * (m // steps[digit])))
            reach[digit] += (count - 1) * (m // steps[digit])
            n //= count
            m *= count
        for count, mult in reversed(pieces):
            shape.append(count)
            dims.append(dim)
            new_mults.append(mult)
    if any(r >= n for r, n in zip(reach, sizes, strict=True)):
        raise _not_nested(p, dim, sizes)
    moved = offset + sum(b * m for b, m in zip(base, mults, strict=True))
    return replace(
        p,
        shape=tuple(shape),
        dims=tuple(dims),
        mults=tuple(new_mults),
        base=(*p.base[:dim], moved, *p.base[dim + 1 :]),
    )


def _not_nested(p: LayoutPart, dim: int, sizes: Sequence[int]) -> MappingError:
    return MappingError(
        f"{p.name!r} as {p.shape} along dimension {dim} does not nest into {list(sizes)}",
        tensor=p.name,
    )


def _names(layouts: Sequence[TensorLayout]) -> str:
    return ", ".join(dict.fromkeys(repr(p.name) for layout in layouts for p in layout.parts))
