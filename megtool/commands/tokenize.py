"""Tokenize: text as tokens in Megatron's indexed data sets, `.bin` and `.idx`."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool.checkpoint.storage.files import Files
from megtool.console import Progress, format_bytes, silent
from megtool.data.dataset_writer import DatasetFiles
from megtool.data.documents import Document, documents, source_bytes
from megtool.errors import UsageError
from megtool.reshard.find_tokenizer import find_tokenizer

if TYPE_CHECKING:
    from megtool.data.indexed import Tokens
    from megtool.data.tokenizer import Tokenizer

_CHUNK_BYTES = 256 << 10
_CHUNK_DOCUMENTS = 1024
_SAMPLE_BYTES = 1 << 20
_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeReport:
    """What was written, or with `dry_run` what a sample of it looks like.

    `empty` documents have no text and are left out. `source_bytes` are those of the sources as
    they lie on disk, 0 for a data set that does not say; `text_bytes` those of the texts in UTF-8.
    In a dry run `documents`, `tokens` and `text_bytes` are of the first MiB of text alone.
    """

    sources: tuple[str, ...]
    destination: str
    dtype: str
    vocab_size: int
    documents: int
    empty: int
    tokens: int
    source_bytes: int
    text_bytes: int
    written_bytes: int
    seconds: float
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The report as a person reads it."""
        yield f"{', '.join(self.sources)} -> {self.destination}.bin, {self.destination}.idx"
        yield f"  {'dtype':<12}{self.dtype}, for a vocabulary of {self.vocab_size}"
        texts = f"{self.documents} documents, {self.tokens} tokens"
        if self.dry_run:
            yield f"  {'sample':<12}{texts} out of {format_bytes(self.text_bytes)} of text"
            return
        rate = format_bytes(self.text_bytes / self.seconds) if self.seconds else "-"
        yield f"  {'written':<12}{texts}, {format_bytes(self.written_bytes)}"
        yield (
            f"  {'text':<12}{format_bytes(self.text_bytes)} in {self.seconds:.2f} s ({rate}/s), "
            f"{self.text_bytes / max(1, self.tokens):.2f} bytes a token"
        )
        if self.empty:
            yield f"  {'left out':<12}{self.empty} documents without text"


def tokenize(
    sources: str | Path | Sequence[str | Path],
    destination: str | Path,
    *,
    tokenizer: str | Path,
    field: str | None = None,
    split: str | None = None,
    append_eos: bool = False,
    special: bool = True,
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    progress: Progress = silent,
    files: Files | None = None,
) -> TokenizeReport:
    """Write the documents of `sources`, in order, to `destination`.bin and `destination`.idx.

    Sources are what `megtool.data.documents.documents` reads: files of text, JSON lines or parquet,
    folders of such, and data sets of Hugging Face; `field` and `split` are as there. `tokenizer` is
    a folder with tokenizer files, or a checkpoint of any format that carries one. Each document
    becomes one sequence: `special` adds what the tokenizer puts around a text, `append_eos` its
    end-of-document token. `workers` are threads (default: one a core, 8 at most); the result does
    not depend on them. The files appear under their names when they are complete, the index last.

    Raises:
        DestinationError: the files exist (without `overwrite`), or another run writes them.
        FormatError: malformed input; it names the file and the line. See `documents` for more.
    """
    from megtool.data.indexed import IndexedWriter, token_dtype

    given = [sources] if isinstance(sources, str | Path) else list(sources)
    if not given:
        raise UsageError("no source is given", hint="files of text, folders or data sets")
    if workers is not None and workers < 1:
        raise UsageError(f"workers {workers}", hint="1 or more")
    target = DatasetFiles(Path(destination), files or Files(), overwrite=overwrite)
    target.check()
    chosen = find_tokenizer(tokenizer)
    began = time.monotonic()
    total = sum(source_bytes(s, split=split) for s in given)
    chunks = _chunks(d for s in given for d in documents(s, field=field, split=split))
    work = _Work(chosen, append_eos=append_eos, special=special)
    dtype, written = token_dtype(chosen.vocab_size), 0
    if dry_run:
        for done in map(work.encode, _first(chunks)):
            work.count(done)
        work.check(given)
    else:
        with target:
            with IndexedWriter(target.staged, dtype) as writer:
                for done in work.encode_all(chunks, workers or _cores()):
                    for ids in done.ids:
                        writer.add(ids)
                        writer.end_document()
                    work.count(done)
                    progress("tokenize", done.num_bytes, total)
            work.check(given)
            written = target.commit(fsync=fsync)
    return TokenizeReport(
        sources=tuple(map(str, given)),
        destination=str(target.prefix),
        dtype=dtype.name,
        vocab_size=chosen.vocab_size,
        documents=work.documents,
        empty=work.empty,
        tokens=work.tokens,
        source_bytes=total,
        text_bytes=work.text_bytes,
        written_bytes=written,
        seconds=time.monotonic() - began,
        dry_run=dry_run,
    )


@dataclass(frozen=True, slots=True)
class _Done:
    """A chunk of documents as tokens; those without any are left out of `ids`."""

    ids: list[Tokens]
    empty: int
    num_bytes: int
    text_bytes: int


class _Work:
    """Chunks of documents to tokens, in several threads, and the count of what was done.

    Tokenizers of the tokenizers package let go of the interpreter while they work, so threads are
    as fast as processes and start at once. Each has a twin of its own: one that is shared makes
    threads wait for its cache.
    """

    def __init__(self, tokenizer: Tokenizer, *, append_eos: bool, special: bool) -> None:
        self._tokenizer = tokenizer
        self._append_eos = append_eos
        self._special = special
        self._twins = threading.local()
        self.documents = self.empty = self.tokens = self.text_bytes = 0

    def encode(self, chunk: Sequence[Document]) -> _Done:
        """The tokens of a chunk, by this thread's twin."""
        from megtool.data.tokenize_documents import encode, with_eos

        own = getattr(self._twins, "tokenizer", None) or self._twin()
        plain = all(d.completion is None and not d.messages for d in chunk)
        if plain:
            texts = [d.text for d in chunk if d.text]
            lists = own.encode_batch(texts, add_special=self._special)
            ids = [np.asarray(with_eos(i, own, self._append_eos), np.int32) for i in lists]
        else:
            ids = [e.ids for e in encode(chunk, own, append_eos=self._append_eos)]
        there = [i for i in ids if len(i)]
        return _Done(
            there,
            len(chunk) - len(there),
            sum(d.num_bytes for d in chunk),
            sum(_text_bytes(d) for d in chunk),
        )

    def _twin(self) -> Tokenizer:
        twin = self._twins.tokenizer = self._tokenizer.twin()
        return twin

    def encode_all(self, chunks: Iterable[list[Document]], workers: int) -> Iterator[_Done]:
        """All chunks in their order; a few are read ahead of what is written."""
        from megtool.data.tokenizer import single_threaded

        waiting: deque[Future[_Done]] = deque()
        pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        try:
            with single_threaded():
                for chunk in chunks:
                    waiting.append(pool.submit(self.encode, chunk))
                    if len(waiting) > workers + _AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def count(self, done: _Done) -> None:
        """Add a chunk to what was done."""
        self.documents += len(done.ids)
        self.empty += done.empty
        self.tokens += sum(map(len, done.ids))
        self.text_bytes += done.text_bytes

    def check(self, sources: Sequence[str | Path]) -> None:
        """Refuse sources that hold no text at all.

        Raises:
            UsageError: they do.
        """
        if not self.documents:
            raise UsageError(
                f"no document with any text in {sources[0]}", hint="name a file with some text"
            )


def _text_bytes(document: Document) -> int:
    texts = [document.text, document.completion or ""]
    texts += [c for m in document.messages if isinstance(c := m["content"], str)]
    return sum(len(t) if t.isascii() else len(t.encode()) for t in texts)


def _chunks(texts: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about `_CHUNK_BYTES` of text."""
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


def _first(chunks: Iterable[list[Document]]) -> Iterator[list[Document]]:
    """As many chunks as hold `_SAMPLE_BYTES` of text."""
    size = 0
    for chunk in chunks:
        yield chunk
        size += sum(map(_text_bytes, chunk))
        if size >= _SAMPLE_BYTES:
            return


def _cores() -> int:
    return min(8, len(os.sched_getaffinity(0)))
