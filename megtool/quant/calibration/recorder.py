"""Record: taps on one layer at a time, and the statistics of all ranks' activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from megtool.errors import CalibrationError, UsageError
from megtool.model.batch import Batch
from megtool.model.decoder import Decoder
from megtool.model.hook_locations import HookLocation, places
from megtool.model.moe import MoeMlp
from megtool.parallel.collectives import all_max, gather_columns
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.quant.calibration.activation_sites import ActivationSite
from megtool.quant.calibration.reduce_statistics import reduce_statistics
from megtool.quant.calibration.running_statistics import NO_BAD_ROW, RunningStatistics
from megtool.quant.calibration.statistics import ActivationStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedSite:
    """A point, where it is, and what was seen there so far (None: others hold the expert)."""

    site: ActivationSite
    place: HookLocation
    statistics: RunningStatistics | None


class ActivationRecorder:
    """Keeps statistics of the inputs of one layer after the other while a decoder runs.

    `start` a layer, run its batches, each told to `see` before, and `take` its statistics. Points
    named in `gram` and `sample` have these too, those in `even` an even gram (see `Tally`). With
    `route_all` every expert sees every token, for statistics alone: the pass is the same.

    Every rank makes the same calls. Statistics are of all ranks' tokens and columns, the same on
    every rank of a pipeline stage. An activation that is not finite is an error of the pass on one
    process and a CPU, and of `take` elsewhere.
    """

    def __init__(
        self,
        decoder: Decoder,
        sites: Iterable[ActivationSite],
        *,
        groups: ProcessGroups | None = None,
        gram: Collection[str] = (),
        normalize_tokens: Collection[str] = (),
        sample: Collection[str] = (),
        route_all: bool = False,
    ) -> None:
        self.decoder = decoder
        self.groups = decoder.groups if groups is None else groups
        self._sites: dict[int | None, list[ActivationSite]] = defaultdict(list)
        for point in sites:
            self._sites[point.layer].append(point)
        self._gram, self._normalize_tokens = frozenset(gram), frozenset(normalize_tokens)
        self._sample, self._route_all = frozenset(sample), route_all
        self._watched: list[_WatchedSite] = []
        self._moe: MoeMlp | None = None
        self._labels: dict[int, Tensor] = {}
        self._labels_T: Tensor | None = None
        self._on_host = self.groups.device.type == "cpu"

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a pass over the layer advances: `state` of `kernels.graphs.Graphs`."""
        return [t for w in self._watched if w.statistics is not None for t in w.statistics.state]

    @property
    def is_graphable(self) -> bool:
        """A pass over the layer neither waits for the device nor keeps rows of it."""
        tallies = [w.statistics for w in self._watched if w.statistics is not None]
        return self._moe is None and all(t.sample_rows is None for t in tallies)

    def start(self, layer: int | None) -> None:
        """Watch a layer (None: the head), and no other.

        Raises:
            MappingError: a point of it is not in this decoder.
        """
        self.stop()
        watched: dict[tuple[int, str], list[_WatchedSite]] = defaultdict(list)
        for point in self._sites[layer]:
            place = places(self.decoder, point.name)[0]
            tally = self._make_statistics(point, place) if place.is_here else None
            entry = _WatchedSite(site=point, place=place, statistics=tally)
            self._watched.append(entry)
            watched[id(place.module), place.attribute].append(entry)
        for entries in watched.values():
            self._install_hook(entries)
        if layer is None or all(p.expert is None for p in self._sites[layer]):
            return
        mlp = self.decoder.decoder.layers[str(layer)].get_submodule("mlp")
        if isinstance(mlp, MoeMlp):
            self._moe = mlp
            mlp.shows_all = self._route_all

    def set_batch(self, batch: Batch, *, first_sample: int = 0) -> None:
        """What the next pass is over: padding does not count, and rows have numbers in errors."""
        rows, tokens = batch.shape
        samples_B = torch.arange(first_sample, first_sample + rows)
        labels_T = samples_B.repeat_interleave(tokens).to(self.groups.device)
        if batch.valid_BS is not None:
            labels_T = labels_T.masked_fill(~batch.valid_BS.flatten().to(labels_T.device), -1)
        # The same storage for the same shape, as graphs need it.
        buffer = self._labels.setdefault(len(labels_T), labels_T)
        if buffer is not labels_T:
            buffer.copy_(labels_T)
        self._labels_T = buffer
        if self._moe is not None:
            self._moe.labels_T = self._local_labels(buffer)

    def collect(self) -> dict[str, ActivationStatistics]:
        """The statistics of the layer by point, which is watched no longer.

        Raises:
            CalibrationError: an activation is NaN or infinite.
        """
        watched = self._watched
        self.stop()
        self._raise_nonfinite(watched)
        return {
            w.site.name: reduce_statistics(
                w.statistics,
                w.place,
                w.site.width,
                self.groups,
                gram=w.site.name in self._gram,
                sample=w.site.name in self._sample,
            )
            for w in watched
        }

    def stop(self) -> None:
        """Watch nothing, and forget what was seen."""
        for w in self._watched:
            w.place.set(None)
        self._watched, self._labels_T = [], None
        if self._moe is not None:
            self._moe.shows_all, self._moe.labels_T = False, None
            self._moe.labels_R = None
            self._moe = None

    def _make_statistics(self, point: ActivationSite, place: HookLocation) -> RunningStatistics:
        columns = place.columns.size
        return RunningStatistics(
            point.width * place.repeats // columns,
            self.groups.device,
            gram_width=point.width if point.name in self._gram else 0,
            normalize_tokens=point.name in self._normalize_tokens,
            keep_sample=point.name in self._sample,
        )

    def _install_hook(self, entries: Sequence[_WatchedSite]) -> None:
        """Put the tap of all points that are at one place."""
        place = entries[0].place
        local = [w for w in entries if w.statistics is not None]

        def rows(x_TW: Tensor) -> Tensor:
            labels_T = self._row_labels(x_TW, place.rows.size)
            padded = self._is_padded(labels_T)
            for w in local:
                self._add_rows(w, x_TW, labels_T, padded)
            return x_TW

        def cache(key_BSKD: Tensor, value_BSKD: Tensor) -> tuple[Tensor, Tensor]:
            kv_BSW = torch.cat((key_BSKD.flatten(2), value_BSKD.flatten(2)), -1)
            rows(kv_BSW.flatten(0, 1))
            return key_BSKD, value_BSKD

        def experts(rows_RW: Tensor, counts_E: Tensor) -> Tensor:
            self._add_experts(local, rows_RW, counts_E)
            return rows_RW

        if place.expert is not None:
            place.set(experts)
        else:
            place.set(cache if place.attribute == "cache_tap" else rows)

    def _row_labels(self, x_TW: Tensor, ranks: int) -> Tensor:
        """The labels of this rank's rows, of which all `ranks` have some.

        Raises:
            UsageError: the pass is over something else than what was seen.
        """
        labels_T = self._labels_T
        if labels_T is None or len(labels_T) != x_TW.shape[0] * ranks:
            expected = "nothing" if labels_T is None else f"{len(labels_T)} tokens"
            raise UsageError(
                f"a pass over {x_TW.shape[0] * ranks} tokens, and {expected} to see",
                hint="Recorder.see is told of every batch before its pass",
            )
        return self._local_labels(labels_T) if ranks > 1 else labels_T

    def _local_labels(self, labels_T: Tensor) -> Tensor:
        """Of this rank's rows of what lies between blocks."""
        if not self.decoder.sequence_parallel:
            return labels_T
        tp = self.groups.tp
        return labels_T.view(tp.size, -1)[tp.rank]

    def _add_experts(
        self, entries: Sequence[_WatchedSite], rows_RW: Tensor, counts_E: Tensor
    ) -> None:
        moe = self._moe
        if moe is None:
            return
        labels_R = moe.labels_R
        if labels_R is None or (self._route_all and not moe.is_showing):
            return
        counts, padded = counts_E.tolist(), self._is_padded(labels_R)
        parts, labels = torch.split(rows_RW, counts), torch.split(labels_R, counts)
        for w in entries:
            if w.place.expert is not None and counts[w.place.expert]:
                self._add_rows(w, parts[w.place.expert], labels[w.place.expert], padded)

    def _add_rows(self, w: _WatchedSite, x_TW: Tensor, labels_T: Tensor, padded: bool) -> None:
        statistics, columns = w.statistics, w.place.columns
        if statistics is None:
            return
        if not self._on_host:
            full = (
                gather_columns(x_TW, columns)
                if self._needs_all_columns(statistics, columns)
                else None
            )
            statistics.add_labeled(x_TW, labels_T, full)
            return
        if padded:
            is_real_T = labels_T >= 0
            x_TW, labels_T = x_TW[is_real_T], labels_T[is_real_T]
        full = (
            gather_columns(x_TW, columns) if self._needs_all_columns(statistics, columns) else None
        )
        bad = statistics.add(x_TW, full)
        if bad is not None:
            sample = int(labels_T[bad])
            if self.groups.world.size == 1:
                self.stop()
                _raise_at(w.site, sample)
            statistics.bad_row.fill_(min(sample, int(statistics.bad_row)))

    def _is_padded(self, labels_T: Tensor) -> bool:
        """Some rows do not count; looked up on a CPU alone."""
        return self._on_host and bool((labels_T < 0).any())

    @staticmethod
    def _needs_all_columns(statistics: RunningStatistics, columns: Group) -> bool:
        return statistics.gram is not None and columns.size > 1

    def _raise_nonfinite(self, watched: Sequence[_WatchedSite]) -> None:
        """Raise the first fault that any rank of the stage has found, on all of them."""
        if not watched:
            return
        none = torch.tensor(NO_BAD_ROW, device=self.groups.device)
        faults = torch.stack(
            [none if w.statistics is None else w.statistics.bad_row for w in watched]
        )
        for group in (self.groups.tp, self.groups.replicas):
            faults = -all_max(-faults, group)
        for w, sample in zip(watched, faults.tolist(), strict=True):
            if sample != NO_BAD_ROW:
                _raise_at(w.site, sample)


def _raise_at(point: ActivationSite, sample: int) -> NoReturn:
    location = "the head" if point.layer is None else f"layer {point.layer}"
    raise CalibrationError(
        f"an activation at {point.name} ({location}) is NaN or infinite, in sample {sample}",
        hint="`megtool inspect --stats` shows NaN in weights; float16 overflows: --dtype float32",
    )
