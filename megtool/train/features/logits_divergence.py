"""The divergence of a student from its teacher, of states: logits of all tokens never exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megtool.kernels.vocabulary.lm_head import bend
from megtool.kernels.wgrad_accumulation import accumulate_product

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Logits of each model that are in memory as float32 at a time, if they are of `LEAST_TOKENS`."""

LEAST_TOKENS = 64
"""Each chunk reads and writes the whole gradient of the head's weight, which takes longer than the
products of a few tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsHead:
    """How a model turns hidden states into logits: weight (this rank's rows), cap and scale."""

    weight_VH: Tensor
    softcap: float = 0.0
    scale: float = 1.0

    def logits(self, x_TH: Tensor, num_columns: int) -> Tensor:
        """The first `num_columns` of this rank's columns, float32."""
        return bend(F.linear(x_TH, self.weight_VH[:num_columns]), self.softcap, self.scale)


def kl_divergence(
    x_TH: Tensor,
    student: LogitsHead,
    teacher_x_TH: Tensor,
    teacher: LogitsHead,
    *,
    num_columns: int,
    temperature: float = 1.0,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The sum over tokens of `t^2 * KL(softmax(teacher / t) || softmax(student / t))`, float32.

    Logits are made of both models' states for some tokens at a time (`chunk`), and gradients of the
    student's states and weight with them: logits are computed once, and those of all tokens never
    exist. With `group`, weights are this rank's rows of one padded vocabulary, of which the first
    `num_columns` are no padding, and x's gradient is this rank's part of a sum over the group.
    """
    out: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        x_TH,
        student.weight_VH,
        student,
        teacher_x_TH,
        teacher,
        num_columns,
        temperature,
        chunk,
        group,
    )
    return out


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_VH: Tensor,
        student: LogitsHead,
        teacher_x_TH: Tensor,
        teacher: LogitsHead,
        num_columns: int,
        temperature: float,
        chunk: int | None,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        device = x_TH.device
        if chunk is None:
            room = CHUNK.get(device.type, CHUNK["cuda"])
            chunk = max(LEAST_TOKENS, room // max(weight_VH.shape[0], 1))
        g_x_TH = torch.empty_like(x_TH) if wants_x else None
        g_weight_VH = None
        if wants_weight:
            kind = torch.promote_types(weight_VH.dtype, torch.float32)
            g_weight_VH = torch.zeros(weight_VH.shape, dtype=kind, device=device)
        total = torch.zeros((), dtype=torch.float32, device=device)
        for begin in range(0, x_TH.shape[0], chunk):
            x_CH = x_TH[begin : begin + chunk]
            s_CV = student.logits(x_CH, num_columns)
            bending = 1 - (s_CV / student.softcap).square() if student.softcap else None
            s_CV, log_s_C = _apply_temperature(s_CV, temperature, group)
            t_CV = teacher.logits(teacher_x_TH[begin : begin + chunk], num_columns)
            t_CV, log_t_C = _apply_temperature(t_CV, temperature, group)
            log_t_CV = t_CV.sub_(log_t_C.unsqueeze(1))
            log_s_CV = s_CV.sub_(log_s_C.unsqueeze(1))
            p_CV = log_t_CV.exp()
            # Underflown probabilities count for nothing: 0 * (finite difference).
            part = log_t_CV.sub_(log_s_CV).mul_(p_CV).sum()
            del t_CV, log_t_CV
            total += part.float()
            if not (wants_x or wants_weight):
                continue
            g_CV = log_s_CV.exp_().sub_(p_CV).mul_(temperature * student.scale)
            del p_CV
            if bending is not None:
                g_CV.mul_(bending)
            g_CV = g_CV.to(x_TH.dtype)
            if g_x_TH is not None:
                torch.mm(g_CV, weight_VH[:num_columns], out=g_x_TH[begin : begin + chunk])
            if g_weight_VH is not None:
                accumulate_product(g_weight_VH[:num_columns], g_CV.t(), x_CH)
        if group is not None:
            dist.all_reduce(total, group=group)
        ctx.save_for_backward(g_x_TH, g_weight_VH)
        ctx.dtype = weight_VH.dtype
        return total * temperature**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        g_x_TH, g_weight_VH = ctx.saved_tensors
        by_x = None if g_x_TH is None else g_x_TH.mul_(g.to(g_x_TH.dtype))
        by_weight = None if g_weight_VH is None else g_weight_VH.mul_(g).to(ctx.dtype)
        return by_x, by_weight, *(None,) * 7


def _apply_temperature(
    logits_CV: Tensor, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Logits over the temperature, in place, and the logarithms of their exponentials' sums on all
    ranks."""
    if temperature != 1:
        logits_CV.div_(temperature)
    if not logits_CV.shape[1]:  # all of this rank's columns are padding
        top_C = logits_CV.new_full((logits_CV.shape[0],), -torch.inf)
    else:
        top_C = logits_CV.amax(1)
    if group is not None:
        dist.all_reduce(top_C, dist.ReduceOp.MAX, group)
    sum_C = (logits_CV - top_C.unsqueeze(1)).exp_().sum(1)
    if group is not None:
        dist.all_reduce(sum_C, group=group)
    return logits_CV, top_C + sum_C.log()
