"""The router: which experts a token goes to, and their weights.

Sources of the formulas: megatron-core 0.16.1, `transformer/moe/moe_utils.py`, and transformers'
models of the families in converters/.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import MappingError, UsageError
from megtool.kernels.elementwise.norm import rms_norm
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.hooks import ActivationHook
from megtool.model.layers.param_attributes import mark
from megtool.model.moe.aux_loss import Balance
from megtool.parallel.collectives import scatter_rows
from megtool.parallel.process_groups import ALONE, Group
from megtool.spec import layer_sets
from megtool.spec.feed_forward import ROUTER_SCORES, SPARSEMIXER
from megtool.spec.model_config import ModelConfig


def check_trainable(config: ModelConfig) -> None:
    """Check that the experts of a token are the same in training.

    Raises:
        UsageError: they are sampled.
    """
    if config.router.router_score == SPARSEMIXER:
        raise UsageError(
            "experts are sampled in training (SparseMixer, Phi-MoE), which megtool does not do",
            hint="megtool generate, evaluate, quantize and export run such a model",
        )


class Router(nn.Module):
    """A linear layer onto the experts, the same on every rank, and the choice among them.

    Parameters: `weight` `[E, H]`, `bias` `[E]`, and `expert_bias` `[E]` in fp32, which decides who
    is chosen but not how much that counts, and which no gradient reaches; with `router_norm`
    `scale` `[H]` and `per_expert_scale` `[E]`. `partial` says that a
    rank routes a part of the tokens alone, so that gradients have to be added up over tp.
    `balance` is told of what is chosen in training.

    Raises:
        MappingError: scores of a kind that is not known, or groups that do not divide the experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        partial: bool = False,
        group: Group = ALONE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        _check(config)
        self.config, self.layer, self.group = config, layer, group
        self.tap: ActivationHook | None = None
        self.balance: Balance | None = None
        num, hidden = config.moe.num_experts, config.hidden_size
        weight = torch.empty(num, hidden, dtype=dtype, device=device)
        self.weight = mark(nn.Parameter(weight), partial=partial)
        self.bias = self.expert_bias = self.scale = self.per_expert_scale = None
        if config.router.router_norm:
            self.scale, self.per_expert_scale = (
                mark(nn.Parameter(torch.ones(n, dtype=dtype, device=device)), partial=partial)
                for n in (hidden, num)
            )
        if config.router.router_bias:
            bias = torch.zeros(num, dtype=dtype, device=device)
            self.bias = mark(nn.Parameter(bias), partial=partial)
        self.tid2eid: nn.Parameter | None = None
        if layer in layer_sets.hash_layers(config):
            shape = (config.embedding.vocab_size, config.moe.num_experts_per_token)
            table = torch.zeros(shape, dtype=torch.int64, device=device)
            self.tid2eid = mark(nn.Parameter(table, requires_grad=False))
        elif config.router.router_expert_bias:
            counted = torch.zeros(num, dtype=torch.float32, device=device)
            self.expert_bias = mark(nn.Parameter(counted, requires_grad=False))

    def forward(self, x_TH: Tensor, frame: ForwardContext | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each token, experts_TK (int64), and their shares, probs_TK (fp32).

        In training, `balance` adds its losses to the backward pass of a `frame`'s shares.

        Raises:
            UsageError: the model is trained, and experts are sampled in training.
        """
        if self.training:
            check_trainable(self.config)
        if self.tap is not None:
            x_TH = self.tap(x_TH)
        logits_TE = self.logits(x_TH)
        experts_TK, probs_TK = self._choose(logits_TE, self.config, self._listed(x_TH, frame))
        watched = self.training and torch.is_grad_enabled()
        if watched and self.balance is not None and frame is not None:
            probs_TK = self.balance(logits_TE, experts_TK, probs_TK, frame, self.layer)
        return experts_TK, probs_TK

    def _listed(self, x_TH: Tensor, frame: ForwardContext | None) -> Tensor | None:
        """The experts that the table has for this rank's tokens; None without a table."""
        if self.tid2eid is None or frame is None or frame.tokens_BS is None:
            return None
        tokens_T = frame.tokens_BS.flatten()
        if tokens_T.shape[0] != x_TH.shape[0]:  # sequence parallelism
            tokens_T = scatter_rows(tokens_T, self.group)
        return self.tid2eid[tokens_T]

    def all(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """All experts for each token, experts_TE, and the share each of them would have."""
        every = self.config.moe.num_experts
        config = self.config.with_fields(num_experts_per_token=every, router_topk_groups=0)
        return self._choose(self.logits(x_TH), config)

    def _choose(
        self, logits_TE: Tensor, config: ModelConfig, listed_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        experts_TK, probs_TK = choose(logits_TE, config, self.expert_bias, listed_TK)
        if self.per_expert_scale is not None:
            probs_TK = probs_TK * self.per_expert_scale[experts_TK]
        return experts_TK, probs_TK

    def logits(self, x_TH: Tensor) -> Tensor:
        """The router's logits_TE, in x's dtype or (if the model requires it) in fp32."""
        if self.scale is not None:
            x_TH = rms_norm(x_TH, None, self.config.norms.norm_eps)
            x_TH = x_TH * self.scale * self.config.hidden_size**-0.5
        if not self.config.router.router_fp32:
            return F.linear(x_TH, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x_TH.float(), self.weight.float(), bias)


def choose(
    logits_TE: Tensor,
    config: ModelConfig,
    expert_bias_E: Tensor | None = None,
    listed_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each token, experts_TK (int64), and their shares, probs_TK (fp32).

    Sigmoid scores are divided by their sum over the chosen as `router_normalized` says; else unless
    there is but one, or the score multiplies what the expert is given (Llama 4). A softmax goes
    over all experts (`router_pre_softmax`) or over the chosen; a bias is added to one over all.
    Where experts come in groups, a token's are all from its `router_topk_groups` best groups.
    `router_scaling` multiplies all shares. `listed_TK` are the experts where a table says them.
    """
    logits_TE = logits_TE.float()
    if config.router.router_score == SPARSEMIXER:
        return _choose_in_turn(logits_TE, config)
    if config.router.router_score == "sigmoid":
        scores_TE = logits_TE.sigmoid()
    elif config.router.router_score == "sqrtsoftplus":
        scores_TE = F.softplus(logits_TE).sqrt()
    elif config.router.router_pre_softmax:
        scores_TE = logits_TE.softmax(-1)
    else:
        scores_TE = logits_TE
    has_groups = config.router.router_topk_groups > 0 and config.router.router_num_groups > 1
    if expert_bias_E is not None:
        is_raw = config.router.router_score == "softmax" and not config.router.router_pre_softmax
        ranked_TE = (logits_TE.softmax(-1) if is_raw else scores_TE).detach() + expert_bias_E
    else:  # scores keep the order of logits, of which large ones have the same score
        ranked_TE = (scores_TE if has_groups else logits_TE).detach()
    if has_groups:
        ranked_TE = _within_best_groups(ranked_TE, config)
    if listed_TK is None:
        listed_TK = ranked_TE.topk(config.moe.num_experts_per_token, -1).indices
    experts_TK = listed_TK
    probs_TK = scores_TE.gather(-1, experts_TK)
    if config.router.router_score != "softmax":
        divides = config.router.router_normalized
        if divides is None:
            divides = config.moe.num_experts_per_token > 1 and not config.router.router_scales_input
        if divides:
            probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + 1e-20)
    elif not config.router.router_pre_softmax:
        probs_TK = probs_TK.softmax(-1)
    if config.router.router_scaling != 1:
        probs_TK = probs_TK * config.router.router_scaling
    return experts_TK, probs_TK


def _choose_in_turn(logits_TE: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """`choose` by SparseMixer without its sampling (arXiv 2409.12136): the best expert, with its
    share in a softmax over all that are about as good, then the best of the others, and so on.
    """
    left_TE, experts, probs = logits_TE, [], []
    for _ in range(config.moe.num_experts_per_token):
        best_T1, expert_T1 = left_TE.detach().max(-1, keepdim=True)
        size_TE = logits_TE.detach().abs().clamp(min=best_T1)
        is_far_TE = (best_T1 - logits_TE.detach()) / size_TE > 2 * config.router.router_jitter
        shares_TE = left_TE.masked_fill(is_far_TE, float("-inf")).softmax(-1)
        experts.append(expert_T1)
        probs.append(shares_TE.gather(-1, expert_T1))
        left_TE = left_TE.scatter(-1, expert_T1, float("-inf"))
    probs_TK = torch.cat(probs, -1)
    if config.router.router_scaling != 1:
        probs_TK = probs_TK * config.router.router_scaling
    return torch.cat(experts, -1), probs_TK


def _within_best_groups(ranked_TE: Tensor, config: ModelConfig) -> Tensor:
    """Ranks, minus infinity for experts outside of a token's best groups.

    A group counts as much as the sum of its best experts.
    """
    groups_TGE = ranked_TE.reshape(ranked_TE.shape[0], config.router.router_num_groups, -1)
    num_best = config.router.router_group_best or max(
        1, config.moe.num_experts_per_token // config.router.router_topk_groups
    )
    best_TG = groups_TGE.topk(min(num_best, groups_TGE.shape[-1]), -1).values.sum(-1)
    chosen = best_TG.topk(config.router.router_topk_groups, -1, sorted=False).indices
    is_out_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(-1, chosen, False)
    return groups_TGE.masked_fill(is_out_TG.unsqueeze(-1), float("-inf")).flatten(-2)


def _check(config: ModelConfig) -> None:
    if config.router.router_score not in ROUTER_SCORES:
        raise MappingError(
            f"router_score is {config.router.router_score!r}",
            hint=f"known: {', '.join(ROUTER_SCORES)}",
        )
    num, chosen = config.moe.num_experts, config.moe.num_experts_per_token
    if not 0 < chosen <= num:
        raise MappingError(f"num_experts_per_token is {chosen}, of {num} experts")
    groups, best = config.router.router_num_groups, config.router.router_topk_groups
    if groups > 1 and best and (num % groups or best > groups or chosen > best * (num // groups)):
        raise MappingError(
            f"{chosen} of {num} experts cannot be chosen from {best} of {groups} groups",
            hint="equal groups, of which the chosen ones hold enough experts",
        )
