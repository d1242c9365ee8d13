"""A mapping table bound to one configuration: stored tensors to canonical ones, both ways."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby, islice

from megtool.convert.language.canonical import DOMAINS, CanonicalModel, fill_in, indices_in
from megtool.convert.language.expression import Expression, names_in
from megtool.convert.language.mapping import (
    Dropped,
    Row,
    Table,
    Tower,
    instantiate,
    without_computed,
    word,
)
from megtool.convert.language.tensor_layout import LayoutPart, TensorLayout
from megtool.dtypes import DType, dtype
from megtool.errors import MappingError
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

_NUMBER = re.compile(r"(\d+)")
_NUMBER_OR_INDEX = re.compile(r"((?:\{\w+\}|\d)+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedTensors:
    """Canonical tensors found in stored ones.

    `placements` and `canonical` are keyed by canonical name; `padding` counts the padding rows of
    stored tensors; `copies` says of dropped tensors which canonical one they repeat, and `keeping`
    with which value of which flag of the configuration they would be kept.
    """

    placements: dict[str, Placement] = field(default_factory=dict)
    canonical: dict[str, GlobalTensor] = field(default_factory=dict)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    keeping: dict[str, tuple[str, bool]] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(MatchedTensors):
    """The canonical tensors that a table matched; `unmatched` are names that no row knows."""

    unmatched: list[str] = field(default_factory=list)


def _other_count(index: str, config: ModelConfig, *, has_mtp: bool) -> str:
    """A hint about a stored tensor whose index is beyond what the configuration counts.

    `has_mtp` says whether the family numbers layers of multi-token prediction behind the others.
    """
    hint = "the configuration belongs to another model"
    if index in ("l", "m") and config.mtp.num_mtp_layers:
        hint += (
            ", or the tensors are of more layers of multi-token prediction than the "
            f"{config.mtp.num_mtp_layers} it counts: correct that number, or --exclude GLOB"
        )
    elif index == "l" and config.layer_kinds:
        hint += ", or its list of layers is too short"
    elif index == "l" and has_mtp:
        hint += (
            ", or it counts no layer of multi-token prediction (num_nextn_predict_layers), and the "
            "tensors are of one: correct that number, or --exclude GLOB"
        )
    return hint


@dataclass(slots=True)
class WrittenBinding:
    """The stored tensors that a table builds from canonical ones.

    `padding` holds the placement of every tensor's padding rows; `unplaced` names canonical
    tensors that no line stores.
    """

    tensors: list[GlobalTensor] = field(default_factory=list)
    placements: dict[str, Placement] = field(default_factory=dict)
    padding: list[Placement] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)


class Binding:
    """A table bound to a configuration; layouts of rows are made once."""

    def __init__(self, table: Table, model: CanonicalModel) -> None:
        self.model = model
        self.rows = [x for r in table if isinstance(r, Row) for x in without_computed(r, model)]
        self._has_mtp = any(isinstance(r, Row) and "{num_layers+m}" in r.stored for r in table)
        self.drops = [r for r in table if isinstance(r, Dropped)]
        self.towers = [r for r in table if isinstance(r, Tower)]
        self._layouts: dict[tuple[int, int], TensorLayout] = {}
        self._keeps: dict[int, bool] = {}
        self._holds: dict[tuple[int, tuple[int, ...]], bool] = {}
        # By the text between numbers: the rows with that text, and their numbers and indices.
        self._patterns: dict[tuple[str, ...], list[tuple[int, tuple[str, ...]]]] = {}
        for number, row in enumerate(self.rows):
            for pattern in (row.stored, *row.also):
                text, numbers = _pattern(pattern)
                self._patterns.setdefault(text, []).append((number, numbers))

    def read(self, tensors: Iterable[GlobalTensor]) -> Read:
        """Find the canonical tensors inside stored ones.

        Raises:
            MappingError: a shape is not what the configuration says, an index is out of range, or
                two stored tensors hold the same canonical one.
        """
        out = Read()
        for tensor in tensors:
            if self._read_tower(tensor, out):
                continue
            if (carried := self._carried(tensor.name)) is not None:
                self._place_part(Placement.identity(carried, tensor.shape), tensor, out)
                continue
            candidates = list(self._candidates(tensor.name))
            if candidates:
                number, index = self._fitting(candidates, tensor)
                self._place(number, index, tensor, out)
                continue
            drop = self._dropped(tensor.name)
            if drop is None:
                out.unmatched.append(tensor.name)
                continue
            out.dropped.append((tensor.name, drop.reason))
            if drop.copy_of is not None:
                out.copies[tensor.name] = drop.copy_of
            if drop.keeping_flag is not None:
                out.keeping[tensor.name] = drop.keeping_flag
        return out

    def knows(self, name: str) -> bool:
        """Some row is about a stored tensor of this name."""
        if self._carried(name) is not None or any(
            t.megatron and name.startswith(t.megatron.prefix) for t in self.towers
        ):
            return True
        parts = _NUMBER.split(name)
        return any(
            all(
                want[0] == "{" or want == value
                for want, value in zip(pattern, parts[1::2], strict=True)
            )
            for _, pattern in self._patterns.get(tuple(parts[::2]), ())
        )

    def write(
        self, canonical: Mapping[str, GlobalTensor], *, pad_to: int = 1, cast: DType | None = None
    ) -> WrittenBinding:
        """Plan stored tensors from canonical ones, layer by layer in the table's order.

        Tensors marked padded get a multiple of `pad_to` rows; floats become `cast` if given.
        """
        out = WrittenBinding()
        for number, index in self._in_order():
            if len(out.placements) == len(canonical):
                break
            layout = self._layout(number, index)
            names = [fill_in(p.name, index) for p in layout.parts]
            if any(n not in canonical or n in out.placements for n in names):
                continue
            stored = fill_in(self.rows[number].stored, index)
            shape = _padded(layout, pad_to)
            kind = _common([canonical[n].dtype for n in names], stored)
            if cast is not None and kind.is_float and not self._keeps_dtype(number):
                kind = cast
            out.tensors.append(GlobalTensor(name=stored, shape=shape, dtype=kind))
            for name, part in zip(names, layout.parts, strict=True):
                out.placements[name] = _placement(name, part, stored)
            if layout.padded is not None and shape != layout.shape:
                out.padding.append(_padding(stored, shape, layout))
        self._write_towers(canonical, cast, out)
        for name, tensor in canonical.items():
            tower = next((t for t in self.towers if name.startswith(t.name)), None)
            if tower is None or name in out.placements:
                continue
            stored = tower.prefixes[0] + name.removeprefix(tower.name)
            kind = cast if cast is not None and tensor.dtype.is_float else tensor.dtype
            out.tensors.append(GlobalTensor(name=stored, shape=tensor.shape, dtype=kind))
            out.placements[name] = replace(Placement.identity(name, tensor.shape), stored=stored)
        out.unplaced = [n for n in canonical if n not in out.placements]
        return out

    def _candidates(self, name: str) -> Iterator[tuple[int, dict[str, int]]]:
        """Rows that match a stored name and whose condition is true."""
        parts = _NUMBER.split(name)
        beyond: MappingError | None = None
        is_known = False
        for number, pattern in self._patterns.get(tuple(parts[::2]), ()):
            indices = list(zip(pattern, parts[1::2], strict=True))
            if any(want != value and want[0] != "{" for want, value in indices):
                continue
            index = {want[1:-1]: int(value) for want, value in indices if want[0] == "{"}
            for n, v in index.items():
                if v >= self.model.size(n):
                    beyond = MappingError(
                        f"{name!r} is {n}={v}, but {DOMAINS[n]} is {self.model.size(n)}",
                        tensor=name,
                        hint=_other_count(n, self.model.config, has_mtp=self._has_mtp),
                    )
                    break
            else:
                is_known = True
                if self._applies(number, index):
                    yield number, index
        if beyond is not None and not is_known:
            raise beyond

    def _fitting(
        self, candidates: Sequence[tuple[int, dict[str, int]]], tensor: GlobalTensor
    ) -> tuple[int, dict[str, int]]:
        for number, index in candidates:
            layout = self._layout(number, index)
            if _fits(layout, tensor.shape):
                return number, index
        want = self._layout(*candidates[0])
        padded = " or more rows" if want.padded is not None else ""
        raise MappingError(
            f"{tensor.name!r} has shape {list(tensor.shape)}, "
            f"but the configuration says {list(want.shape)}{padded}",
            tensor=tensor.name,
            hint="the configuration belongs to another model, or the tensor is truncated",
        )

    def _place(self, number: int, index: dict[str, int], tensor: GlobalTensor, out: Read) -> None:
        layout = instantiate(self._layout(number, index), index)
        for part in layout.parts:
            self._place_part(_placement(part.name, part, tensor.name), tensor, out)
            if part.size != tensor.shape:
                out.canonical[part.name] = replace(out.canonical[part.name], shape=part.size)
        if layout.padded is not None:
            rows = tensor.shape[layout.padded] - layout.shape[layout.padded]
            if rows:
                out.padding[tensor.name] = rows

    def _place_part(self, placement: Placement, tensor: GlobalTensor, out: Read) -> None:
        name = placement.canonical
        if name in out.placements:
            raise MappingError(
                f"{out.placements[name].stored!r} and {tensor.name!r} both hold {name!r}",
                tensor=tensor.name,
                hint="exclude one of them",
            )
        if placement.stored != tensor.name:
            placement = replace(placement, stored=tensor.name)
        out.placements[name] = placement
        out.canonical[name] = GlobalTensor(name=name, shape=tensor.shape, dtype=tensor.dtype)

    def _carried(self, stored: str) -> str | None:
        """The canonical name of a tower's tensor; None for any other."""
        for tower in self.towers:
            for prefix in tower.prefixes:
                if stored.startswith(prefix):
                    return tower.name + stored.removeprefix(prefix)
        return None

    def _read_tower(self, tensor: GlobalTensor, out: Read) -> bool:
        """Place what a tower's tensor under Megatron's names holds; whether it is one."""
        for tower in self.towers:
            extra = self.model.config.extra
            parts = tower.megatron.read(tensor, extra) if tower.megatron else None
            for p in parts or ():
                p = replace(p, canonical=tower.name + p.canonical)
                self._place_part(p, tensor, out)
                shape = tensor.shape if 0 in p.dims else tensor.shape[1:]  # of a stack's layer
                out.canonical[p.canonical] = replace(out.canonical[p.canonical], shape=shape)
            if parts is not None:
                return True
        return False

    def _write_towers(
        self, canonical: Mapping[str, GlobalTensor], cast: DType | None, out: WrittenBinding
    ) -> None:
        """Plan the tensors of towers that are written under Megatron's names."""
        for tower in self.towers:
            if tower.megatron is None or not tower.writes_megatron:
                continue
            own = {
                n.removeprefix(tower.name): t
                for n, t in canonical.items()
                if n.startswith(tower.name)
            }
            for tensor, parts in tower.megatron.write(own, self.model.config.extra):
                kind = cast if cast is not None and tensor.dtype.is_float else tensor.dtype
                out.tensors.append(replace(tensor, dtype=kind))
                for p in parts:
                    name = tower.name + p.canonical
                    out.placements[name] = replace(p, canonical=name)

    def _layout(self, number: int, index: Mapping[str, int]) -> TensorLayout:
        model = self.model.at(index)
        key = (
            number,
            -1
            if model is self.model
            else index.get("l", layer_sets.mtp_size_layer(self.model.config)),
        )
        if key not in self._layouts:
            row = self.rows[number]
            layout = word(row.word).layout(model)
            free = {n for p in layout.parts[:1] for n in indices_in(p.name)}
            if missing := free - set(indices_in(row.stored)):
                raise MappingError(
                    f"row {row.stored!r} lacks the index {sorted(missing)} of its tensors",
                    hint="put it in the stored name, or stack over it",
                    error_id="missing-tensors",
                )
            self._layouts[key] = layout
        return self._layouts[key]

    def _keeps_dtype(self, number: int) -> bool:
        if number not in self._keeps:
            names = word(self.rows[number].word).names()
            self._keeps[number] = any(self.model.keeps_dtype(n) for n in names[:1])
        return self._keeps[number]

    def _applies(self, number: int, index: Mapping[str, int]) -> bool:
        """Whether the row's condition is true; for indices missing in its name, for all of their
        values.
        """
        key = (number, tuple(index.values()))
        if key not in self._holds:
            when = self.rows[number].when
            free = tuple(n for n in _domains_in(when) if n not in index)
            self._holds[key] = (
                all(self.model.value(when, {**index, **more}) for more in self.model.each(free))
                if free
                else bool(self.model.value(when, index))
            )
        return self._holds[key]

    def _in_order(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Rows with every index they apply to: runs of rows with `{l}` go layer by layer."""
        numbered = [(n, indices_in(r.stored)) for n, r in enumerate(self.rows)]
        for per_layer, run in groupby(numbered, key=lambda item: "l" in item[1]):
            rows = list(run)
            for layer in range(self.model.size("l")) if per_layer else (0,):
                fixed = {"l": layer} if per_layer else {}
                for number, names in rows:
                    for more in self.model.each(tuple(n for n in names if n not in fixed)):
                        if self._applies(number, {**fixed, **more}):
                            yield number, {**fixed, **more}

    def _dropped(self, name: str) -> Dropped | None:
        for drop in self.drops:
            if fnmatchcase(name, drop.pattern) and self.model.value(drop.when):
                return drop
        return None


def missing(
    canonical: Mapping[str, GlobalTensor], model: CanonicalModel
) -> tuple[list[str], dict[str, bool]]:
    """Canonical tensors the model should have and has not, and the flags presence sets.

    An optional tensor is there in all layers or in none; its flag in the configuration, when
    true, demands it.
    """
    absent: list[str] = []
    flags: dict[str, bool] = {}
    texts = {tuple(_NUMBER.split(name)[::2]) for name in canonical}
    for pattern, entry in model.vocabulary.items():
        if entry.flag is not None and not flags.setdefault(entry.flag, False):
            may_be_present = tuple(_NUMBER_OR_INDEX.split(pattern)[::2]) in texts
            flags[entry.flag] = may_be_present and any(n in canonical for n in model.names(pattern))
    for pattern, entry in model.vocabulary.items():
        is_expected = entry.flag is None or flags[entry.flag] or model.value(entry.flag)
        if is_expected:
            absent += [n for n in model.names(pattern) if n not in canonical]
    return absent, flags


def summarize(names: Sequence[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(repr(n) for n in islice(names, limit))
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown


@cache
def _pattern(pattern: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The text of a stored name between numbers, and its numbers and `{indices}`.

    Names are split, not matched: a regular expression for every row took longer than all else.
    """
    parts = _NUMBER_OR_INDEX.split(pattern)
    for part in parts[1::2]:
        if "{" in part[1:] or "}" in part[:-1]:
            raise MappingError(
                f"{part!r} in {pattern!r} can be read in several ways",
                hint="put a dot or a letter between an index and what comes next to it",
            )
    return tuple(parts[::2]), tuple(parts[1::2])


@cache
def _domains_in(when: Expression) -> tuple[str, ...]:
    """The indices that a condition uses."""
    return tuple(n for n in DOMAINS if n in names_in(when))


def _fits(layout: TensorLayout, shape: tuple[int, ...]) -> bool:
    if len(shape) != len(layout.shape):
        return False
    return all(
        have == want or (d == layout.padded and have > want)
        for d, (have, want) in enumerate(zip(shape, layout.shape, strict=True))
    )


def _padded(layout: TensorLayout, pad_to: int) -> tuple[int, ...]:
    if layout.padded is None:
        return layout.shape
    return tuple(
        -(-n // pad_to) * pad_to if d == layout.padded else n for d, n in enumerate(layout.shape)
    )


def _padding(stored: str, shape: tuple[int, ...], layout: TensorLayout) -> Placement:
    dim = layout.padded
    rows = tuple(n - layout.shape[d] if d == dim else n for d, n in enumerate(shape))
    placement = Placement.identity(f"padding of {stored}", rows, stored=stored)
    return Placement(
        canonical=placement.canonical,
        stored=stored,
        shape=rows,
        dims=placement.dims,
        mults=placement.mults,
        base=tuple(layout.shape[d] if d == dim else 0 for d in range(len(shape))),
    )


def _placement(name: str, part: LayoutPart, stored: str) -> Placement:
    return Placement(
        canonical=name,
        stored=stored,
        shape=part.shape,
        dims=part.dims,
        mults=part.mults,
        base=part.base,
        shift=part.shift,
    )


def _common(kinds: Sequence[DType], stored: str) -> DType:
    """The element type that represents all of `kinds` without loss."""
    names = {k.name for k in kinds}
    if len(names) == 1:
        return kinds[0]
    if names == {"bfloat16", "float16"} or names <= {"bfloat16", "float16", "float32"}:
        return dtype("float32")
    raise MappingError(
        f"{stored!r} would fuse tensors of different dtypes: {sorted(names)}",
        tensor=stored,
        hint="cast them to one dtype (--dtype)",
    )
