"""A Retro project on disk: its samples with the tokens of their chunks' neighbors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megtool.data.indexed import IndexedDataset
from megtool.data.retro.chunk_database import (
    DATABASE,
    ChunkDatabase,
    ChunkPart,
    read_infos,
)
from megtool.data.retro.chunk_writer import DATA
from megtool.data.retro.neighbors import QUERY, NeighborBlocks, gather
from megtool.data.retro.queries import QuerySamples
from megtool.data.retro.settings import RetroSettings
from megtool.errors import FormatError, UsageError
from megtool.storage.location.path import location, require_local


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievedChunks:
    """What is retrieved for the chunks of a sample; each neighbor with the chunks after it.

    `numbers` are those of the database's chunks, `[chunks, neighbors, retrieved chunks]`, and
    `tokens` theirs, `[chunks, neighbors, retrieved chunks * chunk_length]`: `neighbor_chunks` and
    `neighbor_tokens` of Megatron's RetroDataset.
    """

    numbers: NDArray[np.int64]
    tokens: NDArray[np.int64]


class RetroProject:
    """A project folder that Megatron's preprocessing or `write_chunk_database` made.

    `end_of_document` is the token that short chunks are filled with.

    Raises:
        FormatError: `config.json`, the database or a data set is missing, damaged, or of another
            project.
        MissingPackageError: h5py is not installed.
    """

    def __init__(self, folder: str | Path, *, end_of_document: int) -> None:
        self.folder = location(folder)
        require_local(self.folder, "a Retro project")
        self.end_of_document = end_of_document
        self.settings = RetroSettings.read(self.folder)
        self.infos = read_infos(self.folder)
        self.datasets: dict[str, IndexedDataset] = {}
        for info in self.infos:
            dataset = IndexedDataset(self.folder / DATA / info.prefix)
            if dataset.num_documents != info.n_docs:
                raise FormatError(
                    f"{dataset.num_documents} documents, and {info.n_docs} were chunked",
                    file=dataset.index_file,
                    hint="data/ has to hold the data sets that were chunked: copy or link those",
                )
            self.datasets[info.prefix] = dataset

    def database(self, part: ChunkPart = "train") -> ChunkDatabase:
        """A part of the chunk database; neighbors are of "train".

        Raises:
            FormatError: the file is damaged, or has another number of chunks than its data sets.
        """
        database = ChunkDatabase(
            self.folder / DATABASE / "merged" / f"{part}.hdf5",
            list(self.datasets.values()),
            chunk_length=self.settings.chunk_length,
            end_of_document=self.end_of_document,
        )
        needed = sum(info.num_chunks(part) for info in self.infos)
        if len(database) != needed:
            raise FormatError(
                f"{len(database)} chunks, and its data sets have {needed}",
                file=database.file,
                hint="it is of another run: remove it and merge again (--retro-tasks db-build)",
            )
        return database

    def neighbors(self, split: str) -> NeighborBlocks:
        """The neighbors of a split ("train", "valid", "test").

        Raises:
            UsageError: the project has none for it.
            FormatError: blocks are missing or overlap, or do not have whole samples.
        """
        blocks = NeighborBlocks(
            self.folder / QUERY / self._folder_name(split),
            block_size=self.settings.block_size,
            num_database=sum(info.n_chunks_train for info in self.infos),
        )
        if len(blocks) % self.settings.num_chunks:
            raise FormatError(
                f"{len(blocks)} chunks are no whole samples of {self.settings.num_chunks}",
                file=blocks.folder,
                hint="a run was interrupted: start it again, it builds the blocks that are missing",
                error_id="missing-shard",
            )
        return blocks

    def samples(
        self, split: str, *, num_neighbors: int = 2, num_retrieved_chunks: int = 2
    ) -> RetroSamples:
        """What is retrieved for each sample of a split; `num_retrieved_chunks` a neighbor."""
        return RetroSamples(self, split, num_neighbors, num_retrieved_chunks)

    def queries(self, split: str, *, data_cache: str | Path | None = None) -> QuerySamples:
        """The samples of a split themselves, as Megatron draws them.

        `data_cache` is the folder of Megatron's cache, by default the one in `config.json`.

        Raises:
            UsageError: neither names one, or the project has no such split.
            FormatError: the cache has no such samples, or those of other data.
        """
        cache = data_cache if data_cache is not None else self.settings.data_cache
        if cache is None:
            raise UsageError(
                "the order of samples is in Megatron's cache, and config.json names none",
                hint="name Megatron's --data-cache-path of the preprocessing as data_cache",
            )
        return QuerySamples(
            location(cache),
            self._folder_name(split),
            self.datasets,
            sequence_length=self.settings.sequence_length,
            padding=self.end_of_document,
        )

    def _folder_name(self, split: str) -> str:
        name = self.settings.neighbor_folders.get(split)
        if name is None:
            raise UsageError(
                f"the project has no neighbors for {split!r}",
                file=self.folder,
                hint=f"there are some for {list(self.settings.neighbor_folders) or 'no split'}",
            )
        return name


class RetroSamples:
    """What is retrieved for the samples of a split: `samples[i]` are the `RetrievedChunks` of one.

    Raises:
        FormatError: a file is damaged.
        UsageError: fewer neighbors are stored than are to be read.
    """

    def __init__(
        self, project: RetroProject, split: str, num_neighbors: int, num_retrieved_chunks: int
    ) -> None:
        self.database, self.blocks = project.database(), project.neighbors(split)
        self._num_neighbors, self._num_retrieved = num_neighbors, num_retrieved_chunks
        self._num_chunks = project.settings.num_chunks
        if num_neighbors < 1 or num_retrieved_chunks < 1:
            raise UsageError(
                f"{num_neighbors} neighbors of {num_retrieved_chunks} chunks", hint="1 or more"
            )
        stored = self.blocks.rows(0, 1).shape[1]
        if stored < num_neighbors:
            raise UsageError(
                f"{num_neighbors} neighbors, and {stored} are stored",
                file=self.blocks.folder,
                hint="fewer, or query again with a larger --retro-query-num-neighbors-save",
            )

    def __len__(self) -> int:
        return len(self.blocks) // self._num_chunks

    def __getitem__(self, i: int) -> RetrievedChunks:
        """What is retrieved for sample `i`."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        begin = i * self._num_chunks
        neighbors = self.blocks.rows(begin, begin + self._num_chunks)[:, : self._num_neighbors]
        numbers = gather(neighbors, self._num_retrieved, len(self.database))
        tokens = self.database.tokens(numbers)
        return RetrievedChunks(numbers=numbers, tokens=tokens.reshape(*tokens.shape[:2], -1))
