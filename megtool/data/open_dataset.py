"""Opens the data set of a run: tokens of its sources, as rows of the form that the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megtool.console import Progress, silent
from megtool.data.dataset import BlendedDataset, TokenDataset
from megtool.data.fill_in_middle import FillInMiddle
from megtool.data.masking import Masking
from megtool.data.sample_index import Mode, Overflow
from megtool.data.source_target import SourceTarget, SourceTargetDataset
from megtool.data.token_cache import Documents, Encoding, IndexedStore, is_indexed, store_tokens
from megtool.data.tokenizer import Tokenizer
from megtool.errors import MegtoolError, UsageError
from megtool.parallel.process_groups import ALONE, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """How documents become rows of `length` tokens.

    Args:
        length: tokens per row.
        seed: determines the order of documents and of rows; None keeps the order of the data.
        mode: see `sample_index.cut`. None: "packed", and "whole" for conversations and answers.
        overflow: what happens to documents that are longer than a row.
        shares: the share of samples from each source (None: by size).
        masking: which tokens are to be predicted, of themselves; None: all, of those before them.
        fill_in: how texts are rearranged, for a model that is to fill in.
        targets: rows are sources with targets, for a model with an encoder.
        target_length: tokens of a target (None: as many as texts need; of pairs, `length`).
    """

    length: int
    seed: int | None = 1234
    mode: Mode | None = None
    overflow: Overflow = "split"
    shares: Sequence[float] | None = None
    masking: Masking | None = None
    fill_in: FillInMiddle | None = None
    targets: SourceTarget | None = None
    target_length: int | None = None


def open_dataset(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer | None,
    options: RowForm,
    *,
    cache: Path | None,
    vocab_size: int,
    encoding: Encoding | None = None,
    world: Group = ALONE,
    progress: Progress = silent,
) -> TokenDataset | BlendedDataset:
    """Open the data set of one source, or a blend of several.

    Every rank of `world` has to call this: the first one tokenizes while the others wait, and all
    raise the same error.

    Args:
        sources: what `documents.documents` reads, or Megatron data sets (`is_indexed`).
        tokenizer: the tokenizer of the model; None if all sources are tokens already.
        options: how documents become rows.
        cache: folder of tokenized text; None for no cache.
        vocab_size: token numbers of Megatron data sets have to be less.
        encoding: which part of a document is text.
        world: the ranks.
        progress: reports bytes of text.

    Raises:
        FormatError: a line is malformed (it is named), or a source has nothing to learn.
        UsageError: a source does not exist, the shares do not match the sources, or a source is
            text and there is no tokenizer.
        StorageError: the cache cannot be written.
    """
    encoding = Encoding() if encoding is None else encoding

    def open_store(source: str | Path) -> Documents:
        if is_indexed(source):
            return IndexedStore(source, vocab_size, cache=cache)
        if tokenizer is None:
            raise UsageError(f"{str(source)!r} is text, and there is no tokenizer for it")
        return store_tokens(source, tokenizer, cache, encoding, progress=progress)

    def prepare() -> list[Documents]:
        return [open_store(source) for source in sources]

    stores: list[Documents] = []
    if world.handle is None:
        stores = prepare()
    else:
        failure: list[MegtoolError | None] = [None]
        if world.is_first:
            try:
                stores = prepare()
            except MegtoolError as e:
                failure = [e]
        dist.broadcast_object_list(failure, src=world.ranks[0], group=world.handle)
        if failure[0] is not None:
            raise failure[0]
        if not world.is_first:
            stores = prepare()  # tokenizes on a host without the cache
    feeds = _make_feeds(stores, sources, options, 0 if tokenizer is None else tokenizer.pad_id or 0)
    if not feeds:
        raise UsageError("there is no data", hint="--data FILE")
    return feeds[0] if len(feeds) == 1 else BlendedDataset(feeds, options.shares)


def _make_feeds(
    stores: Sequence[Documents], sources: Sequence[str | Path], options: RowForm, pad_id: int
) -> list[TokenDataset]:
    if options.targets is None:
        return [
            TokenDataset(
                store,
                options.length,
                seed=options.seed,
                mode=options.mode or ("whole" if store.is_partly_learned else "packed"),
                overflow=options.overflow,
                pad_id=pad_id,
                source=str(source),
                change=options.masking or options.fill_in,
            )
            for store, source in zip(stores, sources, strict=True)
        ]
    length = options.target_length
    if any(store.is_partly_learned for store in stores):
        length = length or options.length  # all rows are equally long
    form = replace(options.targets, target_length=length)
    return [
        SourceTargetDataset(
            store,
            options.length,
            form,
            seed=options.seed,
            mode=options.mode or "packed",
            overflow=options.overflow,
            pad_id=pad_id,
            source=str(source),
        )
        for store, source in zip(stores, sources, strict=True)
    ]
