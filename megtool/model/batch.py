"""The inputs of a forward pass (`Batch`), and the state its layers share (`ForwardContext`).

Shape suffixes of model/ and kernels/: B batch, S sequence, T = B*S tokens (flattened), H hidden,
N query heads (of this rank), K key and value heads (of this rank), D head size, L keys attended to
(S without a cache), F ffn size, V vocabulary, E experts, R rotary part of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.kernels.cuda_graphs import is_rehearsed
from megtool.parallel.process_groups import ALONE, Group

if TYPE_CHECKING:
    from megtool.model.cache import KVCache
    from megtool.model.dropout import Draws
    from megtool.model.masks import Mask, Masks
    from megtool.model.rotary import Rotary, Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Token rows of equal length, with their masks and positions.

    `tokens_BS` is int64. `positions_BS` are the tokens' places (int64, batch may be 1); by default
    they count valid tokens, on from those in the cache. `valid_BS` is false for padding, which may
    stand on the left or on the right and is never attended to. Tokens attend within equal
    `documents_BS` alone; positions do not start again by themselves where a document does.
    `counted_BS` is false for tokens that fill rows up: losses of routers leave them out, and they
    are attended to as others are.

    Raises:
        UsageError: there is no token, or a shape is not that of the tokens.
    """

    tokens_BS: Tensor
    positions_BS: Tensor | None = None
    valid_BS: Tensor | None = None
    documents_BS: Tensor | None = None
    counted_BS: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens_BS.dim() != 2:
            raise UsageError(
                f"tokens have shape {list(self.tokens_BS.shape)}", hint="[batch, sequence]"
            )
        if not self.tokens_BS.numel():
            raise UsageError(
                f"tokens have shape {list(self.tokens_BS.shape)}", hint="one row and token at least"
            )
        for name in ("positions_BS", "valid_BS", "documents_BS", "counted_BS"):
            value: Tensor | None = getattr(self, name)
            if value is None:
                continue
            batch_of_one = (1, self.tokens_BS.shape[1])
            if value.shape != self.tokens_BS.shape and (
                name != "positions_BS" or value.shape != batch_of_one
            ):
                raise UsageError(
                    f"{name} has shape {list(value.shape)}, and the tokens "
                    f"{list(self.tokens_BS.shape)}"
                )
        if self.valid_BS is not None and self.valid_BS.dtype != torch.bool:
            raise UsageError(f"valid_BS is of {self.valid_BS.dtype}", hint="true for real tokens")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of each."""
        return self.tokens_BS.shape[0], self.tokens_BS.shape[1]


def check_ids(ids: Tensor | Sequence[int], vocab_size: int, location: str = "the batch") -> None:
    """Refuse tokens that the model does not have, padding included.

    A tensor elsewhere than on the CPU is not looked at, since that would wait for the device: who
    puts tokens there checks them before.

    Raises:
        UsageError: an id is negative, or not less than `vocab_size`.
    """
    if (ends := _ends(ids)) is None:
        return
    if ends[0] < 0 or ends[1] >= vocab_size:
        raise UsageError(
            f"{location} holds token {ends[0] if ends[0] < 0 else ends[1]}, and the model has a "
            f"vocabulary of {vocab_size}",
            hint=f"ids go from 0 to {vocab_size - 1}: is the tokenizer another model's?",
        )


def check_positions(positions_BS: Tensor, max_positions: int) -> None:
    """Refuse positions beyond the learned embeddings; on the CPU only, like `check_ids`.

    Raises:
        UsageError: a place is negative, or not less than `max_positions`.
    """
    if (ends := _ends(positions_BS)) is None:
        return
    if ends[0] < 0 or ends[1] >= max_positions:
        raise UsageError(
            f"a token is at position {ends[0] if ends[0] < 0 else ends[1]}, and the model has "
            f"learned {max_positions} positions",
            hint=f"at most {max_positions} tokens a row, with those in the cache",
        )


def _ends(values: Tensor | Sequence[int]) -> tuple[int, int] | None:
    """The smallest and the largest; None where there is none, or where it cannot be seen."""
    if not isinstance(values, Tensor):
        return (min(values), max(values)) if len(values) else None
    if values.device.type != "cpu" or is_rehearsed.get() or not values.numel():
        return None
    low, high = values.aminmax()
    return int(low), int(high)


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """State shared by all layers of one forward pass: sizes, positions, rotations, masks, the
    cache.

    Rotations and masks are made when a layer first asks for its kind, and kept for the others, and
    for the backward pass where layers are computed again: other passes may have run since.
    `positions_BS` has a batch of 1 where all rows have the same. `balanced` are the layers whose
    routers have counted their choices (see `moe_aux_loss`), and `draws` the elements that dropout
    zeroes, if any (see `dropout`). With context parallelism (`cp`)
    all this is of this rank's tokens, two stretches of every row, each with masks of its own, and
    `last_B` are the largest positions of whole rows.
    """

    num_rows: int
    num_tokens: int
    positions_BS: Tensor
    rotary: Rotary
    masks: tuple[Masks, ...]
    cache: KVCache | None = None
    cp: Group = ALONE
    last_B: Tensor | None = None
    counted_BS: Tensor | None = None
    balanced: set[int] = field(default_factory=set)
    draws: Draws | None = None
    _turns: dict[int, Rotation | None] = field(default_factory=dict)

    def rotation(self, layer: int) -> Rotation | None:
        """Cosines and sines for a layer; None for a layer without rotary embedding."""
        if layer not in self._turns:
            self._turns[layer] = self.rotary.of(layer, self.positions_BS, self.last_B)
        return self._turns[layer]

    def stretches(self, layer: int) -> list[tuple[int, Mask]]:
        """For each stretch of this rank's queries, all equally long: the number of keys up to its
        end, and which of these a layer's queries may attend to."""
        return [(masks.span.num_keys, masks.of(layer)) for masks in self.masks]
