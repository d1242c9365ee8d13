"""An adapter as a file has it: low-rank matrices by the names of a dialect, read when needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megtool.adapters.weight_slices import DialectWeights, MatrixSlice
from megtool.convert.families.family import Family
from megtool.errors import FormatError, MappingError, listed
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.weight_update import LowRankProduct, WeightUpdate


class LazyMatrix:
    """A matrix, or one for each expert `[E, ., .]`, that is read as a whole when it is indexed.

    Threads may index it at the same time.
    """

    def __init__(
        self, read: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._read = read
        self._lock = threading.Lock()
        self._tensor: Tensor | None = None

    def read(self) -> Tensor:
        with self._lock:
            if self._tensor is None:
                self._tensor = self._read()
            return self._tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]

    def derive(self, function: Callable[[Tensor], Tensor], shape: Sequence[int]) -> LazyMatrix:
        """What a function makes of it, of `shape`, when it is read."""
        return LazyMatrix(lambda: function(self.read()), shape, self.dtype)

    def take(self, dim: int, index: Tensor) -> LazyMatrix:
        """The rows (dim 0) or columns (dim 1) with these numbers; itself if those are all."""
        size = self.shape[dim]
        if torch.equal(index, torch.arange(size)):
            return self
        shape = list(self.shape)
        shape[dim] = len(index)
        return self.derive(lambda tensor: tensor.index_select(dim, index), shape)

    def of_expert(self, number: int | None) -> LazyMatrix:
        """The matrix of one expert, or the one that all share."""
        if len(self.shape) == 2 or number is None:
            return self
        index = number if self.shape[0] > 1 else 0
        return self.derive(lambda tensor: tensor[index], self.shape[1:])


def open_matrix(catalogue: Catalogue, name: str, files: Files) -> LazyMatrix:
    """A stored tensor of floats.

    Raises:
        FormatError: it is of another type.
    """
    stored = catalogue[name]
    if not stored.dtype.is_float:
        raise FormatError(
            f"an adapter's matrix is of {stored.dtype}", file=catalogue.root, tensor=name
        )
    kind = getattr(torch, stored.dtype.name)

    def read() -> Tensor:
        with CheckpointReader(catalogue, files) as reader:
            elements = reader.open_stored(name).read()
        return torch.from_numpy(elements).view(kind).view(stored.shape)

    return LazyMatrix(read, stored.shape, kind)


def foreign_tensors(catalogue: Catalogue, names: Sequence[str], merge: str) -> MappingError:
    """The error that tensors of an adapter are no matrices; `merge` says how to merge it."""
    return MappingError(
        f"the adapter has tensors that are no matrices of LoRA: {listed(names)}",
        file=catalogue.root,
        tensor=names[0],
        hint=f"{merge}, and take the merged model",
        error_id="unsupported-adapter",
    )


def unpaired_matrix(catalogue: Catalogue, names: Mapping[str, str]) -> FormatError:
    """The error that of an A and a B, one is stored."""
    return FormatError(
        "the adapter has one matrix of a pair",
        file=catalogue.root,
        tensor=next(iter(names.values())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedWeight(LowRankProduct[LazyMatrix]):
    """Return what is added to the weight `name` of a dialect.

    `down` is `[rank, in]` and `up` `[out, rank]`, or both have a leading dimension of experts;
    `tensor` is the stored name of one of them. `part` names the canonical weight (`q`)
    whose rows are those of `up`, where the stored one has several. A checkpoint of ranks has the
    rows of `up` in `row_pieces` pieces.
    """

    name: str
    part: str | None = None
    row_pieces: int = 1


Resolver = Callable[[AdaptedWeight, DialectWeights], tuple[AdaptedWeight, list[MatrixSlice]] | None]
"""A weight with its matrices as `AdaptedWeight` has them, and the canonical weights in it; None if
the model has none by its name."""


def resolve_weight(
    weight: AdaptedWeight, weights: DialectWeights
) -> tuple[AdaptedWeight, list[MatrixSlice]] | None:
    """That of a weight that is stored under the adapter's name of it."""
    stored = weights.find(weight.name)
    return None if stored is None else (weight, weights.slices(stored))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """An adapter that is open: its headers and settings are read, its matrices are not.

    `form` is `peft`, `bridge` or `modelopt`; `dialect` is that of the names of `weights`.
    `settings` are those of the adapter that say more than its matrices, for a report, and `notes`
    what a user should know.
    """

    form: str
    path: Path
    dialect: str
    weights: tuple[AdaptedWeight, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    resolve: Resolver = resolve_weight

    @property
    def num_elements(self) -> int:
        """Elements of all matrices."""
        return sum(prod(m.shape) for w in self.weights for m in (w.down, w.up))

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(prod(m.shape) * m.dtype.itemsize for w in self.weights for m in (w.down, w.up))

    def updates(self, config: ModelConfig, family: Family | None) -> dict[str, WeightUpdate]:
        """What is added to the canonical weights of a base model, by their names.

        Matrices are read when they are indexed. A weight that several of the adapter's weights
        change, one after another, is refused.

        Raises:
            MappingError: the adapter has weights that the model has not, or of other shapes.
        """
        weights = DialectWeights(config, family, self.dialect)
        out: dict[str, WeightUpdate] = {}
        unknown = []
        for weight in self.weights:
            resolved = self.resolve(weight, weights)
            if resolved is None:
                unknown.append(weight)
                continue
            for part in resolved[1]:
                if part.canonical in out:
                    raise MappingError(
                        f"the adapter changes {part.canonical!r} twice",
                        file=self.path,
                        tensor=weight.tensor,
                        error_id="unsupported-adapter",
                    )
                out[part.canonical] = self._update(resolved[0], part)
        if unknown:
            raise MappingError(
                f"the adapter changes weights that the model has not: "
                f"{listed([w.name for w in unknown])}",
                file=self.path,
                tensor=unknown[0].tensor,
                hint="it belongs to another model, or --family names another one",
                error_id="foreign-adapter",
            )
        return out

    def _update(self, weight: AdaptedWeight, part: MatrixSlice) -> WeightUpdate:
        down, up = weight.down.of_expert(part.expert), weight.up.of_expert(part.expert)
        if (up.shape[0], down.shape[1]) != (part.num_rows, part.num_columns):
            raise MappingError(
                f"the adapter's matrices are for a weight of shape "
                f"{[up.shape[0], down.shape[1]]}, and {weight.name!r} is "
                f"{[part.num_rows, part.num_columns]}",
                file=self.path,
                tensor=weight.tensor,
                hint="the adapter is of another model",
                error_id="foreign-adapter",
            )
        return WeightUpdate(
            down=down.take(1, part.columns),
            up=up.take(0, part.rows),
            scale=weight.scale,
            file=self.path,
            tensor=weight.tensor,
        )
