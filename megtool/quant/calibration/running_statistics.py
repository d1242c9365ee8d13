"""Tally: running sums over the rows of one activation, cheap beside the product they go into."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from megtool.quant.calibration.statistics import BINS, BINS_PER_OCTAVE, MAX_SAMPLE_ROWS, OCTAVES

_TILE = (1 << 15) - 1  # elements worked on at a time: a cache's worth, and less than torch cuts
_SHIFT = 23 - BINS_PER_OCTAVE.bit_length() + 1  # bits of a float32 below those that tell the bin
_ALL_BINS = 1 << (31 - _SHIFT)
_FIRST_BIN = (
    127 + OCTAVES[0]
) * BINS_PER_OCTAVE  # the pattern of the smallest magnitude with a bin
_COPIES = 32  # of the counts on a GPU, so that few of its threads add to one at a time
_TINY = torch.finfo(torch.float32).tiny
NO_BAD_ROW = torch.iinfo(torch.int64).max


class RunningStatistics:
    """What was seen of `[rows, width]`, in tensors on one device.

    `gram_width` is that of the rows that the gram's columns come from (0: no gram), which is more
    than `width` where ranks have some columns each. Into an `even` one rows go divided by the root
    of their length: a few tokens have inputs a thousand times as large as all others, and would be
    all that its sums are of. On a CPU, rows that are not finite are told at once and leave no
    trace. Elsewhere nothing waits for the device, so that calls can be recorded as a graph (`state`
    is what they change), unless `samples`: `fault` then holds the smallest label of a bad row.
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
        """Count rows in, on a CPU; the first that is not finite, where there is one.

        `full_TV` are the same rows with all ranks' columns, where they are not the same.
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
        self._sample(x_TW)
        return None

    def add_labeled(self, x_TW: Tensor, labels_T: Tensor, full_TV: Tensor | None = None) -> None:
        """Count rows in whose label is not negative, without waiting for the device."""
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
        if self.sample_rows is not None:
            self._sample(x_TW[is_real_T])

    def _multiply(self, x_TW: Tensor, full_TV: Tensor | None) -> None:
        if self.gram is not None:
            x_TW = x_TW.float()
            full = x_TW if full_TV is None else full_TV.detach().float()
            if self._normalize_tokens:
                x_TW = x_TW / full.norm(dim=1, keepdim=True).clamp_(min=_TINY)
            self.gram.addmm_(x_TW.T, full)

    def _sample(self, x_TW: Tensor) -> None:
        """Keep every n-th of all rows there ever were, n doubling as they become too many."""
        if self.sample_rows is None:
            return
        start = -self._num_rows % self._stride
        self._num_rows += x_TW.shape[0]
        self.sample_rows.append(x_TW[start :: self._stride].float().clone())
        while sum(len(r) for r in self.sample_rows) > MAX_SAMPLE_ROWS:
            self.sample_rows = [torch.cat(self.sample_rows)[::2].clone()]
            self._stride *= 2

    @property
    def sample(self) -> Tensor | None:
        """The rows kept."""
        if self.sample_rows is None:
            return None
        return (
            torch.cat(self.sample_rows)
            if self.sample_rows
            else self.amax.new_zeros(0, len(self.amax))
        )

    @property
    def histogram(self) -> Tensor:
        """The counts in the bins of `Statistics.histogram`."""
        return fold_bins(self.counts.sum(0))


def _sums(x_TW: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By column the largest magnitudes, their sums and those of squares; counts of bit patterns.

    Tiles are too small for torch to cut, and go over its threads whole; what they give is added up
    in their order, so that the result does not depend on the number of threads.
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
        parts = _pool(threads).map(
            sum_tiles, (range(k, len(tiles), threads) for k in range(threads))
        )
        counts = torch.stack(list(parts)).sum(0)
    if len(tiles) == 1:
        return largest[0], sums[0].double(), squares[0].double(), counts
    wide = torch.float64
    return largest.amax(0), sums.sum(0, dtype=wide), squares.sum(0, dtype=wide), counts


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="megtool-tally")


def _bins(size: Tensor) -> Tensor:
    """The bit pattern of magnitudes down to the mantissa's bits that tell the bin."""
    return size.view(torch.int32) >> _SHIFT


def fold_bins(counts: Tensor) -> Tensor:
    """Counts of all bit patterns, `[2^13]`, as those of `BINS`: outer ones take what is beyond."""
    end = _FIRST_BIN + BINS - 1
    out = counts.new_zeros(BINS)
    out[0] = counts[:_FIRST_BIN].sum()
    out[1:] = counts[_FIRST_BIN:end]
    out[-1] += counts[end:].sum()
    return out
