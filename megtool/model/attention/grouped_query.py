"""Grouped-query attention over this rank's heads: projections, rotary, cache, scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.kernels.attention.dot_product import attention
from megtool.kernels.attention.mask import Mask
from megtool.kernels.attention.tiles import ScoreRule
from megtool.kernels.elementwise.norm import rms_norm
from megtool.kernels.elementwise.rotary import rotate
from megtool.model.attention.context_parallel import ContextExchange, attend_across, attend_to_parts
from megtool.model.attention.shared_kv import kv_source, kv_sources
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.dropout import DropoutSpec
from megtool.model.layers.hooks import KVCacheHook
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.norm import HeadsNorm, NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark, mark_parts
from megtool.model.positions.rotary import Rotation, has_rotation
from megtool.parallel.collectives import copy_to, gather_columns
from megtool.parallel.context_parallel import gather_tokens
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


def attend_all(
    query_BNSD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    frame: ForwardContext,
    layer: int,
    rule: ScoreRule,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """`attend` for all queries that this rank has, under the masks of a layer."""
    if frame.key_ranks.size > 1:
        states = query_BNSD, key_BKLD, value_BKLD
        return attend_to_parts(states, frame, layer, rule, sinks_N)
    stretches = frame.stretches(layer)
    chances: Sequence[DropoutSpec | None] = [None] * len(stretches)
    if frame.draws is not None:
        chances = [frame.draws.attention(layer, n) for n in range(len(stretches))]
    outs = [
        attend(
            query,
            key_BKLD[:, :, :keys],
            value_BKLD[:, :, :keys],
            mask,
            scale=rule.scale,
            softcap=rule.softcap,
            sinks_N=sinks_N,
            chance=chance,
        )
        for query, (keys, mask), chance in zip(
            query_BNSD.chunk(len(stretches), 2), stretches, chances, strict=True
        )
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def attend(
    query_BNSD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks_N: Tensor | None = None,
    chance: DropoutSpec | None = None,
) -> Tensor:
    """The attention output of every query: [B, S, N, D of the values] (`kernels.attention`).

    Dropout leaves weights out by `chance`, of each query and key for itself.
    """
    rule = ScoreRule(
        scale=scale,
        softcap=softcap,
        share=0.0 if chance is None else chance.share,
        seed=0 if chance is None else int(chance.seed),
    )
    return attention(query_BNSD, key_BKLD, value_BKLD, mask, rule, sinks_N)


def query_scale(config: ModelConfig, positions_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """The multiplier of queries by position, [B, S, 1, 1]."""
    counted = positions_BS.float() + (not config.attention.attn_temperature_rotated)
    steps = torch.floor(counted / config.attention.attn_temperature_floor)
    scale = torch.log1p(steps) * config.attention.attn_temperature_scale + 1
    return scale[:, :, None, None].to(dtype)


class CoreAttention(nn.Module):
    """The parameters of attention besides its projections: a sink per head (`softmax_offset`)."""

    def __init__(self, num_heads: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        sinks = nn.Parameter(torch.zeros(num_heads, dtype=dtype, device=device))
        self.softmax_offset = mark(sinks, split_dim=0)


class Attention(nn.Module):
    """Self-attention of one layer; its norm is part of `linear_qkv`.

    A rank has N = num_heads / tp query heads and K = num_kv_heads / tp key and value heads. With
    more ranks than key and value heads, Megatron still cuts the fused rows evenly: ranks then
    gather the rows' outputs and pick theirs, and several hold the same key and value head (K = 1).
    `cache_tap` is handed keys and values `[B, S, K, D]` before they are used or cached. A layer
    may attend to those of another layer (`kv_layer`); `linear_qkv` then has queries alone. With
    context parallelism S is this rank's tokens, and their queries attend to those of all ranks.

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
        tp = groups.tp.size
        if attention.num_heads % tp or (
            attention.num_kv_heads % tp and tp % attention.num_kv_heads
        ):
            raise LayoutError(
                f"{attention.num_heads} query heads and {attention.num_kv_heads} key "
                f"and value heads cannot be split over tp={tp}",
                hint="tp divides the query heads, and divides or is a multiple of the others",
            )
        self.config, self.layer, self.tp = config, layer, groups.tp
        self.exchange = ContextExchange.of(groups, layer)
        self.cache_tap: KVCacheHook | None = None
        self.num_heads = attention.num_heads // tp
        self.num_kv_heads = max(1, attention.num_kv_heads // tp)
        self.gate_heads = attention.num_heads // attention.num_kv_heads * attention.attn_output_gate
        self.scale = (
            1 / math.sqrt(attention.head_dim)
            if attention.softmax_scale is None
            else attention.softmax_scale
        )
        if attention.attn_scale_by_layer:
            self.scale /= layer + 1
        self.has_rotation = has_rotation(config, layer)
        self.has_tied_values = layer in layer_sets.tied_value_layers(config)
        self.kv_layer = kv_source(config, layer)
        self.has_own_kv, self.lends_kv = self.kv_layer == layer, layer in kv_sources(config)
        d, h, norm = (
            attention.head_dim,
            config.hidden_size,
            NormSpec.before_attention(config, layer),
        )
        self.has_sinks = attention.attn_sinks and layer in layer_sets.sink_layers(config)
        each = attention.num_heads // attention.num_kv_heads
        kinds = (each * d, self.gate_heads * d, *self.kv_parts)
        self.linear_qkv = ColumnLinear(
            h,
            sum(kinds) * attention.num_kv_heads,
            groups.tp,
            bias=attention.qkv_bias,
            norm=norm,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        mark_parts(self.linear_qkv.weight, tuple(n for n in kinds if n))
        if config.norms.qk_norm:
            self.q_layernorm = self._head_norm(attention.num_heads, dtype=dtype, device=device)
        if config.norms.qk_norm and self.has_own_kv:
            self.k_layernorm = self._head_norm(attention.num_kv_heads, dtype=dtype, device=device)
        if self.has_sinks:
            self.core_attention = CoreAttention(self.num_heads, dtype=dtype, device=device)
        self.linear_proj = RowLinear(
            attention.num_heads * attention.value_size,
            h,
            groups.tp,
            bias=attention.attn_out_bias,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The attention output that is added to the residual x_TH (before its scale), in x_TH's
        rows.
        """
        config, b, s = self.config, frame.num_rows, frame.num_tokens
        turn = frame.rotation(self.layer)
        query, gate, key, value = self._project(x_TH, b, s)
        query = self._turned(query, turn, self.q_layernorm if config.norms.qk_norm else None)
        is_scaled = (turn is not None) == config.attention.attn_temperature_rotated
        if config.attention.attn_temperature_scale and is_scaled:
            query = query * query_scale(config, frame.positions_BS, query.dtype)
        if self.has_own_kv:
            key = self._turned(key, turn, self.k_layernorm if config.norms.qk_norm else None)
            key, value = self._kept(key, value, frame)
        else:
            key, value = frame.shared_kv[self.kv_layer]
        sinks_N: Tensor | None = self.core_attention.softmax_offset if self.has_sinks else None
        if config.attention.attn_zero_sinks:
            sinks_N = query.new_zeros(self.num_heads)
        query, rule = (
            query.transpose(1, 2),
            ScoreRule(scale=self.scale, softcap=config.attention.attn_softcap),
        )
        if frame.cp.size > 1 and not self.exchange.gathers:
            states = query, key, value
            out_BSND = attend_across(states, frame, self.layer, rule, self.exchange, sinks_N)
        else:
            out_BSND = attend_all(query, key, value, frame, self.layer, rule, sinks_N)
        if gate is not None:
            out_BSND = out_BSND * torch.sigmoid(gate)
        out: Tensor = self.linear_proj(out_BSND.reshape(b * s, -1))
        return out

    def _turned(
        self, x_BSND: Tensor, turn: Rotation | None, norm: NormLayer | HeadsNorm | None
    ) -> Tensor:
        """Queries or keys after their norm and rotation, in either order."""
        config = self.config
        if norm is not None and not config.norms.qk_norm_rotated:
            x_BSND = norm(x_BSND)
        if clip := config.attention.qkv_clip:
            x_BSND = x_BSND.clamp(-clip, clip)
        if turn is not None:
            x_BSND = rotate(x_BSND, *turn, interleaved=config.positions.rope_interleaved)
        if config.norms.qk_l2_norm and (turn is not None or config.norms.qk_l2_norm_unrotated):
            x_BSND = rms_norm(x_BSND, None, config.norms.norm_eps)
        return norm(x_BSND) if norm is not None and config.norms.qk_norm_rotated else x_BSND

    def _kept(
        self, key_BSKD: Tensor, value_BSKD: Tensor, frame: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Keys and values that queries may attend to, [B, K, L, D]: those of all ranks, unless they
        are exchanged later, and of the cache, to which new ones are added.
        """
        if clip := self.config.attention.qkv_clip:
            value_BSKD = value_BSKD.clamp(-clip, clip)
        if self.config.attention.attn_value_scale != 1:
            value_BSKD = value_BSKD * self.config.attention.attn_value_scale
        if self.config.attention.value_norm:
            value_BSKD = rms_norm(value_BSKD, None, self.config.norms.norm_eps)
        if self.cache_tap is not None:
            key_BSKD, value_BSKD = self.cache_tap(key_BSKD, value_BSKD)
        if self.exchange.gathers:
            key_BSKD, value_BSKD = gather_tokens((key_BSKD, value_BSKD), frame.cp)
        key, value = key_BSKD.transpose(1, 2), value_BSKD.transpose(1, 2)
        if frame.cache is not None:
            key, value = frame.cache.append(self.layer, key, value)
        if self.lends_kv:
            frame.shared_kv[self.layer] = key, value
        return key, value

    @property
    def kv_parts(self) -> tuple[int, ...]:
        """How many rows of keys, and of values, the fused rows have for each group."""
        has_values = self.has_own_kv and not self.has_tied_values
        return (
            self.config.attention.head_dim * self.has_own_kv,
            self.config.attention.value_size * has_values,
        )

    def _head_norm(
        self, heads: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> NormLayer | HeadsNorm:
        """The norm of queries or keys, of which a rank sees its own heads."""
        config, tp = self.config, self.tp
        norm, d = NormSpec.of(config), config.attention.head_dim
        if config.norms.qk_norm_of == "head":
            return NormLayer(norm, d, partial=tp.size > 1, dtype=dtype, device=device)
        if config.norms.qk_norm_of == "all" and norm.kind != "rmsnorm":
            raise LayoutError(
                f"queries and keys have a norm of the kind {norm.kind!r} over all heads",
                hint="a norm over all heads is a root mean square norm",
            )
        own = max(1, heads // tp.size)
        copies = max(1, tp.size // heads)
        return HeadsNorm(
            norm,
            (heads * d,) if config.norms.qk_norm_of == "all" else (heads, d),
            tp,
            first=tp.rank * own // copies,
            heads=own,
            copies=copies,
            dtype=dtype,
            device=device,
        )

    def _project(
        self, x_TH: Tensor, b: int, s: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Queries, gates, keys and values, [B, S, heads, D]; no elements of keys and values where
        those of another layer are used.
        """
        config, d = self.config, self.config.attention.head_dim
        attention = config.attention
        rows = self.linear_qkv(x_TH)
        share = (
            self.tp.size // attention.num_kv_heads if self.tp.size > attention.num_kv_heads else 1
        )
        if share > 1:
            # copy_to adds up what the ranks that share a group's rows say about them.
            rows = copy_to(gather_columns(rows, self.tp), self.tp)
            rows = rows.view(b * s, attention.num_kv_heads, -1)[:, self.tp.rank // share]
        heads = self.num_heads // self.num_kv_heads * share
        sizes = (heads * d, self.gate_heads * d, *self.kv_parts)
        x = rows.view(b, s, self.num_kv_heads, sum(sizes))
        query, gate, key, value = x.split(sizes, 3)
        if share > 1:
            size = self.num_heads * d
            own = slice((share_index := self.tp.rank % share) * size, (share_index + 1) * size)
            query, gate = query[..., own], gate[..., own]
        return (
            query.reshape(b, s, self.num_heads, d),
            gate.reshape(b, s, self.num_heads, d) if self.gate_heads else None,
            key,
            key if self.has_tied_values else value,
        )
