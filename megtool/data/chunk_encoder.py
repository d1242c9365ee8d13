"""Documents to tokens in several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megtool.data.documents import Document
from megtool.errors import UsageError
from megtool.process.threads import stream_in_threads

if TYPE_CHECKING:
    from megtool.data.indexed import Tokens
    from megtool.data.tokenizer import Tokenizer

_CHUNK_BYTES = 256 << 10
_CHUNK_DOCUMENTS = 1024
_SAMPLE_BYTES = 1 << 20
_AHEAD = 3


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk of documents as tokens; those without any are left out of `ids`."""

    ids: list[Tokens]
    empty: int
    num_bytes: int
    text_bytes: int


class ChunkEncoder:
    """Chunks of documents to tokens, in several threads, and the count of what was chunk.

    Tokenizers of the tokenizers package let go of the interpreter while they work, so threads are
    as fast as processes and start at once. Each has a twin of its own: one that is shared makes
    threads wait for its cache.
    """

    def __init__(self, tokenizer: Tokenizer, *, append_eos: bool, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._append_eos = append_eos
        self._add_special_tokens = add_special_tokens
        self._twins = threading.local()
        self.documents = self.empty = self.tokens = self.text_bytes = 0

    def encode(self, chunk: Sequence[Document]) -> EncodedChunk:
        """Encode a chunk with this thread's tokenizer."""
        from megtool.data.tokenize_documents import encode, with_eos

        tokenizer = getattr(self._twins, "tokenizer", None) or self._make_twin()
        is_plain = all(d.completion is None and not d.messages for d in chunk)
        if is_plain:
            texts = [d.text for d in chunk if d.text]
            lists = tokenizer.encode_batch(texts, add_special=self._add_special_tokens)
            ids = [np.asarray(with_eos(i, tokenizer, self._append_eos), np.int32) for i in lists]
        else:
            ids = [e.ids for e in encode(chunk, tokenizer, append_eos=self._append_eos)]
        nonempty = [i for i in ids if len(i)]
        return EncodedChunk(
            nonempty,
            len(chunk) - len(nonempty),
            sum(d.num_bytes for d in chunk),
            sum(_text_bytes(d) for d in chunk),
        )

    def _make_twin(self) -> Tokenizer:
        twin = self._twins.tokenizer = self._tokenizer.twin()
        return twin

    def encode_all(self, chunks: Iterable[list[Document]], workers: int) -> Iterator[EncodedChunk]:
        """Encode all chunks in order; a few are read ahead.

        Raises:
            MemoryError, StorageError: a thread ended for lack of memory, or cannot be started.
        """
        from megtool.data.tokenizer import single_threaded

        with single_threaded():
            yield from stream_in_threads(self.encode, chunks, threads=workers, ahead=_AHEAD)

    def count(self, chunk: EncodedChunk) -> None:
        """Add a chunk to what was chunk."""
        self.documents += len(chunk.ids)
        self.empty += chunk.empty
        self.tokens += sum(map(len, chunk.ids))
        self.text_bytes += chunk.text_bytes

    def check_documents(self, sources: Sequence[str]) -> None:
        """Refuse sources without any text.

        Raises:
            UsageError: they have none.
        """
        if not self.documents:
            raise UsageError(
                f"there is no document with any text in {sources[0]}",
                hint="name a file with some text",
            )


def _text_bytes(document: Document) -> int:
    texts = [document.text, document.completion or ""]
    texts += [c for m in document.messages if isinstance(c := m["content"], str)]
    return sum(len(t) if t.isascii() else len(t.encode()) for t in texts)


def split_chunks(texts: Iterable[Document]) -> Iterator[list[Document]]:
    """Split documents into lists of about `_CHUNK_BYTES` of text."""
    chunk: list[Document] = []
    size = 0
    for document in texts:
        chunk.append(document)
        size += _text_bytes(document)
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def take_sample(chunks: Iterable[list[Document]]) -> Iterator[list[Document]]:
    """Take as many chunks as hold `_SAMPLE_BYTES` of text."""
    size = 0
    for chunk in chunks:
        yield chunk
        size += sum(map(_text_bytes, chunk))
        if size >= _SAMPLE_BYTES:
            return


def count_cores() -> int:
    """Threads by default: one per core, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))
