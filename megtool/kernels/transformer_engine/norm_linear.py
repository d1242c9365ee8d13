"""A norm and the linear layers behind it, by Transformer Engine's modules for both.

`LayerNormLinear` and `LayerNormMLP`, held against the sources of Transformer Engine 2.20
(`pytorch/module/layernorm_linear.py`, `layernorm_mlp.py`). In FP8 the norm and the activation write
the operands of the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megtool.kernels.transformer_engine.library import GATED, PLAIN, load
from megtool.kernels.transformer_engine.linear import TeModule, check_sides, fill_rows
from megtool.kernels.transformer_engine.weights import call


@dataclass(frozen=True, slots=True, kw_only=True)
class TeNorm:
    """A norm with a weight, and with a bias if it is a layer norm; `zero_centered` weights stand
    for 1 + w."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    eps: float
    zero_centered: bool

    @property
    def options(self) -> dict[str, Any]:
        """Transformer Engine's arguments."""
        kind = "RMSNorm" if self.bias is None else "LayerNorm"
        return {"normalization": kind, "eps": self.eps, "zero_centered_gamma": self.zero_centered}


class TeNormLinear(TeModule):
    """`norm(x) W^T + b` by `transformer_engine.pytorch.LayerNormLinear`.

    Rows and sides are as in `TeLinear`.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
        UsageError: a side of the weight is no multiple of `num_rows`.
    """

    def __init__(
        self,
        norm: TeNorm,
        weight_OI: nn.Parameter,
        bias_O: nn.Parameter | None = None,
        *,
        num_rows: int = 1,
    ) -> None:
        check_sides(tuple(weight_OI.shape), num_rows)
        out, inner = weight_OI.shape
        self.module = load().pytorch.LayerNormLinear(
            inner,
            out,
            bias=bias_O is not None,
            params_dtype=weight_OI.dtype,
            device="meta",
            **norm.options,
        )
        _set(self.module, norm, {"bias": bias_O})
        self.weight, self.num_rows = weight_OI, num_rows

    @property
    def weights(self) -> Sequence[Tensor]:
        return (self.weight,)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The output for rows before the norm."""
        filled, rows = fill_rows(x_TI, self.num_rows)
        y_TO = call(self.module, {("weight",): self.weight}, filled)
        return y_TO[:rows].view(*x_TI.shape[:-1], -1)


class TeNormMlp(TeModule):
    """An MLP behind its norm by `transformer_engine.pytorch.LayerNormMLP`, without its residual.

    `fc1` and `fc2` are weight and bias of both projections; both have a bias, or none. `activation`
    is one of `transformer_engine.KINDS`; gated, the first half of `fc1`'s rows goes through it.
    Rows and sides are as in `TeLinear`.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
        UsageError: a side of a weight is no multiple of `num_rows`.
    """

    def __init__(
        self,
        norm: TeNorm,
        fc1: tuple[nn.Parameter, nn.Parameter | None],
        fc2: tuple[nn.Parameter, nn.Parameter | None],
        *,
        activation: str,
        is_gated: bool,
        num_rows: int = 1,
    ) -> None:
        (fc1_weight, fc1_bias), (fc2_weight, fc2_bias) = fc1, fc2
        for weight in (fc1_weight, fc2_weight):
            check_sides(tuple(weight.shape), num_rows)
        hidden, ffn = fc2_weight.shape
        self.module = load().pytorch.LayerNormMLP(
            hidden,
            ffn,
            bias=fc1_bias is not None,
            activation=(GATED if is_gated else PLAIN)[activation],
            params_dtype=fc1_weight.dtype,
            device="meta",
            **norm.options,
        )
        _set(self.module, norm, {"fc1_bias": fc1_bias, "fc2_bias": fc2_bias})
        self._weights, self.num_rows = (fc1_weight, fc2_weight), num_rows

    @property
    def weights(self) -> Sequence[Tensor]:
        """Those of both projections."""
        return self._weights

    def __call__(self, x_TH: Tensor) -> Tensor:
        """The MLP's output for rows before the norm."""
        filled, rows = fill_rows(x_TH, self.num_rows)
        fc1, fc2 = self._weights
        y_TH = call(self.module, {("fc1_weight",): fc1, ("fc2_weight",): fc2}, filled)
        return y_TH[:rows].view(x_TH.shape)


def _set(module: Any, norm: TeNorm, biases: dict[str, nn.Parameter | None]) -> None:
    """Have a module use these parameters, which it does not own."""
    given = {"layer_norm_weight": norm.weight, "layer_norm_bias": norm.bias, **biases}
    for name, parameter in given.items():
        if parameter is not None:
            setattr(module, name, parameter)
