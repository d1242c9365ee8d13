"""Linear layers of experts by Transformer Engine's `GroupedLinear`.

Held against the sources of Transformer Engine 2.20 (`pytorch/module/grouped_linear.py`,
`fp8_padding.py`). It has one weight for each expert, which here are the rows of one stacked
parameter, and takes counts as numbers of the host; experts without rows may be among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megtool.kernels.experts.grouped_gemm import add_expert_bias
from megtool.kernels.transformer_engine.library import load
from megtool.kernels.transformer_engine.linear import TeModule
from megtool.kernels.transformer_engine.weights import call


class TeGroupedLinear(TeModule):
    """`x W[e]^T + b[e]` for rows sorted by expert; it stands for `grouped_gemm.grouped_linear`.

    No module of torch's, so that the layer that has it keeps its parameters and their names. In FP8
    each expert's rows are filled up to `num_rows`, which its products need.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
    """

    def __init__(self, weight_EOI: nn.Parameter, num_rows: int = 1) -> None:
        self.num_gemms, out, inner = weight_EOI.shape
        te = load().pytorch
        # On `meta` nothing is allocated, and nothing initialized, for what is put in its place.
        self.module = te.GroupedLinear(
            self.num_gemms,
            inner,
            out,
            bias=False,
            params_dtype=weight_EOI.dtype,
            device="meta",
        )
        self.weight, self.num_rows = weight_EOI, num_rows
        self._names = tuple(f"weight{i}" for i in range(self.num_gemms))
        self._fill = te.Fp8Padding(self.num_gemms, num_rows)
        self._take = te.Fp8Unpadding(self.num_gemms, num_rows)

    @property
    def weights(self) -> Sequence[Tensor]:
        """Each expert's weight."""
        return self.weight.detach().unbind(0)

    def __call__(
        self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, bias_EO: Tensor | None = None
    ) -> Tensor:
        """The output `[R, O]` in x's dtype for `counts_E` rows of each expert, one after the other;
        the host waits for the counts."""
        counts, rows = counts_E.tolist(), x_RI.shape[0]
        if not rows:  # the module is called all the same, since ranks share what it measures
            x_RI, counts[0] = F.pad(x_RI, (0, 0, 0, self.num_rows)), self.num_rows
        filled_PI, sizes = x_RI, counts
        if self.num_rows > 1:
            filled_PI, sizes = self._fill(x_RI, counts)
        y_RO = call(self.module, {self._names: weight_EOI}, filled_PI, sizes)
        if sizes != counts:
            y_RO = self._take(y_RO, counts)
        y_RO = y_RO[:rows]
        return y_RO if bias_EO is None else add_expert_bias(y_RO, counts_E, bias_EO)
