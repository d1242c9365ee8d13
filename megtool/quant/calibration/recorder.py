"""Records activation statistics of one layer at a time with hooks, over all ranks."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from megtool.errors import CalibrationError, UsageError
from megtool.model.batch import Batch
from megtool.model.moe.experts import MoeMlp
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import HookLocation, places
from megtool.parallel.collectives import all_max, gather_columns
from megtool.parallel.context_parallel import own_tokens
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quant.statistics.reduce import reduce_statistics
from megtool.quant.statistics.running import NO_BAD_ROW, RunningStatistics
from megtool.quant.statistics.site_statistics import ActivationStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedSite:
    """A site, its hook place, and its statistics so far (None: the expert is on another rank)."""

    site: ActivationSite
    place: HookLocation
    statistics: RunningStatistics | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is left to add of one input after a pass: to these sites, all of experts or none."""

    watched: tuple[WatchedSite, ...]
    is_expert: bool = False


PostponedObservation = tuple[Observation, tuple[Tensor, ...]]


class ActivationRecorder:
    """Records statistics of the inputs of one layer at a time while a decoder runs.

    Call `start` for a layer, `set_batch` before each forward pass, and `collect` for the
    statistics. Sites named in `gram` and `sample` also get these, and those in `normalize_tokens` a
    token-normalized Gram matrix (see `RunningStatistics`). With `calibrate_all_experts` every
    expert observes every token; the outputs of the pass do not change.

    Every rank makes the same calls. Statistics cover all ranks' tokens and columns and are the same
    on every rank of a pipeline stage. NaN or Inf raises during the pass with one process on a CPU,
    and in `collect` otherwise.
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
        calibrate_all_experts: bool = False,
    ) -> None:
        self.decoder = decoder
        self.groups = decoder.groups if groups is None else groups
        self._sites: dict[int | None, list[ActivationSite]] = defaultdict(list)
        for site in sites:
            self._sites[site.layer].append(site)
        self._gram, self._normalize_tokens = frozenset(gram), frozenset(normalize_tokens)
        self._sample, self._route_all = frozenset(sample), calibrate_all_experts
        self._watched: list[WatchedSite] = []
        self._moe: MoeMlp | None = None
        self._labels: dict[int, Tensor] = {}
        self._labels_T: Tensor | None = None
        self._has_padding = False
        self._postponed: list[PostponedObservation] | None = None

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a postponing pass updates, as `CudaGraphs` takes them."""
        return [
            t
            for w in self._watched
            if w.statistics is not None and w.place.expert is None
            for t in w.statistics.state
        ]

    @contextlib.contextmanager
    def postponing(self) -> Iterator[list[PostponedObservation]]:
        """Do nothing in a pass that waits for the device, so that it can be captured as a graph.

        The list gets what is left to do, with the tensors that it needs: rows of experts, whose
        counts the host has to know, and rows to sample. Each is for `add_observation` after the
        pass, or after a replay, with the tensors of that.
        """
        postponed: list[PostponedObservation] = []
        self._postponed = postponed
        try:
            yield postponed
        finally:
            self._postponed = None
            if self._moe is not None:
                self._moe.labels_R = None

    def add_observation(self, observation: Observation, tensors: tuple[Tensor, ...]) -> None:
        """Add what a pass has postponed."""
        if observation.is_expert:
            rows_RW, counts_E, labels_R = tensors
            self._add_expert_rows(observation.watched, rows_RW, counts_E, labels_R)
            return
        x_TW, labels_T = tensors
        for w in observation.watched:
            self._add_postponed(w, x_TW, labels_T)

    def start(self, layer: int | None) -> None:
        """Start recording a layer (None: the head), and stop any other.

        Raises:
            MappingError: a site is not in this decoder.
        """
        self.stop()
        watched: dict[tuple[int, str], list[WatchedSite]] = defaultdict(list)
        for site in self._sites[layer]:
            place = places(self.decoder, site.name)[0]
            tally = self._make_statistics(site, place) if place.is_here else None
            entry = WatchedSite(site=site, place=place, statistics=tally)
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
        """Announce the batch of the next pass, for its padding mask and row numbers in errors."""
        rows, tokens = batch.shape
        self._has_padding = batch.valid_BS is not None
        samples_B1 = torch.arange(first_sample, first_sample + rows)[:, None]
        labels_BS = samples_B1.expand(rows, tokens).to(self.groups.device)
        if batch.valid_BS is not None:
            labels_BS = labels_BS.masked_fill(~batch.valid_BS.to(labels_BS.device), -1)
        labels_T = own_tokens(labels_BS, self.groups.cp).flatten().contiguous()
        # CUDA graphs need the same storage for the same shape.
        buffer = self._labels.setdefault(len(labels_T), labels_T)
        if buffer is not labels_T:
            buffer.copy_(labels_T)
        self._labels_T = buffer
        if self._moe is not None:
            self._moe.labels_T = self._local_labels(buffer)

    def end_batch(self) -> None:
        """Finish a pass over a micro-batch; statistics need nothing of it."""

    def collect(self) -> dict[str, ActivationStatistics]:
        """Return the statistics of the layer by site, and stop recording.

        Raises:
            CalibrationError: an activation is NaN or Inf.
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
        """Stop recording and discard statistics."""
        for w in self._watched:
            w.place.set(None)
        self._watched, self._labels_T = [], None
        if self._moe is not None:
            self._moe.shows_all, self._moe.labels_T = False, None
            self._moe.labels_R = None
            self._moe = None

    def _make_statistics(self, site: ActivationSite, place: HookLocation) -> RunningStatistics:
        columns = place.columns.size
        return RunningStatistics(
            site.width * place.repeats // columns,
            self.groups.device,
            gram_width=site.width if site.name in self._gram else 0,
            normalize_tokens=site.name in self._normalize_tokens,
            keep_sample=site.name in self._sample,
        )

    def _install_hook(self, entries: Sequence[WatchedSite]) -> None:
        """Install the hook of all sites at one place."""
        place = entries[0].place
        local = [w for w in entries if w.statistics is not None]

        def rows(x_TW: Tensor) -> Tensor:
            labels_T = self._row_labels(x_TW, place)
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

    def _row_labels(self, x_TW: Tensor, place: HookLocation) -> Tensor:
        """The labels of this rank's rows: of its tokens, or of all, a row for each of its groups.

        Raises:
            UsageError: the pass is not over the announced batch.
        """
        labels_T, groups = self._labels_T, place.groups
        ranks = 1 if groups else place.rows.size
        tokens = x_TW.shape[0] * ranks // max(groups, 1)
        if labels_T is None or len(labels_T) != tokens:
            expected = "nothing" if labels_T is None else f"{len(labels_T)} tokens"
            raise UsageError(
                f"a pass runs {tokens} tokens, and there is {expected} to see",
                hint="call set_batch before every pass",
            )
        if groups:
            return labels_T.repeat_interleave(groups)
        return self._local_labels(labels_T) if ranks > 1 else labels_T

    def _local_labels(self, labels_T: Tensor) -> Tensor:
        """The labels of this rank's rows between blocks (sequence parallelism)."""
        if not self.decoder.sequence_parallel:
            return labels_T
        tp = self.groups.tp
        return labels_T.view(tp.size, -1)[tp.rank]

    def _add_experts(
        self, entries: Sequence[WatchedSite], rows_RW: Tensor, counts_E: Tensor
    ) -> None:
        moe = self._moe
        if moe is None:
            return
        labels_R = moe.labels_R
        if labels_R is None or (self._route_all and not moe.is_showing):
            return
        if self._postponed is not None:
            observation = Observation(watched=tuple(entries), is_expert=True)
            self._postponed.append((observation, (rows_RW.detach(), counts_E, labels_R)))
            return
        self._add_expert_rows(entries, rows_RW, counts_E, labels_R)

    def _add_expert_rows(
        self, entries: Sequence[WatchedSite], rows_RW: Tensor, counts_E: Tensor, labels_R: Tensor
    ) -> None:
        """Add the rows of each expert, sorted by expert, to its sites."""
        counts, padded = counts_E.tolist(), self._is_padded(labels_R)
        parts, labels = torch.split(rows_RW, counts), torch.split(labels_R, counts)
        for w in entries:
            if w.place.expert is not None and counts[w.place.expert]:
                self._add_rows(w, parts[w.place.expert], labels[w.place.expert], padded)

    def _add_rows(self, w: WatchedSite, x_TW: Tensor, labels_T: Tensor, padded: bool) -> None:
        statistics, columns = w.statistics, w.place.columns
        if statistics is None:
            return
        if not x_TW.is_cpu:
            full = (
                gather_columns(x_TW, columns)
                if self._needs_all_columns(statistics, columns)
                else None
            )
            statistics.add_labeled(x_TW, labels_T, full)
            self._sample_site(w, statistics, x_TW, labels_T)
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
                raise_nonfinite(w.site, sample)
            statistics.bad_row.fill_(min(sample, int(statistics.bad_row)))
            return
        self._sample_site(w, statistics, x_TW, labels_T)

    def _sample_site(
        self, w: WatchedSite, statistics: RunningStatistics, x_TW: Tensor, labels_T: Tensor
    ) -> None:
        """Sample rows of a site that has a sample, now or after the pass."""
        if statistics.sample_rows is None:
            return
        if self._postponed is not None:
            self._postponed.append((Observation(watched=(w,)), (x_TW.detach(), labels_T)))
            return
        self._add_postponed(w, x_TW, labels_T)

    def _add_postponed(self, w: WatchedSite, x_TW: Tensor, labels_T: Tensor) -> None:
        if w.statistics is not None:
            w.statistics.sample_from(x_TW[labels_T >= 0] if self._has_padding else x_TW)

    def _is_padded(self, labels_T: Tensor) -> bool:
        """Return whether some rows are padding; looked at on a CPU only."""
        return labels_T.is_cpu and bool((labels_T < 0).any())

    @staticmethod
    def _needs_all_columns(statistics: RunningStatistics, columns: Group) -> bool:
        return statistics.gram is not None and columns.size > 1

    def _raise_nonfinite(self, watched: Sequence[WatchedSite]) -> None:
        """Raise the first NaN or Inf of any rank of the stage, on all of them."""
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
                raise_nonfinite(w.site, sample)


def raise_nonfinite(site: ActivationSite, sample: int) -> NoReturn:
    """Raise that an activation of a sample is NaN or Inf.

    Raises:
        CalibrationError: always.
    """
    location = "the head" if site.layer is None else f"layer {site.layer}"
    raise CalibrationError(
        f"an activation at {site.name} ({location}) is NaN or Inf, in sample {sample}",
        hint="`megtool inspect --stats` shows NaN in weights; float16 overflows: --dtype float32",
        error_id="nan-activations",
    )
