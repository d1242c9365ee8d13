"""Sliding windows in a config.json: how far, and which layers have one, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megtool.convert.config.keys import Setting, for_type, num_layers
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

_WINDOWED, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Window(Setting):
    """Sliding windows: how many tokens a layer attends to, and which layers have one.

    Which layers, `layer_types` says; without it every layer but each `every`-th, or (where the
    family has `first_key`) those from a number on. `switch` is a key that has to be true. Layer 0
    is the first that attends to all with `full_first`, and with `both_sides`, where the key counts
    the tokens of both.
    The keys are kept verbatim in `extra`, since releases of transformers disagree on which are
    written.
    """

    key: str = "sliding_window"
    default: int | Mapping[str, int] = 0
    every: int = 0
    every_key: str | None = None
    switch: str | None = None
    first_key: str | None = None
    both_sides: bool = False
    full_first: bool = False

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Size and pattern; no key counts as understood, so that all are kept."""
        size = stored.get(self.key, for_type(self.default, stored)) or 0
        if self.switch and not stored.get(self.switch):
            size = 0
        if size and self.both_sides:
            size = size // 2 + 1
        layers = num_layers(into)
        kinds, every = stored.get("layer_types"), self.every
        if self.every_key:
            every = stored.get(self.every_key) or every
        if kinds is None and not isinstance(every, int):
            raise MappingError(
                f"{self.every_key} is {every!r}", hint="a number, or layer_types for every layer"
            )
        flags: tuple[int, ...] = (1,) * layers
        if kinds is not None:
            if len(kinds) != layers or set(kinds) - {_WINDOWED, _FULL}:
                raise MappingError(
                    f"layer_types is {kinds!r}",
                    hint=f"{_FULL!r} or {_WINDOWED!r} for each of {layers} layers",
                )
            flags = tuple(int(k == _WINDOWED) for k in kinds)
        elif every:
            last = not (self.both_sides or self.full_first)
            flags = tuple(int((i + last) % every != 0) for i in range(layers))
        elif self.first_key:
            flags = tuple(int(i >= stored.get(self.first_key, 0)) for i in range(layers))
        into["window_size"] = size if any(flags) else 0
        into["window_skip_freq"] = skip_freq(flags) if into["window_size"] else None
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The keys, unless they were kept."""
        window = config.window
        if self.key in config.extra:
            return
        if not window.window_size:
            if for_type(self.default, config.extra):
                into[self.key] = None
            return
        into[self.key] = 2 * (window.window_size - 1) if self.both_sides else window.window_size
        if self.switch:
            into[self.switch] = True
        freq = window.window_skip_freq
        if freq is not None:
            flags = skip_flags(freq, config.num_layers)
            into["layer_types"] = [_WINDOWED if f else _FULL for f in flags]


def skip_freq(flags: tuple[int, ...]) -> int | tuple[int, ...] | None:
    """Megatron's word for which layers have a window: None for all, n for all but each n-th."""
    if all(flags):
        return None
    every = flags.index(0) + 1
    return every if every > 1 and flags == skip_flags(every, len(flags)) else flags


def skip_flags(freq: int | tuple[int, ...] | None, layers: int) -> tuple[int, ...]:
    """A 1 for every layer that has what `skip_freq` says."""
    if isinstance(freq, tuple):
        return freq
    return tuple(int(freq is None or (i + 1) % freq != 0) for i in range(layers))
