"""Hands the rows of a layer's inputs, of all ranks, to the rank that solves a site."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import HookLocation
from megtool.parallel.process_groups import Group
from megtool.quant.calibration.recorder import (
    ActivationRecorder,
    Observation,
    WatchedSite,
    raise_nonfinite,
)
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quant.statistics.reduce import gather_site_columns
from megtool.quant.statistics.running import RunningStatistics

RowReader = Callable[[ActivationSite, Tensor], None]


class RowRecorder(ActivationRecorder):
    """Hands the rows `[rows, width]` of each site to `read`, on one rank of the pipeline stage.

    `owners` are these ranks, as positions in `stage`, by site. Rows are without padding; a call of
    `read` has those of one rank's micro-batch, in the order in which one process would run them,
    and all their columns. Every rank makes the same calls, and `end_batch` after each pass over a
    micro-batch.
    """

    def __init__(
        self,
        decoder: Decoder,
        sites: Sequence[ActivationSite],
        *,
        stage: Group,
        owners: Mapping[str, int],
        read: RowReader,
        calibrate_all_experts: bool = False,
    ) -> None:
        super().__init__(decoder, sites, calibrate_all_experts=calibrate_all_experts)
        self._stage, self._owners, self._read = stage, owners, read
        self._rows: dict[str, list[Tensor]] = defaultdict(list)
        self._bad: dict[str, int] = {}

    @property
    def state(self) -> list[Tensor]:
        """Nothing: rows are read after a pass."""
        return []

    def _make_statistics(self, site: ActivationSite, place: HookLocation) -> RunningStatistics:
        return RunningStatistics(1, self.groups.device)  # marks that this rank sees the site

    def _is_padded(self, labels_T: Tensor) -> bool:
        if self._postponed is not None:
            return False
        return bool((labels_T < 0).any())  # left out at once, also on a GPU

    def _add_postponed(self, w: WatchedSite, x_TW: Tensor, labels_T: Tensor) -> None:
        self._add_rows(w, x_TW, labels_T, self._is_padded(labels_T))

    def _add_rows(self, w: WatchedSite, x_TW: Tensor, labels_T: Tensor, padded: bool) -> None:
        if self._postponed is not None:
            self._postponed.append((Observation(watched=(w,)), (x_TW.detach(), labels_T)))
            return
        if padded:
            is_real_T = labels_T >= 0
            x_TW, labels_T = x_TW[is_real_T], labels_T[is_real_T]
        x_TW = x_TW.detach()
        is_finite_T = x_TW.isfinite().all(1)
        if not bool(is_finite_T.all()):
            sample = int(labels_T[~is_finite_T].min())
            self._bad[w.site.name] = min(sample, self._bad.get(w.site.name, sample))
        self._rows[w.site.name].append(gather_site_columns(x_TW, w.place))

    def end_batch(self) -> None:
        """Exchange the rows of a micro-batch, and read those of sites that this rank owns.

        Raises:
            CalibrationError: an activation is NaN or Inf; on every rank.
        """
        sites = [w.site for w in self._watched]
        counts = {
            w.site.name: sum(map(len, self._rows[w.site.name])) if self._is_first(w) else 0
            for w in self._watched
        }
        facts = [(counts, self._bad)]
        if self._stage.size > 1:
            facts = [facts[0]] * self._stage.size
            dist.all_gather_object(facts, (counts, self._bad), group=self._stage.handle)
        for site in sites:
            samples = [bad[site.name] for _, bad in facts if site.name in bad]
            if samples:
                raise_nonfinite(site, min(samples))
        for site in sites:
            for sender, (by_site, _) in enumerate(facts):
                if by_site[site.name]:
                    self._hand_over(site, sender, by_site[site.name])
        self._rows.clear()

    def _is_first(self, w: WatchedSite) -> bool:
        """Whether no rank before this one has the same rows of a site."""
        if w.place.expert is not None:
            return w.place.is_here and self.groups.etp.is_first
        return w.place.rows.size > 1 or self.groups.tp.is_first

    def _hand_over(self, site: ActivationSite, sender: int, num_rows: int) -> None:
        """Send rows of one rank to the owner of a site, which reads them."""
        stage, owner = self._stage, self._owners[site.name]
        is_sender, is_owner = stage.rank == sender, stage.rank == owner
        if not (is_sender or is_owner):
            return
        if is_sender:
            rows_TW = torch.cat(self._rows[site.name])
        else:
            rows_TW = torch.empty(
                num_rows, site.width, dtype=self.decoder.dtype, device=self.groups.device
            )
        if is_sender and not is_owner:
            dist.send(rows_TW.contiguous(), dst=stage.ranks[owner], group=stage.handle)
        elif is_owner and not is_sender:
            dist.recv(rows_TW, src=stage.ranks[sender], group=stage.handle)
        if is_owner:
            self._read(site, rows_TW)
