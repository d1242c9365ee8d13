"""The key of config.json that names an activation of `transformers.activations.ACT2FN`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megtool.convert.config.keys import Setting
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

ACTIVATIONS = (
    *("silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    *("gelu_accurate", "gelu_python_tanh", "quick_gelu", "relu", "relu2"),
)
"""Names of `ACT2FN` whose formulas are known."""


@dataclass(frozen=True, slots=True)
class Activation(Setting):
    """The activation of MLPs, by any name that the class looks up; `default` is that of an absence.

    A family whose class passes the key to other kernels, too, or ignores it, has another setting.
    """

    key: str = "hidden_act"
    default: str = "silu"

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The key's value, if its formula is known."""
        value = stored.get(self.key)
        into["activation"] = self._check(self.key, self.default if value is None else value)
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The field's value, if transformers knows it."""
        into[self.key] = self._check("activation", config.mlp.activation)

    def _check(self, name: str, value: Any) -> Any:
        if value not in ACTIVATIONS:
            raise MappingError(
                f"the configuration says {name}={value!r}, "
                f"but the family knows {', '.join(map(repr, ACTIVATIONS))}",
                error_id="unsupported-model",
            )
        return value
