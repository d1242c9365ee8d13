"""Update rules of main parameters and states, given reduced and clipped gradients."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megtool.optim.config import OptimizerConfig
from megtool.optim.muon import Muon
from megtool.optim.segments import Segment
from megtool.optim.te_adam import TeFusedAdam

# Elements at a time if states or main parameters have to be converted to fp32 and back: on a CPU
# what fits its caches, on a GPU enough to keep it busy.
_STAGED_NUMEL_CPU = 2**17
_STAGED_NUMEL = 2**24


class UpdateRule(Protocol):
    """A rule for fp32 main parameters, each element by itself.

    `states` are the names of its states, which start as zeros. `hyperparameters` is what Megatron
    saves of it in a parameter group.
    """

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states."""

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Its entries in a checkpoint's parameter groups."""

    def apply(
        self,
        mains: list[Tensor],
        grads: list[Tensor],
        states: dict[str, list[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Update fp32 tensors on one device in place; `step` counts from 1."""


class Adam:
    """AdamW with torch's fused kernel, bit by bit `torch.optim.AdamW(fused=True)`; with `by_te`
    segments on a GPU are updated by Transformer Engine's, whatever the dtype of their states.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
    """

    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, *, beta1: float, beta2: float, eps: float, by_te: bool = False) -> None:
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.te = TeFusedAdam(beta1=beta1, beta2=beta2, eps=eps) if by_te else None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Its entries in a checkpoint's parameter groups."""
        return {"betas": (self.beta1, self.beta2), "eps": self.eps, "bias_correction": True}

    def apply(
        self,
        mains: list[Tensor],
        grads: list[Tensor],
        states: dict[str, list[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Update in place."""
        if not mains:
            return
        steps = [torch.full((), float(step), device=mains[0].device)] * len(mains)
        torch._fused_adamw_(
            mains,
            grads,
            states["exp_avg"],
            states["exp_avg_sq"],
            [],
            steps,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


class Sgd:
    """SGD with momentum and coupled weight decay: bit by bit `torch.optim.SGD(fused=True)`."""

    def __init__(self, *, momentum: float) -> None:
        self.momentum = momentum
        self.states: tuple[str, ...] = ("momentum_buffer",) if momentum else ()

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Its entries in a checkpoint's parameter groups."""
        return {"momentum": self.momentum, "dampening": 0, "nesterov": False}

    def apply(
        self,
        mains: list[Tensor],
        grads: list[Tensor],
        states: dict[str, list[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Update in place."""
        if not mains:
            return
        torch._fused_sgd_(
            mains,
            grads,
            states.get("momentum_buffer", []),
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


def make_update_rule(kind: str, settings: OptimizerConfig, *, by_te: bool = False) -> UpdateRule:
    """The update rule `kind`: adam, sgd or muon; `by_te` is for Adam.

    Raises:
        MissingPackageError: see `Adam`.
    """
    if kind == "muon":
        return Muon(momentum=settings.muon_momentum)
    if kind == "sgd":
        return Sgd(momentum=settings.sgd_momentum)
    betas = {"beta1": settings.adam_beta1, "beta2": settings.adam_beta2}
    return Adam(**betas, eps=settings.adam_eps, by_te=by_te)


def update_segments(
    update: UpdateRule, segments: list[Segment], *, lr: float, weight_decay: float, step: int
) -> None:
    """Update segments of one group in fp32, whatever the dtype of their states.

    fp32 main parameters and states are updated in place, all at once; others are converted to fp32
    copies in parts.
    """
    if isinstance(update, Adam) and update.te is not None:
        segments = update.te.update(segments, lr=lr, weight_decay=weight_decay, step=step)
    straight = [s for s in segments if _is_float32(s)]
    mains = [s.read_main(0, s.numel) for s in straight]
    grads = [s.grad for s in straight if s.grad is not None]
    states = {name: [s.states[name] for s in straight] for name in update.states}
    update.apply(mains, grads, states, lr=lr, weight_decay=weight_decay, step=step)
    for s in segments:
        if _is_float32(s) or s.grad is None:
            continue
        each = _STAGED_NUMEL_CPU if s.device.type == "cpu" else _STAGED_NUMEL
        for start in range(0, s.numel, each):
            stop = min(start + each, s.numel)
            main = s.read_main(start, stop)
            staged = {name: [s.states[name][start:stop].float()] for name in update.states}
            update.apply(
                [main],
                [s.grad[start:stop]],
                staged,
                lr=lr,
                weight_decay=weight_decay,
                step=step,
            )
            for name, (values,) in staged.items():
                if s.states[name].dtype != torch.float32:
                    s.states[name][start:stop].copy_(values)
            if s.main is None:
                s.write_main(start, stop, main)


def _is_float32(segment: Segment) -> bool:
    states = [*segment.states.values()]
    return segment.main is not None and all(t.dtype == torch.float32 for t in states)
