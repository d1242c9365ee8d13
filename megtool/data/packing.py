"""Packs documents of any length into rows of one length, with every label exactly once.

A document of n tokens gives n - 1 pairs of a token and its label, the token after it. Rows hold
pairs, not tokens: where a document goes on in another row, the token at the cut is the last label
of one row and the first input of the next, so no label is lost and none is seen twice.

B rows, S length of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megtool.data.tokenize_documents import EncodedDocument
from megtool.errors import UsageError

IGNORED = -100
"""The label of what is not to be learned: what PyTorch's losses leave out."""

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows for a model: `labels_BS[b, s]` is the token that follows `tokens_BS[b, s]`, or IGNORED.

    `positions_BS` start at 0 with every document and every row. `documents_BS` counts documents
    from 0 through the whole run, and is -1 where a row is filled up; tokens attend to equal
    documents alone. With `both_ways` tokens attend to those behind them as well, and labels are
    those of the tokens themselves. `sources_BE` are what an encoder reads, E tokens for each row,
    of which those are padding where `source_valid_BE` is false.
    """

    tokens_BS: Int
    labels_BS: Int
    positions_BS: Int
    documents_BS: Int
    both_ways: bool = False
    sources_BE: Int | None = None
    source_valid_BE: NDArray[np.bool_] | None = None

    @property
    def valid_BS(self) -> NDArray[np.bool_]:
        """Where a row is not filled up."""
        return self.documents_BS >= 0

    @property
    def num_labels(self) -> int:
        """How many labels count."""
        return int((self.labels_BS != IGNORED).sum())


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some consecutive pairs of one document."""

    inputs: Int
    labels: Int
    document: int


def pack(
    documents: Iterable[EncodedDocument],
    length: int,
    *,
    mode: Literal["packed", "padded", "whole"] = "packed",
    rows: int = 1,
    pad_id: int = 0,
) -> Iterator[PackedRows]:
    """Documents, in order, as batches of `rows` rows of `length`; the last may have fewer rows.

    "packed" fills every row but the last and cuts documents where a row ends; "whole" begins a new
    row rather than cut a document that fits into one; "padded" begins a row with every document.
    Documents longer than a row go on in the next ones; a document of one token gives no pair.

    Raises:
        UsageError: `length` or `rows` is below 1.
    """
    _check(length=length, rows=rows)
    return _batches(_fill(_pairs(documents), length, mode), length, rows, pad_id)


def windows(
    documents: Iterable[EncodedDocument],
    length: int,
    stride: int,
    *,
    rows: int = 1,
    pad_id: int = 0,
) -> Iterator[PackedRows]:
    """Windows of `length` that begin every `stride` tokens of a document, for perplexity.

    Each label counts in the first window that has it and is IGNORED in later ones, which see it as
    context, so every token but a document's first counts exactly once. A window holds tokens of one
    document alone; positions start at 0 with it.

    Raises:
        UsageError: `stride` is below 1 or above `length`, `length` or `rows` below 1.
    """
    _check(length=length, rows=rows, stride=stride)
    if stride > length:
        raise UsageError(
            f"stride {stride} is more than the window of {length}: tokens would be left out",
            hint=f"1 to {length}",
        )
    return _batches(_windows(_pairs(documents), length, stride), length, rows, pad_id)


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} is {size}", hint="1 or more")


def _pairs(documents: Iterable[EncodedDocument]) -> Iterator[_Piece]:
    """All pairs of each document that has any."""
    for number, document in enumerate(documents):
        if len(document.ids) < 2:
            continue
        ids = document.ids.astype(np.int64)
        labels = ids[1:].copy()
        if document.learned is not None:
            labels[~document.learned[1:]] = IGNORED
        yield _Piece(ids[:-1], labels, number)


def _cut(piece: _Piece, begin: int, end: int) -> _Piece:
    return _Piece(piece.inputs[begin:end], piece.labels[begin:end], piece.document)


def _fill(pieces: Iterable[_Piece], length: int, mode: str) -> Iterator[list[_Piece]]:
    """Pieces as rows: lists of pieces of at most `length` pairs together."""
    row: list[_Piece] = []
    room = length
    for piece in pieces:
        num = len(piece.inputs)
        alone = mode == "padded" or (mode == "whole" and num > room)
        if row and alone:
            yield row
            row, room = [], length
        begin = 0
        while begin < num:
            part = _cut(piece, begin, begin + room)
            row.append(part)
            begin += len(part.inputs)
            room -= len(part.inputs)
            if not room:
                yield row
                row, room = [], length
    if row:
        yield row


def _windows(pieces: Iterable[_Piece], length: int, stride: int) -> Iterator[list[_Piece]]:
    for piece in pieces:
        num, counted = len(piece.inputs), 0
        for begin in range(0, num, stride):
            window = _cut(piece, begin, begin + length)
            end = begin + len(window.inputs)
            labels = window.labels.copy()
            labels[: counted - begin] = IGNORED
            counted = end
            yield [_Piece(window.inputs, labels, piece.document)]
            if end == num:
                break


def _batches(
    filled: Iterable[Sequence[_Piece]], length: int, rows: int, pad_id: int
) -> Iterator[PackedRows]:
    waiting: list[Sequence[_Piece]] = []
    for row in filled:
        waiting.append(row)
        if len(waiting) == rows:
            yield _batch(waiting, length, pad_id)
            waiting = []
    if waiting:
        yield _batch(waiting, length, pad_id)


def _batch(rows: Sequence[Sequence[_Piece]], length: int, pad_id: int) -> PackedRows:
    shape = (len(rows), length)
    tokens, labels = np.full(shape, pad_id, np.int64), np.full(shape, IGNORED, np.int64)
    positions, documents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    for b, row in enumerate(rows):
        offset = 0
        for piece in row:
            columns = slice(offset, offset + len(piece.inputs))
            tokens[b, columns], labels[b, columns] = piece.inputs, piece.labels
            positions[b, columns], documents[b, columns] = (
                np.arange(len(piece.inputs)),
                piece.document,
            )
            offset = columns.stop
    return PackedRows(
        tokens_BS=tokens, labels_BS=labels, positions_BS=positions, documents_BS=documents
    )
