"""Running statistics over the rows of one activation, cheap relative to the matmul it feeds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megtool.process.threads import map_in_threads
from megtool.quant.statistics.site_statistics import BINS, BINS_PER_OCTAVE, MAX_SAMPLE_ROWS, OCTAVES

_TILE = (1 << 15) - 1  # elements per tile: fits the cache, below torch's parallel threshold
_SHIFT = 23 - BINS_PER_OCTAVE.bit_length() + 1  # low bits of a float32 that do not affect the bin
_ALL_BINS = 1 << (31 - _SHIFT)
_FIRST_BIN = (
    127 + OCTAVES[0]
) * BINS_PER_OCTAVE  # bit pattern of the smallest magnitude with its own bin
_COPIES = 32  # copies of the counts on a GPU, against contention of atomic adds
_TINY = torch.finfo(torch.float32).tiny
NO_BAD_ROW = torch.iinfo(torch.int64).max


class RunningStatistics:
    """Statistics of rows `[rows, width]`, in tensors on one device.

    `gram_width` is the width of the full rows (0: no Gram matrix), larger than `width` if columns
    are split over ranks. With `normalize_tokens`, each row's contribution to the Gram matrix is
    divided by its norm: a few tokens have inputs a thousand times as large as all others and would
    dominate the sums. On a CPU, non-finite rows are reported at once and not added. Elsewhere
    nothing synchronizes with the device, so calls of `add_labeled` can be captured in a CUDA graph
    (`state` is what they change), and `bad_row` holds the smallest label of a non-finite row.
    With `keep_sample` rows are also given to `sample_from`, which is no part of a graph.
    """

    def __init__(
        self,
        width: int,
        device: torch.device,
        *,
        gram_width: int = 0,
        normalize_tokens: bool = False,
        keep_sample: bool = False,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.num_tokens = zeros(dtype=torch.int64)
        self.amax = zeros(width, dtype=torch.float32)
        self.abs_sum = zeros(width, dtype=torch.float64)
        self.square_sum = zeros(width, dtype=torch.float64)
        copies = 1 if device.type == "cpu" else _COPIES
        self.counts = zeros(copies, _ALL_BINS, dtype=torch.int64)
        self.bad_row = zeros(dtype=torch.int64).fill_(NO_BAD_ROW)
        self.gram = zeros(width, gram_width, dtype=torch.float32) if gram_width else None
        self.sample_rows: list[Tensor] | None = [] if keep_sample else None
        self._normalize_tokens = normalize_tokens
        self._num_rows, self._stride = 0, 1

    @property
    def state(self) -> tuple[Tensor, ...]:
        """All tensors that `add` changes."""
        state = (
            self.num_tokens,
            self.amax,
            self.abs_sum,
            self.square_sum,
            self.counts,
            self.bad_row,
        )
        return state if self.gram is None else (*state, self.gram)

    def add(self, x_TW: Tensor, full_TV: Tensor | None = None) -> int | None:
        """Add rows, on a CPU; returns the index of the first non-finite row, if any.

        `full_TV` are the same rows with all ranks' columns, if these differ.
        """
        if not x_TW.shape[0]:
            return None
        x_TW = x_TW.detach()
        amax, abs_sum, square_sum, counts = _sums(x_TW)
        if not math.isfinite(float(amax.amax())):
            return int((~x_TW.isfinite().all(1)).nonzero()[0, 0])
        torch.maximum(self.amax, amax, out=self.amax)
        self.abs_sum += abs_sum
        self.square_sum += square_sum
        self.counts[0] += counts
        self.num_tokens += x_TW.shape[0]
        self._multiply(x_TW, full_TV)
        return None

    def add_labeled(self, x_TW: Tensor, labels_T: Tensor, full_TV: Tensor | None = None) -> None:
        """Add rows with nonnegative labels, without synchronizing with the device."""
        is_real_T = labels_T >= 0
        x_TW = x_TW.detach().float().masked_fill(~is_real_T.unsqueeze(1), 0.0)
        size = x_TW.abs()
        bad_T = ~(size.amax(1) < torch.inf)
        first = torch.where(bad_T, labels_T, NO_BAD_ROW).min()
        torch.minimum(self.bad_row, first, out=self.bad_row)
        torch.maximum(self.amax, size.amax(0), out=self.amax)
        self.abs_sum += size.sum(0, dtype=torch.float64)
        bins = _bins(size)
        copies = torch.arange(bins.shape[0], device=bins.device) % self.counts.shape[0]
        indices = (bins + copies.unsqueeze(1) * _ALL_BINS).flatten()
        ones = torch.ones((), dtype=torch.int64, device=bins.device).expand(indices.shape)
        self.counts.view(-1).scatter_add_(0, indices, ones)
        num = is_real_T.sum()
        self.counts[0, 0] -= (is_real_T.numel() - num) * x_TW.shape[1]
        self.num_tokens += num
        self.square_sum += size.mul_(size).sum(0, dtype=torch.float64)
        if full_TV is not None:
            full_TV = full_TV.float().masked_fill(~is_real_T.unsqueeze(1), 0.0)
        self._multiply(x_TW, full_TV)

    def _multiply(self, x_TW: Tensor, full_TV: Tensor | None) -> None:
        if self.gram is not None:
            x_TW = x_TW.float()
            full = x_TW if full_TV is None else full_TV.detach().float()
            if self._normalize_tokens:
                x_TW = x_TW / full.norm(dim=1, keepdim=True).clamp_(min=_TINY)
            self.gram.addmm_(x_TW.T, full)

    def sample_from(self, x_TW: Tensor) -> None:
        """Keep every n-th of the rows that are added; n doubles when there are too many.

        Rows are finite and without padding. Does nothing without `keep_sample`.
        """
        if self.sample_rows is None:
            return
        start = -self._num_rows % self._stride
        self._num_rows += x_TW.shape[0]
        self.sample_rows.append(x_TW.detach()[start :: self._stride].float().clone())
        while sum(len(r) for r in self.sample_rows) > MAX_SAMPLE_ROWS:
            self.sample_rows = [torch.cat(self.sample_rows)[::2].clone()]
            self._stride *= 2

    @property
    def sample(self) -> Tensor | None:
        """The sampled rows."""
        if self.sample_rows is None:
            return None
        return (
            torch.cat(self.sample_rows)
            if self.sample_rows
            else self.amax.new_zeros(0, len(self.amax))
        )

    @property
    def histogram(self) -> Tensor:
        """The counts in the bins of `ActivationStatistics.histogram`."""
        return fold_bins(self.counts.sum(0))


def _sums(x_TW: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The amax, sum and sum of squares of magnitudes by column, and counts of bit patterns.

    Tiles are too small for torch to parallelize and are distributed over threads as a whole; their
    results are added in order, so the result does not depend on the number of threads.
    """
    width = x_TW.shape[1]
    tiles = torch.split(x_TW, max(1, _TILE // width))
    largest, sums, squares = (torch.empty(len(tiles), width) for _ in range(3))

    @torch.inference_mode(torch.is_inference_mode_enabled())  # each thread has its own
    def sum_tiles(indices: range) -> Tensor:
        counts = torch.zeros(_ALL_BINS, dtype=torch.int64)
        for i in indices:
            tile = tiles[i]
            size = tile.abs() if tile.dtype == torch.float32 else tile.float().abs_()
            torch.amax(size, 0, out=largest[i])
            torch.sum(size, 0, out=sums[i])
            counts += torch.bincount(_bins(size).flatten(), minlength=_ALL_BINS)
            torch.sum(size.mul_(size), 0, out=squares[i])
        return counts

    threads = min(torch.get_num_threads(), len(tiles) // 4)
    if threads < 2:
        counts = sum_tiles(range(len(tiles)))
    else:
        shares = [range(k, len(tiles), threads) for k in range(threads)]
        counts = torch.stack(map_in_threads(sum_tiles, shares, threads=threads)).sum(0)
    if len(tiles) == 1:
        return largest[0], sums[0].double(), squares[0].double(), counts
    wide = torch.float64
    return largest.amax(0), sums.sum(0, dtype=wide), squares.sum(0, dtype=wide), counts


def _bins(size: Tensor) -> Tensor:
    """The leading bits of magnitudes, which determine the bin."""
    return size.view(torch.int32) >> _SHIFT


def fold_bins(counts: Tensor) -> Tensor:
    """Convert counts of bit patterns `[2^13]` to `BINS`; the outer bins take the rest."""
    end = _FIRST_BIN + BINS - 1
    out = counts.new_zeros(BINS)
    out[0] = counts[:_FIRST_BIN].sum()
    out[1:] = counts[_FIRST_BIN:end]
    out[-1] += counts[end:].sum()
    return out
