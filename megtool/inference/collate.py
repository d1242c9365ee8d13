"""Collation of rows into the batches that a model takes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megtool.data.packing import IGNORED, PackedRows
from megtool.model.batch import Batch, run_starts


class RowDataset(Protocol):
    """Rows by their number in a run; see `megtool.data.dataset.TokenDataset`."""

    def __len__(self) -> int:
        """Rows of one pass over the data."""

    def rows(self, first: int, count: int) -> PackedRows:
        """`count` rows of the run from number `first`, the same on every rank."""


def collate_rows(rows: PackedRows, device: torch.device) -> tuple[Batch, Tensor]:
    """Rows as a batch, and their labels [B, S].

    If no row holds two texts, the batch has no documents: padding comes after all other tokens, so
    a causal mask is enough. Where tokens attend both ways, padding is another document. Router
    losses exclude padding.
    """

    def to_device(array: NDArray[Any]) -> Tensor:
        return move(torch.from_numpy(np.ascontiguousarray(array)))

    def move(tensor: Tensor) -> Tensor:
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    differ_BS = rows.documents_BS != rows.documents_BS[:, :1]
    has_documents = bool((differ_BS & (rows.valid_BS | rows.both_ways)).any())
    starts_BM = run_starts(torch.from_numpy(rows.documents_BS)) if has_documents else None
    sources, are_valid = rows.sources_BE, rows.source_valid_BE
    has_source_padding = are_valid is not None and not are_valid.all()
    batch = Batch(
        tokens_BS=to_device(rows.tokens_BS),
        positions_BS=to_device(rows.positions_BS) if has_documents else None,
        documents_BS=to_device(rows.documents_BS) if has_documents else None,
        run_starts_BM=None if starts_BM is None else move(starts_BM),
        counted_BS=None if rows.valid_BS.all() else to_device(rows.valid_BS),
        source_BE=None if sources is None else to_device(sources),
        source_valid_BE=to_device(are_valid)
        if are_valid is not None and has_source_padding
        else None,
    )
    return batch, to_device(rows.labels_BS)


def pad_rows(rows: PackedRows, count: int) -> PackedRows:
    """Rows, with rows without labels added up to `count`."""
    num_rows = len(rows.tokens_BS)
    if num_rows == count:
        return rows
    indices = np.concatenate([np.arange(num_rows), np.zeros(count - num_rows, np.int64)])
    labels = rows.labels_BS[indices].copy()
    labels[num_rows:] = IGNORED
    return PackedRows(
        tokens_BS=rows.tokens_BS[indices],
        labels_BS=labels,
        positions_BS=rows.positions_BS[indices],
        documents_BS=rows.documents_BS[indices],
        both_ways=rows.both_ways,
        sources_BE=None if rows.sources_BE is None else rows.sources_BE[indices],
        source_valid_BE=None if rows.source_valid_BE is None else rows.source_valid_BE[indices],
    )
