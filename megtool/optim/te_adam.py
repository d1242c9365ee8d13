"""Adam's update by Transformer Engine's FusedAdam, of the segments of a sharded optimizer.

Held against the sources of Transformer Engine 2.20 (`pytorch/optimizers/fused_adam.py`,
`common/multi_tensor/adam.cu`). Its kernel takes moments in bf16 as they are stored, and a bf16
parameter with the other 16 bits of its fp32 value, which `segments.split_float32` makes as it does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from megtool.kernels.transformer_engine.library import load
from megtool.optim.segments import Segment

_MOMENTS = ("exp_avg", "exp_avg_sq")


class TeFusedAdam:
    """AdamW of segments, whose tensors Transformer Engine's optimizer is given for each step.

    States stay those of the segments, so that checkpoints and resuming know nothing of it. Results
    are those of torch's fused kernel but for rounding.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
    """

    def __init__(self, *, beta1: float, beta2: float, eps: float) -> None:
        load()
        self._options = {"betas": (beta1, beta2), "eps": eps, "weight_decay": 0.0}
        self._optimizers: dict[tuple[bool, torch.dtype], Any] = {}

    def update(
        self, segments: list[Segment], *, lr: float, weight_decay: float, step: int
    ) -> list[Segment]:
        """Update the segments that are on a GPU and have a gradient; returns the others."""
        by_kind: dict[tuple[bool, torch.dtype], list[Segment]] = defaultdict(list)
        others = []
        for segment in segments:
            if segment.device.type == "cuda" and segment.grad is not None and segment.numel:
                kind = segment.main is None, segment.states[_MOMENTS[0]].dtype
                by_kind[kind].append(segment)
            else:
                others.append(segment)
        for (is_remainder, dtype), some in by_kind.items():
            optimizer = self._optimizer(is_remainder, dtype, some[0])
            _set(optimizer, some, lr=lr, weight_decay=weight_decay, step=step)
            try:
                optimizer.step()
            finally:
                optimizer.state.clear()
                optimizer.param_groups[0]["params"] = []
                optimizer._scales = {}
        return others

    def _optimizer(self, is_remainder: bool, dtype: torch.dtype, segment: Segment) -> Any:
        """The optimizer of segments of a kind: with remainders or not, and by their moments."""
        kind = is_remainder, dtype
        if kind not in self._optimizers:
            self._optimizers[kind] = load().pytorch.optimizers.FusedAdam(
                [_parameter(segment)],
                exp_avg_dtype=dtype,
                exp_avg_sq_dtype=dtype,
                use_decoupled_grad=True,  # of fp32 beside parameters in bf16
                master_weights=is_remainder,
                store_param_remainders=is_remainder,
                **self._options,
            )
        return self._optimizers[kind]


def _parameter(segment: Segment) -> Tensor:
    return segment.halves[0] if segment.main is None else segment.main


def _set(
    optimizer: Any, segments: list[Segment], *, lr: float, weight_decay: float, step: int
) -> None:
    """Have an optimizer's next step update these segments."""
    parameters = []
    unit = torch.ones(1, device=segments[0].device)
    for segment in segments:
        parameter = _parameter(segment).detach()
        parameter.decoupled_grad = segment.grad  # type: ignore[attr-defined]
        state = {name: segment.states[name] for name in _MOMENTS}
        if segment.main is None:
            state["master_param"] = segment.halves[1]
        optimizer.state[parameter] = state
        # bf16 has no factor, but the optimizer looks for one.
        optimizer._scales[parameter] = dict.fromkeys(state, unit)
        parameters.append(parameter)
    optimizer.param_groups[0] |= {
        "params": parameters,
        "lr": lr,
        "weight_decay": weight_decay,
        "step": step - 1,  # it counts this one itself
    }
