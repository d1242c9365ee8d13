"""Mixture of experts: tokens are dispatched to the ranks of their experts and combined; dropless.

Each rank of an ep group holds other experts, each rank of an etp group another part of the same
ones. Every rank sends tokens of its own, so that none is counted twice: where tp ranks hold the
same tokens, each takes its share of them and the results are gathered. Rows then go to their
experts' ep rank, to all etp ranks of the experts there; these compute parts of every row's result,
which are summed on the rank that the row came from, and go back to where the token is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.kernels.experts.grouped_gemm import (
    grouped_linear,
    invert,
    permute,
    unpermute,
    waits_for_host,
)
from megtool.model.attention.mla import DownLinear
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.hooks import ExpertHook
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.mlp import activated
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark
from megtool.model.moe.router import Router
from megtool.parallel.collectives import (
    Exchange,
    all_to_all,
    copy_to,
    gather_columns,
    gather_rows,
    reduce_from,
    reduce_scatter_rows,
    scatter_rows,
)
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig


class MoeMlp(nn.Module):
    """The MLP of a layer whose tokens choose experts; the norm before it belongs to the layer.

    Takes and gives x_TH, of which a rank has all rows, or with `sequence_parallel` its own.
    `layer` is the layer's number; all mixtures of a model are alike. With `moe_latent_size` routed
    experts are given, and return, smaller vectors, of two projections that all ranks have whole.

    With `overlaps_shared_experts` the shared experts' projections are computed while tokens are on
    their way to other ranks and back: the same values and gradients.

    For who watches: `labels_T` (int64, of this rank's rows) go with the tokens to their experts,
    whose rows then have `labels_R`, -1 where one is filler. With `shows_all` every expert is given
    every token before the pass, and nothing comes of it; `is_showing` says so meanwhile.

    Raises:
        LayoutError: ep does not divide the experts, or etp not their size.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        groups: ProcessGroups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config, self.layer, self.groups = config, layer, groups
        self.sequence_parallel = sequence_parallel and groups.tp.size > 1
        self.labels_T: Tensor | None = None
        self.labels_R: Tensor | None = None
        self.shows_all = self.is_showing = False
        self.overlaps_shared_experts = False
        self.router = Router(
            config,
            layer,
            partial=self.sequence_parallel,
            group=groups.tp,
            dtype=dtype,
            device=device,
        )
        # Two levels, as Megatron's names have them: mlp.experts.experts.linear_fc1.weight.
        if size := config.moe.moe_latent_size:
            down, up = (config.hidden_size, size), (size, config.hidden_size)
            self.fc1_latent_proj, self.fc2_latent_proj = (
                DownLinear(
                    *sizes,
                    groups.tp,
                    sequence_parallel=sequence_parallel,
                    dtype=dtype,
                    device=device,
                )
                for sizes in (down, up)
            )
        experts = Experts(config, groups, dtype=dtype, device=device)
        self.experts = nn.ModuleDict({"experts": experts})
        self.post_moe_layernorm: NormLayer | None = None
        if config.moe.expert_norms:
            self.post_moe_layernorm = NormLayer(
                NormSpec.of(config),
                config.hidden_size,
                partial=self.sequence_parallel,
                dtype=dtype,
                device=device,
            )
        self.shared_experts = None
        if config.moe.shared_ffn_hidden_size:
            self.shared_experts = SharedExperts(
                config, groups, sequence_parallel=sequence_parallel, dtype=dtype, device=device
            )

    @property
    def is_in_place(self) -> bool:
        """Tokens stay on their ranks: every rank has a part of every expert."""
        groups = self.groups
        return groups.ep.size == 1 and groups.etp.ranks == groups.tp.ranks

    @property
    def is_graphable(self) -> bool:
        """Whether a pass reads no counts on the host: tokens stay, and experts are multiplied at
        once.
        """
        experts = self.experts["experts"]
        linears = (m for m in experts.modules() if isinstance(m, ExpertLinear))
        return self.is_in_place and not any(waits_for_host(m.weight) for m in linears)

    def forward(
        self,
        x_TH: Tensor,
        frame: ForwardContext | None = None,
        residual_TH: Tensor | None = None,
    ) -> Tensor:
        """The sum of each token's experts by their shares, and of the shared ones.

        With `expert_norms` shared experts are given `residual_TH`, of which x_TH is a norm, and
        with `router_norm` the router is.
        """
        config = self.config
        whole_TH = x_TH if residual_TH is None else residual_TH
        routed_TH = whole_TH if config.router.router_norm else x_TH
        if self.shows_all:
            self._show_all(x_TH, routed_TH)
        experts_TK, probs_TK = self.router(routed_TH, frame)
        shared: SharedPass | None = None
        if self.shared_experts is not None:
            shared = SharedPass(self.shared_experts, whole_TH if config.moe.expert_norms else x_TH)
        overlaps = self.overlaps_shared_experts and not self.is_in_place
        out_TH = self._routed(x_TH, experts_TK, probs_TK, shared if overlaps else None)
        if self.post_moe_layernorm is not None:
            out_TH = self.post_moe_layernorm(out_TH)
        return out_TH if shared is None else out_TH + shared.result()

    def _routed(
        self,
        x_TH: Tensor,
        experts_TK: Tensor,
        probs_TK: Tensor,
        shared: SharedPass | None = None,
    ) -> Tensor:
        if not self.config.moe.moe_latent_size:
            return self._by_experts(x_TH, experts_TK, probs_TK, shared)
        latent_TH = self._by_experts(self.fc1_latent_proj(x_TH), experts_TK, probs_TK, shared)
        out_TH: Tensor = self.fc2_latent_proj(latent_TH)
        return out_TH

    def _by_experts(
        self, x_TH: Tensor, experts_TK: Tensor, probs_TK: Tensor, shared: SharedPass | None
    ) -> Tensor:
        if self.is_in_place:
            return self._in_place(x_TH, experts_TK, probs_TK)
        if self.sequence_parallel or self.groups.tp.size == 1:
            return self._dispatched(x_TH, experts_TK, probs_TK, self.labels_T, shared)
        return self._shared_out(x_TH, experts_TK, probs_TK, shared)

    @torch.no_grad()
    def _show_all(self, x_TH: Tensor, routed_TH: Tensor) -> None:
        """Send every token to every expert, as many at a time as it chooses in the pass."""
        experts_TE, probs_TE = self.router.all(routed_TH)
        self.is_showing = True
        try:
            for part in range(0, experts_TE.shape[1], self.config.moe.num_experts_per_token):
                some = slice(part, part + self.config.moe.num_experts_per_token)
                self._routed(x_TH, experts_TE[:, some], probs_TE[:, some])
        finally:
            self.is_showing = False

    def _label(
        self, labels_T: Tensor | None, row_ids_R: Tensor, num: int, route: Route | None
    ) -> None:
        """Note which tokens the experts' rows are, where somebody has named these."""
        if labels_T is None:
            return
        self.labels_R = labels_T[row_ids_R // num]
        if route is not None:
            self.labels_R = route.dispatch(self.labels_R.unsqueeze(1)).squeeze(1)

    def _in_place(self, x_TH: Tensor, experts_TK: Tensor, probs_TK: Tensor) -> Tensor:
        """Every rank has a part of every expert, cut as the dense layers are."""
        tp, labels_T = self.groups.tp, self.labels_T
        if self.sequence_parallel:
            experts_TK = gather_rows(experts_TK, tp)
            x_TH, probs_TK = gather_rows(x_TH, tp), gather_rows(probs_TK, tp)
            labels_T = None if labels_T is None else gather_rows(labels_T, tp)
        else:
            x_TH, probs_TK = copy_to(x_TH, tp), copy_to(probs_TK, tp)
        rows_RH, row_ids_R, counts_E = permute(x_TH, experts_TK, self.config.moe.num_experts)
        rows_RH, probs_TK = self._scaled(rows_RH, row_ids_R, probs_TK)
        self._label(labels_T, row_ids_R, experts_TK.shape[1], None)
        out_TH = unpermute(self.experts["experts"](rows_RH, counts_E), row_ids_R, probs_TK)
        if self.sequence_parallel:
            return reduce_scatter_rows(out_TH, tp)
        return reduce_from(out_TH, tp)

    def _shared_out(
        self, x_TH: Tensor, experts_TK: Tensor, probs_TK: Tensor, shared: SharedPass | None
    ) -> Tensor:
        """All tp ranks have the same tokens: each takes its share; padded to equal shares."""
        tp, (tokens, hidden), labels_T = self.groups.tp, x_TH.shape, self.labels_T
        if missing := -tokens % tp.size:
            x_TH, probs_TK = (
                torch.cat((v, v.new_zeros(missing, v.shape[1]))) for v in (x_TH, probs_TK)
            )
            experts_TK = torch.cat((experts_TK, experts_TK[:1].expand(missing, -1)))
            if labels_T is not None:
                labels_T = torch.cat((labels_T, labels_T.new_full((missing,), -1)))
        labels_T = None if labels_T is None else scatter_rows(labels_T, tp)
        x_TH, experts_TK, probs_TK = (scatter_rows(v, tp) for v in (x_TH, experts_TK, probs_TK))
        out_TH = self._dispatched(x_TH, experts_TK, probs_TK, labels_T, shared)
        # What follows is computed alike on every rank, so a gradient is its own part, not a sum.
        return gather_columns(out_TH.reshape(1, -1), tp).view(-1, hidden)[:tokens]

    def _dispatched(
        self,
        x_TH: Tensor,
        experts_TK: Tensor,
        probs_TK: Tensor,
        labels_T: Tensor | None,
        shared: SharedPass | None,
    ) -> Tensor:
        """Dispatch this rank's tokens to their experts and combine the results."""
        rows_RH, row_ids_R, counts_E = permute(x_TH, experts_TK, self.config.moe.num_experts)
        rows_RH, probs_TK = self._scaled(rows_RH, row_ids_R, probs_TK)
        route = Route.of(counts_E, self.groups.ep, self.groups.etp)
        self._label(labels_T, row_ids_R, experts_TK.shape[1], route)
        rows_RH = route.dispatch(rows_RH, None if shared is None else shared.expand)
        rows_RH = self.experts["experts"](rows_RH, route.counts_E)
        rows_RH = route.combine(rows_RH, None if shared is None else shared.contract)
        return unpermute(rows_RH, row_ids_R, probs_TK)

    def _scaled(
        self, rows_RH: Tensor, row_ids_R: Tensor, probs_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Where shares scale what experts are given: rows times shares, and shares of one."""
        if not self.config.router.router_scales_input:
            return rows_RH, probs_TK
        probs_R = probs_TK.flatten()[row_ids_R].to(rows_RH.dtype)
        return rows_RH * probs_R.unsqueeze(1), torch.ones_like(probs_TK)


class Experts(nn.Module):
    """This rank's experts: `num_experts / ep` of them, and `moe_ffn_hidden_size / etp` of each."""

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config = config
        num = groups.ep.part(config.moe.num_experts, "num_experts")
        ffn = groups.etp.part(config.moe.moe_ffn_hidden_size, "moe_ffn_hidden_size")
        hidden = config.moe.moe_latent_size or config.hidden_size
        inner, bias = ffn * (2 if config.mlp.gated else 1), config.mlp.mlp_bias
        self.linear_fc1 = ExpertLinear(
            num, hidden, inner, groups.etp, bias=bias, split_dim=1, dtype=dtype, device=device
        )
        self.linear_fc2 = ExpertLinear(
            num, ffn, hidden, groups.etp, bias=bias, split_dim=2, dtype=dtype, device=device
        )

    def forward(self, rows_RH: Tensor, counts_E: Tensor) -> Tensor:
        """The part of each row's result that this rank's columns give; rows sorted by expert."""
        inner = activated(self.linear_fc1(rows_RH, counts_E), self.config)
        out: Tensor = self.linear_fc2(inner, counts_E)
        return out


# Stands for `grouped_linear`, with gradients of its own, where an expert layer's `product` is set.
ExpertProduct = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class ExpertLinear(nn.Module):
    """The same linear layer of every expert: `weight` `[E, out, in]`, `bias` `[E, out]`.

    `split_dim` is the dimension of the weight that etp cuts. Where that is the input's, results of
    etp ranks are summed, and the bias is added on the first alone; its gradient is whole on each.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool,
        split_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        is_summed = split_dim == 2
        self.group, self.split_dim = group, split_dim
        self.adapter: nn.Module | None = None
        self.adds_bias = group.is_first or not is_summed
        self.product: ExpertProduct | None = None
        self.tap: ExpertHook | None = None
        weight = torch.empty(num_experts, out_features, in_features, dtype=dtype, device=device)
        split = split_dim if group.size > 1 else None
        self.weight = mark(nn.Parameter(weight), split_dim=split, expert=True)
        self.bias = None
        if bias:
            parameter = nn.Parameter(
                torch.empty(num_experts, out_features, dtype=dtype, device=device)
            )
            split = None if is_summed or group.size == 1 else 1
            self.bias = mark(parameter, split_dim=split, expert=True)

    def forward(self, rows: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, `counts_E` of them each; `tap` is handed both.

        What `adapter` makes of them is added (`megtool.model.stacks.lora`).
        """
        if self.tap is not None:
            rows = self.tap(rows, counts_E)
        bias: Tensor | None = self.bias
        if bias is not None and not self.adds_bias:
            bias = bias - bias.detach()  # zero, with the gradient of one
        y = (self.product or grouped_linear)(rows, self.weight, counts_E, bias)
        return y if self.adapter is None else y + self.adapter(rows, counts_E)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The dispatch of this rank's rows and their way back: row counts, known to the host.

    Made of one exchange of counts between the ranks of the ep and etp groups.
    """

    ep: Group
    etp: Group
    send: list[int]  # to each ep rank
    receive: list[int]  # from each ep rank
    parts: list[int]  # rows that each etp rank has received so
    order_R: Tensor  # received rows, (etp rank, ep rank, expert), as sorted by expert
    counts_E: Tensor  # rows of each expert here

    @classmethod
    def of(cls, counts_E: Tensor, ep: Group, etp: Group) -> Route:
        """`counts_E` are this rank's rows for each of all experts, by which they are sorted."""
        local = counts_E.shape[0] // ep.size
        ones = [1] * ep.size
        counts_PE = all_to_all(counts_E.view(ep.size, local), ones, ones, ep)  # from each ep rank
        counts_AE = gather_rows(counts_PE, etp)  # from each rank of both groups
        experts_A = torch.arange(local, device=counts_E.device).repeat(counts_AE.shape[0])
        totals = torch.cat(
            (counts_E.view(ep.size, local).sum(1), counts_PE.sum(1), counts_AE.sum(1))
        ).tolist()
        received = totals[2 * ep.size :]
        experts_R = experts_A.repeat_interleave(counts_AE.flatten(), output_size=sum(received))
        return cls(
            ep=ep,
            etp=etp,
            send=totals[: ep.size],
            receive=totals[ep.size : 2 * ep.size],
            parts=[sum(received[i : i + ep.size]) for i in range(0, len(received), ep.size)],
            order_R=experts_R.argsort(stable=True),
            counts_E=counts_AE.sum(0),
        )

    def dispatch(self, rows_RH: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """This rank's rows, sorted by expert, as rows of the experts here, sorted by expert.

        `meanwhile` is called while rows are on their way between ep ranks, if there are several.
        """
        rows_RH = self._exchange(rows_RH, self.send, self.receive, meanwhile)
        if self.etp.size > 1:
            num_received = sum(self.receive)
            copies = rows_RH.repeat(self.etp.size, 1)
            rows_RH = all_to_all(copies, [num_received] * self.etp.size, self.parts, self.etp)
        return rows_RH.index_select(0, self.order_R)

    def combine(self, rows_RH: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """The way back of `dispatch`, where the parts of a row's result are summed."""
        rows_RH = rows_RH.index_select(0, invert(self.order_R))
        if self.etp.size > 1:
            num_received = sum(self.receive)
            parts = all_to_all(rows_RH, self.parts, [num_received] * self.etp.size, self.etp)
            rows_RH = parts.view(self.etp.size, num_received, parts.shape[1]).sum(0)
        return self._exchange(rows_RH, self.receive, self.send, meanwhile)

    def _exchange(
        self,
        rows_RH: Tensor,
        send: list[int],
        receive: list[int],
        meanwhile: Callable[[], None] | None,
    ) -> Tensor:
        if meanwhile is None or self.ep.size == 1:
            return all_to_all(rows_RH, send, receive, self.ep)
        exchange = Exchange(rows_RH, send, receive, self.ep)
        meanwhile()
        return exchange.wait()


class SharedPass:
    """A pass of shared experts over x_TH, in two steps, of which each may be done ahead."""

    def __init__(self, experts: SharedExperts, x_TH: Tensor) -> None:
        self._experts, self._x_TH = experts, x_TH
        self._inner_TF: Tensor | None = None
        self._out_TH: Tensor | None = None

    def expand(self) -> None:
        """Compute the first projection and its activation."""
        self._inner_TF = self._experts.expand(self._x_TH)

    def contract(self) -> None:
        """Compute the second projection."""
        if self._inner_TF is not None:
            self._out_TH = self._experts.contract(self._inner_TF, self._x_TH)

    def result(self) -> Tensor:
        """What the shared experts give."""
        if self._out_TH is None:
            self._out_TH = self._experts(self._x_TH)
        return self._out_TH


class SharedExperts(nn.Module):
    """An MLP of `shared_ffn_hidden_size`, sharded over tp; a gate may scale its output per token.

    With `expert_norms` it has norms of its own, part of its projections as in a dense layer. Takes
    and gives x_TH, of which a rank has all rows, or with `sequence_parallel` its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config = config
        hidden, ffn = config.hidden_size, config.moe.shared_ffn_hidden_size
        self.gate_weight = None
        if config.moe.shared_expert_gate:
            weight = torch.empty(1, hidden, dtype=dtype, device=device)
            is_partial = sequence_parallel and groups.tp.size > 1
            self.gate_weight = mark(nn.Parameter(weight), partial=is_partial)
        self.linear_fc1 = ColumnLinear(
            hidden,
            ffn * (2 if config.mlp.gated else 1),
            groups.tp,
            norm=NormSpec.of(config) if config.moe.expert_norms else None,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.linear_fc2 = RowLinear(
            ffn,
            hidden,
            groups.tp,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        if config.moe.expert_norms:
            is_partial = sequence_parallel and groups.tp.size > 1
            norm = NormSpec.of(config)
            after = NormLayer(norm, hidden, partial=is_partial, dtype=dtype, device=device)
            self.linear_fc2.add_module("post_layernorm", after)

    def forward(self, x_TH: Tensor) -> Tensor:
        """The MLP of each token, times the sigmoid of its gate where there is one."""
        return self.contract(self.expand(x_TH), x_TH)

    def expand(self, x_TH: Tensor) -> Tensor:
        """The first projection of each token after its activation, this rank's columns."""
        return activated(self.linear_fc1(x_TH), self.config)

    def contract(self, inner_TF: Tensor, x_TH: Tensor) -> Tensor:
        """The output for what `expand` gave of x_TH."""
        out: Tensor = self.linear_fc2(inner_TF)
        if self.config.moe.expert_norms:
            out = self.linear_fc2.get_submodule("post_layernorm")(out)
        if self.gate_weight is not None:
            out = out * F.linear(x_TH, self.gate_weight).sigmoid()
        return out
