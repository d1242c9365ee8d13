"""The mapping language of converters and dialects.

A table is a tuple of rows `Row(stored name, word)`. A word says how the stored tensor is made of
canonical ones; it is a relation, so the same row reads and writes. Words nest:

    Row("decoder.layers.{l}.mlp.experts.linear_fc1.weight",
        Stacked(Cat("layers.{l}.mlp.experts.{e}.gate.weight",
                    "layers.{l}.mlp.experts.{e}.up.weight"), over="e"))

`{l}` and `{e}` stand for every layer and every expert. A plain string is the word for "the same
tensor under another name".
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from megtool.convert.language import tensor_layout
from megtool.convert.language.canonical import (
    DOMAINS,
    CanonicalModel,
    as_inner_mtp,
    as_mtp,
    fill_in,
    indices_in,
)
from megtool.convert.language.expression import Expression, names_in
from megtool.convert.language.tensor_layout import TensorLayout
from megtool.convert.language.tower_names import TowerNames


class Word(ABC):
    """How a stored tensor is built from canonical tensors."""

    __slots__ = ()

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The canonical patterns it is made of, in the order they are stored."""

    @abstractmethod
    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The stored tensor at a configuration; parts are named by patterns."""


WordLike = Word | str


def word(text: WordLike) -> Word:
    """The mapping word that a string abbreviates."""
    return Same(text) if isinstance(text, str) else text


@dataclass(frozen=True, slots=True)
class Same(Word):
    """The canonical tensor unchanged, under another name."""

    name: str

    def names(self) -> tuple[str, ...]:
        """The one canonical pattern."""
        return (self.name,)

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The canonical tensor itself."""
        return tensor_layout.full_layout(self.name, model.shape(self.name))


class Grouped(Word):
    """Tensors side by side along `dim`, within each of `by` equal groups of rows.

    Megatron's fused attention rows are grouped by KV heads, GPT-NeoX's by heads; `by=1` is
    concatenation, and `by` all rows is interleaving.
    """

    __slots__ = ("by", "dim", "words")

    def __init__(self, *words: WordLike, by: Expression, dim: int = 0) -> None:
        self.words = tuple(word(w) for w in words)
        self.by = by
        self.dim = dim

    def names(self) -> tuple[str, ...]:
        """The patterns of all its words."""
        return tuple(n for w in self.words for n in w.names())

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """Group after group, and in each the words' rows in order."""
        parts = [w.layout(model) for w in self.words]
        dim = self.dim % len(parts[0].shape)
        return tensor_layout.group(parts, model.value(self.by), dim)


class Cat(Grouped):
    """Tensors one after the other along `dim`: gate and up projections, for example."""

    __slots__ = ()

    def __init__(self, *words: WordLike, dim: int = 0) -> None:
        super().__init__(*words, by=1, dim=dim)


class Blocks(Cat):
    """Tensors one after the other, of which each tensor rank may have a part in a block of its own.

    Megatron-FSDP (`fsdp_dtensor`) puts ranks' parameters together as they are. Elsewhere there is
    one block.
    """

    __slots__ = ()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """Block after block, and in each the words' rows in order."""
        parts = [w.layout(model) for w in self.words]
        return tensor_layout.group(parts, model.blocks, self.dim % len(parts[0].shape))


class Interleaved(Grouped):
    """Tensors of equal size whose rows (or columns) alternate along `dim`."""

    __slots__ = ()

    def __init__(self, *words: WordLike, dim: int = 0) -> None:
        super().__init__(*words, by=0, dim=dim)

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """Row 0 of every word, then row 1 of every word, and so on."""
        parts = [w.layout(model) for w in self.words]
        dim = self.dim % len(parts[0].shape)
        return tensor_layout.group(parts, parts[0].shape[dim], dim)


class Qkv(Grouped):
    """Megatron's fused attention rows: per query group its queries, gate rows, key and value."""

    __slots__ = ()

    def __init__(
        self, q: WordLike, k: WordLike, v: WordLike, *, gate: WordLike | None = None
    ) -> None:
        words = (q, k, v) if gate is None else (q, gate, k, v)
        super().__init__(*words, by="num_kv_heads")


@dataclass(frozen=True, slots=True)
class Transposed(Word):
    """The last two dimensions exchanged, as GPT-2's Conv1D stores a linear layer."""

    of: WordLike

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """Columns as rows."""
        inner = word(self.of).layout(model)
        n = len(inner.shape)
        return tensor_layout.transpose(inner, (*range(n - 2), n - 1, n - 2))


@dataclass(frozen=True, slots=True)
class Vector(Word):
    """A tensor of one row stored as a vector: GGUF's gate of a shared expert."""

    of: WordLike

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The row alone."""
        inner = word(self.of).layout(model)
        parts = (replace(p, dims=(0,) * len(p.dims), base=p.base[1:]) for p in inner.parts)
        return TensorLayout(inner.shape[1:], tuple(parts))


@dataclass(frozen=True, slots=True)
class Unsqueezed(Word):
    """A tensor with `before` and `after` further dimensions of size 1: ERNIE's expert bias is a
    matrix of one row.
    """

    of: WordLike
    before: int = 1
    after: int = 0

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The same elements, along the other dimensions."""
        inner, before, after = word(self.of).layout(model), (1,) * self.before, (1,) * self.after
        parts = (
            replace(
                p,
                dims=tuple(d + len(before) for d in p.dims),
                base=(*(0 for _ in before), *p.base, *(0 for _ in after)),
            )
            for p in inner.parts
        )
        return TensorLayout((*before, *inner.shape, *after), tuple(parts))


@dataclass(frozen=True, slots=True)
class Permuted(Word):
    """Rows seen as a grid of `grid` (outermost first) and stored with its axes in `order`.

    GGUF's Llama query rows are `Permuted(q, ("num_heads", 2, "head_dim // 2"), (0, 2, 1))`.
    """

    of: WordLike
    grid: tuple[Expression, ...]
    order: tuple[int, ...]
    dim: int = 0

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The same rows in another order."""
        inner = word(self.of).layout(model)
        grid = [model.value(n) for n in self.grid]
        return tensor_layout.permute(inner, self.dim % len(inner.shape), grid, self.order)


@dataclass(frozen=True, slots=True)
class Stacked(Word):
    """All values of an index on a new leading dimension: layers (`l`) or experts (`e`)."""

    of: WordLike
    over: str

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """One slice for every value of the index."""
        inner = word(self.of).layout(model)
        return tensor_layout.stack(
            [bind(inner, self.over, i) for i in range(model.size(self.over))]
        )


@dataclass(frozen=True, slots=True)
class Shifted(Word):
    """Its word's elements plus `by`: a norm's weight stored as w of (1 + w) is `by=-1`.

    Sums are rounded to the stored dtype; a reshard says how many elements that changed. Moments of
    an optimizer stay as they are, and its master weights are shifted.
    """

    of: WordLike
    by: float

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The same layout, with its parts shifted."""
        inner = word(self.of).layout(model)
        parts = (replace(p, shift=p.shift + self.by) for p in inner.parts)
        return replace(inner, parts=tuple(parts))


@dataclass(frozen=True, slots=True)
class Padded(Word):
    """The first dimension may be longer in the stored tensor; the padding is zero."""

    of: WordLike

    def names(self) -> tuple[str, ...]:
        """The patterns of its word."""
        return word(self.of).names()

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The unpadded tensor, marked."""
        return replace(word(self.of).layout(model), padded=0)


@dataclass(frozen=True, slots=True)
class Renamed(Word):
    """A word for other canonical tensors of the same shapes: `old` in their names is `new`."""

    of: WordLike
    old: str
    new: str

    def names(self) -> tuple[str, ...]:
        """The patterns of its word, renamed."""
        return tuple(n.replace(self.old, self.new) for n in word(self.of).names())

    def layout(self, model: CanonicalModel) -> TensorLayout:
        """The same layout, with its parts renamed."""
        inner = word(self.of).layout(model)
        parts = (replace(p, name=p.name.replace(self.old, self.new)) for p in inner.parts)
        return replace(inner, parts=tuple(parts))


def bind(layout: TensorLayout, index: str, value: int) -> TensorLayout:
    """The layout with an index of its parts' names put in."""
    mark = f"{{{index}}}"
    return replace(
        layout,
        parts=tuple(replace(p, name=p.name.replace(mark, str(value))) for p in layout.parts),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    `stored` is the name written; `also` are other names accepted when reading. `when` is a
    condition on the configuration and the indices in the names: where it is false the row does
    not apply. Rows that make the same canonical tensor are alternatives: reading takes what is
    stored, writing the first; where weights become codes, the first that is not `plain`.
    """

    stored: str
    word: WordLike
    also: tuple[str, ...] = ()
    when: Expression = True
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """Stored tensors that mean nothing to the model, and why; `pattern` may hold `*`.

    `copy_of` is the canonical tensor that they repeat: whether they do is looked at before they are
    left out. Where one does not and `when` is a flag of the configuration, or `not` one, the flag
    is wrong: with its other value the table has a row for the tensor (`keeping_flag`).
    """

    pattern: str
    reason: str
    when: Expression = True
    copy_of: str | None = None

    @property
    def keeping_flag(self) -> tuple[str, bool] | None:
        """The flag and its value with which such a tensor is one of the model's."""
        if self.copy_of is None or not isinstance(self.when, str):
            return None
        negation, _, flag = self.when.rpartition("not ")
        is_flag = flag.isidentifier() and not negation.strip()
        return (flag, self.when != flag) if is_flag else None


@dataclass(frozen=True, slots=True)
class Tower:
    """Stored tensors of another part of the model than its text, which are carried as they are.

    All tensors whose names begin with `name` are, and the rest of a name may be anything. `stored`
    is how their names begin in Hugging Face folders, if not with `name`; `also` are other
    beginnings accepted when reading. A part that `is_required` has at least one tensor. A part with
    tensors needs those whose names, like its own, begin with `projector`, and one that ends with
    each of `ends`, which lie outside its layers (`{n}` counts the entries of the list `entries` of
    its settings). `megatron` are the names of a tower that Megatron-Bridge has as Megatron's
    layers: Megatron's formats are read with either names, and written with these where
    `writes_megatron` says so.
    """

    name: str
    stored: str = ""
    also: tuple[str, ...] = ()
    is_required: bool = True
    projector: str = ""
    ends: tuple[str, ...] = ()
    entries: str = ""
    megatron: TowerNames | None = None
    writes_megatron: bool = False

    @property
    def prefixes(self) -> tuple[str, ...]:
        """How stored names begin: the first is written."""
        return (self.stored or self.name, *self.also)


Table = Sequence[Row | Dropped | Tower]


def in_mtp(table: Table, *stored: tuple[str, str]) -> tuple[Row, ...]:
    """The rows of single layers as rows of the layers of multi-token prediction.

    `stored` are the replacements in stored names; each makes one name, the first is written. In
    stored names `{num_layers+m}` stands for the number of the layer as Hugging Face counts.
    """

    def names(row: Row) -> tuple[str, ...]:
        return tuple(n.replace(*s) for s in stored for n in (row.stored, *row.also))

    return tuple(
        Row(
            stored=names(row)[0],
            word=Renamed(row.word, "layers.{l}.", "mtp.{m}."),
            also=names(row)[1:],
            when=as_mtp(row.when),
            plain=row.plain,
        )
        for row in table
        if isinstance(row, Row) and stored[0][0] in row.stored
    )


def in_inner_mtp(table: Table, *stored: tuple[str, str]) -> tuple[Row, ...]:
    """The same for the numbered layers (`k`) inside layers of multi-token prediction."""
    return tuple(
        replace(
            rewritten,
            word=Renamed(row.word, "layers.{l}.", "mtp.{m}.layers.{k}."),
            when=as_inner_mtp(row.when),
        )
        for row in table
        if isinstance(row, Row)
        for rewritten in in_mtp((row,), *stored)
    )


def in_branches(*tables: Table) -> Table:
    """The rows of layers of two branches for a model that may count every branch as a layer.

    Of a model with `layer_kinds`, the stored layer n has the layers 2n and 2n + 1.
    """
    return tuple(
        replace(row, stored=_in_branches(row.stored), also=tuple(_in_branches(n) for n in row.also))
        if isinstance(row, Row)
        else row
        for table in tables
        for row in table
    )


def _in_branches(stored: str) -> str:
    return stored.replace("{l}", "{l // (2 if layer_kinds else 1)}")


_COMPUTED = re.compile(r"\{([^{}]*\W[^{}]*)\}")


def without_computed(row: Row, model: CanonicalModel) -> Iterator[Row]:
    """The row with expressions in its stored name (`{num_layers+m}`) put in: one for each `m`.

    Of layers (`l`, or `k` inside those of multi-token prediction) one for each that has all tensors
    of the row's word.
    """
    if not (match := _COMPUTED.search(row.stored)):
        yield row
        return
    index = tuple(n for n in DOMAINS if n in names_in(match[1]))
    whens: list[Expression] = []
    if "l" in index or "k" in index:
        whens = [row.when, *(model.vocabulary[n].when for n in word(row.word).names())]
        row = replace(row, when=True)
    for values in model.each(index):
        if not all(model.value(when, values) for when in whens):
            continue
        of: WordLike = row.word
        for n, v in values.items():
            of = Renamed(of, f"{{{n}}}", str(v))

        def stored(name: str, values: dict[str, int] = values) -> str:
            return _COMPUTED.sub(lambda m: str(model.value(m[1], values)), fill_in(name, values))

        yield Row(stored(row.stored), of, tuple(stored(a) for a in row.also), row.when, row.plain)


def stack_layers(table: Table) -> tuple[Row | Dropped | Tower, ...]:
    """The table with `{l}.` and `{d}.` gone from stored names and all layers on a leading axis.

    Layers have to be alike: a condition that holds for some layers only makes the row impossible.
    """
    return tuple(_stacked(row) if isinstance(row, Row) else row for row in table)


def _stacked(row: Row) -> Row:
    index = next((n for n in "ld" if f"{{{n}}}." in row.stored), None)
    if index is None:
        return row
    mark = f"{{{index}}}."
    return Row(
        stored=row.stored.replace(mark, ""),
        word=Stacked(row.word, index),
        also=tuple(a.replace(mark, "") for a in row.also),
        when=row.when,
    )


def instantiate(layout: TensorLayout, index: dict[str, int]) -> TensorLayout:
    """The layout with all indices of its parts' names put in."""
    if not index:
        return layout
    return replace(
        layout, parts=tuple(replace(p, name=fill_in(p.name, index)) for p in layout.parts)
    )


def first_gap(
    table: Table, model: CanonicalModel, name: str, have: Collection[str]
) -> tuple[str, str] | None:
    """The stored tensor that `name` would be part of, and the first of its parts not in `have`."""
    for row in table:
        words = word(row.word).names() if isinstance(row, Row) else ()
        for pattern in words:
            index = _match(pattern, name)
            if index is None or not isinstance(row, Row) or not model.value(row.when, index):
                continue
            fixed = {n: index[n] for n in indices_in(row.stored)}
            for part in words:
                for more in model.each(tuple(n for n in indices_in(part) if n not in fixed)):
                    if (missing := fill_in(part, {**fixed, **more})) not in have:
                        return fill_in(row.stored, fixed), missing
    return None


def _match(pattern: str, name: str) -> dict[str, int] | None:
    """The indices at which `name` follows `pattern`; None if it does not."""
    parts = re.split(r"\{(\w+)\}", pattern)
    exact = "".join(rf"(?P<{p}>\d+)" if i % 2 else re.escape(p) for i, p in enumerate(parts))
    match = re.fullmatch(exact, name)
    return None if match is None else {n: int(v) for n, v in match.groupdict().items()}
