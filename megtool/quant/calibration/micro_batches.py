"""Micro-batches of calibration data, small enough for a layer, sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megtool.errors import CalibrationError
from megtool.inference.windows import IGNORED
from megtool.model.batch import Batch, run_starts
from megtool.parallel.context_parallel import own_tokens
from megtool.parallel.process_groups import ALONE, Group, ProcessGroups
from megtool.spec.model_config import ModelConfig

MAX_TOKENS = 4096
MAX_INTERMEDIATE_BYTES = 160 << 20
"""Limit of the intermediate activations of a layer, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of a batch, starting at row `first_row` of the data.

    One without `is_counted` only runs so that all ranks run the same number. With context
    parallelism a rank runs its own tokens of the rows.
    """

    batch: Batch
    first_row: int
    is_counted: bool = True
    cp: Group = ALONE

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank runs, padding included."""
        return self.batch.tokens_BS.numel() // self.cp.size

    @property
    def valid_T(self) -> Tensor | None:
        """Mask of this rank's tokens to observe; None for all."""
        valid_BS = self.valid_BS
        return None if valid_BS is None else own_tokens(valid_BS, self.cp).flatten()

    @property
    def valid_BS(self) -> Tensor | None:
        """Mask of the rows' tokens to observe; None for all."""
        if not self.is_counted:
            return torch.zeros_like(self.batch.tokens_BS, dtype=torch.bool)
        return self.batch.valid_BS

    @property
    def is_plain(self) -> bool:
        """It has only tokens, so positions and masks follow from its shape."""
        b = self.batch
        return b.positions_BS is None and b.valid_BS is None and b.documents_BS is None


def split_batches(batches: Sequence[Batch], config: ModelConfig) -> list[MicroBatch]:
    """Split batches into micro-batches of whole rows, sized by a layer's intermediate activations.

    The split does not depend on the parallel layout, so neither do sums.

    Raises:
        CalibrationError: the data has no tokens.
    """
    max_tokens, out, first = compute_micro_batch_tokens(config), [], 0
    for batch in batches:
        rows, width = batch.shape
        step = max(1, max_tokens // width)
        for start in range(0, rows, step):
            part = slice_rows(batch, slice(start, start + step))
            out.append(MicroBatch(batch=part, first_row=first + start))
        first += rows
    if not any(_num_valid(p.batch) for p in out):
        raise CalibrationError(
            "the data has no tokens, so there is nothing to calibrate with",
            hint="--data FILE with text; --field names the text field",
        )
    return out


def shard_micro_batches(
    micro_batches: Sequence[MicroBatch], groups: ProcessGroups
) -> list[MicroBatch]:
    """The micro-batches of a data-parallel rank, padded to the same number on each rank; with
    context parallelism their rows are padded to equal parts."""
    dp, cp = groups.dp, groups.cp
    local = list(micro_batches[dp.rank :: dp.size])
    if len(local) < -(-len(micro_batches) // dp.size):
        local.append(replace(micro_batches[-1], is_counted=False))
    if cp.size == 1:
        return local
    return [
        replace(p, cp=cp, batch=p.batch.padded(-p.batch.shape[1] % (2 * cp.size))) for p in local
    ]


def compute_micro_batch_tokens(config: ModelConfig) -> int:
    """The tokens per micro-batch: a power of two, which usual row lengths divide."""
    moe = config.moe
    halves = 1 + config.mlp.gated
    inner = config.mlp.ffn_hidden_size * (halves + 1)
    if moe.num_experts:
        inner = max(inner, moe.moe_ffn_hidden_size * moe.num_experts_per_token * (halves + 1))
    fits = MAX_INTERMEDIATE_BYTES // (4 * (inner + 4 * config.hidden_size))
    return max(1, min(MAX_TOKENS, 1 << max(fits, 1).bit_length() - 1))


def num_valid(micro_batches: Sequence[MicroBatch]) -> int:
    """Tokens without padding."""
    return sum(_num_valid(p.batch) for p in micro_batches if p.is_counted)


def move_to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Move a micro-batch to a device, with what kernels there would have to wait for."""
    b = micro_batch.batch
    starts_BM = None if device.type == "cpu" else run_starts(b.documents_BS, b.valid_BS)
    values = {
        n: None if (t := getattr(b, n)) is None else t.to(device)
        for n in ("tokens_BS", "positions_BS", "valid_BS", "documents_BS")
    }
    values["run_starts_BM"] = None if starts_BM is None else starts_BM.to(device)
    return replace(micro_batch, batch=Batch(**values))  # type: ignore[arg-type]


def _num_valid(batch: Batch) -> int:
    return batch.tokens_BS.numel() if batch.valid_BS is None else int(batch.valid_BS.sum())


def slice_rows(batch: Batch, rows: slice | Tensor) -> Batch:
    """Take rows of a batch: a range of them, or those of given numbers."""
    num_rows = batch.shape[0]

    def part(t: Tensor | None) -> Tensor | None:
        return t if t is None or (t.shape[0] == 1 and num_rows != 1) else t[rows]

    return Batch(
        tokens_BS=batch.tokens_BS[rows],
        positions_BS=part(batch.positions_BS),
        valid_BS=part(batch.valid_BS),
        documents_BS=part(batch.documents_BS),
    )


def split_rows(micro_batch: MicroBatch, most_tokens: int) -> Iterator[MicroBatch]:
    """Parts of at most so many tokens, of one row at least."""
    rows, width = micro_batch.batch.shape
    step = max(1, most_tokens // width)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        yield replace(micro_batch, batch=slice_rows(micro_batch.batch, part))


def next_tokens(batch: Batch) -> Tensor:
    """The next token of each token, `IGNORED` where there is none."""
    labels_BS = torch.full_like(batch.tokens_BS, IGNORED)
    labels_BS[:, :-1] = batch.tokens_BS[:, 1:]
    if batch.valid_BS is not None:
        labels_BS[~batch.valid_BS] = IGNORED
        labels_BS[:, :-1][~batch.valid_BS[:, 1:]] = IGNORED
    return labels_BS
