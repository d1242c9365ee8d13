"""Declarative config keys of families with gated short convolutions (LFM2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Setting
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

_SIZE, _OLD_SIZE, _ADJUST = "intermediate_size", "block_ff_dim", "block_auto_adjust_ff_dim"
_MULTIPLIER, _MULTIPLE = "block_ffn_dim_multiplier", "block_multiple_of"


@dataclass(frozen=True, slots=True)
class AdjustedFeedForward(Setting):
    """The size of MLPs: two thirds of a key, times a multiplier, rounded up to a multiple.

    It is the key itself where `block_auto_adjust_ff_dim` is false. `block_ff_dim`, the key's older
    name, comes before it. The keys are kept verbatim in `extra`. Source: transformers 5.23,
    `models/lfm2/modeling_lfm2.py`.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (_SIZE, _OLD_SIZE, _ADJUST, _MULTIPLIER, _MULTIPLE)

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The size; no key counts as understood."""
        into["ffn_hidden_size"] = self._size(stored)
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The size as it is, unless the keys that were kept give the same."""
        size, stored = config.mlp.ffn_hidden_size, config.extra
        if {_SIZE, _OLD_SIZE} & stored.keys() and self._size(stored) == size:
            return
        into |= {_SIZE: size, _ADJUST: False}
        if _OLD_SIZE in stored:
            into[_OLD_SIZE] = size

    def _size(self, stored: Mapping[str, Any]) -> int:
        key = _OLD_SIZE if _OLD_SIZE in stored else _SIZE
        size, multiple = stored.get(key, 12288), stored.get(_MULTIPLE, 256)
        multiplier = stored.get(_MULTIPLIER, 1.0)
        for name, value, kinds in (
            (key, size, int),
            (_MULTIPLE, multiple, int),
            (_MULTIPLIER, multiplier, int | float),
        ):
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
                raise MappingError(f"{name} is {value!r}", hint="a positive number")
        if not stored.get(_ADJUST, True):
            return int(size)
        adjusted = int(multiplier * int(2 * size / 3))
        return int(multiple * -(-adjusted // multiple))
