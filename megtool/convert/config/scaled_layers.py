"""Layers that grow with their number (OpenELM): heads and MLP widths by layer in config.json.

Lists give the heads of queries, and of keys and values, of every layer, and the factor by which its
MLP is wider than the model. Megatron has no args for that: where its args are written, they get the
sizes of `ModelConfig.layer_sizes` under that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Setting, num_layers
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

SIZES = "layer_sizes"
_FIELDS = ("num_heads", "num_kv_heads", "ffn_hidden_size")
_DIVISOR = 256


@dataclass(frozen=True, slots=True)
class ScaledLayers(Setting):
    """Heads and MLP widths of every layer; it comes after the number of layers and the hidden size.

    The keys are kept verbatim in `extra`. One factor stands for all layers; two are those of the
    first and the last, with the others evenly between them.
    """

    names_keys: ClassVar[tuple[str, ...]] = ("heads", "kv_heads", "factors", "divisor")

    heads: str = "num_query_heads"
    kv_heads: str = "num_kv_heads"
    factors: str = "ffn_multipliers"
    divisor: str = "ffn_dim_divisor"

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The sizes by layer, and the largest of each; no key counts as understood."""
        sizes = self._sizes(stored, num_layers(into), into["hidden_size"])
        into[SIZES] = sizes
        into |= {name: max(numbers) for name, numbers in sizes.items()}
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The lists, unless what was kept says the same."""
        layers = range(config.num_layers)
        want = {name: tuple(config.at_layer(n).get(name) for n in layers) for name in _FIELDS}
        hidden, extra = config.hidden_size, config.extra
        keys = (self.heads, self.kv_heads, self.factors)
        if all(k in extra for k in keys) and self._sizes(extra, len(layers), hidden) == want:
            return
        divisor = extra.get(self.divisor) or _DIVISOR
        factors = [width / hidden for width in want["ffn_hidden_size"]]
        if tuple(_width(f, hidden, divisor) for f in factors) != want["ffn_hidden_size"]:
            divisor = 1
        into |= {
            self.heads: list(want["num_heads"]),
            self.kv_heads: list(want["num_kv_heads"]),
            self.factors: factors,
            self.divisor: divisor,
        }

    def _sizes(
        self, stored: Mapping[str, Any], layers: int, hidden: int
    ) -> dict[str, tuple[int, ...]]:
        divisor = stored.get(self.divisor, _DIVISOR)
        if not _is_size(divisor):
            raise MappingError(f"{self.divisor} is {divisor!r}", hint="a positive integer")
        factors = self._factors(stored.get(self.factors), layers)
        return {
            "num_heads": self._numbers(self.heads, stored, layers),
            "num_kv_heads": self._numbers(self.kv_heads, stored, layers),
            "ffn_hidden_size": tuple(_width(f, hidden, divisor) for f in factors),
        }

    def _numbers(self, key: str, stored: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        listed = stored.get(key)
        is_list = isinstance(listed, list | tuple) and len(listed) == layers
        if not is_list or not all(map(_is_size, listed or ())):
            raise MappingError(
                f"{key} is {str(listed)[:80]}", hint=f"one number for each of {layers} layers"
            )
        return tuple(listed or ())

    def _factors(self, listed: Any, layers: int) -> Sequence[float]:
        if _is_factor(listed):
            return [listed] * layers
        if isinstance(listed, list | tuple) and all(map(_is_factor, listed)):
            if len(listed) == layers:
                return listed
            if len(listed) == 2:
                first, last = listed
                steps = max(layers - 1, 1)
                return [round(first + (last - first) * n / steps, 2) for n in range(layers)]
        raise MappingError(
            f"{self.factors} is {str(listed)[:80]}",
            hint=f"a positive number, two, or one for each of {layers} layers",
        )


def _width(factor: float, hidden: int, divisor: int) -> int:
    """The multiple of the divisor that is nearest, and not less than 0.9 of the product."""
    product = factor * hidden
    width = max(divisor, int(product + divisor / 2) // divisor * divisor)
    return width + divisor if width < 0.9 * product else width


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 10**6


def scaled_args(config: ModelConfig) -> dict[str, Any]:
    """An arg with the sizes by layer."""
    return {SIZES: {name: list(sizes) for name, sizes in (config.layer_sizes or {}).items()}}


def scaled_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that the arg of `scaled_args` says."""
    sizes = {name: tuple(numbers) for name, numbers in args[SIZES].items()}
    return {SIZES: sizes} | {name: max(numbers) for name, numbers in sizes.items()}
