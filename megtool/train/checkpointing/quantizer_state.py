"""ModelOpt's quantizers as a run saves them: small whole tensors, objects, and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megtool.convert.dialects import TargetView
from megtool.options.layout import ParallelConfig
from megtool.quant.qparams import QParams
from megtool.quant.recipes.match import Decision
from megtool.quantize.layout.megatron_target import (
    QuantizedMegatron,
    add_quantizers,
    list_buffer_values,
)
from megtool.reshard.writers.target_spec import AddedState


@dataclass(slots=True, kw_only=True)
class QuantizerState:
    """The quantizers of all modules, whose amaxes the optimizer of the model's weights keeps.

    `add` plans them for the modules of a target, and `values` are those of the tensors then; they
    change with `update`.
    """

    decisions: Sequence[Decision]
    qparams: QParams
    _planned: QuantizedMegatron = field(default_factory=QuantizedMegatron)
    _values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, side: TargetView, parallel: ParallelConfig) -> AddedState:
        """Plan what a checkpoint stores of them; see `make_target`.

        Raises:
            MappingError, LayoutError: see `add_quantizers`.
        """
        self._planned = QuantizedMegatron(is_fixed=True)
        return add_quantizers(self._planned, self.decisions, self.qparams, side, parallel)

    def values(self) -> dict[str, Tensor]:
        """The planned tensors by name, on the CPU.

        Raises:
            MappingError: the amaxes of a weight are not known.
        """
        if not self._values:
            self._values = self._read_values(self.qparams)
        return self._values

    def update(self, qparams: QParams) -> None:
        """Give the tensors of `values` those of other parameters of the same modules."""
        for name, tensor in self._read_values(qparams).items():
            self._values[name].copy_(tensor)

    def _read_values(self, qparams: QParams) -> dict[str, Tensor]:
        return {
            t.name: torch.from_numpy(bits.copy()).view(getattr(torch, t.dtype.name))
            for t, bits in list_buffer_values(qparams, self._planned)
        }
