"""Fake quantization of weights and inputs in torch, fast enough for searches.

Gives the same values as `megtool.number_formats`, in float32 and without packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megtool.quant.fake_quant.fake_quantize import second_scale
from megtool.quant.fake_quant.rounding_torch import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    block_scale,
    e2m1_values,
    plain_scale,
    power_scale,
    to_e2m1,
    to_e4m3,
    to_integers,
)
from megtool.quant.recipes.formats import INPUT_PACKINGS, RecipeFormat, packing_of

_INTEGERS = {"int8": 127.0, "int4rows": 7.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The quantization grid of a weight `[out, in]`.

    `kind` is the first word of the packing. One scale covers `rows` x `columns` elements (0: all of
    that dimension); `has_global_scale`: scales have a per-tensor scale in turn.
    """

    algo: str
    kind: str
    rows: int
    columns: int
    has_global_scale: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, which GPTQ can choose freely."""
        return self.kind in _INTEGERS

    @property
    def chooses_codes(self) -> bool:
        """Whether GPTQ can choose codes: integers, and FP4 numbers."""
        return self.is_integer or "fp4" in self.kind

    @property
    def largest(self) -> float:
        """The largest code."""
        return _INTEGERS.get(self.kind, E2M1_LARGEST if "fp4" in self.kind else E4M3_LARGEST)

    def amax(self, weight_OI: Tensor) -> Tensor:
        """The amax of a weight, in the shape of `WeightQParams.amax`."""
        size = weight_OI.abs()
        if not self.rows and not self.columns:
            return size.amax()
        if not self.columns:
            return size.amax(dim=1)
        if self.rows > 1:  # the last blocks may be cut
            size = pad(size, (0, -size.shape[1] % self.columns, 0, -size.shape[0] % self.rows))
        out, width = size.shape
        size = size.reshape(out, width // self.columns, self.columns).amax(dim=2)
        if self.rows > 1:
            size = size.reshape(out // self.rows, self.rows, -1).amax(dim=1)
        return size

    def broadcast(self, amax: Tensor) -> Tensor:
        """Expand values per group, block, row or tensor to the weight's shape; blocks are whole."""
        if amax.dim() == 0:
            return amax
        if amax.dim() == 1:
            return amax[:, None]
        if self.rows > 1:
            amax = amax.repeat_interleave(self.rows, dim=0)
        return amax.repeat_interleave(self.columns, dim=1)

    def scale(self, amax: Tensor, global_amax: float | None = None) -> Tensor:
        """The scale that weights are divided by, from the amax; 1 for zeros."""
        if self.kind.startswith("mx"):
            return power_scale(amax, self.largest)
        if self.kind == "nvfp4":
            global_scale = float(second_scale(self.algo, global_amax or 0.0))
            return block_scale(amax, global_scale) * global_scale
        return plain_scale(amax, self.largest)

    def fake_quantize(
        self, weight_OI: Tensor, amax: Tensor | None = None, global_amax: float | None = None
    ) -> Tensor:
        """The weight after quantization and dequantization; both amaxes default to its own."""
        amax = self.amax(weight_OI) if amax is None else amax
        if self.has_global_scale and global_amax is None:
            global_amax = float(weight_OI.abs().max())
        scale = self.broadcast(self.scale(amax, global_amax))
        if self.rows > 1:
            scale = scale[: weight_OI.shape[0], : weight_OI.shape[1]]
        values = weight_OI / scale
        if self.is_integer:
            values = self.nearest_codes(values).mul_(scale)
            return self.requantize(values, global_amax)
        if "fp4" in self.kind:
            return to_e2m1(values, half_down=self.kind == "mxfp4").mul_(scale)
        return to_e4m3(values).mul_(scale)

    def encode(self, weight_OI: Tensor, global_amax: float | None) -> tuple[Tensor, Tensor]:
        """The amax of a weight, and the nearest codes under it as `stored_codes` gives them."""
        amax = self.amax(weight_OI)
        scale = self.broadcast(self.scale(amax, global_amax))
        return amax, self.stored_codes(self.nearest_codes(weight_OI / scale))

    def nearest_codes(self, values: Tensor) -> Tensor:
        """The values of the nearest codes, integers or FP4 numbers; overwrites `values`."""
        if not self.is_integer:
            return to_e2m1(values, half_down=self.kind == "mxfp4")
        return to_integers(values, -int(self.largest) - 1, int(self.largest))

    def stored_codes(self, codes: Tensor) -> Tensor:
        """Codes as `WeightQParams.codes` has them, int8: integers, or the bits of FP4 numbers.

        Zeros have no sign.
        """
        if self.is_integer:
            return codes.to(torch.int8)
        # Twice the magnitude is an integer: 0 to 4 in steps of half, then 6, 8 and 12.
        twice = codes.abs().mul_(2).to(torch.int64)
        bits = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.int8)[twice]
        return torch.where(codes < 0, bits + 8, bits)

    def code_values(self, codes: Tensor) -> Tensor:
        """The values of codes as `stored_codes` gives them, float32."""
        if self.is_integer:
            return codes.float()
        return e2m1_values(codes)

    def requantize(self, values: Tensor, global_amax: float | None) -> Tensor:
        """Round dequantized integers to FP8, for formats whose engines multiply in FP8."""
        if not self.has_global_scale or global_amax is None or not self.is_integer:
            return values
        scale = plain_scale(torch.tensor(global_amax), E4M3_LARGEST)
        return to_e4m3(values / scale).mul_(scale)


def make_grid(format: RecipeFormat) -> Grid:
    """The grid of the weights of a format."""
    kind, _, granularity = packing_of(format).partition(":")
    if granularity == "tensor":
        return Grid(algo=format.algo, kind=kind, rows=0, columns=0)
    if granularity == "channel":
        return Grid(algo=format.algo, kind=kind, rows=1, columns=0)
    if "x" in granularity:
        rows, columns = map(int, granularity.split("x"))
        return Grid(algo=format.algo, kind=kind, rows=rows, columns=columns)
    has_global_scale = kind == "nvfp4" or format.algo == "W4A8_AWQ"
    return Grid(
        algo=format.algo,
        kind=kind,
        rows=1,
        columns=int(granularity),
        has_global_scale=has_global_scale,
    )


def max_input_code(format: RecipeFormat) -> float:
    """The largest code of inputs with one calibrated scale (0: they have no such scale)."""
    kind = INPUT_PACKINGS.get(format.algo, "")
    if not format.number.calibrates:
        return 0.0
    return {"fp8:tensor": E4M3_LARGEST, "int8:tensor": 127.0}.get(kind, E4M3_LARGEST * E2M1_LARGEST)


def fake_quantize_inputs(x_TI: Tensor, format: RecipeFormat, amax: float = 0.0) -> Tensor:
    """Fake-quantize smoothed inputs as an engine does, with `amax` if their scale is static."""
    kind, _, granularity = INPUT_PACKINGS.get(format.algo, "none:").partition(":")
    if kind == "none":
        return x_TI
    if kind == "nvfp4":
        return Grid(
            algo=format.algo, kind=kind, rows=1, columns=16, has_global_scale=True
        ).fake_quantize(x_TI, None, amax or None)
    if granularity not in ("tensor", "token"):
        return Grid(algo=format.algo, kind=kind, rows=1, columns=int(granularity)).fake_quantize(
            x_TI
        )
    if granularity == "tensor" and amax:
        amax_ = torch.tensor(amax)
        grid = Grid(algo=format.algo, kind=kind, rows=0, columns=0)
        return grid.fake_quantize(x_TI, amax_)
    return Grid(
        algo=format.algo, kind=kind, rows=0 if granularity == "tensor" else 1, columns=0
    ).fake_quantize(x_TI)
