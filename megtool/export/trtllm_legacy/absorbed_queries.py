"""Queries of latent attention that meet latents instead of keys: products of two weights.

A key is `k = W_k c`, made of what the cache holds of a token, so a query's product with it is that
of `W_k^T q` with the latents `c` themselves. Legacy TensorRT-LLM has the weights of both as one,
`fused_q_proj`, which its conversion computes, beside `q_b_proj` and `kv_b_proj`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.export.trtllm_legacy.ranks import AbsorbedQueries
from megtool.number_formats.small_floats import single
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import cast
from megtool.transport.computed_tensors import ElementReader, RegionReader, TargetRegion
from megtool.transport.constant_feed import digest_facts
from megtool.transport.strided import Array
from megtool.transport.tile import Index


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedQueryFeed:
    """The three tensors of a rank: of every head the products and what turns (`fused_q_proj`), its
    queries (`q_b_proj`), and the keys of all heads with their values below them (`kv_b_proj`).

    Products of 8 or 16 bits are exact in float64, in which they are added, so that neither threads
    nor a machine's libraries matter; each sum is rounded once. `placements` are those of the
    weights of queries and of keys and values, which are taken as `dtype`.
    """

    placements: tuple[Placement, ...]
    queries: AbsorbedQueries
    dtype: DType
    tensors: tuple[GlobalTensor, ...]

    @property
    def reads(self) -> tuple[Placement, ...]:
        """Both weights."""
        return self.placements

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """All of the rank's tensors."""
        return tuple(TargetRegion(stored=t.name, lo=(0, 0), hi=t.shape) for t in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of the three."""
        return sum(t.num_bytes for t in self.tensors)

    @property
    def identity(self) -> bytes:
        """Which heads, and the types."""
        return digest_facts("W_k^T q", self.queries, self.dtype.name, self.tensors[0].dtype.name)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        """See `TensorFeed`; one head at a time."""
        query, key_value = self.placements
        with (
            reader.open(query, self.dtype) as queries,
            reader.open(key_value, self.dtype) as keys,
        ):
            for number, row, values in self._blocks(queries, keys):
                dtype = self.tensors[number].dtype
                out = np.empty(values.shape, f"<u{dtype.itemsize}")
                if lost := cast(values, named_dtype("float32"), out, dtype):
                    reader.overflowed[(key_value if number == 2 else query).stored] += lost
                yield number, (row, 0), out

    def _blocks(
        self, queries: ElementReader, keys: ElementReader
    ) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
        """Rows of the three tensors: the number of one, the first row there, and the numbers."""
        q = self.queries
        size = q.nope + q.rope
        for head in range(q.heads):
            of_query = self._rows(queries, (q.first + head) * size, size, q.width)
            first = (q.first + head) * (q.nope + q.value)
            of_key = self._rows(keys, first, q.nope + q.value, q.rank)
            products = of_key[: q.nope].astype(np.float64).T @ of_query[: q.nope].astype(np.float64)
            fused = np.concatenate([products.astype(np.float32), of_query[q.nope :]])
            yield 0, head * len(fused), fused
            yield 1, head * size, of_query
            yield 2, head * q.nope, of_key[: q.nope]
            yield 2, q.heads * q.nope + head * q.value, of_key[q.nope :]

    def _rows(
        self, reader: ElementReader, first: int, count: int, width: int
    ) -> NDArray[np.float32]:
        bits = reader.read(first * width, (first + count) * width)
        return np.array(single(bits, self.dtype.name), np.float32).reshape(count, width)
