"""Batches: a replica's rows of a step, as the model takes them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megtool.data.packing import IGNORED, PackedRows
from megtool.model.batch import Batch


class Feed(Protocol):
    """Samples by their numbers in a run; see `megtool.data.dataset.Feed`."""

    def __len__(self) -> int:
        """Samples of one pass over the data."""

    def rows(self, first: int, count: int) -> PackedRows:
        """Samples number `first` and the next of the run, the same on every rank."""


def batch_of(rows: PackedRows, device: torch.device) -> tuple[Batch, Tensor]:
    """Rows as a batch, and their labels [B, S].

    Where no row holds two texts, the batch says nothing of documents: tokens that fill a row up
    come after all others, so a causal mask is enough. Losses of routers leave them out.
    """

    def put(array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    several = bool(((rows.documents_BS != rows.documents_BS[:, :1]) & rows.valid_BS).any())
    batch = Batch(
        tokens_BS=put(rows.tokens_BS),
        positions_BS=put(rows.positions_BS) if several else None,
        documents_BS=put(rows.documents_BS) if several else None,
        counted_BS=None if rows.valid_BS.all() else put(rows.valid_BS),
    )
    return batch, put(rows.labels_BS)


def padded(rows: PackedRows, count: int) -> PackedRows:
    """Rows, made as many as `count` by ones that have no labels."""
    have = len(rows.tokens_BS)
    if have == count:
        return rows
    again = np.concatenate([np.arange(have), np.zeros(count - have, np.int64)])
    labels = rows.labels_BS[again].copy()
    labels[have:] = IGNORED
    return PackedRows(
        tokens_BS=rows.tokens_BS[again],
        labels_BS=labels,
        positions_BS=rows.positions_BS[again],
        documents_BS=rows.documents_BS[again],
    )
