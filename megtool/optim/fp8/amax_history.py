"""Amax histories of linear layers, and the scales of delayed scaling.

The form is Transformer Engine's (`megtool.number_formats.delayed_scaling`): row 0 is the current
step, the others go from the oldest to the newest, and `scale = fp8_max / amax / 2^margin`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megtool.number_formats.delayed_scaling import KINDS
from megtool.optim.fp8.config import Fp8Config
from megtool.optim.segments import copy_parts
from megtool.parallel.collectives import all_max
from megtool.parallel.process_groups import ProcessGroups

_MOST = torch.finfo(torch.float32).max


class AmaxHistories:
    """The delayed scaling state of `num_modules` linear layers, updated once for each step.

    A module has columns for input, weight and output (`fwd`), and for two gradients (`bwd`); the
    output and the gradient of the input are never quantized. Transformer Engine ends a step with
    every pass; here a step is the optimizer's, so that scales do not depend on the size of micro
    batches, and are the same when activations are recomputed.

    The first `num_dense` modules are dense layers (None: all), the others experts.

    A module without a step is fresh: its scales have no meaning yet. `is_known` says on the device
    which columns have a magnitude in their history.
    """

    def __init__(
        self,
        num_modules: int,
        settings: Fp8Config,
        device: torch.device | str = "cpu",
        *,
        num_dense: int | None = None,
    ) -> None:
        self.settings, length = settings, settings.fp8_amax_history_len
        self._num_dense = num_modules if num_dense is None else num_dense
        self.is_fresh = [True] * num_modules
        self.history = {
            d: torch.zeros(length, num_modules, n, device=device) for d, n in KINDS.items()
        }
        self.scale = {d: torch.ones(num_modules, n, device=device) for d, n in KINDS.items()}
        self.is_known = {
            d: torch.zeros(num_modules, n, dtype=torch.bool, device=device)
            for d, n in KINDS.items()
        }

    def record(self, module: int | slice, direction: str, column: int, amax: Tensor) -> None:
        """Record the largest magnitude of a tensor in the current step, or those of several
        modules."""
        largest = self.current(module, direction, column)
        torch.maximum(largest, amax, out=largest)

    def current(self, module: int | slice, direction: str, column: int) -> Tensor:
        """The largest magnitude in the current step, in place: 0-d, or one for each module."""
        return self.history[direction][0, module, column]

    def end_step(self, groups: ProcessGroups) -> None:
        """End the step: update scales from the amax of all ranks, and roll the histories.

        Every rank that has these modules calls it: those of the tp group and all replicas, and of
        experts those of their etp group and their replicas.
        """
        dense, experts = slice(None, self._num_dense), slice(self._num_dense, None)
        for modules, same in (
            (dense, (groups.tp, groups.replicas)),
            (experts, (groups.etp, groups.expert_dp)),
        ):
            parts = [self.history[d][0, modules] for d in KINDS]
            newest = torch.cat([p.flatten() for p in parts])
            if newest.numel():
                copy_parts(all_max(all_max(newest, same[0]), same[1]), [p.view(-1) for p in parts])
        for d, fp8_max in zip(KINDS, self.settings.largest, strict=True):
            history = self.history[d]
            is_max = self.settings.fp8_amax_compute_algo == "max"
            amax = history.amax(0) if is_max else history[0].clone()
            margin = self.settings.fp8_margin
            self.scale[d].copy_(update_scales(amax, self.scale[d], fp8_max, margin))
            if len(history) > 1:
                history.copy_(history.roll(-1, 0))
            self.is_known[d].copy_(amax > 0)
            history[0].zero_()
        self.is_fresh = [False] * len(self.is_fresh)

    def state(self, module: int) -> dict[str, Tensor]:
        """A module's state under Transformer Engine's names, copied to the CPU."""
        out = {}
        for d in KINDS:
            out[f"scale_{d}"] = self.scale[d][module].cpu()
            out[f"amax_history_{d}"] = self.history[d][:, module].cpu()
        return {name: tensor.clone() for name, tensor in out.items()}

    def load(self, module: int, state: Mapping[str, Tensor]) -> None:
        """Load a module's state, whose histories have the same length."""
        for d in KINDS:
            self.scale[d][module].copy_(state[f"scale_{d}"])
            self.history[d][:, module].copy_(state[f"amax_history_{d}"])
            self.is_known[d][module].copy_((state[f"amax_history_{d}"] > 0).any(0))
        self.is_fresh[module] = not any(state[f"amax_history_{d}"].any() for d in KINDS)


def update_scales(amax: Tensor, previous: Tensor, fp8_max: float, margin: int) -> Tensor:
    """Scales from amax; the `previous` ones if an amax is 0, NaN or Inf.

    Source: `_default_sf_compute` in Transformer Engine 2.20, `pytorch/quantization.py`.
    """
    # A number divided by a tensor is computed as reciprocal times number, rounded twice.
    updated = (torch.full_like(amax, fp8_max) / amax) / 2.0**margin
    updated = torch.where((amax > 0) & amax.isfinite(), updated, previous)
    return torch.where(updated.isinf(), torch.full_like(updated, _MOST), updated)
