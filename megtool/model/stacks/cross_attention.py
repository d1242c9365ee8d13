"""A decoder's layer that also attends to the output of an encoder."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.model.attention.grouped_query import attend
from megtool.model.cache.source import EncodedSource
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark_parts
from megtool.model.stacks.layer import TransformerLayer
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig


class CrossAttention(nn.Module):
    """Attention of a layer's tokens to those of the source, without positions.

    A rank has N = num_heads / tp heads. `linear_kv` has the rows of each head's key, then those of
    its value. Keys and values of a source are computed once, where there is a cache.
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
        self.config, self.layer = config, layer
        heads, d, h = attention.num_heads, attention.head_dim, config.hidden_size
        self.num_heads = heads // groups.tp.size
        self.scale = (
            1 / math.sqrt(d) if attention.softmax_scale is None else attention.softmax_scale
        )

        def column(out_features: int) -> ColumnLinear:
            return ColumnLinear(
                h,
                out_features,
                groups.tp,
                bias=attention.qkv_bias,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )

        self.linear_q, self.linear_kv = column(heads * d), column(2 * heads * d)
        mark_parts(self.linear_kv.weight, (d, d))
        self.linear_proj = RowLinear(
            heads * d,
            h,
            groups.tp,
            bias=attention.attn_out_bias,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The output that is added to the residual, of rows after the norm.

        Raises:
            UsageError: the pass has no source.
        """
        if frame.source is None:
            raise UsageError("a decoder that attends to an encoder was given no source")
        b, s, n = frame.num_rows, frame.num_tokens, self.num_heads
        query = self.linear_q(x_TH).view(b, s, n, -1).transpose(1, 2)
        key, value = self._keys_and_values(frame.source, b)
        out_BSND = attend(
            query,
            key,
            value,
            frame.source.mask,
            scale=self.scale,
            chance=None if frame.draws is None else frame.draws.across_weights(self.layer),
        )
        out: Tensor = self.linear_proj(out_BSND.reshape(b * s, -1))
        return out

    def _keys_and_values(self, source: EncodedSource, num_rows: int) -> tuple[Tensor, Tensor]:
        """Those of the source, [B, N, E, D]."""
        if source.states_EH is None:
            if source.cache is None:
                raise UsageError("a pass without a source needs the cache of an earlier one")
            return source.cache.read(self.layer)
        rows = self.linear_kv(source.states_EH)
        shape = (num_rows, source.num_tokens, self.num_heads, 2, self.config.attention.head_dim)
        key, value = rows.view(shape).permute(3, 0, 2, 1, 4)
        if source.cache is not None:
            source.cache.write(self.layer, key, value)
        return key, value


class CrossLayer(TransformerLayer):
    """A layer with attention to a source (`cross_attention`) between self-attention and MLP.

    The norm before it is a module of its own, `pre_cross_attn_layernorm`.
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
        super().__init__(
            config, layer, groups, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )
        self.pre_cross_attn_layernorm = NormLayer(
            NormSpec.of(config),
            config.hidden_size,
            partial=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.cross_attention = CrossAttention(
            config, layer, groups, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )

    def sum_branches(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The residual with what attention to itself, to the source, and the MLP add to it."""
        draws, norm = frame.draws, self.mlp_norm
        first, second = (None, None) if draws is None else draws.branches(self.layer)
        between = None if draws is None else draws.across(self.layer)
        x_TH = self._add(x_TH, self.attend(x_TH, frame), first)
        across_TH = self.cross_attention(self.pre_cross_attn_layernorm(x_TH), frame)
        x_TH = self._add(x_TH, across_TH, between)
        if norm is None:
            return x_TH
        return self._add(x_TH, self.feed(norm.normalize(x_TH), frame), second)
