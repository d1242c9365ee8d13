"""The sample index of a run: documents cut into numbered rows.

A row has parts of documents. A document of n tokens gives n - 1 pairs of a token and its label; a
part is a range of pairs. The index is computed once, from lengths alone, so any row of any epoch is
found at once on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError

Int = NDArray[np.int64]
Mode = Literal["packed", "whole", "padded"]
Overflow = Literal["split", "truncate", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleIndex:
    """Rows of a data set: row r has parts `first[r]` to `first[r + 1]`.

    Part p has pairs `begin[p]` to `end[p]` of `document[p]`. `truncated` documents lost their end,
    `split` ones were longer than a row and continue in other rows, `skipped` ones had no pair.
    """

    document: Int
    begin: Int
    end: Int
    first: Int
    truncated: int = 0
    split: int = 0
    skipped: int = 0

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.first) - 1


def cut(
    lengths: Int, order: Int, row: int, *, mode: Mode = "packed", overflow: Overflow = "split"
) -> SampleIndex:
    """Cut documents of the given lengths, in `order`, into rows of `row` pairs.

    "packed" fills every row except the last and splits documents at the end of a row; "whole" puts
    several documents into a row and splits none that fits into one; "padded" starts a row with each
    document. With `overflow`, documents longer than a row are split, truncated or an error;
    "packed" splits them.

    Raises:
        FormatError: a document is too long and `overflow` is "error".
    """
    pairs = np.maximum(lengths[order] - 1, 0)
    is_used = pairs > 0
    order, pairs, skipped = order[is_used], pairs[is_used], int((~is_used).sum())
    over = pairs > row
    if overflow == "error" and over.any():
        worst = int(order[np.argmax(over)])
        raise FormatError(
            f"document {worst + 1} has {int(lengths[worst])} tokens, and a row has {row}",
            hint="--overflow split or truncate, or a larger --seq-length",
        )
    if mode == "packed" and overflow != "truncate":
        return _filled(order, pairs, row, skipped, split=int(over.sum()))
    truncated = split = 0
    if overflow == "truncate":
        truncated, pairs = int(over.sum()), np.minimum(pairs, row)
        document, begin, end = order, np.zeros_like(pairs), pairs
        if mode == "packed":
            return _filled(order, pairs, row, skipped, truncated=truncated)
    else:
        split = int(over.sum())
        parts = -(-pairs // row)
        document_ids = np.repeat(np.arange(len(order)), parts)
        number = np.arange(len(document_ids)) - np.repeat(np.cumsum(parts) - parts, parts)
        begin = number * row
        end = np.minimum(begin + row, pairs[document_ids])
        document = order[document_ids]
    first = _fitted(end - begin, row) if mode == "whole" else np.arange(len(document) + 1)
    return SampleIndex(
        document=document,
        begin=begin,
        end=end,
        first=first,
        truncated=truncated,
        split=split,
        skipped=skipped,
    )


def _filled(
    order: Int, pairs: Int, row: int, skipped: int, *, truncated: int = 0, split: int = 0
) -> SampleIndex:
    """Full rows of consecutive documents."""
    ends = np.cumsum(pairs)
    total = int(ends[-1]) if len(ends) else 0
    starts = ends - pairs
    part_starts = np.union1d(starts, np.arange(0, total, row)).astype(np.int64)
    document_ids = np.searchsorted(starts, part_starts, side="right") - 1
    stop = np.append(part_starts[1:], total)[: len(part_starts)]
    rows = -(-total // row)
    first = np.searchsorted(part_starts // row, np.arange(rows + 1)).astype(np.int64)
    return SampleIndex(
        document=order[document_ids],
        begin=part_starts - starts[document_ids],
        end=stop - starts[document_ids],
        first=first,
        truncated=truncated,
        split=split,
        skipped=skipped,
    )


def _fitted(sizes: Int, row: int) -> Int:
    """The first part of each row if parts stay in order and none is split."""
    first, room = [0], row
    for number, size in enumerate(sizes.tolist()):
        if size > room:
            first.append(number)
            room = row
        room -= size
    if len(sizes):
        first.append(len(sizes))
    return np.asarray(first, np.int64)
