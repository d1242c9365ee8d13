"""The tensors of a quantized linear module in the file of a rank, and what fills them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import FormatError, MappingError
from megtool.export.quantized_module import QuantizedModule
from megtool.export.repack import WeightSlice, plan_repack
from megtool.export.trtllm_legacy.quantized_weights import ALGOS, QuantizedWeights
from megtool.export.trtllm_legacy.rank_files import RankFileTensor
from megtool.export.trtllm_legacy.ranks import RankBox, RankTensor
from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import cast
from megtool.transport.computed_tensors import TensorFeed
from megtool.transport.constant_feed import ConstantFeed

_F32 = named_dtype("float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModule:
    """The tensors of one module on one rank: `filed` all of them, `given` those whose values are
    known beforehand, and `feeds` what fills the others."""

    file_tensors: tuple[RankFileTensor, ...]
    constants: tuple[tuple[GlobalTensor, NDArray[np.generic]], ...]
    feeds: tuple[TensorFeed, ...]


def plan_quantized_module(
    tensor: RankTensor, module: QuantizedModule, weights: QuantizedWeights, dtype: DType
) -> PlannedModule:
    """What `tensor`, whose weights have the format of `coded`, becomes.

    Raises:
        FormatError: scales that the format needs are missing, or float16 is too narrow for some.
        MappingError: weights that have their inputs in common have other factors for them.
    """
    return _ModulePlanner(tensor, module, weights, dtype).plan()


class _ModulePlanner:
    def __init__(
        self, tensor: RankTensor, module: QuantizedModule, weights: QuantizedWeights, dtype: DType
    ) -> None:
        self.tensor, self.module, self.weights, self.dtype = tensor, module, weights, dtype
        self.file_tensors: list[RankFileTensor] = []
        self.constants: list[tuple[GlobalTensor, NDArray[np.generic]]] = []
        self.packing = ALGOS[module.algo].format(group=module.group_size)

    def plan(self) -> PlannedModule:
        """All of it."""
        rows, width = self.tensor.shape
        parts: list[tuple[PackedPart, GlobalTensor]] = []
        for part in layout(self.packing, (rows, width)):
            # Single scales are given: an expert's is one element of a tensor of all experts'.
            single = GlobalTensor(name="", shape=(), dtype=_F32)
            parts.append((part, self._add_computed(part) if part.shape else single))
        feeds: list[TensorFeed] = []
        for boxes, scales in self._split_by_scale():
            slices = [s for b in boxes for s in self._slices(b)]
            planned = plan_repack(slices, self.packing, parts, scales=scales or None)
            feeds += [f for f in planned if not isinstance(f, ConstantFeed)]
        for role, name in ((SCALE, "weights_scaling_factor"), (SCALE_2, _SECOND)):
            self._add_single_scales(role, name)
        self._add_input_scale()
        self._add_smoothing_scale()
        return PlannedModule(
            file_tensors=tuple(self.file_tensors),
            constants=tuple(self.constants),
            feeds=tuple(feeds),
        )

    def _split_by_scale(self) -> Iterator[tuple[list[RankBox], dict[str, NDArray[np.float32]]]]:
        """Boxes that have their single scales in common, one expert's or all, with these."""
        boxes, count = list(self.tensor.boxes), max(self.tensor.experts, 1)
        size = len(boxes) // count
        for i in range(0, len(boxes), size):
            some = boxes[i : i + size]
            scales = {}
            for role in (SCALE, SCALE_2):
                for box in some:  # all are asked: it is noted which are not their own
                    scale = self.weights.shared_scale(box.canonical, role)
                    if scale is not None and (role == SCALE or self.module.algo == "NVFP4"):
                        scales[role] = scale
            yield some, scales

    def _slices(self, box: RankBox) -> Iterator[WeightSlice]:
        """A box of a weight as boxes of its module."""
        part = self.weights.rows[box.canonical]
        columns = box.lo[1], box.hi[1]
        down, along = box.offset
        for first, end, before in part.runs(box.lo[0], box.hi[0]):
            yield WeightSlice(part.module, (first, end), columns, (down + before, along))

    def _add_computed(self, part: PackedPart) -> GlobalTensor:
        """Codes, or scales of rows or groups."""
        kind = named_dtype(part.dtype)
        name = "weight"
        if part.role != CODES:
            by_row = self.module.algo == "FP8_PER_CHANNEL_PER_TOKEN"
            name = "per_channel_scale" if by_row else "weights_scaling_factor"
        elif self.packing.startswith("int4rows"):
            kind = named_dtype("int8")
        experts, (rows, *inner) = self.tensor.experts, part.shape
        file_shape = (experts, rows // experts, *inner) if experts else part.shape
        return self._add_file_tensor(name, part.shape, kind, file_shape)

    def _add_single_scales(self, role: str, name: str) -> None:
        """One scale, or one for each expert."""
        boxes = self.tensor.boxes
        size = len(boxes) // max(self.tensor.experts, 1)
        scales = [self.weights.shared_scale(b.canonical, role) for b in boxes[::size]]
        values = np.array([x for x in scales if x is not None], np.float32)
        if not len(values):
            return
        shape = (len(values), 1) if self.tensor.experts and role == SCALE else (len(values),)
        self._add_constant(name, values.reshape(shape), _F32)

    def _add_input_scale(self) -> None:
        value = self.weights.input_scale(self.tensor.boxes[0].canonical)
        if value is not None:
            self._add_constant("activation_scaling_factor", value.reshape(1), _F32)

    def _add_smoothing_scale(self) -> None:
        """What inputs are multiplied by; ones where a norm does it and engines ask for factors."""
        algo = self.module.algo
        needs_factors = algo in ("W4A16_AWQ", "W4A8_AWQ") and self.weights.is_smoothed
        if not needs_factors and algo != "W8A8_SQ_PER_CHANNEL":
            return
        rows, size = [], len(self.tensor.boxes) // max(self.tensor.experts, 1)
        for i in range(0, len(self.tensor.boxes), size):
            boxes = self.tensor.boxes[i : i + size]
            begin, end = boxes[0].lo[1], boxes[0].hi[1]
            all_of = [self.weights.smoothing_scale(b.canonical) for b in boxes]
            first = np.ones(end, np.float32) if all_of[0] is None else all_of[0]
            for box, factors in zip(boxes, all_of, strict=True):
                if not np.array_equal(first, np.ones_like(first) if factors is None else factors):
                    raise MappingError(
                        f"{boxes[0].canonical} and {box.canonical} are fed by the same inputs, and "
                        "multiply them by other factors first",
                        tensor=self.weights.rows[box.canonical].module.name,
                        hint="a legacy checkpoint has one vector for both: quantize them together",
                    )
            rows.append(first[begin:end])
        values = np.stack(rows) if self.tensor.experts else rows[0]
        self._add_constant("prequant_scaling_factor", values, self.dtype)

    def _add_constant(self, name: str, values: NDArray[np.float32], dtype: DType) -> None:
        tensor = self._add_file_tensor(name, values.shape, dtype, values.shape)
        stored = np.empty(values.shape, dtype.view)
        if cast(np.ascontiguousarray(values, np.float32), _F32, stored, dtype):
            raise FormatError(
                f"factors of up to {np.abs(values).max():g} are too large for {dtype}",
                tensor=tensor.name,
                hint="--dtype bfloat16 holds them",
            )
        self.constants.append((tensor, stored))

    def _add_file_tensor(
        self, name: str, shape: tuple[int, ...], dtype: DType, file_shape: tuple[int, ...]
    ) -> GlobalTensor:
        full = f"{self.tensor.module}.{name}"
        stored = f"rank{self.tensor.rank}/{full}"
        tensor = GlobalTensor(name=stored, shape=shape, dtype=dtype)
        self.file_tensors.append(
            RankFileTensor(rank=self.tensor.rank, name=full, shape=file_shape, tensor=tensor)
        )
        return tensor


_SECOND = "weights_scaling_factor_2"
