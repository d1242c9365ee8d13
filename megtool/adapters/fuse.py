"""Updates of canonical weights as updates of the weights that a dialect stores.

Updates of weights that a dialect fuses may have the same `down`: then the rows of their `up` are
rows of one matrix. Others are put side by side: `down` has the rows of all, `up` has blocks, and
the rank is the sum of theirs. Both are exactly the same function.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megtool.adapters.weight_slices import DialectWeights, MatrixSlice
from megtool.convert.families.family import Family
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig
from megtool.transport.weight_update import WeightUpdate

EXPERTS = ".experts.experts."
"""In the names of stored weights that have those of all experts."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedUpdate:
    """What is added to a stored weight: `scale * up @ down`, `[num_rows, rank] @ [rank, in]`.

    `is_exact` is False where a factor of scales is no power of two, so that elements of `up` were
    rounded.
    """

    down: Tensor
    up: Tensor
    scale: float
    is_exact: bool = True

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return self.down.shape[0]

    def with_scale(self, scale: float) -> FusedUpdate:
        """The same update with another factor, the rest of which is in `up`."""
        if scale == self.scale:
            return self
        up, is_exact = _times(self.up, self.scale / scale)
        return replace(self, up=up, scale=scale, is_exact=self.is_exact and is_exact)

    def with_rank(self, rank: int) -> FusedUpdate:
        """The same update with rows and columns of zeros up to a rank."""
        more = rank - self.rank
        if not more:
            return self
        return replace(
            self,
            down=torch.cat([self.down, self.down.new_zeros(more, self.down.shape[1])]),
            up=torch.cat([self.up, self.up.new_zeros(self.up.shape[0], more)], 1),
        )


StoredPlace = tuple[str, int | None]
"""A stored weight, and the expert's index in it."""


def group_updates(
    updates: Mapping[str, WeightUpdate], slice_of: Callable[[str], MatrixSlice]
) -> dict[StoredPlace, list[tuple[MatrixSlice, WeightUpdate]]]:
    """The updates of each stored weight, by the positions of canonical weights in it."""
    out: dict[StoredPlace, list[tuple[MatrixSlice, WeightUpdate]]] = {}
    for name, update in updates.items():
        part = slice_of(name)
        update.check_shape(name, (len(part.rows), len(part.columns)))
        out.setdefault((part.stored, part.expert), []).append((part, update))
    return out


def fuse(parts: Sequence[tuple[MatrixSlice, WeightUpdate]]) -> FusedUpdate:
    """The update of a stored weight."""
    blocks: list[_Block] = []
    for part, update in parts:
        down, up = update.down[:, :], update.up[:, :]
        block = next((b for b in blocks if b.shares(part, down, update.scale)), None)
        if block is None:
            block = _Block(part, down, update.scale)
            blocks.append(block)
        block.rows.append((part.rows, up))
    scale, is_exact, ups = blocks[0].scale, True, []
    for block in blocks:
        up, has_bits = _times(block.up(), block.scale / scale)
        ups.append(up)
        is_exact = is_exact and has_bits
    kind = _widest([b.full_down() for b in blocks] + ups)
    return FusedUpdate(
        down=torch.cat([b.full_down().to(kind) for b in blocks]),
        up=torch.cat([up.to(kind) for up in ups], 1),
        scale=scale,
        is_exact=is_exact,
    )


class _Block:
    """Updates of a stored weight that share `down`."""

    def __init__(self, part: MatrixSlice, down: Tensor, scale: float) -> None:
        self.part, self.down, self.scale = part, down, scale
        self.rows: list[tuple[Tensor, Tensor]] = []

    def shares(self, part: MatrixSlice, down: Tensor, scale: float) -> bool:
        """Whether another update has the same `down`, inputs and scale."""
        return (
            scale == self.scale
            and torch.equal(part.columns, self.part.columns)
            and down.dtype == self.down.dtype
            and torch.equal(down, self.down)
        )

    def full_down(self) -> Tensor:
        """`[rank, in]` with all inputs of the stored weight."""
        if len(self.part.columns) == self.part.num_columns and bool(
            (self.part.columns.diff() == 1).all()
        ):
            return self.down
        out = self.down.new_zeros(self.down.shape[0], self.part.num_columns)
        out[:, self.part.columns] = self.down
        return out

    def up(self) -> Tensor:
        """`[num_rows, rank]`, zero where no update has rows."""
        kind = _widest([up for _, up in self.rows])
        out = torch.zeros(self.part.num_rows, self.down.shape[0], dtype=kind)
        for rows, up in self.rows:
            out[rows] = up.to(kind)
        return out


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """A dtype that has all numbers of the tensors."""
    kind = tensors[0].dtype
    for tensor in tensors[1:]:
        kind = torch.promote_types(kind, tensor.dtype)
    return kind


def _times(tensor: Tensor, factor: float) -> tuple[Tensor, bool]:
    """A tensor times a factor in its dtype, and whether nothing was rounded."""
    if factor == 1:
        return tensor, True
    product = tensor.double() * factor
    out = product.to(tensor.dtype)
    return out, torch.equal(out.double(), product)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUpdates:
    """What is added to Megatron's layers, which all have the same modules, rank and scale.

    `modules` has for each module (`mlp.linear_fc1`) and layer the update, or that of each expert.
    """

    modules: Mapping[str, Mapping[int, Sequence[FusedUpdate]]]
    rank: int
    scale: float

    @property
    def rounded(self) -> tuple[str, ...]:
        """The modules of which elements were rounded, because scales differ."""
        return tuple(
            f"decoder.layers.{n}.{module}"
            for module, of_layers in self.modules.items()
            for n, of_layer in of_layers.items()
            if not all(update.is_exact for update in of_layer)
        )


def fuse_layers(
    updates: Mapping[str, WeightUpdate],
    config: ModelConfig,
    family: Family | None,
    *,
    program: str,
) -> LayerUpdates:
    """Updates of canonical weights as those of Megatron's layers, for a `program` that reads them.

    Layers and modules without an update get zeros, smaller ranks rows of zeros, and the rest of a
    scale is in `up`.

    Raises:
        MappingError: a weight is none of a linear layer in Megatron's decoder.
    """
    weights = DialectWeights(config, family, "megatron")
    for name in updates:
        _check_place(name, weights, program)
    grouped = group_updates(updates, weights.slice_of)
    fused = {place: fuse(parts) for place, parts in grouped.items()}
    rank = max(update.rank for update in fused.values())
    scale = Counter(update.scale for update in fused.values()).most_common(1)[0][0]
    modules = sorted({match[2] for stored, _ in fused if (match := _LAYER.fullmatch(stored))})
    layers: dict[str, dict[int, list[FusedUpdate]]] = {module: {} for module in modules}
    for stored in weights.stored:
        if (match := _LAYER.fullmatch(stored)) and match[2] in layers:
            zeros = _zeros(weights, stored, rank, scale, next(iter(fused.values())))
            experts = dict.fromkeys(part.expert for part in weights.slices(stored))
            layers[match[2]][int(match[1])] = [
                fused.get((stored, expert), zeros).with_scale(scale).with_rank(rank)
                for expert in experts
            ]
    return LayerUpdates(modules=layers, rank=rank, scale=scale)


def _check_place(name: str, weights: DialectWeights, program: str) -> None:
    """Refuse a weight that a program has no adapter for.

    Raises:
        MappingError: it has none.
    """
    stored = weights.slice_of(name).stored
    if _LAYER.fullmatch(stored) is None:
        reason = f"{program} has adapters in layers only"
    elif not stored.rpartition(".weight")[0].rpartition(".")[2].startswith("linear_"):
        reason = f"{program} stores the rows of its parts in another way"
    else:
        return
    raise MappingError(
        f"the adapter changes {name!r}: {reason}",
        tensor=name,
        hint="megtool reshard --adapter merges it",
        error_id="unsupported-adapter",
    )


def _zeros(
    weights: DialectWeights, stored: str, rank: int, scale: float, like: FusedUpdate
) -> FusedUpdate:
    """The update of a weight that the adapter does not change."""
    part = weights.slices(stored)[0]
    return FusedUpdate(
        down=like.down.new_zeros(rank, part.num_columns),
        up=like.up.new_zeros(part.num_rows, rank),
        scale=scale,
    )
