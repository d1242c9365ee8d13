"""The samples whose neighbors a Retro project has, from Megatron's cache of their order.

Megatron saves how it draws samples below `--data-cache-path`, in files named by the hash that also
names the folder of neighbors: `HASH-BlendedDataset-SPLIT-*.npy` and, for each data set,
`HASH-MultiSplitGPTDataset-SPLIT-*.npy`, each with a `description.txt` of which HASH is the MD5.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.data.indexed import IndexedDataset
from megtool.errors import FormatError

_REBUILD = "let Megatron build its cache again, with the settings of the preprocessing"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySample:
    """A sample: `text` has one token more than the sequence, the last label.

    `dataset` is the number of its data set, `documents` are those that it is of.
    """

    text: NDArray[np.int64]
    dataset: int
    documents: NDArray[np.int64]


class QuerySamples:
    """The samples of a split in Megatron's order, of which only the order is mapped into memory.

    Raises:
        FormatError: the cache is missing, damaged, or of other data sets.
    """

    def __init__(
        self,
        cache: Path,
        folder_name: str,
        datasets: Mapping[str, IndexedDataset],
        *,
        sequence_length: int,
        padding: int,
    ) -> None:
        """Open what the cache has for a folder of neighbors.

        `datasets` are the project's by prefix, in the order of the database; `padding` fills a last
        sample that is short.
        """
        self._cache, self._length, self._padding = cache, sequence_length, padding
        split, _, digest = folder_name.partition("_")
        self._split = split
        files = sorted(cache.glob(f"{digest}-*-{split}-description.txt")) if digest else []
        if len(files) != 1:
            raise FormatError(
                f"the order of samples {folder_name!r} is not in the cache",
                file=cache,
                hint="name Megatron's --data-cache-path of the preprocessing as data_cache",
                error_id="source-not-found",
            )
        description = _describe(files[0], digest)
        self._blend: tuple[NDArray[Any], NDArray[Any]] | None = None
        parts: Sequence[Any] = [description]
        if description.get("class") == "BlendedDataset":
            base = f"{digest}-BlendedDataset-{split}"
            order = self._load(base, "dataset_index")
            self._blend = order, self._load(base, "dataset_sample_index")
            parts = description["datasets"]
        self._parts = [self._open(files[0], part, datasets) for part in parts]

    def _open(
        self, file: Path, part: Mapping[str, Any], datasets: Mapping[str, IndexedDataset]
    ) -> tuple[int, IndexedDataset, NDArray[Any], NDArray[Any], NDArray[Any]]:
        """A data set, by number, and which of its documents each sample has."""
        path = str(part.get("dataset_path"))
        number = _match(path, list(datasets))
        if number is None or part.get("sequence_length") != self._length:
            raise FormatError(
                f"samples of {part.get('sequence_length')} tokens of {path}, and the project has "
                f"samples of {self._length} of {list(datasets)}",
                file=file,
                hint="the cache is of another project or of other settings",
            )
        digest = _digest(json.dumps(part, indent=4))
        base = f"{digest}-{part['class']}-{self._split}"
        documents, samples, shuffle = (
            self._load(base, f"{name}_index") for name in ("document", "sample", "shuffle")
        )
        return number, list(datasets.values())[number], documents, samples, shuffle

    def _load(self, base: str, suffix: str) -> NDArray[Any]:
        file = self._cache / f"{base}-{suffix}.npy"
        try:
            order: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as e:
            raise FormatError(
                f"the order of samples cannot be read: {e}",
                file=file,
                hint=_REBUILD,
            ) from e
        return order

    def __len__(self) -> int:
        return len(self._parts[0][4] if self._blend is None else self._blend[0])

    def __getitem__(self, i: int) -> QuerySample:
        """Sample `i`.

        Raises:
            FormatError: it is of documents that the data set does not have.
        """
        if not 0 <= i < len(self):
            raise IndexError(i)
        place, sample = 0, i
        if self._blend is not None:
            place, sample = (int(order[i]) for order in self._blend)
        try:
            number, dataset, documents, samples, shuffle = self._parts[place]
            first, begin, last, end = map(int, samples[shuffle[sample] : shuffle[sample] + 2].flat)
            ids = np.asarray(documents[first : last + 1], np.int64)
            tokens = [dataset[d] for d in ids]
        except (IndexError, ValueError) as e:
            raise FormatError(
                f"sample {i} of {self._split} is of documents that are not in the data sets",
                file=self._cache,
                hint="data/ has to hold the data sets of the cache",
            ) from e
        tokens[-1] = tokens[-1][: end + 1]  # of one document, too: its offsets are the document's
        tokens[0] = tokens[0][begin:]
        text = np.full(self._length + 1, self._padding, np.int64)
        flat = np.concatenate(tokens)[: len(text)]
        text[: len(flat)] = flat
        return QuerySample(text=text, dataset=number, documents=ids)


def _describe(file: Path, digest: str) -> dict[str, Any]:
    """What a file of the cache says of a data set."""
    try:
        text = file.read_text()
        description = json.loads(text)
    except (OSError, ValueError, RecursionError) as e:
        raise FormatError(f"not a description of samples: {e}", file=file, hint=_REBUILD) from e
    if not isinstance(description, dict) or _digest(text) != digest:
        raise FormatError(
            "the description of samples does not fit its name", file=file, hint=_REBUILD
        )
    return description


def _digest(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _match(path: str, prefixes: Sequence[str]) -> int | None:
    """The number of the prefix that a data set's path ends with; the longest of several."""
    parts = PurePosixPath(path).parts
    fitting = [
        p for p in prefixes if parts[-len(PurePosixPath(p).parts) :] == PurePosixPath(p).parts
    ]
    return prefixes.index(max(fitting, key=len)) if fitting else None
