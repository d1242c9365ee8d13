"""The positions of canonical weights in the weight matrices of a dialect, by rows and columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megtool.convert.canonical_view import canonical_side
from megtool.convert.dialects import write_side
from megtool.convert.families.family import Family
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSlice:
    """The position of a canonical weight `[out, in]` in a stored one with `num_rows` outputs and
    `num_columns` inputs: its rows and columns are `rows` and `columns` of that.

    `expert` is the index along the leading dimension of a stored tensor of all experts, None in a
    matrix. `is_transposed`: inputs are stored before outputs.
    """

    canonical: str
    stored: str
    num_rows: int
    num_columns: int
    rows: Tensor
    columns: Tensor
    expert: int | None = None
    is_transposed: bool = False


class DialectWeights:
    """The weights of a model by the names of a dialect.

    Raises:
        MappingError: the dialect cannot hold the model, or needs a family.
    """

    def __init__(self, config: ModelConfig, family: Family | None, dialect: str) -> None:
        self.config, self.family, self.dialect = config, family, dialect
        self._side = canonical_side(config)
        target = write_side(
            self._side,
            dialect=dialect,
            family=family,
            config=self._side.config,
            per_layer=True if dialect == "megatron" else None,
        )
        self._placements = target.placements
        self._shapes = {t.name: t.shape for t in target.tensors}
        self._canonical_of: dict[str, list[str]] = {}
        for name, placement in target.placements.items():
            self._canonical_of.setdefault(placement.stored, []).append(name)
        self._by_tail: dict[str, list[str]] = {}
        for stored in self._shapes:
            self._by_tail.setdefault(_split_tail(stored)[1], []).append(stored)

    @property
    def stored(self) -> Collection[str]:
        """The names of all stored tensors."""
        return self._shapes.keys()

    def find(self, name: str) -> str | None:
        """The stored weight called `name`, whatever the model is called in which it is.

        Classes of transformers differ in what they call the decoder (`model.`, `transformer.`,
        `model.language_model.`).
        """
        if name in self._shapes:
            return name
        prefix, tail = _split_tail(name)
        matches = self._by_tail.get(tail, [])
        if len(matches) == 1 and set(prefix.split(".")) <= _DECODER_NAMES:
            return matches[0]
        return None

    def slices(self, stored: str) -> list[MatrixSlice]:
        """The canonical weights in a stored one.

        Raises:
            MappingError: one of them is not rows and columns of it.
        """
        return [self.slice_of(name) for name in self._canonical_of[stored]]

    def expert_slices(self, module: str, parts: Sequence[str]) -> list[MatrixSlice]:
        """The weights of all experts in a parameter that no file has: transformers makes it of
        the experts below `module`, with the rows of `parts` one after another. None if there are
        no such experts.
        """
        names = [module, module.replace(".mlp.", ".block_sparse_moe.")]
        first = next(
            (c[0] for s, c in self._canonical_of.items() for n in names if s.startswith(f"{n}.0.")),
            None,
        )
        if first is None:
            return []
        begin = first.partition(".experts.")[0]
        out: list[MatrixSlice] = []
        for number in range(self.config.moe.num_experts):
            pieces = [
                (name, self._side.canonical[name].shape)
                for part in parts
                if (name := f"{begin}.experts.{number}.{part}.weight") in self._side.canonical
            ]
            num_rows, start = sum(shape[0] for _, shape in pieces), 0
            for name, (rows, columns) in pieces:
                out.append(
                    MatrixSlice(
                        canonical=name,
                        stored=module,
                        num_rows=num_rows,
                        num_columns=columns,
                        rows=torch.arange(start, start + rows),
                        columns=torch.arange(columns),
                        expert=number,
                    )
                )
                start += rows
        return out

    def slice_of(self, canonical: str) -> MatrixSlice:
        """The position of a canonical weight.

        Raises:
            MappingError: the model has no such weight, or it is not rows and columns of a matrix.
        """
        placement = self._placements.get(canonical)
        if placement is None:
            raise MappingError(
                f"the model has no weight {canonical!r} in {self.dialect!r} names", tensor=canonical
            )
        return _slice(
            placement, self._side.canonical[canonical].shape, self._shapes[placement.stored]
        )


_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")
_DECODER_NAMES = {"", "model", "language_model", "text_model", "transformer", "backbone", "decoder"}


def _split_tail(name: str) -> tuple[str, str]:
    """What a model is called, and the name in it: `model` and `layers.0.mlp.up_proj.weight`."""
    number = _NUMBER.search(name)
    parts = name.split(".")
    last = name[: number.start()].count(".") - 1 if number else len(parts) - 2
    return ".".join(parts[: max(last, 0)]), ".".join(parts[max(last, 0) :])


def _slice(p: Placement, canonical: Sequence[int], stored: Sequence[int]) -> MatrixSlice:
    error = MappingError(
        f"{p.canonical} is not rows and columns of {p.stored}, so no adapter of one is one of the "
        "other",
        tensor=p.canonical,
    )
    if len(canonical) != 2 or len(stored) not in (2, 3):
        raise error
    split = next((k for k in range(len(p.shape) + 1) if prod(p.shape[:k]) == canonical[0]), None)
    if split is None:
        raise error
    axes = [
        {d for d, n in zip(p.dims[part], p.shape[part], strict=True) if n > 1}
        for part in (slice(None, split), slice(split, None))
    ]
    if any(len(dims) > 1 for dims in axes) or (axes[0] & axes[1]):
        raise error
    first = len(stored) - 2
    column = axes[1].pop() if axes[1] else None
    row = axes[0].pop() if axes[0] else (first if column != first else first + 1)
    if column is None:
        column = first + 1 if row == first else first
    if row == column or {row, column} - {first, first + 1}:
        raise error
    return MatrixSlice(
        canonical=p.canonical,
        stored=p.stored,
        num_rows=stored[row],
        num_columns=stored[column],
        rows=_positions(p, row, range(split)),
        columns=_positions(p, column, range(split, len(p.shape))),
        expert=p.base[0] if first else None,
        is_transposed=row > column,
    )


def _positions(p: Placement, dim: int, axes: range) -> Tensor:
    positions = torch.tensor(p.base[dim])
    for j in axes:
        mult = p.mults[j] if p.dims[j] == dim else 0
        positions = positions.unsqueeze(-1) + torch.arange(p.shape[j]) * mult
    return positions.flatten()
