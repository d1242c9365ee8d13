"""The neighbors of the chunks of samples: for each chunk, numbers of chunks of the database."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.data.retro.blocks import RowBlock, find_blocks, plan_blocks
from megtool.data.retro.chunk_database import read_infos
from megtool.data.retro.hdf5 import Hdf5Output, Hdf5Table, load_h5py
from megtool.data.retro.settings import RetroSettings, is_inside
from megtool.errors import FormatError, UsageError
from megtool.staging.folder.place import FolderPlace
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from megtool.storage.location.path import location, require_local

QUERY = "query"
NONE = -1
"""The number in the place of a neighbor that is missing."""


class NeighborBlocks:
    """A folder of neighbors: `len` chunks, in the order of samples, one file open at a time.

    Raises:
        FormatError: blocks are missing or overlap.
    """

    def __init__(self, folder: Path, *, block_size: int, num_database: int) -> None:
        """`num_database` is the number of chunks in the database."""
        self.folder, self.blocks = folder, find_blocks(folder, block_size)
        self._block_size, self._num_database = block_size, num_database
        self._open: tuple[RowBlock, Hdf5Table] | None = None

    def __len__(self) -> int:
        return self.blocks[-1].end

    def rows(self, begin: int, end: int) -> NDArray[np.int64]:
        """The neighbors of chunks `begin` to `end`, nearest first: `[end - begin, neighbors]`.

        -1 is in the place of those that are missing.

        Raises:
            IndexError: there are no such chunks.
            FormatError: a file is damaged, has other rows than its name says, or names a chunk
                that is not in the database.
        """
        if not 0 <= begin < end <= len(self):
            raise IndexError(begin)
        parts = []
        while begin < end:
            block = self.blocks[begin // self._block_size]
            stop = min(end, block.end)
            rows = self._table(block).rows(slice(begin - block.begin, stop - block.begin))
            if rows.size and not NONE <= rows.min() <= rows.max() < self._num_database:
                outside = rows.max() if rows.max() >= self._num_database else rows.min()
                raise FormatError(
                    f"neighbor {outside} of chunks {begin} to {stop} is not among the "
                    f"{self._num_database} chunks of the database",
                    file=block.file,
                    hint="neighbors and db/merged/train.hdf5 have to be of one index: query again",
                )
            parts.append(rows.astype(np.int64))
            begin = stop
        if len({part.shape[1] for part in parts}) != 1:
            raise FormatError(
                "blocks have different numbers of neighbors",
                file=self.folder,
                hint="blocks of two runs are mixed: keep those of one",
            )
        return np.concatenate(parts)

    def _table(self, block: RowBlock) -> Hdf5Table:
        if self._open is None or self._open[0] != block:
            table = Hdf5Table(block.file, "neighbors")
            if len(table) != block.end - block.begin:
                raise FormatError(
                    f"{len(table)} rows, and its name says {block.end - block.begin}",
                    file=block.file,
                    hint="remove the file and query again",
                )
            self._open = block, table
        return self._open[1]


def write_neighbors(
    project: str | Path,
    split: str,
    neighbors: NDArray[np.integer[Any]],
    *,
    folder: str | None = None,
    overwrite: bool = False,
    files: Files | None = None,
) -> Path:
    """Write the neighbors of a split's chunks into a project, and name them in `config.json`.

    `neighbors` are `[chunks, neighbors]`: for each chunk of each sample, in the order in which
    Megatron draws samples, numbers of the database's chunks, nearest first, and -1 where there is
    none. It may be a memory map: one block is read at a time. `folder` is their name below
    `query/`: Megatron's own is `SPLIT_HASH`, with the `unique_description_hash` of the data set;
    by default it is the one that `config.json` has, or the split. Returns the folder.

    Raises:
        DestinationError: the folder exists, and not `overwrite`.
        FormatError: the project has no database.
        UsageError: numbers that the database does not have, or chunks that are not whole samples.
    """
    project = location(project)
    require_local(project, "a Retro project")
    load_h5py()
    settings = RetroSettings.read(project)
    name = folder or settings.neighbor_folders.get(split, split)
    if split not in ("train", "valid", "test") or not is_inside(name):
        raise UsageError(
            f"split {split!r} in folder {name!r}", hint="train, valid or test; a name below query/"
        )
    if neighbors.ndim != 2 or neighbors.dtype.kind not in "iu" or not neighbors.size:
        raise UsageError(
            f"neighbors are {neighbors.dtype} of shape {list(neighbors.shape)}",
            hint="an array of integers [chunks, neighbors]",
        )
    if len(neighbors) % settings.num_chunks:
        raise UsageError(
            f"{len(neighbors)} chunks are no whole samples of {settings.num_chunks}",
            hint="every sample has sequence_length / chunk_length chunks",
        )
    num_database = sum(info.n_chunks_train for info in read_infos(project))
    facts = repr((neighbors.shape, settings.block_size))
    place = FolderPlace(
        project / QUERY / name,
        files=files or Files(),
        fingerprint=hashlib.sha256(facts.encode()).hexdigest(),
        overwrite=overwrite,
    )
    with Stage(place) as staging:
        for block in plan_blocks(Path(), len(neighbors), settings.block_size):
            rows = np.asarray(neighbors[block.begin : block.end]).astype("<i8")
            if not NONE <= rows.min() <= rows.max() < num_database:
                outside = rows.max() if rows.max() >= num_database else rows.min()
                raise UsageError(
                    f"neighbor {outside} is not among the {num_database} chunks of the database",
                    hint="numbers are those of db/merged/train.hdf5; -1 where there is none",
                )
            with Hdf5Output(staging.path(str(block.file))) as output:
                output.write({"neighbors": rows})
        staging.commit()
    folders = {**settings.neighbor_folders, split: name}
    replace(settings, neighbor_folders=folders).write(project, files=files)
    return project / QUERY / name


def gather(numbers: NDArray[np.int64], num_retrieved: int, num_database: int) -> NDArray[np.int64]:
    """Each neighbor with the chunks after it, `[..., num_retrieved]`, as RetroDataset counts them.

    After the last chunk comes the first, and -1 is the last.
    """
    return (numbers[..., None] + np.arange(num_retrieved)) % num_database
