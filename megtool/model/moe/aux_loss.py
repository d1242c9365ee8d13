"""Auxiliary losses that balance the load of experts, and the counts they need.

Source of the formulas: megatron-core 0.16.1, `transformer/moe/moe_utils.py` and `router.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megtool.model.forward_context import ForwardContext
from megtool.model.loss_options import LossOptions
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import ALONE, ProcessGroups
from megtool.spec.model_config import ModelConfig


class Balance:
    """The auxiliary losses of one router, and its choices since `begin`.

    Of E experts of which each of T tokens chooses k, with the tokens c_e whose k best scores expert
    e is among, and p_e the sum of its normalized scores, a microbatch has the losses
    `E / (k T^2) * sum_e(c_e p_e)` (of each row, and their mean, with `seq_aux_loss`), and the mean
    of `logsumexp(logits)^2`. They are means over a microbatch, as Megatron's; a decoder's own loss
    is a sum over labels. So `factor`, which their gradients are multiplied with, is the number of
    labels of a microbatch, the loss scale times: what is then divided by all labels of the step is
    the mean over microbatches and replicas. Padding counts for nothing. Ranks that share the tokens
    of a microbatch (sequence and context parallelism) have parts of one loss of all of them.

    In the sums, of this rank's tokens: `aux` and `z` of microbatches, without coefficients, their
    number `passes`, and `load_E` tokens for each expert, as they are chosen.
    """

    def __init__(
        self,
        settings: LossOptions,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        sequence_parallel: bool,
    ) -> None:
        self.settings, self.config = settings, config
        self.has_parts = sequence_parallel
        self._shared = (groups.tp if sequence_parallel else ALONE, groups.cp)
        self._first = groups.tp.rank if sequence_parallel else 0
        # Tensors that stay where they are: a CUDA graph of a pass adds to them.
        self.factor = torch.ones((), device=groups.device)
        self.aux, self.z, self.passes = torch.zeros(3, device=groups.device).unbind()
        self.load_E = torch.zeros(config.moe.num_experts, device=groups.device)

    def begin(self, factor: float) -> None:
        """Reset the counts, and multiply gradients by `factor` from now on."""
        self.factor.fill_(factor)
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        for count in (self.aux, self.z, self.passes, self.load_E):
            count.zero_()

    def __call__(
        self,
        logits_TE: Tensor,
        experts_TK: Tensor,
        probs_TK: Tensor,
        frame: ForwardContext,
        layer: int,
    ) -> Tensor:
        """Shares whose backward pass is the losses' too; a pass that is done again counts once."""
        counted_T1 = self._counted(frame, logits_TE.shape[0])
        if is_new := layer not in frame.balanced:
            frame.balanced.add(layer)
            self._note(experts_TK, counted_T1)
        wants = self.settings
        if not wants.has_router_losses:
            return probs_TK
        aux, z = self._losses(logits_TE.float(), counted_T1, frame)
        if is_new:
            self.aux.add_(aux.detach())
            self.z.add_(z.detach())
        is_balanced = wants.moe_router_load_balancing_type != "none"
        coefficient = wants.moe_aux_loss_coeff if is_balanced else 0.0
        loss = aux * coefficient + z * wants.moe_z_loss_coeff
        out: Tensor = _Attached.apply(  # type: ignore[no-untyped-call]
            probs_TK, loss, self.factor
        )
        return out

    def _losses(
        self, logits_TE: Tensor, counted_T1: Tensor | None, frame: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """This rank's parts of both losses of a microbatch, without coefficients."""
        config = self.config
        per_row = self.settings.moe_router_load_balancing_type == "seq_aux_loss"
        num_rows = frame.num_rows if per_row else 1
        scores_TE, chosen_TE = scores_of(logits_TE, config)
        z_T1 = logits_TE.logsumexp(-1, keepdim=True).square()
        if counted_T1 is not None:
            scores_TE, chosen_TE = scores_TE * counted_T1, chosen_TE * counted_T1
            z_T1 = z_T1 * counted_T1
        if per_row:
            first, each = self._first * len(logits_TE), frame.num_tokens
            ends = [max(0, row * each - first) for row in range(num_rows + 1)]
            rows = [slice(*pair) for pair in pairwise(ends)]
        else:
            rows = [slice(None)]
        scores_BE = torch.stack([scores_TE[row].sum(0) for row in rows])
        chosen_BE = torch.stack([chosen_TE[row].sum(0) for row in rows])
        for group in self._shared:
            chosen_BE = all_sum(chosen_BE, group)
        k = config.moe.num_experts_per_token
        num = (chosen_BE.sum() / k).clamp(min=1)  # of tokens; where none counts all sums are zero
        aux = (scores_BE * chosen_BE).sum() * (config.moe.num_experts / (k * num_rows))
        return aux / (num / num_rows).square(), z_T1.sum() / num

    @torch.no_grad()
    def _note(self, experts_TK: Tensor, counted_T1: Tensor | None) -> None:
        ones_TK = torch.ones(experts_TK.shape, device=experts_TK.device)
        if counted_T1 is not None:
            ones_TK = ones_TK * counted_T1
        load_E = ones_TK.new_zeros(self.config.moe.num_experts)
        self.load_E.add_(load_E.index_add(0, experts_TK.flatten(), ones_TK.flatten()))
        self.passes.add_(1)

    def _counted(self, frame: ForwardContext, tokens: int) -> Tensor | None:
        """1 for this rank's tokens that count, 0 for others; None where all do."""
        if frame.counted_BS is None:
            return None
        own_T = frame.counted_BS.flatten()[self._first * tokens :][:tokens]
        return own_T.unsqueeze(1).float()


def scores_of(logits_TE: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Scores that add up to one for each token, and 1 for the best of them, which say nothing of
    groups of experts or of a bias that chooses; float32."""
    logits_TE = logits_TE.float()
    if config.router.router_score == "sigmoid":
        scores_TE = logits_TE.sigmoid()
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    else:
        scores_TE = logits_TE.softmax(-1)
    best_TK = scores_TE.detach().topk(config.moe.num_experts_per_token, -1).indices
    return scores_TE, torch.zeros_like(scores_TE).scatter(1, best_TK, 1.0)


def moved_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """The bias that chooses experts, a step further for those with less than the mean load.

    Source: megatron-core 0.16.1, `get_updated_expert_bias` (arXiv 2408.15664).
    """
    return bias_E + torch.sign(load_E.mean() - load_E) * rate


class _Attached(torch.autograd.Function):
    """An identity whose backward pass also runs the backward pass of a loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.factor, ctx.dtype = factor, loss.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, ctx.factor.to(ctx.dtype), None
