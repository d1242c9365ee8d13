"""Given: feeds of small tensors: values known beforehand, and norms that take factors in."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.computed_tensors import Region, Taking
from megtool.checkpoint.transport.strided import Array
from megtool.checkpoint.transport.tile import Index
from megtool.dtypes import DType
from megtool.errors import CalibrationError
from megtool.number_formats.small_floats import single
from megtool.quant.packed_tensors.modelopt_tensors import in_dtype
from megtool.quant.qparams import Floats
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Tensors whose values are known beforehand."""

    values: tuple[tuple[GlobalTensor, NDArray[Any]], ...]

    @property
    def reads(self) -> tuple[Placement, ...]:
        """Nothing."""
        return ()

    @property
    def writes(self) -> tuple[Region, ...]:
        """All of each tensor."""
        return tuple(whole(t) for t, _ in self.values)

    @property
    def num_bytes(self) -> int:
        """Their bytes."""
        return sum(t.num_bytes for t, _ in self.values)

    @property
    def facts(self) -> bytes:
        """Their values."""
        return hash_of(*(v for _, v in self.values))

    def make(self, taking: Taking) -> Generator[tuple[int, Index, Array], None, None]:
        """See `Feed`."""
        for number, (tensor, value) in enumerate(self.values):
            yield number, (0,) * len(tensor.shape), bits_of(value, tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A norm's weight (or bias) divided by factors, in float32 and rounded once.

    `zero_centered` weights w stand for 1 + w.
    """

    placement: Placement
    tensor: GlobalTensor
    factors: Floats
    zero_centered: bool

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The tensor as it was."""
        return (self.placement,)

    @property
    def writes(self) -> tuple[Region, ...]:
        """All of it."""
        return (whole(self.tensor),)

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return self.tensor.num_bytes

    @property
    def facts(self) -> bytes:
        """The factors."""
        return hash_of(self.factors, self.zero_centered, self.tensor.dtype.name)

    def make(self, taking: Taking) -> Generator[tuple[int, Index, Array], None, None]:
        """See `Feed`."""
        # Taken as it is to be stored: a source of other types is then no other than its cast.
        with taking.run(self.placement, self.tensor.dtype) as run:
            found = run.read(0, numel(self.placement.shape))
            values = single(found, self.tensor.dtype.name)
        one = np.float32(self.zero_centered)
        out = ((values + one) / self.factors.astype(np.float32) - one).astype(np.float32)
        if not np.isfinite(out).all():
            raise CalibrationError(
                "factors of its columns make it infinite or NaN", tensor=self.tensor.name
            )
        yield 0, (0,), bits_of(in_dtype(out, self.tensor.dtype), self.tensor.dtype)


def whole(tensor: GlobalTensor) -> Region:
    """All of a tensor."""
    return Region(stored=tensor.name, lo=(0,) * len(tensor.shape), hi=tensor.shape)


def bits_of(values: NDArray[Any], dtype: DType) -> Array:
    """Elements as unsigned integers of the type's width."""
    return np.ascontiguousarray(values).reshape(values.shape).view(f"<u{dtype.itemsize}")


def hash_of(*facts: Any) -> bytes:
    """What tells whether facts (arrays among them) are the same."""
    h = hashlib.sha256()
    for fact in facts:
        if isinstance(fact, np.ndarray):
            h.update(repr((fact.shape, fact.dtype.str)).encode())
            h.update(np.ascontiguousarray(fact).data)
        else:
            h.update(repr(fact).encode())
    return h.digest()
