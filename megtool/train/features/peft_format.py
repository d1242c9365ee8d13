"""The adapters of a run in PEFT's format, which `PeftModel.from_pretrained` loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from megtool.adapters.peft_writer import PeftAdapter, PeftNames, make_peft_adapter
from megtool.convert.families.family import Family
from megtool.model.stacks.lora import LoraSettings
from megtool.spec.model_config import ModelConfig
from megtool.train.features.adapter_tensors import A, B, canonical_modules
from megtool.transport.weight_update import WeightUpdate

_EXPERTS = ".experts.experts."


class PeftFormat:
    """The places of a run's adapters in PEFT's format.

    Raises:
        MappingError: the family has no place for a module, or does not store it as a matrix.
    """

    def __init__(self, config: ModelConfig, family: Family, linears: Iterable[str]) -> None:
        self._config = config.with_fields(num_mtp_layers=0)
        self._names = PeftNames(self._config, family)
        self._linears = list(linears)
        for linear in self._linears:
            for weight, _ in self._weights(linear):
                self._names.slice_of(weight)

    def convert(
        self, matrices: Mapping[str, Tensor], settings: LoraSettings, base: str
    ) -> PeftAdapter:
        """PEFT's tensors and configuration from canonical matrices
        (`megtool.train.features.adapter_tensors`); `base` is the path of the base model."""
        updates = {}
        for linear in self._linears:
            for weight, expert in self._weights(linear):
                down, up = matrices[f"{linear}.{A}"], self._up(matrices, linear, weight, expert)
                if expert is not None:
                    down = down[expert]
                updates[weight] = WeightUpdate(down=down, up=up, scale=settings.scale)
        return make_peft_adapter(updates, self._names, base=base, dropout=settings.dropout)

    def _weights(self, linear: str) -> Iterator[tuple[str, int | None]]:
        """The canonical weights of a linear layer, and of which expert each is."""
        if _EXPERTS not in linear:
            yield from (
                (f"{module}.weight", None) for module in canonical_modules(linear, self._config)
            )
            return
        layer = linear.split(".")[2]
        for expert in range(self._config.moe.num_experts):
            for part in self._parts(linear):
                yield f"layers.{layer}.mlp.experts.{expert}.{part}.weight", expert

    def _parts(self, linear: str) -> tuple[str, ...]:
        """The weights of an expert that are fused in a layer, in the order of their rows."""
        if linear.endswith("fc2"):
            return ("down",)
        return ("gate", "up") if self._config.mlp.gated else ("up",)

    def _up(
        self, matrices: Mapping[str, Tensor], linear: str, weight: str, expert: int | None
    ) -> Tensor:
        if expert is None:
            return matrices[f"{weight.removesuffix('.weight')}.{B}"]
        b_EOR, parts = matrices[f"{linear}.{B}"], self._parts(linear)
        rows = b_EOR.shape[1] // len(parts)
        return b_EOR[expert].narrow(0, rows * parts.index(weight.split(".")[-2]), rows)
