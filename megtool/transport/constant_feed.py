"""A feed of small tensors with known values, and what feeds of whole tensors share."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import cast
from megtool.transport.computed_tensors import RegionReader, TargetRegion
from megtool.transport.strided import Array
from megtool.transport.tile import Index


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantFeed:
    """Tensors with constant values: each with its bits in the dtype that is stored."""

    values: tuple[tuple[GlobalTensor, NDArray[Any]], ...]

    @property
    def reads(self) -> tuple[Placement, ...]:
        return ()

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """All of each tensor."""
        return tuple(whole_region(t) for t, _ in self.values)

    @property
    def num_bytes(self) -> int:
        """Their bytes."""
        return sum(t.num_bytes for t, _ in self.values)

    @property
    def identity(self) -> bytes:
        """Their values."""
        return digest_facts(*(v for _, v in self.values))

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        for number, (tensor, value) in enumerate(self.values):
            yield number, (0,) * len(tensor.shape), to_bits(value, tensor.dtype)


class WholeTensorFeed:
    """The part that all feeds of one whole `tensor` have."""

    __slots__ = ()

    tensor: GlobalTensor

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The whole tensor."""
        return (whole_region(self.tensor),)

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return self.tensor.num_bytes


def whole_region(tensor: GlobalTensor) -> TargetRegion:
    """The region that is all of a tensor."""
    return TargetRegion(stored=tensor.name, lo=(0,) * len(tensor.shape), hi=tensor.shape)


def to_bits(values: NDArray[Any], dtype: DType) -> Array:
    """Elements as unsigned integers of the type's width."""
    return np.ascontiguousarray(values).reshape(values.shape).view(f"<u{dtype.itemsize}")


def digest_facts(*facts: Any) -> bytes:
    """A digest of facts, arrays among them: equal facts have equal digests."""
    h = hashlib.sha256()
    for fact in facts:
        if isinstance(fact, np.ndarray):
            h.update(repr((fact.shape, fact.dtype.str)).encode())
            h.update(np.ascontiguousarray(fact).data)
        else:
            h.update(repr(fact).encode())
    return h.digest()


def round_to_dtype(values: NDArray[np.float32], dtype: DType) -> NDArray[np.generic]:
    """Float32 values rounded once to a float dtype, as `DType.view` stores it."""
    if dtype.name == "bfloat16":
        out = np.empty(values.shape, "<u2")
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        cast(bits, named_dtype("float32"), out, dtype)
        return out
    return np.asarray(values.astype(dtype.view))
