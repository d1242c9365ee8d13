"""Calibration data: rows of tokens from any data set, or random ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megtool.errors import UsageError
from megtool.options.quantize import CalibrationData
from megtool.storage.location.path import location

if TYPE_CHECKING:
    from megtool.data.tokenize_documents import EncodedDocument
    from megtool.data.tokenizer import Tokenizer
    from megtool.model.batch import Batch

BATCH_TOKENS = 2048

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSamples:
    """Rows of tokens, `[N, S]`, with each token's position in its document and its document.

    `digest` is that of tokens and documents; `name` is the name of the data.
    """

    name: str
    tokens_NS: Int
    positions_NS: Int
    documents_NS: Int
    digest: str
    note: str = ""

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return int((self.documents_NS >= 0).sum())

    def __len__(self) -> int:
        return len(self.tokens_NS)

    def batches(self) -> list[Batch]:
        """The rows as batches of about `BATCH_TOKENS` tokens."""
        import torch

        from megtool.model.batch import Batch

        size = max(1, BATCH_TOKENS // self.tokens_NS.shape[1])
        out = []
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            documents = self.documents_NS[rows]
            several = bool((documents != documents[:, :1]).any())
            ragged = bool((documents < 0).any())
            out.append(
                Batch(
                    tokens_BS=torch.from_numpy(self.tokens_NS[rows]),
                    positions_BS=torch.from_numpy(self.positions_NS[rows]) if several else None,
                    valid_BS=torch.from_numpy(documents >= 0) if ragged else None,
                    documents_BS=torch.from_numpy(documents) if several else None,
                )
            )
        return out


def read_samples(
    options: CalibrationData,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_positions: int,
) -> CalibrationSamples:
    """Read or generate the samples that `options` describe.

    Raises:
        UsageError: the data is empty, or too short.
        FormatError: it cannot be read. See `megtool.data.documents.documents` for more.
    """
    samples, length = options.sizes(max_positions)
    if options.synthetic:
        if options.data is not None:
            raise UsageError("--synthetic and --data exclude each other", hint="give one of them")
        return _synthetic_samples(samples, length, vocab_size, options.seed or 0)
    if tokenizer is None:
        raise UsageError(
            "no tokenizer to read the data with", hint="--tokenizer FOLDER, or --synthetic"
        )
    name = "the text that comes with megtool" if options.data is None else str(options.data)
    rows = list(_select_rows(_iterate_rows(options, tokenizer, length), samples, options.seed))
    if not rows:
        raise UsageError(
            f"{name} has no text to calibrate on", hint="--field names the field with the text"
        )
    note = ""
    if len(rows) < samples:
        total = sum(int((d >= 0).sum()) for _, _, d in rows)
        if options.samples is not None:
            raise UsageError(
                f"{name} has {total:,} tokens, but {samples} samples of {length} tokens need "
                f"{samples * length:,}",
                hint=f"--samples {max(1, total // length)}, --seq-length, or more --data",
            )
        note = f"{name} has only {len(rows)} samples of {length} tokens; the default is {samples}"
    tokens, positions, documents = (np.stack(parts) for parts in zip(*rows, strict=True))
    return _make_samples(name, tokens, positions, documents, note)


def _make_samples(
    name: str, tokens: Int, positions: Int, documents: Int, note: str = ""
) -> CalibrationSamples:
    digest = hashlib.sha256(np.ascontiguousarray(tokens).tobytes())
    digest.update(np.ascontiguousarray(documents).tobytes())
    return CalibrationSamples(
        name=name,
        tokens_NS=tokens,
        positions_NS=positions,
        documents_NS=documents,
        digest=digest.hexdigest(),
        note=note,
    )


def _synthetic_samples(samples: int, length: int, vocab_size: int, seed: int) -> CalibrationSamples:
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (samples, length))
    positions = np.broadcast_to(np.arange(length), tokens.shape).copy()
    note = "calibrated on random tokens: scales may differ much from those for text"
    return _make_samples("random tokens", tokens, positions, np.zeros_like(tokens), note)


def _iterate_rows(
    options: CalibrationData, tokenizer: Tokenizer, length: int
) -> Iterator[tuple[Int, Int, Int]]:
    """All rows of the data; only the last one has padding."""
    from megtool.data.packing import pack

    for rows in pack(_documents(options, tokenizer), length, mode="packed", rows=1):
        documents = rows.documents_BS[0]
        first = documents[documents >= 0].min(initial=1 << 60)
        numbered = np.where(documents >= 0, documents - first, -1)
        yield rows.tokens_BS[0], rows.positions_BS[0], numbered


def _documents(options: CalibrationData, tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    from megtool.data.documents import documents
    from megtool.data.indexed import IndexedDataset
    from megtool.data.tokenize_documents import EncodedDocument, encode

    if options.data is None:
        text = files("megtool.data") / "founding_documents.txt"
        yield EncodedDocument(ids=np.asarray(tokenizer.encode(text.read_text()), np.int32))
    elif location(options.data).suffix in (".bin", ".idx"):
        dataset = IndexedDataset(options.data)
        for number in range(dataset.num_documents):
            ids = np.asarray(dataset.document(number), np.int32)
            if ids.size and int(ids.max()) >= tokenizer.vocab_size:
                raise UsageError(
                    f"{options.data} has token {ids.max()}, but the tokenizer has only "
                    f"{tokenizer.vocab_size} tokens",
                    hint="it was written with another tokenizer: tokenize the text again",
                )
            yield EncodedDocument(ids=ids)
    else:
        source_documents = documents(
            options.data, field=options.records.field, split=options.records.split
        )
        yield from encode(source_documents, tokenizer, append_eos=False, answers_only=False)


def _select_rows(
    rows: Iterator[tuple[Int, Int, Int]], samples: int, seed: int | None
) -> Sequence[tuple[Int, Int, Int]]:
    """The first rows, or with a seed a uniform sample, in the order of the data."""
    reservoir: list[tuple[int, tuple[Int, Int, Int]]] = []
    draw = None if seed is None else random.Random(seed)
    for number, row in enumerate(rows):
        if len(reservoir) < samples:
            reservoir.append((number, row))
        elif draw is None:
            break
        elif (place := draw.randrange(number + 1)) < samples:
            reservoir[place] = (number, row)
    return [row for _, row in sorted(reservoir, key=lambda item: item[0])]
