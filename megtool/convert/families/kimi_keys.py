"""Declarative config keys of Kimi Linear: which layers have Kimi delta attention, and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.hybrid import kinds_of
from megtool.convert.config.keys import Setting, num_layers
from megtool.convert.config.layer_kinds import LayerKinds
from megtool.errors import MappingError
from megtool.spec.layer_symbols import KIMI_DELTA
from megtool.spec.model_config import ModelConfig

_TYPES, _NESTED = "layer_types", "linear_attn_config"
_LINEAR, _FULL = "linear_attention", "full_attention"
_LISTS = (("kda_layers", _LINEAR), ("full_attn_layers", _FULL))
_SIZES = (
    ("linear_num_heads", "num_heads", 32),
    ("linear_head_dim", "head_dim", 128),
    ("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
)
_FIELDS = (
    ("linear_num_key_heads", "linear_num_value_heads"),
    ("linear_key_head_dim", "linear_value_head_dim"),
    ("linear_conv_kernel",),
)
_EVERY = 4


@dataclass(frozen=True, slots=True)
class KimiDeltaLayers(Setting):
    """The mixer of every layer and the sizes of Kimi delta attention, in both forms of config.json.

    Published files have `linear_attn_config`, with numbers of layers that count from 1, and
    transformers `layer_types` and keys of its own; as there, the former says the sizes and the
    latter the layers where both are. The keys are kept verbatim in `extra`. Both forms are written:
    engines read the published one. Source: transformers 5.23,
    `models/kimi_linear/configuration_kimi_linear.py`.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (
        _TYPES,
        _NESTED,
        *(key for key, _, _ in _SIZES),
    )

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Kinds of layers, and the sizes; no key counts as understood."""
        layers = num_layers(into)
        _KINDS.read({_TYPES: self._types(stored, layers)}, into)
        for value, fields in zip(self._sizes(stored), _FIELDS, strict=True):
            into |= dict.fromkeys(fields, value)
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Both forms, unless what was kept says the same."""
        types = [_LINEAR if KIMI_DELTA in kind else _FULL for kind in kinds_of(config)]
        sizes = tuple(config.get(names[0]) for names in _FIELDS)
        check: dict[str, Any] = {}
        _KINDS.write(config, check)
        extra = config.extra
        is_kept = {_TYPES, _NESTED} & extra.keys()
        if is_kept and self._types(extra, len(types)) == types and self._sizes(extra) == sizes:
            return
        nested = dict(extra.get(_NESTED) or {})
        for (key, inner, _), value in zip(_SIZES, sizes, strict=True):
            into[key] = nested[inner] = value
        for name, kind in _LISTS:
            nested[name] = [n for n, t in enumerate(types, 1) if t == kind]
        into |= {_TYPES: types, _NESTED: nested}

    def _types(self, stored: Mapping[str, Any], layers: int) -> list[str]:
        """What the mixer of every layer is called."""
        if stored.get(_TYPES) is not None:
            listed: list[str] = stored[_TYPES]
            return listed
        nested = _nested(stored)
        if not all(name in nested for name, _ in _LISTS):
            return [_LINEAR if not i or i % _EVERY else _FULL for i in range(layers)]
        numbers = [nested[name] for name, _ in _LISTS]
        if not all(isinstance(n, list | tuple) for n in numbers) or sorted(
            (n for listed in numbers for n in listed), key=str
        ) != sorted(range(1, layers + 1), key=str):
            raise MappingError(
                f"{_NESTED} has the layers {str(numbers)[:80]}",
                hint=f"each of the numbers 1 to {layers}, in one of {' and '.join(dict(_LISTS))}",
            )
        return [_LINEAR if i + 1 in numbers[0] else _FULL for i in range(layers)]

    def _sizes(self, stored: Mapping[str, Any]) -> tuple[int, ...]:
        """Heads, their size, and the taps of convolutions."""
        nested = _nested(stored)
        sizes = [nested.get(inner, stored.get(key, default)) for key, inner, default in _SIZES]
        for (key, inner, _), size in zip(_SIZES, sizes, strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MappingError(
                    f"{inner} of {_NESTED}, or {key}, is {size!r}", hint="a positive integer"
                )
        return tuple(sizes)


def _nested(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = stored.get(_NESTED) or {}
    if not isinstance(nested, Mapping):
        raise MappingError(f"{_NESTED} is {str(nested)[:80]!r}", hint="a table of layers and sizes")
    return nested


_KINDS = LayerKinds(_TYPES, ((_LINEAR, KIMI_DELTA), (_FULL, "*")), feeds=True)
