"""Coded tensors: what a quantized linear module is in a rank's file, and what fills it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.computed_tensors import Feed
from megtool.checkpoint.transport.cast import cast
from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import FormatError, MappingError
from megtool.export.quantized_module import Coded
from megtool.export.repack import Slice, repacked
from megtool.export.trtllm_legacy.quantized_weights import ALGOS, CodedWeights
from megtool.export.trtllm_legacy.rank_files import Filed
from megtool.export.trtllm_legacy.ranks import Box, RankTensor
from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart
from megtool.reshard.constant_feed import Given
from megtool.tensors.sharded import GlobalTensor

_F32 = named_dtype("float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedTensors:
    """The tensors of one module on one rank: `filed` all of them, `given` those whose values are
    known beforehand, and `feeds` what fills the others."""

    filed: tuple[Filed, ...]
    given: tuple[tuple[GlobalTensor, NDArray[np.generic]], ...]
    feeds: tuple[Feed, ...]


def coded_tensors(
    tensor: RankTensor, coded: Coded, weights: CodedWeights, dtype: DType
) -> CodedTensors:
    """What `tensor`, whose weights have the format of `coded`, becomes.

    Raises:
        FormatError: scales that the format needs are missing, or float16 is too narrow for some.
        MappingError: weights that have their inputs in common have other factors for them.
    """
    return _Making(tensor, coded, weights, dtype).made()


class _Making:
    def __init__(
        self, tensor: RankTensor, coded: Coded, weights: CodedWeights, dtype: DType
    ) -> None:
        self.tensor, self.coded, self.weights, self.dtype = tensor, coded, weights, dtype
        self.filed: list[Filed] = []
        self.given: list[tuple[GlobalTensor, NDArray[np.generic]]] = []
        self.packing = ALGOS[coded.algo].format(group=coded.group_size)

    def made(self) -> CodedTensors:
        """All of it."""
        rows, width = self.tensor.shape
        held: list[tuple[PackedPart, GlobalTensor]] = []
        for part in layout(self.packing, (rows, width)):
            # Single scales are given: an expert's is one element of a tensor of all experts'.
            single = GlobalTensor(name="", shape=(), dtype=_F32)
            held.append((part, self._computed(part) if part.shape else single))
        feeds: list[Feed] = []
        for boxes, scales in self._by_scale():
            slices = [self._slice(b) for b in boxes]
            made = repacked(slices, self.packing, held, scales=scales or None)
            feeds += [f for f in made if not isinstance(f, Given)]
        for role, name in ((SCALE, "weights_scaling_factor"), (SCALE_2, _SECOND)):
            self._singles(role, name)
        self._inputs()
        self._columns()
        return CodedTensors(filed=tuple(self.filed), given=tuple(self.given), feeds=tuple(feeds))

    def _by_scale(self) -> Iterator[tuple[list[Box], dict[str, NDArray[np.float32]]]]:
        """Boxes that have their single scales in common, one expert's or all, with these."""
        boxes, count = list(self.tensor.boxes), max(self.tensor.experts, 1)
        size = len(boxes) // count
        for i in range(0, len(boxes), size):
            some = boxes[i : i + size]
            scales = {}
            for role in (SCALE, SCALE_2):
                for box in some:  # all are asked: it is noted which are not their own
                    found = self.weights.common(box.canonical, role)
                    if found is not None and (role == SCALE or self.coded.algo == "NVFP4"):
                        scales[role] = found
            yield some, scales

    def _slice(self, box: Box) -> Slice:
        held = self.weights.held[box.canonical]
        (first, left), (end, right) = box.lo, box.hi
        down, along = box.at
        return Slice(held.coded, (held.row + first, held.row + end), (left, right), (down, along))

    def _computed(self, part: PackedPart) -> GlobalTensor:
        """Codes, or scales of rows or groups."""
        kind = named_dtype(part.dtype)
        name = "weight"
        if part.role != CODES:
            by_row = self.coded.algo == "FP8_PER_CHANNEL_PER_TOKEN"
            name = "per_channel_scale" if by_row else "weights_scaling_factor"
        elif self.packing.startswith("int4rows"):
            kind = named_dtype("int8")
        experts, (rows, *rest) = self.tensor.experts, part.shape
        says = (experts, rows // experts, *rest) if experts else part.shape
        return self._file(name, part.shape, kind, says)

    def _singles(self, role: str, name: str) -> None:
        """One scale, or one for each expert."""
        boxes = self.tensor.boxes
        size = len(boxes) // max(self.tensor.experts, 1)
        found = [self.weights.common(b.canonical, role) for b in boxes[::size]]
        values = np.array([x for x in found if x is not None], np.float32)
        if not len(values):
            return
        shape = (len(values), 1) if self.tensor.experts and role == SCALE else (len(values),)
        self._give(name, values.reshape(shape), _F32)

    def _inputs(self) -> None:
        value = self.weights.input_scale(self.tensor.boxes[0].canonical)
        if value is not None:
            self._give("activation_scaling_factor", value.reshape(1), _F32)

    def _columns(self) -> None:
        """What inputs are multiplied by; ones where a norm does it and engines ask for factors."""
        algo = self.coded.algo
        asks = algo in ("W4A16_AWQ", "W4A8_AWQ") and self.weights.is_smoothed
        if not asks and algo != "W8A8_SQ_PER_CHANNEL":
            return
        rows, size = [], len(self.tensor.boxes) // max(self.tensor.experts, 1)
        for i in range(0, len(self.tensor.boxes), size):
            boxes = self.tensor.boxes[i : i + size]
            left, right = boxes[0].lo[1], boxes[0].hi[1]
            all_of = [self.weights.columns(b.canonical) for b in boxes]
            first = np.ones(right, np.float32) if all_of[0] is None else all_of[0]
            for box, other in zip(boxes, all_of, strict=True):
                if not np.array_equal(first, np.ones_like(first) if other is None else other):
                    raise MappingError(
                        f"{boxes[0].canonical} and {box.canonical} are fed by the same inputs, and "
                        "multiply them by other factors first",
                        tensor=self.weights.held[box.canonical].coded.name,
                        hint="a legacy checkpoint has one vector for both: quantize them together",
                    )
            rows.append(first[left:right])
        values = np.stack(rows) if self.tensor.experts else rows[0]
        self._give("prequant_scaling_factor", values, self.dtype)

    def _give(self, name: str, values: NDArray[np.float32], dtype: DType) -> None:
        tensor = self._file(name, values.shape, dtype, values.shape)
        stored = np.empty(values.shape, dtype.view)
        if cast(np.ascontiguousarray(values, np.float32), _F32, stored, dtype):
            raise FormatError(
                f"factors of up to {np.abs(values).max():g} are too large for {dtype}",
                tensor=tensor.name,
                hint="--dtype bfloat16 holds them",
            )
        self.given.append((tensor, stored))

    def _file(
        self, name: str, shape: tuple[int, ...], dtype: DType, says: tuple[int, ...]
    ) -> GlobalTensor:
        full = f"{self.tensor.module}.{name}"
        stored = f"rank{self.tensor.rank}/{full}"
        tensor = GlobalTensor(name=stored, shape=shape, dtype=dtype)
        self.filed.append(Filed(rank=self.tensor.rank, name=full, shape=says, tensor=tensor))
        return tensor


_SECOND = "weights_scaling_factor_2"
