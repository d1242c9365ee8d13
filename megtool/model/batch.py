"""The inputs of a forward pass: token rows with their masks and positions.

Shape suffixes of model/ and kernels/: B batch, S sequence, T = B*S tokens (flattened), H hidden,
N query heads (of this rank), K key and value heads (of this rank), D head size, L keys attended to
(S without a cache), F ffn size, V vocabulary, E experts, R rotary part of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Token rows of equal length, with their masks and positions.

    `tokens_BS` is int64. `positions_BS` are the tokens' places (int64, batch may be 1); by default
    they count valid tokens, on from those in the cache. `valid_BS` is false for padding, which may
    stand on the left or on the right and is never attended to. Tokens attend within equal
    `documents_BS` alone; positions do not start again by themselves where a document does.
    `counted_BS` is false for tokens that fill rows up: losses of routers leave them out, and they
    are attended to as others are. A model with an encoder has that read `source_BE`, E tokens for
    each row, of which those are padding where `source_valid_BE` is false. `run_starts_BM` (int32)
    are `run_starts` of documents and padding: with them kernels need not wait for the device to
    learn how many documents there are.

    Raises:
        UsageError: there is no token, or a shape is not that of the tokens.
    """

    tokens_BS: Tensor
    positions_BS: Tensor | None = None
    valid_BS: Tensor | None = None
    documents_BS: Tensor | None = None
    counted_BS: Tensor | None = None
    source_BE: Tensor | None = None
    source_valid_BE: Tensor | None = None
    run_starts_BM: Tensor | None = None

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
        self._check_source()
        if self.valid_BS is not None and self.valid_BS.dtype != torch.bool:
            raise UsageError(f"valid_BS is of {self.valid_BS.dtype}", hint="true for real tokens")
        starts = self.run_starts_BM
        if starts is not None and (
            starts.dim() != 2
            or len(starts) != len(self.tokens_BS)
            or starts.dtype != torch.int32
            or (self.documents_BS is None and self.valid_BS is None)
        ):
            raise UsageError(
                f"run_starts_BM is of {starts.dtype} and has shape {list(starts.shape)}, and there "
                f"are {len(self.tokens_BS)} rows of tokens",
                hint="run_starts() makes it of documents_BS and valid_BS",
            )

    def _check_source(self) -> None:
        source, valid = self.source_BE, self.source_valid_BE
        if source is None and valid is None:
            return
        rows = len(self.tokens_BS)
        if source is None or source.dim() != 2 or len(source) != rows or not source.numel():
            shape = None if source is None else list(source.shape)
            raise UsageError(f"source_BE has shape {shape}, and there are {rows} rows of tokens")
        if valid is not None and (valid.shape != source.shape or valid.dtype != torch.bool):
            raise UsageError(
                f"source_valid_BE is of {valid.dtype} and has shape {list(valid.shape)}, and the "
                f"source {list(source.shape)}",
                hint="true for real tokens",
            )

    def padded(self, more: int) -> Batch:
        """The batch with so many more tokens of padding at the end of each row."""
        if not more:
            return self
        valid_BS = self.valid_BS
        if valid_BS is None:
            valid_BS = torch.ones_like(self.tokens_BS, dtype=torch.bool)
        positions_BS, documents_BS = (
            None if x is None else F.pad(x, (0, more))
            for x in (self.positions_BS, self.documents_BS)
        )
        return Batch(
            tokens_BS=F.pad(self.tokens_BS, (0, more)),
            positions_BS=positions_BS,
            valid_BS=F.pad(valid_BS, (0, more)),
            documents_BS=documents_BS,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of each."""
        return self.tokens_BS.shape[0], self.tokens_BS.shape[1]


LEAST_RUNS = 8
"""Numbers of runs are this or a higher power of two: a CUDA graph is captured for each number."""


def run_starts(*kinds: Tensor | None) -> Tensor | None:
    """Return the first tokens of each row's runs of equal numbers, of all `kinds` [B, S] at once.

    They are int32 [B, M] in order, filled up with S; M is a power of two that is enough for the row
    with the most, and at least `LEAST_RUNS`. None where there is no kind, and where one is not
    on the CPU, since counting runs would wait for the device.
    """
    ids = [kind for kind in kinds if kind is not None]
    if not ids or not all(kind.is_cpu for kind in ids):
        return None
    rows, size = ids[0].shape
    begins_BS = torch.zeros(rows, size, dtype=torch.bool)
    begins_BS[:, 0] = True
    for kind in ids:
        begins_BS[:, 1:] |= kind[:, 1:] != kind[:, :-1]
    most = max(LEAST_RUNS, 1 << (int(begins_BS.sum(1).max()) - 1).bit_length())
    places = torch.where(begins_BS, torch.arange(size), size)
    if most > size:
        places = F.pad(places, (0, most - size), value=size)
    return places.sort(1).values[:, :most].to(torch.int32)


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
    if not values.is_cpu or not values.numel():
        return None
    low, high = values.aminmax()
    return int(low), int(high)
