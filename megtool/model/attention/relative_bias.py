"""Relative position biases of attention scores (T5), of a stack's layers together or of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from megtool.errors import MappingError
from megtool.kernels.attention.mask import BucketBias, Mask
from megtool.model.cache.key_span import KeySpan
from megtool.model.layers.param_attributes import mark
from megtool.model.masks import Masks
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig


class RelativeBias(nn.Module):
    """A bias for each head and each bucket of distances between a query and a key.

    Half of the buckets are distances of one token each, and the others grow with the distance, up
    to `relative_max_distance`. In a bidirectional stack keys behind a query have half of all
    buckets; else they are never attended to. The parameter, `relative_attention_bias.weight`
    [buckets, all heads], is whole on every rank, which uses the columns of its own heads. Biases
    that all layers share are on every pipeline stage as well.

    Raises:
        MappingError: there are too few buckets, or the largest distance is one of the first ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        is_shared: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config, self.tp = config, groups.tp
        self.both_ways = config.bidirectional
        self.num_buckets = config.positions.relative_num_buckets // (2 if self.both_ways else 1)
        self.max_distance = config.positions.relative_max_distance
        if self.num_buckets < 2 or self.max_distance <= self.num_buckets // 2:
            raise MappingError(
                f"relative positions have {self.num_buckets} buckets for distances up to "
                f"{self.max_distance}",
                hint="at least 4 buckets, and a distance beyond those that have their own",
            )
        shape = config.positions.relative_num_buckets, config.attention.num_heads
        self.relative_attention_bias = nn.Embedding(*shape, dtype=dtype, device=device)
        pp = groups.pp
        for parameter in self.parameters():
            mark(
                parameter,
                partial=groups.tp.size > 1,
                tied=is_shared and pp.size > 1,
                copy=is_shared and not pp.is_first,
                over="pp",
            )

    def forward(self, span: KeySpan) -> BucketBias:
        """Biases of this rank's heads for the queries and keys of a pass."""
        table_CN: Tensor = self.relative_attention_bias.weight
        heads = table_CN.shape[1] // self.tp.size
        own = slice(self.tp.rank * heads, (self.tp.rank + 1) * heads)
        return BucketBias(table_CN[:, own], self.bucket, span.positions_BS, span.key_positions_BL)

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
    """The masks of a stack's layers, with relative position biases.

    `biases` are by layer, or that of all of them under None.
    """

    def __init__(self, masks: Masks, biases: Mapping[int | None, BucketBias]) -> None:
        super().__init__(
            masks.config,
            masks.span,
            documents_BS=masks.documents_BS,
            run_starts_BM=masks.run_starts_BM,
        )
        plain = masks.of(0)
        self._biased = {n: replace(plain, bias=bias, _square={}) for n, bias in biases.items()}

    def of(self, layer: int) -> Mask:
        """The mask of a layer."""
        mask = self._biased.get(layer)
        return self._biased[None] if mask is None else mask


def biased_masks(
    biases: Mapping[int | None, RelativeBias], masks: Masks, cp: Group
) -> tuple[Masks, ...]:
    """The masks of a pass on a rank that has whole rows, with biases (by layer, None: of all).

    Raises:
        MappingError: context parallelism cuts the rows.
    """
    if cp.size > 1:
        raise MappingError("relative positions are not computed for parts of rows")
    return (BiasedMasks(masks, {layer: bias(masks.span) for layer, bias in biases.items()}),)
