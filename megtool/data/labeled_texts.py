"""Texts with labels, and pairs of a preferred answer and another, as rows of a model's input.

A record is `{"text": ..., "label": ...}` (or `messages`, or another field, and `labels`), or, for a
model of one label, `{"chosen": ..., "rejected": ...}`, texts or messages, to which a `prompt` may
be the begin. A row has one text, or both of a pair, and each label where the token is that is
scored: the last one of a text, the first one where tokens attend both ways.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.data.dataset import Counts, shuffled
from megtool.data.documents import Document, documents
from megtool.data.packing import IGNORED, PackedRows
from megtool.data.sample_index import Overflow
from megtool.data.tokenizer import Tokenizer
from megtool.errors import FormatError, UsageError
from megtool.options.layout import LabelKind

_PREFERRED, _OTHER, _PROMPT = "chosen", "rejected", "prompt"
_LABEL = ("label", "labels")
_WIDTH = 16
"""Rows have a multiple of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelForm:
    """What a model's labels are: their names, and whether its tokens attend both ways.

    `field` is that of a record with the text, `split` that of a data set. Texts without labels are
    refused if it `needs_labels`.
    """

    names: Sequence[str]
    both_ways: bool = False
    field: str | None = None
    split: str | None = None
    needs_labels: bool = True


@dataclass(frozen=True, slots=True)
class LabeledText:
    """One text and its label (see `LabelKind`), if it is known, or a chosen and a rejected one."""

    sides: tuple[tuple[int, ...], ...]
    label: int | None = None


@dataclass(frozen=True, slots=True)
class LabeledTexts:
    """All texts of some sources."""

    kind: LabelKind
    texts: tuple[LabeledText, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max((len(side) for text in self.texts for side in text.sides), default=0)


def read_labeled_texts(
    sources: Sequence[str | Path], tokenizer: Tokenizer, settings: LabelForm
) -> LabeledTexts:
    """Read and tokenize all records of some sources.

    Raises:
        FormatError: a record has no label, or none of the model's; or there is none at all.
        UsageError: pairs, and a model of several labels; or sources of different kinds.
        MegtoolError: a source cannot be read.
    """
    kinds: set[LabelKind] = set()
    texts: list[LabeledText] = []
    for source in sources:
        kind: LabelKind = "classes" if len(settings.names) > 1 else "numbers"
        if settings.field is None and _has_pairs(source, settings.split):
            kind = "preferences"
            if len(settings.names) > 1:
                raise UsageError(
                    f"{str(source)!r} has chosen and rejected answers, and the model "
                    f"{len(settings.names)} labels",
                    hint="a reward model has one label; --field NAME reads texts with labels",
                )
        kinds.add(kind)
        found_texts = _read(source, tokenizer, settings, kind)
        if not found_texts:
            raise FormatError("there is no text", file=source)
        texts += found_texts
    if len(kinds) > 1:
        raise UsageError(
            "some sources have pairs of answers, and others texts with labels",
            hint="a run has data of one kind",
        )
    return LabeledTexts(kind=next(iter(kinds), "classes"), texts=tuple(texts))


def _has_pairs(source: str | Path, split: str | None) -> bool:
    """Whether the first record of a source is a pair of answers."""
    try:
        first = next(documents(source, field=_PREFERRED, split=split, extras=(_OTHER,)), None)
    except FormatError:
        return False
    return first is not None and _OTHER in first.extras


def _read(
    source: str | Path, tokenizer: Tokenizer, settings: LabelForm, kind: LabelKind
) -> list[LabeledText]:
    if kind == "preferences":
        pairs = documents(source, field=_PREFERRED, split=settings.split, extras=(_OTHER, _PROMPT))
        return [_pair(document, tokenizer) for document in pairs]
    ids = {name: number for number, name in enumerate(settings.names)}
    texts = documents(source, field=settings.field, split=settings.split, extras=_LABEL)
    out = []
    for document in texts:
        value = next((document.extras[n] for n in _LABEL if n in document.extras), None)
        text = document.messages or document.text + (document.completion or "")
        if value is None and not settings.needs_labels:
            out.append(LabeledText((_tokens(text, tokenizer, document),)))
            continue
        if value is None:
            raise FormatError(
                f"line {document.number} has no {_LABEL[0]!r}",
                file=document.file,
                hint='records of labeled texts are {"text": ..., "label": ...}',
            )
        label = _class(value, ids, document) if kind == "classes" else _number(value, document)
        out.append(LabeledText((_tokens(text, tokenizer, document),), label))
    return out


def _pair(document: Document, tokenizer: Tokenizer) -> LabeledText:
    other, prompt = document.extras.get(_OTHER), document.extras.get(_PROMPT)
    chosen: Any = document.messages or document.text
    kind = "text" if isinstance(chosen, str) else "list of messages"
    for name, value in ((_OTHER, other), (_PROMPT, prompt)):
        fits = isinstance(value, str) if isinstance(chosen, str) else isinstance(value, list)
        if not fits and not (name == _PROMPT and value is None):
            raise FormatError(
                f"line {document.number}: {name!r} is no {kind}, as {_PREFERRED!r} is",
                file=document.file,
            )
    begin: Any = prompt if prompt is not None else ("" if isinstance(chosen, str) else ())
    sides = (
        [begin + chosen, begin + other]
        if isinstance(chosen, str)
        else [
            (*begin, *chosen),
            (*begin, *(other or ())),
        ]
    )
    tokens = [_tokens(side, tokenizer, document) for side in sides]
    return LabeledText((tokens[0], tokens[1]))


def _tokens(
    text: str | Sequence[Mapping[str, Any]], tokenizer: Tokenizer, document: Document
) -> tuple[int, ...]:
    if isinstance(text, str):
        ids = tokenizer.encode(text)
    else:
        ids = tokenizer.chat(text, add_generation_prompt=False)
    if not ids:
        raise FormatError(f"line {document.number} has an empty text", file=document.file)
    return tuple(ids)


def _class(value: Any, ids: Mapping[str, int], document: Document) -> int:
    """The number of a class, from its number or its name."""
    if isinstance(value, str) and value in ids:
        return ids[value]
    if isinstance(value, int) and 0 <= int(value) < len(ids):
        return int(value)
    some = ", ".join(list(ids)[:8])
    raise FormatError(
        f"line {document.number}: the label {value!r} is none of the model's {len(ids)}",
        file=document.file,
        hint=f"0 to {len(ids) - 1}, or a name: {some}",
    )


def _number(value: Any, document: Document) -> int:
    """The bits of a number as fp32; no finite one has those of `IGNORED`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_float32(value):
        raise FormatError(
            f"line {document.number}: the label {value!r} is no finite number",
            file=document.file,
            hint="the model has one label, which is a number",
        )
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def _is_float32(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= float(np.finfo(np.float32).max)


class LabeledDataset:
    """Rows of one labeled text, or one pair, each; see `TokenDataset`.

    Texts of more than `length` tokens are cut, or refused with the overflow `error`. Rows are as
    long as the longest text needs, and a multiple of `multiple` tokens; those of pairs have two.

    Raises:
        FormatError: a text is too long, and none is to be cut.
    """

    target_length = 0

    def __init__(
        self,
        labeled: LabeledTexts,
        length: int,
        *,
        both_ways: bool,
        seed: int | None = 1234,
        pad_id: int = 0,
        overflow: Overflow = "truncate",
        multiple: int = 1,
    ) -> None:
        self.labeled, self._seed = labeled, seed
        self._both_ways, self._pad_id = both_ways, pad_id
        if overflow == "error" and labeled.longest > length:
            raise FormatError(
                f"a text has {labeled.longest} tokens, and rows have {length}",
                hint="--overflow truncate cuts it, a larger --seq-length has room",
            )
        step = math.lcm(_WIDTH, multiple)
        self._most = min(length, labeled.longest)
        self._side = min(length, -(-self._most // step) * step)
        self.length = self._side * max(len(t.sides) for t in labeled.texts)
        self._part = range(len(labeled.texts))
        self._shuffled: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._part)

    @property
    def fingerprint(self) -> str:
        """A digest of everything that determines the numbers of samples."""
        facts = (self.labeled, self._most, self._seed, self._both_ways, self._part)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def divided(self, share: float) -> tuple[LabeledDataset, LabeledDataset]:
        """Divide into training and validation rows, in the order of the first epoch.

        Raises:
            UsageError: one of them would have no rows.
        """
        num_eval = max(1, round(share * len(self)))
        if not 0 < share < 1 or num_eval >= len(self):
            raise UsageError(
                f"a share of {share} of {len(self)} rows to evaluate on",
                hint="between 0 and 1, with at least one row left for training; or give "
                "--eval-data FILE",
            )
        border = len(self) - num_eval
        order = (
            range(len(self))
            if self._seed is None
            else shuffled(len(self), self._seed, "documents").tolist()
        )
        texts = [self.labeled.texts[self._part[n]] for n in order]
        return self._with(texts[:border]), self._with(texts[border:])

    def _with(self, texts: Sequence[LabeledText]) -> LabeledDataset:
        subset = object.__new__(type(self))
        subset.__dict__.update(self.__dict__)
        subset.labeled = LabeledTexts(self.labeled.kind, tuple(texts))
        subset._part, subset._shuffled = range(len(texts)), None
        return subset

    def rows(self, first: int, count: int) -> PackedRows:
        """Samples number `first` and the next, `count` in all."""
        return self.rows_of([self.number_of(n) for n in range(first, first + count)])

    def rows_of(self, numbers: Sequence[int]) -> PackedRows:
        """The rows of texts, by their numbers."""
        shape = len(numbers), self.length
        tokens, labels = np.full(shape, self._pad_id, np.int64), np.full(shape, IGNORED)
        positions, owners = np.zeros(shape, np.int64), np.full(shape, -1)
        for row, number in enumerate(numbers):
            text = self.labeled.texts[number]
            for side, ids in enumerate(text.sides):
                count, offset = min(len(ids), self._most), side * self._side
                columns = slice(offset, offset + count)
                tokens[row, columns] = ids[:count]
                positions[row, columns] = np.arange(count)
                owners[row, columns] = number * len(text.sides) + side
            places = self.places_of(number)
            if text.label is not None:
                labels[row, places[0]] = text.label
            elif len(places) > 1:
                labels[row, places[0]] = places[1]
        return PackedRows(
            tokens_BS=tokens,
            labels_BS=labels,
            positions_BS=positions,
            documents_BS=owners,
            both_ways=self._both_ways,
        )

    def places_of(self, number: int) -> list[int]:
        """The places in a row of the tokens by which a text, or both of a pair, are scored."""
        sides = self.labeled.texts[number].sides
        return [
            n * self._side + (0 if self._both_ways else min(len(ids), self._most) - 1)
            for n, ids in enumerate(sides)
        ]

    def number_of(self, sample: int) -> int:
        """The number of the text that a sample is."""
        epoch, place = divmod(sample, len(self))
        if self._seed is None:
            return self._part[place]
        if self._shuffled is None or self._shuffled[0] != epoch:
            self._shuffled = epoch, shuffled(len(self), self._seed, f"rows {epoch}")
        return self._part[int(self._shuffled[1][place])]

    @property
    def counts(self) -> Counts:
        """Statistics of one epoch."""
        sizes = [len(side) for text in self.labeled.texts for side in text.sides]
        tokens = sum(min(n, self._most) for n in sizes)
        return Counts(
            documents=len(sizes),
            rows=len(self),
            tokens=tokens,
            labels=len(self),
            truncated=sum(n > self._most for n in sizes),
            split=0,
            skipped=0,
            filled=tokens / (len(self) * self.length),
        )
