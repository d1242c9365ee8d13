"""A token data set: the samples of a run by index, identical for every rank layout.

Samples are the rows of one epoch after the other, each epoch in its own order, which the seed
determines. So a run resumes exactly at a number of samples, at any data-parallel size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.data.blend import Blend, Chain
from megtool.data.fill_in_middle import FillInMiddle
from megtool.data.masking import Masking
from megtool.data.packing import IGNORED, PackedRows
from megtool.data.sample_index import Mode, Overflow, SampleIndex, cut
from megtool.data.token_cache import Documents
from megtool.errors import FormatError, UsageError

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Statistics of a data set. `labels` are those of one epoch; `filled` is the share of positions
    that are no padding."""

    documents: int
    rows: int
    tokens: int
    labels: int
    truncated: int
    split: int
    skipped: int
    filled: float


class TokenDataset:
    """Rows of `length` tokens of one data set.

    `seed` determines the order of documents and of rows; None keeps the order of the data.
    `change` is what is done to the tokens of a row: masked for an encoder, or rearranged.

    Raises:
        FormatError: there is nothing to learn, or a document is too long (see `sample_index.cut`).
    """

    target_length = 0
    """Tokens of a row's target, where an encoder reads the row."""

    def __init__(
        self,
        documents: Documents,
        length: int,
        *,
        seed: int | None = 1234,
        mode: Mode = "packed",
        overflow: Overflow = "split",
        pad_id: int = 0,
        source: str = "",
        change: Masking | FillInMiddle | None = None,
    ) -> None:
        if length < 1:
            raise UsageError(f"rows cannot have {length} tokens", hint="--seq-length 1 or more")
        self._documents, self.length, self._seed = documents, length, seed
        self._pad_id, self._source = pad_id, source
        masking = change if isinstance(change, Masking) else None
        fill_in = change if isinstance(change, FillInMiddle) else None
        self._masking, self._fill_in = masking, fill_in
        if masking is not None and documents.is_partly_learned:
            raise UsageError(
                f"{source!r} has conversations or answers, and the model predicts masked tokens",
                hint="it learns from plain texts: --field NAME, or --all-turns for all of them",
            )
        if fill_in is not None and documents.is_partly_learned:
            raise UsageError(
                f"{source!r} has conversations or answers, and --fim-rate rearranges plain texts",
                hint="--field NAME reads plain texts; --all-turns learns all of a conversation",
            )
        self._cut = self.make_index(mode, overflow)
        self._part = range(self._cut.num_rows)
        self._shuffled: tuple[int, Int] | None = None
        changes = () if change is None else (change,)
        self._facts: tuple[Any, ...] = (length, seed, mode, overflow, pad_id, *changes)
        if not self._cut.num_rows:
            raise FormatError(
                f"there is nothing to train on in {len(documents.lengths)} documents",
                file=source or None,
                hint="a document needs at least two tokens, one of them in an answer",
            )

    @property
    def ahead(self) -> int:
        """How far behind a token its label is."""
        return int(self._masking is None)

    def make_index(self, mode: Mode, overflow: Overflow) -> SampleIndex:
        """The documents cut into rows that have a label."""
        documents = self._documents
        order = document_order(documents, self._seed)
        lengths = documents.lengths + (1 - self.ahead)
        return _with_labels(
            documents, cut(lengths, order, self.length, mode=mode, overflow=overflow)
        )

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._part)

    @property
    def fingerprint(self) -> str:
        """A digest of everything that determines the numbers of samples."""
        part = (self._part.start, self._part.stop)
        facts = repr((self._documents.fingerprint, self._facts, part))
        return hashlib.sha256(facts.encode()).hexdigest()

    def divided(self, share: float) -> tuple[TokenDataset, TokenDataset]:
        """Divide into training and validation rows; at most one document is in both.

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
        border = self._part.stop - num_eval
        return self._taking(range(self._part.start, border)), self._taking(
            range(border, self._part.stop)
        )

    def _taking(self, part: range) -> TokenDataset:
        subset = object.__new__(type(self))
        subset.__dict__.update(self.__dict__)
        subset._part, subset._shuffled = part, None
        return subset

    def rows(self, first: int, count: int) -> PackedRows:
        """Samples number `first` and the next, `count` in all."""
        return _stacked([self._row(n) for n in range(first, first + count)])

    def row_of(self, sample: int) -> int:
        """The row of the index that a sample is."""
        epoch, place = divmod(sample, len(self))
        return self._part[place if self._seed is None else int(self._order(epoch)[place])]

    def _row(self, sample: int) -> PackedRows:
        row = self.row_of(sample)
        tokens, labels = np.full(self.length, self._pad_id, np.int64), np.full(self.length, IGNORED)
        positions, documents = np.zeros(self.length, np.int64), np.full(self.length, -1)
        offset, c = 0, self._cut
        random = None if self._fill_in is None else self._fill_in.generator(sample)
        for piece in range(int(c.first[row]), int(c.first[row + 1])):
            document, begin, end = int(c.document[piece]), int(c.begin[piece]), int(c.end[piece])
            ids = self._documents.tokens(document, begin, end + self.ahead)
            if self._fill_in is not None and random is not None:
                ids = self._fill_in.rearrange(ids.astype(np.int64), random)
                end = begin + min(len(ids) - 1, self.length - offset)
                ids = ids[: end - begin + 1]
                if end <= begin:
                    continue
            columns = slice(offset, offset + end - begin)
            tokens[columns], labels[columns] = ids[: end - begin], ids[self.ahead :]
            learned = self._documents.learned(document, begin + 1, end + 1)
            if learned is not None:
                labels[columns][~learned] = IGNORED
            positions[columns], documents[columns] = np.arange(end - begin), document
            offset = columns.stop
        if self._masking is not None:
            inputs, chosen = self._masking.masked(tokens[:offset], sample)
            tokens[:offset], labels[:offset] = inputs, chosen
        return PackedRows(
            tokens_BS=tokens[None],
            labels_BS=labels[None],
            positions_BS=positions[None],
            documents_BS=documents[None],
            both_ways=self._masking is not None,
        )

    def _order(self, epoch: int) -> Int:
        if self._shuffled is None or self._shuffled[0] != epoch:
            order = shuffled(len(self), self._seed or 0, f"rows {epoch}")
            self._shuffled = epoch, order
        return self._shuffled[1]

    @property
    def counts(self) -> Counts:
        """Statistics of one epoch; reads which tokens are learned."""
        c, labels = self._cut, 0
        pieces = slice(int(c.first[self._part.start]), int(c.first[self._part.stop]))
        sizes = c.end[pieces] - c.begin[pieces]
        if not self._documents.is_partly_learned:
            labels = int(sizes.sum())
        else:
            for document, begin, end in zip(
                c.document[pieces].tolist(),
                c.begin[pieces].tolist(),
                c.end[pieces].tolist(),
                strict=True,
            ):
                learned = self._documents.learned(document, begin + 1, end + 1)
                labels += end - begin if learned is None else int(learned.sum())
        return Counts(
            documents=len(np.unique(c.document[pieces])),
            rows=len(self),
            tokens=int(sizes.sum()),
            labels=labels,
            truncated=c.truncated,
            split=c.split,
            skipped=c.skipped,
            filled=float(sizes.sum() / (len(self) * self.length)),
        )


class BlendedDataset:
    """Several data sets in shares (by default by size); an epoch has as many samples as all."""

    def __init__(
        self,
        feeds: Sequence[TokenDataset],
        shares: Sequence[float] | None = None,
        *,
        in_turn: bool = False,
    ) -> None:
        """Blend data sets of equally long rows; with `in_turn`, one after the other.

        Raises:
            UsageError: there is not one positive share for each.
        """
        if shares is not None and len(shares) != len(feeds):
            raise UsageError(f"{len(shares)} shares of {len(feeds)} data sets")
        self.feeds = tuple(feeds)
        self._blend: Blend | Chain = (
            Chain([len(f) for f in feeds])
            if in_turn
            else Blend([float(len(f)) for f in feeds] if shares is None else shares)
        )

    def __len__(self) -> int:
        """Samples of one epoch."""
        return sum(len(f) for f in self.feeds)

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.feeds[0].length

    @property
    def target_length(self) -> int:
        """See `TokenDataset`."""
        return self.feeds[0].target_length

    @property
    def fingerprint(self) -> str:
        """A digest of everything that determines the numbers of samples."""
        facts = repr(([f.fingerprint for f in self.feeds], self._blend.facts))
        return hashlib.sha256(facts.encode()).hexdigest()

    def rows(self, first: int, count: int) -> PackedRows:
        """Samples number `first` and the next, `count` in all."""
        places = [self._blend.place(n) for n in range(first, first + count)]
        return _stacked([self.feeds[dataset_id].rows(n, 1) for dataset_id, n in places])

    def divided(self, share: float) -> tuple[BlendedDataset, BlendedDataset]:
        """Divide each data set; see `TokenDataset.divided`. Validation has every row once."""
        training, validation = zip(*[f.divided(share) for f in self.feeds], strict=True)
        shares = self._blend.facts if isinstance(self._blend, Blend) else None
        return BlendedDataset(training, shares), BlendedDataset(validation, in_turn=True)

    @property
    def counts(self) -> Counts:
        """Statistics of one epoch over each data set."""
        all_of = [f.counts for f in self.feeds]
        rows = sum(c.rows for c in all_of)
        return Counts(
            documents=sum(c.documents for c in all_of),
            rows=rows,
            tokens=sum(c.tokens for c in all_of),
            labels=sum(c.labels for c in all_of),
            truncated=sum(c.truncated for c in all_of),
            split=sum(c.split for c in all_of),
            skipped=sum(c.skipped for c in all_of),
            filled=sum(c.filled * c.rows for c in all_of) / rows,
        )


def _with_labels(documents: Documents, cut: SampleIndex) -> SampleIndex:
    """Select the rows of a cut that have a label."""
    if not documents.is_partly_learned or not cut.num_rows:
        return cut
    has = np.zeros(len(cut.document), np.bool_)
    for piece in range(len(cut.document)):
        document, begin, end = (int(x[piece]) for x in (cut.document, cut.begin, cut.end))
        learned = documents.learned(document, begin + 1, end + 1)
        has[piece] = learned is None or bool(learned.any())
    row = np.repeat(np.arange(cut.num_rows), np.diff(cut.first))
    counts = np.bincount(row[has], minlength=cut.num_rows)
    rows = np.flatnonzero(np.bincount(row[has], minlength=cut.num_rows))
    first = np.concatenate([[0], np.cumsum(counts[rows])]).astype(np.int64)
    lost = len(np.unique(cut.document)) - len(np.unique(cut.document[has]))
    return replace(
        cut,
        document=cut.document[has],
        begin=cut.begin[has],
        end=cut.end[has],
        first=first,
        skipped=cut.skipped + lost,
    )


def document_order(documents: Documents, seed: int | None) -> Int:
    """The documents in the order in which they become rows."""
    number = len(documents.lengths)
    return np.arange(number) if seed is None else shuffled(number, seed, "documents")


def shuffled(count: int, seed: int, label: str) -> Int:
    """A permutation of `count` items, determined by the seed."""
    words = np.frombuffer(hashlib.sha256(f"{seed} {label}".encode()).digest(), np.uint32)
    return np.random.Generator(np.random.PCG64(words.tolist())).permutation(count)


def _stacked(rows: Sequence[PackedRows]) -> PackedRows:
    def all_of(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(r, name) for r in rows])

    has_sources = rows[0].sources_BE is not None
    return PackedRows(
        tokens_BS=all_of("tokens_BS"),
        labels_BS=all_of("labels_BS"),
        positions_BS=all_of("positions_BS"),
        documents_BS=all_of("documents_BS"),
        both_ways=rows[0].both_ways,
        sources_BE=all_of("sources_BE") if has_sources else None,
        source_valid_BE=all_of("source_valid_BE") if has_sources else None,
    )
