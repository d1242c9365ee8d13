"""The key of config.json that names an activation of `transformers.activations.ACT2FN`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megtool.convert.config.keys import Setting, unsupported
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

ACTIVATIONS = (
    *("silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    *("gelu_accurate", "gelu_python_tanh", "quick_gelu", "relu", "relu2"),
)
"""Names of `ACT2FN` whose formulas are known."""
_KNOWN = ", ".join(map(repr, ACTIVATIONS))


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
        value = self.default if value is None else value
        if value not in ACTIVATIONS:
            raise unsupported(self.key, value, f"but the family knows {_KNOWN}")
        into["activation"] = value
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The field's value, if transformers knows it."""
        if (value := config.mlp.activation) not in ACTIVATIONS:
            raise MappingError(
                f"activation is {value!r}, but the family knows {_KNOWN}",
                error_id="unsupported-model",
            )
        into[self.key] = value
