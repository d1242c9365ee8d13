"""The chunk database of a Retro project: numbered chunks of documents, and their tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megtool.data.indexed import IndexedDataset
from megtool.data.retro.hdf5 import Hdf5Table
from megtool.data.retro.settings import is_inside
from megtool.errors import FormatError, UsageError

DATABASE, INFOS = "db", "indexed_dataset_infos.json"
COLUMNS = ("dataset", "document", "begin", "end", "bert_length")

ChunkPart = Literal["train", "valid", "sampled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedDataset:
    """An indexed data set in `indexed_dataset_infos.json`, and how many chunks it has.

    `n_chunks_invalid` chunks have no BERT tokens and are not in the database, `n_chunks_sampled`
    are those that an index is trained on.
    """

    ratio: float
    prefix: str
    n_docs: int
    n_docs_train: int
    n_chunks: int
    n_chunks_train: int
    n_chunks_invalid: int
    n_chunks_sampled: int

    def num_chunks(self, part: ChunkPart) -> int:
        """How many of the chunks are in a part of the database."""
        counts = {
            "train": self.n_chunks_train,
            "valid": self.n_chunks - self.n_chunks_train,
            "sampled": self.n_chunks_sampled,
        }
        return counts[part]


def read_infos(project: Path) -> tuple[ChunkedDataset, ...]:
    """The data sets that a database is of, in their order.

    Raises:
        FormatError: the file is missing or damaged, or names a data set outside the project.
    """
    file = project / DATABASE / INFOS
    try:
        infos = tuple(ChunkedDataset(**values) for values in json.loads(file.read_bytes()))
    except FileNotFoundError as e:
        raise FormatError(
            "the project has no chunk database",
            file=file,
            hint="run Megatron's preprocessing with --retro-tasks db-build, or "
            "write_chunk_database()",
            error_id="source-not-found",
        ) from e
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise FormatError(
            f"not the data sets of a chunk database: {e}", file=file, hint="build db/ again"
        ) from e
    for info in infos:
        counts = [value for name, value in asdict(info).items() if name.startswith("n_")]
        if not all(isinstance(n, int) and n >= 0 for n in counts):
            raise FormatError(
                f"counts of data set {info.prefix!r} are {counts}",
                file=file,
                hint="build db/ again",
            )
        if not isinstance(info.prefix, str) or not is_inside(info.prefix):
            raise FormatError(
                f"data set {info.prefix!r} is outside the project",
                file=file,
                hint="prefixes are names below data/",
                error_id="unsafe-path",
            )
    return infos


def infos_json(infos: Sequence[ChunkedDataset]) -> bytes:
    """`indexed_dataset_infos.json`, as Megatron writes it."""
    return json.dumps([asdict(info) for info in infos], indent=4).encode()


class ChunkDatabase:
    """Chunks by number: which part of which document each is, and its tokens.

    Nothing but what is asked for is read. `chunk_length` and `end_of_document`, the token that
    short chunks are filled with, are as in the run that trains.

    Raises:
        FormatError: the file is damaged, or was not written to its end.
    """

    def __init__(
        self,
        file: Path,
        datasets: Sequence[IndexedDataset],
        *,
        chunk_length: int,
        end_of_document: int,
    ) -> None:
        self.file, self.datasets = file, tuple(datasets)
        self.chunk_length, self.end_of_document = chunk_length, end_of_document
        self._table = Hdf5Table(file, "chunks", num_columns=len(COLUMNS))
        written = self._table.scalar("n_written")
        if written is not None and written != len(self):
            raise FormatError(
                f"{written} of {len(self)} chunks are written",
                file=file,
                hint="the run that merged them was interrupted: remove the file and start it again",
                error_id="truncated-file",
            )

    def __len__(self) -> int:
        return len(self._table)

    def chunks(self, numbers: Any) -> NDArray[np.int64]:
        """Where chunks are: `[len(numbers), 5]`, see `COLUMNS`; tokens `begin` to `end`.

        Raises:
            UsageError: a number that no chunk has.
            FormatError: a chunk that is longer than `chunk_length` or lies outside its document.
        """
        numbers = np.asarray(numbers, np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            outside = numbers.max() if numbers.max() >= len(self) else numbers.min()
            raise UsageError(f"there is no chunk {outside} among {len(self)}", file=self.file)
        unique, places = np.unique(numbers, return_inverse=True)
        rows = self._table.rows(unique).astype(np.int64)
        for number, row in zip(unique.tolist(), rows.tolist(), strict=True):
            self._check(number, row)
        return rows[places]

    def _check(self, number: int, row: Sequence[int]) -> None:
        dataset, document, begin, end, _ = row
        if dataset >= len(self.datasets) or document >= len(self.datasets[dataset]):
            length = 0
        else:
            length = int(self.datasets[dataset].lengths[document])
        if not 0 <= begin < end <= length:
            raise FormatError(
                f"chunk {number} is tokens {begin} to {end} of document {document} of data set "
                f"{dataset}, which has {length} tokens",
                file=self.file,
                hint="data/ has to hold the data sets that were chunked: copy or link those",
            )
        if end - begin > self.chunk_length:
            raise FormatError(
                f"chunk {number} has {end - begin} tokens, and chunks have {self.chunk_length}",
                file=self.file,
                hint="retro_gpt_chunk_length in config.json has to be that of the database",
            )

    def tokens(self, numbers: Any) -> NDArray[np.int64]:
        """The tokens of chunks, `[*shape of numbers, chunk_length]`; see `chunks`."""
        numbers = np.asarray(numbers, np.int64)
        unique, places = np.unique(numbers.reshape(-1), return_inverse=True)
        tokens = np.full((len(unique), self.chunk_length), self.end_of_document, np.int64)
        for row, (dataset, document, begin, end, _) in zip(
            tokens, self.chunks(unique).tolist(), strict=True
        ):
            row[: end - begin] = self.datasets[dataset][document][begin:end]
        return tokens[places].reshape(*numbers.shape, self.chunk_length)
