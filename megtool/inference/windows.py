"""Long texts cut into windows so that every token is predicted once, with context before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.model.batch import Batch, run_starts

IGNORED = -100
_PAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDocument:
    """A text as tokens. Of tokens where `counted` is false no prediction counts (None: all do).

    `labels` are what a model that sees tokens behind each as well has to predict in its place, or
    `IGNORED`; without them each token predicts the next. `source` is what an encoder reads.
    """

    tokens: Sequence[int]
    counted: Sequence[bool] | None = None
    labels: Sequence[int] | None = None
    source: Sequence[int] | None = None

    @property
    def num_pairs(self) -> int:
        """Tokens that go in and have something to predict."""
        return max(len(self.tokens) - (self.labels is None), 0)

    def label(self, place: int) -> int:
        """What the token before `place` is to predict, or `IGNORED`."""
        if self.labels is not None:
            return self.labels[place - 1]
        return self.tokens[place] if self.counted is None or self.counted[place] else IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWindow:
    """Tokens `start` to `stop` of a document go in; the tokens from `first` to `stop` (included)
    are those whose predictions are new."""

    document: int
    start: int
    stop: int
    first: int


def windows(length: int, *, window: int, stride: int, document: int = 0) -> Iterator[TokenWindow]:
    """Windows over `length` tokens: `window` tokens go in, and each predicts the one after it.

    Windows begin every `stride` tokens. Tokens 1 to length - 1 are each counted exactly once: all
    that the first window predicts, then in every window what lies beyond the one before.

    Raises:
        UsageError: a size is impossible.
    """
    if window < 1 or not 1 <= stride <= window:
        raise UsageError(
            f"windows of {window} tokens cannot move by {stride}",
            hint="the stride is at least 1, and at most the window",
        )
    done = 0
    for start in range(0, max(length - 1, 0), stride):
        stop = min(start + window, length - 1)
        yield TokenWindow(document=document, start=start, stop=stop, first=done + 1)
        done = stop
        if stop == length - 1:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRows:
    """Some windows as one batch: `labels_BS` are the tokens to predict, `IGNORED` elsewhere.

    `places` says for each label that counts, row by row, its document and its place in it.
    """

    batch: Batch
    labels_BS: Tensor
    places: list[tuple[int, int]]

    @property
    def num_counted(self) -> int:
        """Predictions that count."""
        return len(self.places)


def batches(
    documents: Iterable[TokenDocument],
    *,
    window: int,
    stride: int,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> Iterator[WindowRows]:
    """Windows over all documents, `batch_size` in a batch, in the order of the documents.

    Rows shorter than the longest of their batch are padded on the right.
    """
    waiting: list[tuple[TokenWindow, TokenDocument]] = []
    for number, document in enumerate(documents):
        for token_window in windows(
            document.num_pairs + 1, window=window, stride=stride, document=number
        ):
            waiting.append((token_window, document))
            if len(waiting) == batch_size:
                yield _rows(waiting, device)
                waiting = []
    if waiting:
        yield _rows(waiting, device)


def num_counted(documents: Iterable[TokenDocument]) -> int:
    """How many predictions count over all documents."""
    return sum(
        d.num_pairs
        if d.counted is None and d.labels is None
        else sum(d.label(place) != IGNORED for place in range(1, d.num_pairs + 1))
        for d in documents
    )


def _rows(
    some: Sequence[tuple[TokenWindow, TokenDocument]], device: torch.device | str
) -> WindowRows:
    width = max(w.stop - w.start for w, _ in some)
    shape = (len(some), width)
    tokens_BS = torch.full(shape, _PAD, dtype=torch.int64)
    labels_BS = torch.full(shape, IGNORED, dtype=torch.int64)
    valid_BS = torch.zeros(shape, dtype=torch.bool)
    places: list[tuple[int, int]] = []
    for row, (w, document) in enumerate(some):
        size = w.stop - w.start
        tokens_BS[row, :size] = torch.tensor(document.tokens[w.start : w.stop])
        valid_BS[row, :size] = True
        for position in range(w.first, w.stop + 1):
            if (label := document.label(position)) != IGNORED:
                labels_BS[row, position - w.start - 1] = label
                places.append((w.document, position))
    ragged = not bool(valid_BS.all())
    sources = [document.source for _, document in some if document.source is not None]
    source_BE, source_valid_BE = pad_sources(sources, device) if sources else (None, None)
    starts_BM = run_starts(valid_BS) if ragged else None
    batch = Batch(
        tokens_BS=tokens_BS.to(device),
        valid_BS=valid_BS.to(device) if ragged else None,
        run_starts_BM=None if starts_BM is None else starts_BM.to(device),
        source_BE=source_BE,
        source_valid_BE=source_valid_BE,
    )
    return WindowRows(batch=batch, labels_BS=labels_BS.to(device), places=places)


def pad_sources(
    sources: Sequence[Sequence[int]], device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    """Sources as rows that are padded on the right, and which tokens are no padding (None: all)."""
    width = max(map(len, sources))
    padded = [[*source, *[_PAD] * (width - len(source))] for source in sources]
    valid_BE = None
    if min(map(len, sources)) < width:
        lengths_B = torch.tensor([len(source) for source in sources])
        valid_BE = (torch.arange(width) < lengths_B[:, None]).to(device)
    return torch.tensor(padded, dtype=torch.int64).to(device), valid_BE
