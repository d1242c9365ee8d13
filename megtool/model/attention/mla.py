"""Multi-head latent attention (MLA): keys and values are projections of one small vector per token.

Sources: DeepSeek-V2 (arXiv 2405.04434), megatron-core 0.16.1
`transformer/multi_latent_attention.py`, and transformers' DeepSeek models.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.kernels.attention.tiles import ScoreRule
from megtool.kernels.elementwise.rotary import rotate
from megtool.model.attention.context_parallel import ContextExchange, attend_across
from megtool.model.attention.grouped_query import attend_all, query_scale
from megtool.model.attention.indexer import Indexer, SparseAttention
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.hooks import ActivationHook, KVCacheHook
from megtool.model.layers.linear import ColumnLinear, Product, RowLinear
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark
from megtool.model.positions.rotary import Rotation
from megtool.parallel.collectives import copy_to, gather_rows, scatter_rows
from megtool.parallel.context_parallel import gather_tokens
from megtool.parallel.process_groups import ALONE, Group, ProcessGroups
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


class LatentAttention(nn.Module):
    """Self-attention of one layer over latents; the norm before it belongs to the layer.

    A token's keys and values, of all heads, are made of `kv_lora_rank` numbers (its latent), but
    for `qk_rope_head_dim` elements of every key, which turn with the position and are the same in
    all heads. Queries are projected directly, or through `q_lora_rank` numbers. Projections down
    are the same on every tp rank, those up are cut by heads, N = num_heads / tp.

    A cache keeps the latent after its norm, as the key of one head, and the part that turns, after
    turning, as its value: `kv_lora_rank + qk_rope_head_dim` numbers a token on every rank. These,
    `[B, S, 1, ...]`, are what `cache_tap` is handed, cache or none.

    In models with indexers (`megtool.model.attention.indexer`) the norms of compressed queries and
    of latents are modules of their own, and attention is limited to the tokens that the layer's
    indexer chooses, or that of a layer before it; keys of the indexer are kept behind the part that
    turns.

    Raises:
        LayoutError: the heads do not go evenly over the ranks.
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
        attention = config.attention
        super().__init__()
        tp = groups.tp
        if attention.num_heads % tp.size:
            raise LayoutError(
                f"{attention.num_heads} heads cannot be split over tp={tp.size}",
                hint="tp divides the heads",
            )
        self.config, self.layer, self.tp = config, layer, tp
        self.cache_tap: KVCacheHook | None = None
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.num_heads = attention.num_heads // tp.size
        self._rule = ScoreRule(scale=softmax_scale(config), softcap=attention.attn_softcap)
        self.exchange = ContextExchange.of(groups, layer)
        hidden, nope, rope = (
            config.hidden_size,
            config.latent.qk_nope_head_dim,
            config.latent.qk_rope_head_dim,
        )
        norm = NormSpec.of_latents(config) if config.norms.qk_norm else None
        self.q_layernorm: NormLayer | None = None
        self.kv_layernorm: NormLayer | None = None
        self.core_attention: SparseAttention | None = None
        if layer in layer_sets.index_layers(config):
            self.core_attention = SparseAttention(Indexer(config, dtype=dtype, device=device))
        if config.indexer.index_num_heads and norm is not None:
            partial = self.sequence_parallel
            self.q_layernorm, self.kv_layernorm = (
                NormLayer(norm, size, partial=partial, dtype=dtype, device=device)
                for size in (config.latent.q_lora_rank, config.latent.kv_lora_rank)
            )
            norm = None

        def up(size: int, heads_size: int, norm: NormSpec | None) -> ColumnLinear:
            return ColumnLinear(
                size,
                attention.num_heads * heads_size,
                tp,
                norm=norm,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )

        def down(size: int) -> DownLinear:
            return DownLinear(
                hidden, size, tp, sequence_parallel=sequence_parallel, dtype=dtype, device=device
            )

        if config.latent.q_lora_rank:
            self.linear_q_down_proj = down(config.latent.q_lora_rank)
            self.linear_q_up_proj = up(config.latent.q_lora_rank, nope + rope, norm)
        else:
            self.linear_q_proj = up(hidden, nope + rope, None)
        self.linear_kv_down_proj = down(config.latent.kv_lora_rank + rope)
        self.linear_kv_up_proj = up(config.latent.kv_lora_rank, nope + attention.v_head_dim, norm)
        self.linear_proj = RowLinear(
            attention.num_heads * attention.v_head_dim,
            hidden,
            tp,
            bias=attention.attn_out_bias,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """What attention adds to the residual x_TH (before its scale), in x_TH's rows."""
        config, b, s = self.config, frame.num_rows, frame.num_tokens
        turn = adjacent_pairs(frame.rotation(self.layer), config)
        query, query_TC = self._queries(x_TH)
        query = query.view(b, s, self.num_heads, -1)
        nope, rope = torch.split(
            query, [config.latent.qk_nope_head_dim, config.latent.qk_rope_head_dim], -1
        )
        latent, shared = torch.split(
            self.linear_kv_down_proj(x_TH),
            [config.latent.kv_lora_rank, config.latent.qk_rope_head_dim],
            -1,
        )
        # Every rank's heads use the shared part, so that its gradient is a sum over ranks.
        of_all = gather_rows if self.sequence_parallel else copy_to
        shared = of_all(shared, self.tp).view(b, s, 1, -1)
        if turn is not None:
            rope = rotate(rope, *turn, interleaved=True)
            shared = rotate(shared, *turn, interleaved=True)
        if config.attention.attn_temperature_scale:
            scale = query_scale(config, frame.positions_BS, query.dtype)
            nope, rope = nope * scale, rope * scale
        normalize = self.kv_layernorm or self.linear_kv_up_proj.normalize
        latent = normalize(latent)
        if self.cache_tap is not None:
            latent, shared = self._tapped(latent, shared, self.cache_tap)
        index_keys = self._index_keys(x_TH, frame)
        if frame.cache is None:
            keys_values = self.linear_kv_up_proj.project(latent).view(b, s, self.num_heads, -1)
            if self.exchange.gathers:
                keys_values, shared = gather_tokens((keys_values, shared), frame.cp)
            if index_keys is not None:
                (index_keys,) = gather_tokens((index_keys,), frame.cp)
            self._choose(x_TH, query_TC, index_keys, frame)
            out = self._attend(nope, rope, keys_values, shared, frame)
        else:
            latent = of_all(latent, self.tp).view(b, s, 1, -1)
            if config.indexer.index_num_heads:
                nothing = shared.new_zeros(b, s, 1, config.indexer.index_head_dim)
                shared = torch.cat((shared, nothing if index_keys is None else index_keys), -1)
            latent, shared = frame.cache.append(
                self.layer, latent.transpose(1, 2), shared.transpose(1, 2)
            )
            size = config.latent.qk_rope_head_dim
            past_keys = shared[..., size:].transpose(1, 2)
            self._choose(x_TH, query_TC, past_keys, frame)
            out = self._attend_cached(nope, rope, latent, shared[..., :size], frame)
        if not config.indexer.shared_index_layers:
            frame.chosen.pop(self.layer, None)
        result: Tensor = self.linear_proj(out.reshape(b * s, -1))
        return result

    def _tapped(
        self, latent_TC: Tensor, shared_BS1R: Tensor, tap: KVCacheHook
    ) -> tuple[Tensor, Tensor]:
        """What the tap makes of all tokens' latents, of which this rank's rows, and of the rest."""
        rows = gather_rows(latent_TC, self.tp) if self.sequence_parallel else latent_TC
        latent, shared = tap(rows.view(*shared_BS1R.shape[:3], -1), shared_BS1R)
        rows = latent.reshape(rows.shape)
        return scatter_rows(rows, self.tp) if self.sequence_parallel else rows, shared

    def _queries(self, x_TH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries of this rank's heads, and what they are made of, in x_TH's rows."""
        if not self.config.latent.q_lora_rank:
            return self.linear_q_proj(x_TH), None
        normalize = self.q_layernorm or self.linear_q_up_proj.normalize
        compressed_TC = normalize(self.linear_q_down_proj(x_TH))
        return self.linear_q_up_proj.project(compressed_TC), compressed_TC

    def _index_keys(self, x_TH: Tensor, frame: ForwardContext) -> Tensor | None:
        """What this layer's indexer ranks the tokens of this rank by, [B, S, 1, E]."""
        if self.core_attention is None:
            return None
        x_BSH = self._whole(x_TH, frame)
        keys: Tensor = self.core_attention.indexer.keys(x_BSH, frame.rotation(self.layer))
        return keys

    def _choose(
        self,
        x_TH: Tensor,
        query_TC: Tensor | None,
        keys_BL1E: Tensor | None,
        frame: ForwardContext,
    ) -> None:
        """Limit this layer's attention to the tokens that its indexer, or a shared one, chooses."""
        config = self.config
        if not config.indexer.index_num_heads:
            return
        if self.core_attention is None or query_TC is None or keys_BL1E is None:
            frame.chosen[self.layer] = frame.chosen[layer_sets.index_source(config, self.layer)]
            return
        frame.chosen[self.layer] = self.core_attention.indexer.choose(
            self._whole(x_TH, frame),
            self._whole(query_TC, frame),
            keys_BL1E.squeeze(2),
            frame.rotation(self.layer),
            frame,
            self.layer,
        )

    def _whole(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """All rows of what a rank has the rows of a part of, [B, S, H], without gradient."""
        x_TH = x_TH.detach()
        rows = gather_rows(x_TH, self.tp) if self.sequence_parallel else x_TH
        return rows.view(frame.num_rows, frame.num_tokens, -1)

    def _attend(
        self,
        nope_BSND: Tensor,
        rope_BSNR: Tensor,
        keys_values_BLND: Tensor,
        shared_BL1R: Tensor,
        frame: ForwardContext,
    ) -> Tensor:
        """Attention over per-head keys and values computed from the latents: [B, S, N, D]."""
        config = self.config
        key, value = torch.split(
            keys_values_BLND, [config.latent.qk_nope_head_dim, config.attention.v_head_dim], -1
        )
        shared = shared_BL1R.expand(-1, -1, self.num_heads, -1)
        query = torch.cat((nope_BSND, rope_BSNR), -1).transpose(1, 2)
        key = torch.cat((key, shared), -1).transpose(1, 2)
        value, sinks_N = value.transpose(1, 2), self._sinks(query)
        if frame.cp.size > 1 and not self.exchange.gathers:
            states = query, key, value
            return attend_across(states, frame, self.layer, self._rule, self.exchange, sinks_N)
        return attend_all(query, key, value, frame, self.layer, self._rule, sinks_N)

    def _attend_cached(
        self,
        nope_BSND: Tensor,
        rope_BSNR: Tensor,
        latent_B1LC: Tensor,
        shared_B1LR: Tensor,
        frame: ForwardContext,
    ) -> Tensor:
        """Attention over all cached latents: for few queries, in the latent space.

        There the up-projection of keys is applied to the queries and that of values to the result,
        so that no key or value of a head is ever made; for many queries making them costs
        less, and a tap of the up-projection is to see what is multiplied.
        """
        config = self.config
        weight_OC = self._up_weight()
        weight_NDC = weight_OC.view(self.num_heads, -1, config.latent.kv_lora_rank)
        sizes = [config.latent.qk_nope_head_dim, config.attention.v_head_dim]
        key_NDC, value_NDC = torch.split(weight_NDC, sizes, 1)
        width, rank = sum(sizes), config.latent.kv_lora_rank
        tap = self.linear_kv_up_proj.tap
        if tap is not None or frame.num_tokens * (2 * rank - width) > rank * width:
            latent_BLC = latent_B1LC.squeeze(1)
            if tap is not None:
                latent_BLC = tap(latent_BLC.flatten(0, 1)).view(latent_BLC.shape)
            keys_values = F.linear(latent_BLC, weight_OC)
            keys_values = keys_values.view(*keys_values.shape[:2], self.num_heads, -1)
            shared = shared_B1LR.transpose(1, 2)
            return self._attend(nope_BSND, rope_BSNR, keys_values, shared, frame)
        within = torch.einsum("bsnd,ndc->bnsc", nope_BSND, key_NDC)
        out_BSNC = attend_all(
            torch.cat((within, rope_BSNR.transpose(1, 2)), -1),
            torch.cat((latent_B1LC, shared_B1LR), -1),
            latent_B1LC,
            frame,
            self.layer,
            self._rule,
            self._sinks(within),
        )
        return torch.einsum("bsnc,ndc->bsnd", out_BSNC, value_NDC)

    def _sinks(self, query: Tensor) -> Tensor | None:
        """Return the scores that take part in every head's softmax, where there are some."""
        has_sinks = self.config.attention.attn_zero_sinks
        return query.new_zeros(self.num_heads) if has_sinks else None

    def _up_weight(self) -> Tensor:
        """The up-projection of keys and values, including an adapter's addition."""
        linear = self.linear_kv_up_proj
        if linear.adapter is None:
            return linear.weight
        delta: Tensor = linear.adapter.delta()  # type: ignore[operator]
        return (linear.weight.float() + delta).to(linear.weight.dtype)


class DownLinear(nn.Module):
    """`y = x W^T` with all of W on every rank of a group, which with `sequence_parallel` has a part
    of the tokens each. What `adapter` makes of them is added (`megtool.model.stacks.lora`), and
    `product` stands for the product (`megtool.model.layers.linear.Product`)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group = ALONE,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel and group.size > 1
        self.tap: ActivationHook | None = None
        self.product: Product | None = None
        self.adapter: nn.Module | None = None
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = mark(nn.Parameter(weight), partial=self.sequence_parallel)

    def forward(self, x_TH: Tensor) -> Tensor:
        """The product of this rank's rows."""
        if self.tap is not None:
            x_TH = self.tap(x_TH)
        y = (F.linear if self.product is None else self.product)(x_TH, self.weight)
        return y if self.adapter is None else y + self.adapter(x_TH)


def softmax_scale(config: ModelConfig) -> float:
    """The factor of scores: YaRN's temperature for all dimensions is applied twice."""
    if config.attention.softmax_scale is not None:
        return config.attention.softmax_scale
    scale = 1 / math.sqrt(config.latent.qk_nope_head_dim + config.latent.qk_rope_head_dim)
    scaling = config.positions.rope_scaling or {}
    weight, factor = scaling.get("mscale_all_dim"), scaling.get("factor")
    if weight and factor and factor > 1:
        scale *= (0.1 * weight * math.log(factor) + 1) ** 2
    return scale


def adjacent_pairs(turn: Rotation | None, config: ModelConfig) -> Rotation | None:
    """A rotation of adjacent elements, as latent attention uses in every model."""
    if turn is None or config.positions.rope_interleaved:
        return turn
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in turn)
    return Rotation(cos, sin)
