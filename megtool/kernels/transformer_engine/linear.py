"""FP8 linear layers by Transformer Engine: its modules around parameters that we own.

Held against the sources of Transformer Engine 2.20 (`pytorch/module/linear.py`, `module/base.py`,
`quantization.py`, `distributed.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.kernels.transformer_engine.library import load
from megtool.kernels.transformer_engine.weights import call

_COLUMNS = {"fwd": 3, "bwd": 2}  # tensors of each product

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class TERegion:
    """Where `TeLinear` computes in FP8: by `recipe` (one of `transformer_engine.common.recipe`).

    With delayed scaling magnitudes are shared in `group` when a region ends, and in the backward
    pass of its first module; each module is called once in it.
    """

    recipe: Any
    group: dist.ProcessGroup | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While the block lasts; without gradients, no step of delayed scaling ends with it."""
        autocast = load().pytorch.autocast
        token = _region.set(self)
        try:
            with autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self.group):
                yield
        finally:
            _region.reset(token)

    @contextmanager
    def _reenter(self, phase: AbstractContextManager[Any]) -> Iterator[None]:
        """Around a second computation, which has the scales of the first and ends no step."""
        with phase, torch.no_grad(), self.entered(), torch.enable_grad():
            yield


_region: ContextVar[TERegion | None] = ContextVar("megtool_te_region", default=None)


def contexts_again() -> Contexts:
    """Around a computation and its repetition in the backward pass (`torch.utils.checkpoint`).

    Inside a `TERegion` modules keep the scales that the first one had; elsewhere it is nothing.
    """
    region = _region.get()
    if region is None:
        return nullcontext(), nullcontext()
    distributed = import_module("transformer_engine.pytorch.distributed")
    first, second = distributed.get_activation_recompute_contexts()
    return first, region._reenter(second)


def outside_region() -> AbstractContextManager[Any]:
    """Around a module that is not in FP8, inside a `TERegion` or not."""
    if _region.get() is None:
        return nullcontext()
    out: AbstractContextManager[Any] = load().pytorch.autocast(enabled=False)
    return out


class TeModule(ABC):
    """A module of Transformer Engine around weights that are ours.

    `scale` and `history` are the state of delayed scaling of one product: fp32, used and updated
    in place, of the columns that `number_formats.delayed_scaling` names; `direction` is `fwd` or
    `bwd`.
    """

    module: Any

    @property
    @abstractmethod
    def weights(self) -> Sequence[Tensor]:
        """One for each of its products."""

    def prepare(self) -> None:
        """Make the state of the region's recipe now, and not in the first pass."""
        self.module.init_fp8_metadata(num_gemms=len(self.weights))

    def scale(self, direction: str, gemm: int = 0) -> Tensor:
        """The scales of a product."""
        scale: Tensor = self.module.fp8_meta[f"scaling_{direction}"].scale
        return scale[_columns(direction, gemm)]

    def history(self, direction: str, gemm: int = 0) -> Tensor:
        """A product's largest magnitudes `[length, columns]`."""
        history: Tensor = self.module.fp8_meta[f"scaling_{direction}"].amax_history
        return history[:, _columns(direction, gemm)]


def _columns(direction: str, gemm: int) -> slice:
    """The tensors of a product among those of a module: since Transformer Engine 2.3 products
    follow each other."""
    num = _COLUMNS[direction]
    return slice(gemm * num, (gemm + 1) * num)


class TeLinear(TeModule):
    """`x W^T` by `transformer_engine.pytorch.Linear`, which uses `weight` itself, without a copy.

    No module of torch's, so that a layer that has it keeps its parameters and their names. Rows are
    filled up to what FP8 products need. `num_rows` is what rows and both sides of the weight are
    multiples of.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
        UsageError: a side of the weight is no multiple of `num_rows`.
    """

    def __init__(self, weight_OI: nn.Parameter, num_rows: int) -> None:
        check_sides(tuple(weight_OI.shape), num_rows)
        out, inner = weight_OI.shape
        # On `meta` nothing is allocated, and nothing initialized, for what is put in its place.
        self.module = load().pytorch.Linear(
            inner, out, bias=False, params_dtype=weight_OI.dtype, device="meta"
        )
        self.weight, self.num_rows = weight_OI, num_rows

    @property
    def weights(self) -> Sequence[Tensor]:
        return (self.weight,)

    def __call__(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """`x W^T` for `x` `[..., I]`, in x's type."""
        x_TI, rows = fill_rows(x, self.num_rows)
        y_TO = call(self.module, {("weight",): weight_OI}, x_TI)
        return y_TO[:rows].view(*x.shape[:-1], -1)


def fill_rows(x: Tensor, multiple: int) -> tuple[Tensor, int]:
    """x as a matrix with rows of zeros up to a multiple, and how many rows are its own.

    Zeros add no magnitude, and nothing to gradients of weights.
    """
    x_TI = x.reshape(-1, x.shape[-1])
    rows = x_TI.shape[0]
    if missing := -rows % multiple:
        x_TI = F.pad(x_TI, (0, 0, 0, missing))
    return x_TI, rows


def check_sides(shape_OI: tuple[int, ...], multiple: int, name: str | None = None) -> None:
    """Refuse a weight, of the module `name`, of which Transformer Engine makes no product in FP8.

    Raises:
        UsageError: a side is no multiple of `multiple`.
    """
    if any(side % multiple for side in shape_OI):
        raise UsageError(
            f"a linear layer of {shape_OI[0]} x {shape_OI[1]} by Transformer Engine in FP8, whose "
            f"sides have to be multiples of {multiple}",
            tensor=name,
            hint="without --kernels te: megtool's own FP8 takes any size",
        )
