"""Segments of elements that are updated together, and the pieces of state that are saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from megtool.optim.param_groups import ParamGroup, ParamInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements `start` to `stop` of a flattened local parameter, from element `offset` of a
    segment."""

    param_info: ParamInfo
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """The segment's element after the last one."""
        return self.offset + self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """Elements `start` to `stop` of one state of a flattened local parameter.

    `state` is "main" (of an fp32 parameter: itself), "exp_avg", "exp_avg_sq" or "momentum_buffer".
    `tensor` is 1-D: the live storage in fp32 or the moments' dtype, or a copy if the main parameter
    is a bf16 parameter and its remainder.
    """

    state: str
    parameter: str
    start: int
    stop: int
    tensor: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class Segment:
    """A 1-D range of elements of one group, which this process updates.

    The fp32 main parameter is `main`, or, if that is None, `high` (the bf16 parameter itself) with
    `low` (int16, the other half of the bits: see `split_float32`). `grad` (fp32, as long) is set
    by `Optimizer.reduce_gradients`. `spans` are the positions of parameters; between them is
    padding, whose gradient is zero. `replicated`: every replica has and updates the same elements,
    so that sums over processes count them on one replica only.
    """

    group: ParamGroup
    spans: tuple[Span, ...]
    main: Tensor | None = None
    high: Tensor | None = None
    low: Tensor | None = None
    grad: Tensor | None = None
    replicated: bool = False
    states: dict[str, Tensor] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        stored = self.high if self.main is None else self.main
        return 0 if stored is None else stored.numel()

    @property
    def device(self) -> torch.device:
        """The device of the main parameter."""
        stored = self.high if self.main is None else self.main
        return torch.device("cpu") if stored is None else stored.device

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """`high` and `low` of a segment with remainders."""
        if self.high is None or self.low is None:
            raise RuntimeError("a segment without main parameters, and without remainders")
        return self.high, self.low

    def main_parts(self) -> list[tuple[int, Tensor]]:
        """The main parameter, in parts with their first element; none with remainders."""
        return [] if self.main is None else [(0, self.main)]

    def read_main(self, start: int, stop: int) -> Tensor:
        """fp32 values of the main parameter: a view, or a copy with remainders."""
        if self.main is not None:
            return self.main[start:stop]
        high, low = self.halves
        return join_float32(high[start:stop], low[start:stop])

    def write_main(self, start: int, stop: int, values: Tensor) -> None:
        """Set the main parameter (and with remainders the parameter) to fp32 values."""
        if self.main is not None:
            self.main[start:stop].copy_(values)
            return
        high, low = self.halves
        split_float32(values, high=high[start:stop], low=low[start:stop])


def copy_parts(flat: Tensor, parts: list[Tensor]) -> None:
    """Copy a 1-D tensor into several consecutive parts."""
    ends = list(accumulate(p.numel() for p in parts))
    torch._foreach_copy_(
        parts, [flat[end - p.numel() : end] for p, end in zip(parts, ends, strict=True)]
    )


_SIGN = -(2**31)
_NAN = 0x7FC00000


def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 values of bf16 `high` and int16 `low`."""
    return high.float().view(torch.int32).add_(low).view(torch.float32)


def split_float32(values: Tensor, *, high: Tensor, low: Tensor) -> None:
    """Write fp32 `values` into bf16 `high` and int16 `low`, of the same shape.

    With u the bits of the fp32 value, `high` is the upper half of u + 0x8000 (rounded to nearest,
    ties away from zero; torch's own cast rounds ties to even, which 16 bits cannot undo) and `low`
    is the lower half of u as a signed number, so that u = (high << 16) + low. Transformer Engine's
    FusedAdam does the same for `store_param_remainders`. `join_float32` restores the same bits, and
    of a NaN a NaN of the same sign.
    """
    values = values.contiguous()
    # A search for NaN takes longer than a sum, and would synchronize a GPU.
    if values.device.type != "cpu" or not values.sum().isfinite():
        bits = values.view(torch.int32)
        # The halves of a NaN can be finite numbers, unless only its first mantissa bit is set.
        values = torch.where(values.isnan(), bits & _SIGN | _NAN, bits).view(torch.float32)
    halves = values.view(torch.int16).view(*values.shape, 2)  # lower first, as bytes are in memory
    low.copy_(halves[..., 0])
    carried = low.bitwise_right_shift(15)  # -1 where the parameter is rounded up
    torch.sub(halves[..., 1], carried, out=high.view(torch.int16))
