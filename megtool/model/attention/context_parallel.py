"""Attention of layers whose tokens are on several ranks: what is exchanged, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megtool.errors import LayoutError, UsageError
from megtool.kernels.attention.dot_product import attention, attention_part
from megtool.kernels.attention.mask import AttentionSizes
from megtool.kernels.attention.tiles import ScoreRule
from megtool.model.attention.shared_kv import kv_source
from megtool.model.forward_context import ForwardContext
from megtool.options.layout import CommType, ParallelConfig
from megtool.parallel.collectives import all_max, all_sum
from megtool.parallel.context_parallel import share_columns, share_tokens
from megtool.parallel.process_groups import ALONE, Group, ProcessGroups
from megtool.parallel.ring_attention import ring_attention
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextExchange:
    """How a layer's ranks exchange keys and values: ranks of `inner` have heads instead of tokens,
    and those of `outer` pass them round; with `all_gather` every rank has all."""

    kind: CommType = "all_gather"
    inner: Group = ALONE
    outer: Group = ALONE

    @classmethod
    def of(cls, groups: ProcessGroups, layer: int) -> ContextExchange:
        """A layer's."""
        kind = groups.parallel.comm_type(layer)
        if groups.cp.size == 1 or kind == "all_gather":
            return cls()
        if kind == "a2a+p2p":
            return cls(kind=kind, inner=groups.cp_inner, outer=groups.cp_outer)
        if kind == "a2a":
            return cls(kind=kind, inner=groups.cp)
        return cls(kind=kind, outer=groups.cp)

    @property
    def gathers(self) -> bool:
        """Every rank has the keys and values of all."""
        return self.kind == "all_gather"


def attend_across(
    states: Heads,
    frame: ForwardContext,
    layer: int,
    rule: ScoreRule,
    exchange: ContextExchange,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """The attention output of this rank's tokens, [B, S, N, E].

    `states` are queries, keys and values of this rank's tokens alone, [B, heads, S, size]. `rule`
    is without dropout, which each stretch of queries has of its own.
    """
    inner, outer = exchange.inner, exchange.outer
    rows, heads = states[0].shape[:2]
    if inner.size > 1:
        states = _heads_for_tokens(states, inner)
        if sinks_N is not None:
            sinks_N = sinks_N.chunk(inner.size)[inner.rank]
    stretches = frame.stretches_over(layer, outer, inner)
    rules = [_dropped(rule, frame, layer, n) for n in range(len(stretches))]
    if outer.size > 1:
        out_BSNE = ring_attention(states, stretches, rules, outer, sinks_N).transpose(1, 2)
    else:
        out_BSNE = attention(*states, stretches[0][1], rules[0], sinks_N)
    if inner.size > 1:
        out_BSNE = share_tokens(out_BSNE.flatten(2), inner).view(
            rows, -1, heads, out_BSNE.shape[-1]
        )
    return out_BSNE


def attend_to_parts(
    states: Heads,
    frame: ForwardContext,
    layer: int,
    rule: ScoreRule,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """The attention output of all tokens of a pass with a cache, [B, S, N, E], on every rank.

    `states` are all queries, and the keys and values that this rank keeps: what all ranks' keys
    give is merged by the log-sum-exp of scores. Without gradients.
    """
    group, (query, key, value) = frame.key_ranks, states
    ((num_keys, mask),) = frame.stretches(layer)
    sizes = AttentionSizes(query.shape[2], num_keys, query.device)
    part = mask.every(group.rank, group.size, sizes)
    out_BNSE, lse_BNS = attention_part(query, key, value, part, rule)
    top_BNS = all_max(lse_BNS, group)
    if sinks_N is not None:
        top_BNS = torch.maximum(top_BNS, sinks_N.to(lse_BNS.dtype)[:, None])
    share_BNS1 = (lse_BNS - top_BNS).exp().unsqueeze(-1)
    summed = all_sum(torch.cat((out_BNSE * share_BNS1, share_BNS1), -1), group)
    total_BNS1 = summed[..., -1:]
    if sinks_N is not None:
        total_BNS1 = total_BNS1 + (sinks_N[:, None] - top_BNS).exp().unsqueeze(-1)
    return (summed[..., :-1] / total_BNS1).to(query.dtype).transpose(1, 2)


def _dropped(rule: ScoreRule, frame: ForwardContext, layer: int, stretch: int) -> ScoreRule:
    """The rule with the dropout of a stretch of queries."""
    chance = None if frame.draws is None else frame.draws.attention(layer, stretch)
    return rule if chance is None else replace(rule, share=chance.share, seed=int(chance.seed))


def _heads_for_tokens(states: Heads, group: Group) -> Heads:
    """The tokens of all ranks, of this rank's part of the heads, by one exchange."""
    rows, _, tokens, _ = states[0].shape
    # A rank's part of all three, side by side, rank after rank.
    parts = [x.transpose(1, 2).reshape(rows, tokens, group.size, -1) for x in states]
    whole = share_columns(torch.cat(parts, -1).flatten(2), group)
    sizes = [part.shape[-1] for part in parts]
    query, key, value = (
        part.view(rows, tokens * group.size, -1, x.shape[-1]).transpose(1, 2)
        for part, x in zip(torch.split(whole, sizes, -1), states, strict=True)
    )
    return query, key, value


def check_cache(config: ModelConfig, groups: ProcessGroups, kept_by: Group) -> None:
    """Refuse a cache that ranks of context parallelism do not share, or cannot.

    Raises:
        LayoutError: each would keep all keys, or the model compresses its keys or chooses among
            them by those of an indexer.
    """
    compression = config.compression
    if groups.cp.size == 1:
        return
    if kept_by.size != groups.cp.size:
        raise LayoutError(
            f"cp is {groups.cp.size}, and a cache of keys and values is not shared by its ranks",
            hint="a PagedCache with cp, which `generate` has; drafts of a model's own (mtp) have "
            "none such",
        )
    if compression.is_compressed or config.indexer.index_num_heads:
        what = "compressed keys" if compression.is_compressed else "keys that an indexer chooses"
        raise LayoutError(
            f"cp is {groups.cp.size}, and a cache of {what} is not split",
            hint="--tp, --pp or --ep generate",
        )


def check_exchange(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse types of communication that a model's layers cannot have.

    Raises:
        UsageError: there is not one type for all layers, or one for each.
        LayoutError: heads do not go evenly over the ranks that exchange them; an indexer's choice,
            or compressed keys, are of all tokens; or layers share keys and values that are not in
            the same place.
    """
    kinds = parallel.cp_comm_type
    if parallel.cp == 1 or not kinds:
        return
    if len(kinds) not in (1, config.num_layers):
        raise UsageError(
            f"cp_comm_type has {len(kinds)} types, and the model {config.num_layers} layers",
            hint="one type for all layers, or one for each, with commas",
        )
    for layer in sorted(layer_sets.attn_layers(config)):
        kind = parallel.comm_type(layer)
        if kind != "all_gather":
            _check_layer(config.at_layer(layer), layer, kind, parallel)
        source = kv_source(config, layer)
        if parallel.comm_type(source) != kind:
            raise LayoutError(
                f"layer {layer} attends to the keys and values of layer {source}, and their "
                f"cp_comm_type is {kind} and {parallel.comm_type(source)}",
                hint="one type for layers that share keys and values",
            )


def _check_layer(config: ModelConfig, layer: int, kind: CommType, parallel: ParallelConfig) -> None:
    attention = config.attention
    if config.compression.is_compressed:
        raise LayoutError(
            f"cp_comm_type is {kind}, and layer {layer} attends to compressed keys of whole rows",
            hint="--cp-comm-type all_gather",
        )
    if kind == "p2p":
        return
    if layer in layer_sets.index_layers(config) or config.indexer.index_num_heads:
        raise LayoutError(
            f"cp_comm_type is {kind}, and layer {layer} attends to tokens that an indexer chooses "
            "for each rank's own queries",
            hint="--cp-comm-type all_gather or p2p",
        )
    ranks = parallel.hierarchical_cp[0] if kind == "a2a+p2p" else parallel.cp
    kv_heads = attention.num_heads if config.latent.kv_lora_rank else attention.num_kv_heads
    for name, number in (("query", attention.num_heads), ("key and value", kv_heads)):
        own = max(1, number // parallel.tp)
        if own % ranks:
            raise LayoutError(
                f"cp_comm_type is {kind}, and {own} {name} heads of a tp rank in layer {layer} do "
                f"not go evenly over {ranks} ranks",
                hint="p2p and all_gather take any number of heads; fewer ranks that exchange heads",
            )
