"""Relative position biases of attention scores, which all layers of a stack share (T5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megtool.errors import MappingError
from megtool.model.cache import KeySpan
from megtool.model.masks import Mask, Masks
from megtool.model.param_attributes import mark
from megtool.model_config import ModelConfig
from megtool.parallel.process_groups import Group, ProcessGroups


class RelativeBias(nn.Module):
    """A bias for each head and each bucket of distances between a query and a key.

    Half of the buckets are distances of one token each, and the others grow with the distance, up
    to `relative_max_distance`. In a bidirectional stack keys behind a query have half of all
    buckets; else they are never attended to. The parameter, `relative_attention_bias.weight`
    [buckets, all heads], is whole on every rank, which uses the columns of its own heads. Every
    pipeline stage has it as well.

    Raises:
        MappingError: there are too few buckets, or the largest distance is one of the first ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config, self.tp = config, groups.tp
        self.both_ways = config.bidirectional
        self.num_buckets = config.relative_num_buckets // (2 if self.both_ways else 1)
        self.max_distance = config.relative_max_distance
        if self.num_buckets < 2 or self.max_distance <= self.num_buckets // 2:
            raise MappingError(
                f"relative positions have {config.relative_num_buckets} buckets for distances up "
                f"to {self.max_distance}",
                hint="at least 4 buckets, and a distance beyond those that have their own",
            )
        shape = config.relative_num_buckets, config.num_heads
        self.relative_attention_bias = nn.Embedding(*shape, dtype=dtype, device=device)
        pp = groups.pp
        for parameter in self.parameters():
            mark(
                parameter,
                partial=groups.tp.size > 1,
                tied=pp.size > 1,
                copy=not pp.is_first,
                over="pp",
            )

    def forward(self, span: KeySpan) -> Tensor:
        """Biases of this rank's heads for the queries and keys of a pass, [B, N, S, L] (batch may
        be 1)."""
        buckets_BSL = self.bucket(
            span.key_positions_BL[:, None] - span.positions_BS[:, :, None].to(torch.int64)
        )
        bias_BSLN: Tensor = self.relative_attention_bias(buckets_BSL)
        heads = bias_BSLN.shape[-1] // self.tp.size
        own = slice(self.tp.rank * heads, (self.tp.rank + 1) * heads)
        return bias_BSLN[..., own].permute(0, 3, 1, 2)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance of a key from its query (int64, negative before it)."""
        first = torch.zeros_like(distance)
        if self.both_ways:
            first = (distance > 0) * self.num_buckets
            distance = distance.abs()
        else:
            distance = -distance.clamp_max(0)
        exact = self.num_buckets // 2
        share = torch.log(distance.clamp_min(1).float() / exact) / math.log(
            self.max_distance / exact
        )
        far = exact + (share * (self.num_buckets - exact)).to(torch.int64)
        far = far.clamp_max(self.num_buckets - 1)
        return first + torch.where(distance < exact, distance, far)


class BiasedMasks(Masks):
    """The mask of all layers of a stack, with relative position biases."""

    def __init__(self, masks: Masks, bias_BNSL: Tensor) -> None:
        super().__init__(
            masks.config, masks.span, documents_BS=masks.documents_BS, is_part=masks.is_part
        )
        mask, (num_queries, num_keys) = masks.of(0), bias_BNSL.shape[2:]
        allowed = mask.square(num_queries, num_keys, bias_BNSL.device)
        self._mask = Mask(allowed=allowed, scores=bias_BNSL)
        self._mask.bias(bias_BNSL.dtype)  # not within a layer, which may be computed again

    def of(self, layer: int) -> Mask:
        """The mask of a layer, which is that of all."""
        return self._mask


def biased_masks(bias: RelativeBias, masks: Masks, cp: Group) -> tuple[Masks, ...]:
    """The masks of a pass on a rank that has whole rows, with biases.

    Raises:
        MappingError: context parallelism cuts the rows.
    """
    if cp.size > 1:
        raise MappingError("relative positions are not computed for parts of rows")
    return (BiasedMasks(masks, bias(masks.span)),)
