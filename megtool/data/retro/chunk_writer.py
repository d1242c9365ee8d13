"""Cuts the documents of indexed data sets into chunks and writes them as a chunk database."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.data.indexed import IndexedDataset
from megtool.data.retro.blocks import RowBlock, plan_blocks
from megtool.data.retro.chunk_database import (
    COLUMNS,
    DATABASE,
    INFOS,
    ChunkedDataset,
    ChunkPart,
    infos_json,
)
from megtool.data.retro.hdf5 import Hdf5Output, Hdf5Table, load_h5py
from megtool.data.retro.settings import RetroSettings
from megtool.errors import FormatError, UsageError
from megtool.staging.folder.place import FolderPlace
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from megtool.storage.location.path import location, require_local

DATA = "data"

BertLength = Callable[[NDArray[Any]], int]


def write_chunk_database(
    project: str | Path,
    settings: RetroSettings,
    *,
    end_of_document: int,
    num_sampled: int | None = None,
    bert_length: BertLength | None = None,
    document_block_size: int = 100_000,
    overwrite: bool = False,
    files: Files | None = None,
) -> tuple[ChunkedDataset, ...]:
    """Write `db/` and `config.json` of a project that has its `data/`; returns what was written.

    Documents are cut into chunks of `settings.chunk_length` tokens; the last one of a document may
    be shorter, and a document's last token is left out where it is `end_of_document`. Of the first
    documents of each data set, by `settings.split`, chunks are in the database to retrieve from.

    `bert_length` is the number of BERT tokens in a chunk's text, given its tokens; a chunk with
    none is left out, as in Megatron. Without it, chunks count their own tokens, and all are in.
    `num_sampled` chunks, shared out by weight, are in the part that an index is trained on (by
    default all). `db/` appears by one rename; memory holds one block of documents. With `overwrite`
    it replaces the one that is there, and `config.json` names the neighbors of `settings` alone.

    Raises:
        DestinationError: the project has a database, and not `overwrite`.
        FormatError: a data set is missing or damaged, or a document has several sequences.
        UsageError: more chunks are to be sampled than there are.
    """
    project = location(project)
    require_local(project, "a Retro project")
    load_h5py()
    datasets = [IndexedDataset(project / DATA / prefix) for _, prefix in settings.data]
    for dataset in datasets:
        if len(dataset) != dataset.num_documents:
            raise FormatError(
                f"{dataset.num_documents} documents have {len(dataset)} sequences, and Retro takes "
                "each sequence for a document",
                file=dataset.index_file,
                hint="write it with one sequence a document, as `megtool tokenize` does",
            )
    facts = repr((settings.to_json(), end_of_document, num_sampled, document_block_size))
    place = FolderPlace(
        project / DATABASE,
        files=files or Files(),
        fingerprint=hashlib.sha256(facts.encode()).hexdigest(),
        overwrite=overwrite,
    )
    with Stage(place) as staging:
        infos, paths = [], []
        for (ratio, prefix), dataset in zip(settings.data, datasets, strict=True):
            folder = Path("individual") / prefix
            blocks = [
                (block, staging.path(str(block.file)))
                for block in plan_blocks(folder, len(dataset), document_block_size)
            ]
            paths.append([path for _, path in blocks])
            num_train = int(settings.train_share * dataset.num_documents)
            counts = np.zeros(3, np.int64)
            for block, path in blocks:
                counts += _write_block(
                    path,
                    _cut_documents(dataset, block, settings.chunk_length, end_of_document),
                    block,
                    num_train,
                    None if bert_length is None else _measure(dataset, bert_length),
                )
            valid, train, invalid = counts.tolist()
            infos.append(
                ChunkedDataset(
                    ratio=ratio,
                    prefix=prefix,
                    n_docs=dataset.num_documents,
                    n_docs_train=num_train,
                    n_chunks=valid,
                    n_chunks_train=train,
                    n_chunks_invalid=invalid,
                    n_chunks_sampled=train,
                )
            )
        infos = _share_out(infos, num_sampled)
        for part in ("sampled", "train", "valid"):
            _merge(staging.path(f"merged/{part}.hdf5"), infos, paths, part)
        staging.write(INFOS, infos_json(infos))
        staging.commit()
    settings.write(project, files=files)
    return tuple(infos)


def _cut_documents(
    dataset: IndexedDataset, block: RowBlock, chunk_length: int, end_of_document: int
) -> NDArray[np.uint32]:
    """The chunks of a range of documents, `[chunks, 4]`: document, begin, end, and end - begin."""
    lengths = dataset.lengths[block.begin : block.end].astype(np.int64)
    for n in np.flatnonzero(lengths):
        lengths[n] -= int(dataset[block.begin + int(n)][-1]) == end_of_document
    counts = -(-lengths // chunk_length)
    documents = np.repeat(np.arange(len(lengths)), counts)
    begin = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * (
        chunk_length
    )
    end = np.minimum(begin + chunk_length, lengths[documents])
    return np.stack([documents + block.begin, begin, end, end - begin], axis=1).astype("<u4")


def _measure(
    dataset: IndexedDataset, bert_length: BertLength
) -> Callable[[NDArray[np.uint32]], list[int]]:
    """The BERT length of each of some chunks."""
    return lambda chunks: [
        bert_length(dataset[document][begin:end]) for document, begin, end, _ in chunks.tolist()
    ]


def _write_block(
    path: Path,
    chunks: NDArray[np.uint32],
    block: RowBlock,
    num_train: int,
    measure: Callable[[NDArray[np.uint32]], list[int]] | None,
) -> NDArray[np.int64]:
    """Write the chunks of some documents; the numbers of valid, trained and invalid ones."""
    if measure is not None:
        chunks[:, 3] = measure(chunks)
    is_valid = chunks[:, 3] > 0
    valid, invalid = chunks[is_valid], chunks[~is_valid]
    documents = np.arange(block.begin, block.end)
    ends = np.searchsorted(valid[:, 0], documents, side="right")
    with Hdf5Output(path) as output:
        output.write(
            {
                "chunks_valid": valid,
                # As numpy makes an array of no rows, and Megatron compares when it validates.
                "chunks_invalid": invalid if len(invalid) else np.zeros(0, "<u4"),
                "doc_offsets": np.stack([documents, ends], axis=1).astype("<u8"),
            }
        )
    num_trained = int((valid[:, 0] < num_train).sum())
    return np.array([len(valid), num_trained, len(invalid)], np.int64)


def _share_out(infos: Sequence[ChunkedDataset], num_sampled: int | None) -> list[ChunkedDataset]:
    """With how many chunks of each data set are sampled."""
    if num_sampled is None:
        return list(infos)
    total = sum(info.ratio for info in infos)
    out = []
    for info in infos:
        count = int(num_sampled * info.ratio / total)
        if count > info.n_chunks_train:
            raise UsageError(
                f"{count} chunks of {info.prefix} are to be sampled, and there are "
                f"{info.n_chunks_train} to train on",
                hint="a smaller num_sampled, or weights that are nearer to the sizes",
            )
        out.append(replace(info, n_chunks_sampled=count))
    return out


def _merge(
    path: Path, infos: Sequence[ChunkedDataset], paths: Sequence[Sequence[Path]], part: ChunkPart
) -> None:
    """Write a part of the database: the first chunks of each data set, or for "valid" the last."""
    total = sum(info.num_chunks(part) for info in infos)
    with Hdf5Output(path) as output:
        merged = output.create("chunks", (total, len(COLUMNS)), "<u4")
        row = 0
        for number, (info, blocks) in enumerate(zip(infos, paths, strict=True)):
            first = info.n_chunks_train if part == "valid" else 0
            for chunks in _slices(blocks, "chunks_valid", first, info.num_chunks(part)):
                merged[row : row + len(chunks), 0] = number
                merged[row : row + len(chunks), 1:] = chunks
                row += len(chunks)
        output.write({"n_written": np.array([row], "<u8")})
        if part == "train":
            _merge_offsets(output, infos, paths)


def _merge_offsets(
    output: Hdf5Output, infos: Sequence[ChunkedDataset], paths: Sequence[Sequence[Path]]
) -> None:
    """Where the chunks of each document end: data set, document, number of chunks up to there."""
    merged = output.create("doc_offsets", (sum(i.n_docs_train for i in infos), 3), "<u8")
    row = chunk = 0
    for number, (info, blocks) in enumerate(zip(infos, paths, strict=True)):
        left = info.n_docs_train
        for path in blocks:
            table = Hdf5Table(path, "doc_offsets")
            offsets = table.rows(slice(0, left)).astype("<u8")
            if not len(offsets):
                break
            offsets[:, 1] += chunk
            merged[row : row + len(offsets), 0] = number
            merged[row : row + len(offsets), 1:] = offsets
            row, left, chunk = row + len(offsets), left - len(offsets), int(offsets[-1, 1])


def _slices(
    paths: Sequence[Path], name: str, first: int, count: int
) -> Iterator[NDArray[np.integer[Any]]]:
    """Rows `first` to `first + count` of the tables of several files, file by file."""
    for path in paths:
        table = Hdf5Table(path, name, num_columns=4)
        rows = table.rows(slice(first, first + count))
        first, count = max(0, first - len(table)), count - len(rows)
        if len(rows):
            yield rows
