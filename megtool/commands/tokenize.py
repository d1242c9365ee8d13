"""Tokenize text into Megatron's indexed data sets, `.bin` and `.idx`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from megtool.commands.options.models import TokenizeOptions
from megtool.console import Progress, format_bytes, silent
from megtool.data.chunk_encoder import ChunkEncoder, count_cores, split_chunks, take_sample
from megtool.data.dataset_upload import stage_dataset
from megtool.data.documents import documents, source_bytes
from megtool.errors import UsageError
from megtool.report.sections import Report, Row
from megtool.source.find_tokenizer import find_tokenizer
from megtool.storage.files import Files


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeReport(Report):
    """What was written, or with `dry_run` what a sample of it looks like.

    `empty` documents have no text and are left out. `source_bytes` are those of the sources as
    they are on disk, 0 for a data set that does not say; `text_bytes` those of the texts in UTF-8.
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

    def title(self) -> str:
        return f"{', '.join(self.sources)} -> {self.destination}.bin, {self.destination}.idx"

    def rows(self) -> Iterator[Row]:
        yield "dtype", f"{self.dtype}, for a vocabulary of {self.vocab_size}"
        texts = f"{self.documents} documents, {self.tokens} tokens"
        if self.dry_run:
            yield "sample", f"{texts} out of {format_bytes(self.text_bytes)} of text"
            return
        rate = format_bytes(self.text_bytes / self.seconds) if self.seconds else "-"
        yield "written", f"{texts}, {format_bytes(self.written_bytes)}"
        yield (
            "text",
            f"{format_bytes(self.text_bytes)} in {self.seconds:.2f} s ({rate}/s), "
            f"{self.text_bytes / max(1, self.tokens):.2f} bytes a token",
        )
        if self.empty:
            yield "left out", f"{self.empty} documents without text"


def tokenize(
    options: TokenizeOptions, *, progress: Progress = silent, files: Files | None = None
) -> TokenizeReport:
    """Write the documents of `sources`, in order, to `destination`.bin and `destination`.idx.

    Sources are what `megtool.data.documents.documents` reads: files of text, JSON lines or parquet,
    folders of such, and data sets of Hugging Face; `field` and `split` are as there. `tokenizer` is
    a folder with tokenizer files, or a checkpoint of any format that has one. Each document
    becomes one sequence. The result does not depend on `workers`. The files appear under their
    names when they are complete, the index last. For a store they are written to a temporary
    folder and then uploaded.

    Raises:
        DestinationError: the files exist (without `overwrite`), or another run writes them.
        FormatError: malformed input; it names the file and the line. See `documents` for more.
    """
    from megtool.data.indexed import IndexedWriter, token_dtype

    sources, split = options.sources, options.split
    if not sources:
        raise UsageError("no source is given", hint="files of text, folders or data sets")
    target = stage_dataset(options.destination, files or Files(), overwrite=options.overwrite)
    target.check()
    tokenizer = find_tokenizer(options.tokenizer)
    start = time.monotonic()
    total = sum(source_bytes(s, split=split) for s in sources)
    chunks = split_chunks(
        d for s in sources for d in documents(s, field=options.field, split=split)
    )
    encoder = ChunkEncoder(
        tokenizer, append_eos=options.append_eos, add_special_tokens=options.add_special_tokens
    )
    dtype, written_bytes = token_dtype(tokenizer.vocab_size), 0
    if options.dry_run:
        for chunk in map(encoder.encode, take_sample(chunks)):
            encoder.count(chunk)
        encoder.check_documents(sources)
    else:
        with target:
            with IndexedWriter(target.staged, dtype) as writer:
                for chunk in encoder.encode_all(chunks, options.workers or count_cores()):
                    for ids in chunk.ids:
                        writer.add(ids)
                        writer.end_document()
                    encoder.count(chunk)
                    progress("tokenize", chunk.num_bytes, total)
            encoder.check_documents(sources)
            written_bytes = target.commit(fsync=options.fsync)
    return TokenizeReport(
        sources=sources,
        destination=str(target.prefix),
        dtype=dtype.name,
        vocab_size=tokenizer.vocab_size,
        documents=encoder.documents,
        empty=encoder.empty,
        tokens=encoder.tokens,
        source_bytes=total,
        text_bytes=encoder.text_bytes,
        written_bytes=written_bytes,
        seconds=time.monotonic() - start,
        dry_run=options.dry_run,
    )
