"""Moved: rows of a box of a quantized weight in their new places, in another form."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.computed_tensors import Region, Taking, region_bytes
from megtool.checkpoint.transport.strided import Array
from megtool.checkpoint.transport.tile import Index
from megtool.dtypes import dtype as dtype_of
from megtool.errors import FormatError
from megtool.export.quantized_module import Coded
from megtool.export.scale_expansion import Slice, expanded, index_of, per_of, scale_fault
from megtool.export.small_tensors import reciprocal
from megtool.number_formats.decode import CODES, DIVISOR, SCALE, SCALE_2, decode
from megtool.number_formats.element_codes import neutral, stored
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import Style
from megtool.number_formats.packed_parts import PackedPart, trimmed
from megtool.number_formats.scales import RULES
from megtool.number_formats.small_floats import single
from megtool.quant.packed_tensors.modelopt_tensors import in_dtype, stored_type
from megtool.reshard.constant_feed import bits_of, hash_of
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

Known = tuple[tuple[str, NDArray[np.float32]], ...]
Pair = tuple[int, int]

_SECONDS = {SCALE_2: DIVISOR, DIVISOR: SCALE_2}
_E2M1_MAX = 6.0


def source_of(coded: Coded, role: str) -> tuple[PackedPart, str] | None:
    """The part that a target's part is made of."""
    found = coded.part(role)
    return coded.part(_SECONDS[role]) if found is None and role in _SECONDS else found


def stored_as(values: NDArray[np.float32], part: PackedPart, tensor: GlobalTensor) -> NDArray[Any]:
    """Float32 numbers as a tensor of scales holds them, in the part's shape."""
    out = in_dtype(np.array(values), tensor.dtype)
    if not np.array_equal(single(out, tensor.dtype.name), values, equal_nan=True):
        raise FormatError(
            f"{tensor.dtype.name} does not hold its {part.role} exactly",
            tensor=tensor.name,
            hint="store it in float32",
        )
    return out.reshape(part.shape if values.size == math.prod(part.shape) else values.shape)


def identity(name: str, part: PackedPart) -> Placement:
    """All of a stored tensor."""
    return Placement.identity(name, part.shape)


class Window:
    """What the box `lo:hi` of a source needs of a part, read by rows. Use in `with`."""

    def __init__(self, taking: Taking, name: str, part: PackedPart, lo: Index, hi: Index) -> None:
        self._part = part
        self._first, end = part.window(lo, hi)
        self._shape = tuple(b - a for a, b in zip(self._first, end, strict=True))
        placement = Placement(
            canonical=name,
            stored=name,
            shape=self._shape,
            dims=tuple(range(len(self._shape))),
            mults=(1,) * len(self._shape),
            base=self._first,
        )
        self._run = taking.stored(placement)

    def rows(self, lo: Index, hi: Index) -> NDArray[Any]:
        """What a box of some of the rows needs, as bits, in memory of its own."""
        shape, start = self._shape, 0
        if per_of(self._part, 0):  # rows come first in every part that has them
            first, end = self._part.window(lo, hi)
            start = first[0] - self._first[0]
            shape = (end[0] - first[0], *shape[1:])
        line = math.prod(shape[1:])
        found = self._run.read(start * line, start * line + math.prod(shape)).copy()
        return found.view(dtype_of(self._part.dtype).view).reshape(shape)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.__exit__()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Rows `first:end` of a box: codes, and the scales that go with rows.

    `singles` are the target's parts that others fill, `known` the scales given anew; `grain` rows
    cannot be packed apart.
    """

    box: Slice
    packing: str
    held: tuple[tuple[PackedPart, GlobalTensor], ...]
    singles: tuple[PackedPart, ...]
    known: Known
    first: int
    end: int
    grain: int
    shape: tuple[int, int]

    @property
    def reads(self) -> tuple[Placement, ...]:
        """Codes and scales of the source."""
        roles = self._roles
        return tuple(identity(n, p) for p, n in self.box.coded.parts if p.role in roles)

    @property
    def writes(self) -> tuple[Region, ...]:
        """The same rows of each part."""
        at, end = self._target(self.first, self.end)
        return tuple(
            Region(stored=t.name, lo=lo, hi=hi)
            for p, t in self.held
            for lo, hi in [p.window(at, end)]
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        kinds = [t.dtype.itemsize for _, t in self.held]
        return sum(region_bytes(r, n) for r, n in zip(self.writes, kinds, strict=True))

    @property
    def facts(self) -> bytes:
        """The box, both packings, and what is given."""
        box = self.box
        parts = [p for p, _ in self.held], self.singles, box.coded.parts
        return hash_of(
            *(self.packing, box.coded.packing, box.rows, box.columns, box.at),
            *(self.first, self.end, parts, [t.dtype.name for _, t in self.held]),
            *(x for pair in self.known for x in pair),
        )

    @property
    def _roles(self) -> frozenset[str]:
        """The parts of the source that are read."""
        out = {p.role for p, _ in self.held}
        if self.known:
            out |= set(factors(self.box.coded.packing))
        return frozenset(out)

    def make(self, taking: Taking) -> Generator[tuple[int, Index, Array], None, None]:
        """See `Feed`."""
        width = max(self.box.shape[1] * (4 if self.known else 1), 1)
        rows = max(self.grain, taking.tile_bytes // width // self.grain * self.grain)
        start = [r.lo for r in self.writes]
        lo, hi = self._source(self.first, self.end)
        with ExitStack() as stack:
            windows = {
                p.role: stack.enter_context(Window(taking, n, p, lo, hi))
                for p, n in self.box.coded.parts
                if p.role in self._roles
            }
            for first in range(self.first, self.end, rows):
                end = min(first + rows, self.end)
                at, stop = self._target(first, end)
                made = self._strip(windows, first, end)
                for number, (part, tensor) in enumerate(self.held):
                    low = part.window(at, stop)[0]
                    index = tuple(a - b for a, b in zip(low, start[number], strict=True))
                    yield number, index, bits_of(made[number], tensor.dtype)

    def _strip(self, parts: Mapping[str, Window], first: int, end: int) -> list[NDArray[Any]]:
        """The windows of all parts for some rows."""
        lo, hi = self._source(first, end)
        windows = {role: part.rows(lo, hi) for role, part in parts.items()}
        new = self._new(windows, first, end) if self.known else {}
        if new:
            return self._encoded(windows, new, first, end)
        out = []
        for part, tensor in self.held:
            if part.role == CODES:
                out.append(self._codes(windows[CODES], part, lo, hi))
            else:
                out.append(self._scale(windows, part, tensor, first, end))
        return out

    def _codes(self, window: NDArray[Any], part: PackedPart, lo: Index, hi: Index) -> NDArray[Any]:
        """Codes in their new places."""
        packing, have = self.box.coded.packing, self.box.coded.parts[0][0]
        whole_units = all(
            a % per_of(have, d) == 0 and (b % per_of(have, d) == 0 or b == self.box.coded.shape[d])
            for d, (a, b) in enumerate(zip(lo, hi, strict=True))
        )
        if whole_units and packing.partition(":")[0] == self.packing.partition(":")[0]:
            return window
        return stored(trimmed(neutral(window, have, packing), have, lo, hi), self.packing, part)

    def _scale(
        self,
        windows: Mapping[str, NDArray[Any]],
        part: PackedPart,
        tensor: GlobalTensor,
        first: int,
        end: int,
    ) -> NDArray[Any]:
        """Scales in their new places, in the type of their new tensor."""
        have = next(p for p, _ in self.box.coded.parts if p.role == part.role)
        at, stop = self._target(first, end)
        lo, _ = self._source(first, end)
        size = stop[0] - at[0], stop[1] - at[1]
        found = expanded(windows[part.role], have, lo, part, at, size)
        if stored_type(have.dtype) == stored_type(tensor.dtype.name):
            return found
        return stored_as(single(found, have.dtype), part, tensor).reshape(found.shape)

    def _new(
        self, windows: Mapping[str, NDArray[Any]], first: int, end: int
    ) -> dict[str, NDArray[np.float32]]:
        """Windows of given scales by which elements are divided; nothing where they are the old
        ones."""
        at, stop = self._target(first, end)
        lo, _ = self._source(first, end)
        size = stop[0] - at[0], stop[1] - at[1]
        known, roles = dict(self.known), factors(self.packing)
        out: dict[str, NDArray[np.float32]] = {}
        differs = False
        for part in [*(p for p, _ in self.held), *self.singles]:
            if part.role not in roles or part.role not in known:
                continue
            value = np.broadcast_to(known[part.role].reshape(-1), (math.prod(part.shape),))
            box = value.reshape(part.shape)[index_of(part, at, stop)]
            out[part.role] = np.array(box)
            have = source_of(self.box.coded, part.role)
            if have is None or scale_fault(self.box, have[0], part, self.shape) is not None:
                differs = True
                continue
            old = single(windows[have[0].role], have[0].dtype)
            if have[0].role != part.role:
                old = reciprocal(old)
            old = expanded(old, have[0], lo, part, at, size)
            differs |= not np.array_equal(old, out[part.role])
        return out if differs else {}

    def _encoded(
        self,
        windows: Mapping[str, NDArray[Any]],
        new: Mapping[str, NDArray[np.float32]],
        first: int,
        end: int,
    ) -> list[NDArray[Any]]:
        """The windows of all parts, of elements that are decoded, for scales that are new."""
        coded, roles = self.box.coded, {CODES, *factors(self.packing)}
        at, stop = self._target(first, end)
        lo, hi = self._source(first, end)
        size = stop[0] - at[0], stop[1] - at[1]
        have = [p for p, _ in coded.parts if p.role in roles]
        values = np.ascontiguousarray(decode(coded.packing, have, windows, lo, hi))
        parts = [p for p in [*(p for p, _ in self.held), *self.singles] if p.role in roles]
        scales = {p.role: in_dtype(new[p.role], dtype_of(p.dtype)) for p in parts if p.role in new}
        style: Style = "modelopt" if DIVISOR not in scales else "compressed-tensors"
        for part in parts:
            if part.role == CODES or part.role in scales:
                continue
            source = source_of(coded, part.role)
            if source is None:
                continue
            old = single(windows[source[0].role], source[0].dtype)
            if part.role != SCALE:
                old = old if source[0].role == part.role else reciprocal(old)
                scales[part.role] = expanded(old, source[0], lo, part, at, size)
                continue
            # The second scale is new: the first is what brings their product closest to what it was
            for role, divides in ((SCALE_2, False), (DIVISOR, True)):
                if role in windows:
                    second = windows[role].reshape(()).astype(np.float32)
                    old = old / second if divides else old * second
            top = expanded(old, source[0], lo, part, at, size) * np.float32(_E2M1_MAX)
            second = new[SCALE_2 if SCALE_2 in new else DIVISOR].reshape(())
            scales[part.role] = RULES[style].block(top, second)
        made = encode(self.packing, parts, values, "float32", at, stop, scales=scales, style=style)
        return [np.asarray(made[p.role]) for p, _ in self.held]

    def _target(self, first: int, end: int) -> tuple[Pair, Pair]:
        """Rows of the box, in the target's weight."""
        box = self.box
        return (box.at[0] + first, box.at[1]), (box.at[0] + end, box.end[1])

    def _source(self, first: int, end: int) -> tuple[Pair, Pair]:
        """Rows of the box, in the source's weight."""
        box = self.box
        return (box.rows[0] + first, box.columns[0]), (box.rows[0] + end, box.columns[1])


def factors(packing: str) -> tuple[str, ...]:
    """Roles of scales that elements of a packing are divided by."""
    return (SCALE, SCALE_2, DIVISOR) if packing.startswith("nvfp4") else (SCALE,)
