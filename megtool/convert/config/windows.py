"""Sliding windows in a config.json: how far, and which layers have one, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Setting, for_type, num_layers
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

_WINDOWED, _FULL, _CHUNKED = "sliding_attention", "full_attention", "chunked_attention"


@dataclass(frozen=True, slots=True)
class Window(Setting):
    """Sliding windows: how many tokens a layer attends to, and which layers have one.

    Which layers, `layer_types` says; without it every layer but each `every`-th, or (where the
    family has `first_key`) those from a number on, or (`until_key`) every other one below it; the
    number is `number` where the key is absent. `switch` is a key that has to be true; with
    `needs_switch` no layer may have a window where it is not. Layer 0 is the first that attends to
    all with `full_first`, and with `both_sides`, where the key counts the tokens of both; the last
    layer does with `full_last`, whatever layer_types says. With
    `in_still_layers` those without rotary embedding have one where the switch is true, which counts
    without layer_types alone. Only configurations of the model types `types` have the keys, if
    there are any: what has a window is written as one of them, with `architectures`. Where layers
    are not `by_layer`, the class takes no notice of layer_types, and all have one or none.
    Keys that say the same are kept verbatim in `extra`, since releases of transformers disagree on
    which are written.
    """

    names_keys: ClassVar[tuple[str, ...]] = ("key", "switch")
    reads_keys: ClassVar[tuple[str, ...]] = ("layer_types",)

    key: str = "sliding_window"
    default: int | Mapping[str, int] = 0
    every: int = 0
    every_key: str | None = None
    switch: str | None = None
    first_key: str | None = None
    both_sides: bool = False
    full_first: bool = False
    full_last: bool = False
    until_key: str | None = None
    number: int = 28
    needs_switch: bool = False
    in_still_layers: bool = False
    by_layer: bool = True
    types: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Size and pattern; no key counts as understood, so that all are kept."""
        size = stored.get(self.key, for_type(self.default, stored)) or 0
        derives = self.in_still_layers and stored.get("layer_types") is not None
        if self.switch and not stored.get(self.switch) and not derives:
            if self.needs_switch and _WINDOWED in (stored.get("layer_types") or ()):
                raise MappingError(
                    f"{self.switch} is false, and layer_types has layers with a window",
                    hint=f"such a layer attends to nothing in transformers: set {self.switch}, or "
                    f"make all of layer_types {_FULL!r}",
                    error_id="unsupported-setting",
                )
            size = 0
        if self.types and not self._is_of_types(stored):
            size = 0
        if size and self.both_sides:
            size = size // 2 + 1
        layers = num_layers(into)
        kinds, every = stored.get("layer_types") if self.by_layer else None, self.every
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
        elif self.in_still_layers:
            flags = tuple(into.get("no_rope_layers") or (0,) * layers)
        elif self.first_key or self.until_key:
            flags = self._numbered(stored, layers)
        if self.full_last:
            flags = (*flags[:-1], 0)
        into["window_size"] = size if any(flags) else 0
        into["window_skip_freq"] = skip_freq(flags) if into["window_size"] else None
        return ()

    def _is_of_types(self, stored: Mapping[str, Any]) -> bool:
        kind, classes = stored.get("model_type"), stored.get("architectures") or ()
        return kind in self.types if kind else any(c in self.architectures for c in classes)

    def _numbered(self, stored: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """Return a 1 for every layer with a window, by the number of one."""
        key = self.first_key or self.until_key
        number = stored.get(key or "", self.number)
        if isinstance(number, bool) or not isinstance(number, int):
            raise MappingError(
                f"{key} is {number!r}", hint="a number of layers, or layer_types for every layer"
            )
        if self.first_key:
            return tuple(int(i >= number) for i in range(layers))
        return tuple(int(i < number and i % 2 == 0) for i in range(layers))

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The keys, unless those that were kept say the same."""
        size = config.window.window_size
        flags = tuple(config.window.has_window(i) for i in range(config.num_layers))
        is_known = self.key in config.extra or (config.extra and not any(flags))
        if is_known and self._says(config.extra, config, flags):
            return
        counts = self.every or self.switch or self.first_key or self.until_key
        if self.by_layer and (counts or not all(flags)):
            into["layer_types"] = [_WINDOWED if f else _FULL for f in flags]
        if not any(flags):
            if self.switch:
                into[self.switch] = False
            elif not self.every and (
                self.key in config.extra or for_type(self.default, config.extra)
            ):
                into[self.key] = None
            return
        into[self.key] = 2 * (size - 1) if self.both_sides else size
        if self.types and not self._is_of_types(config.extra):
            into["model_type"] = self.types[0]
            into["architectures"] = list(self.architectures)
        if self.switch:
            into[self.switch] = True

    def _says(
        self, stored: Mapping[str, Any], config: ModelConfig, flags: tuple[bool, ...]
    ) -> bool:
        """Whether stored keys mean these windows."""
        fields = config.to_fields()
        try:
            self.read(stored, fields)
        except MappingError:
            return False
        of_layers = skip_flags(fields["window_skip_freq"], config.num_layers)
        read = tuple(bool(fields["window_size"] and flag) for flag in of_layers)
        return read == flags and (
            not any(flags) or fields["window_size"] == config.window.window_size
        )


@dataclass(frozen=True, slots=True)
class Chunks(Setting):
    """Which layers attend within chunks, by `layer_types`; those with rotary embedding where it is
    absent, which is read before. The key is kept verbatim in `extra`."""

    key: str = "layer_types"

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """One flag a layer, or None where they are those with rotary embedding."""
        into["chunk_layers"] = self._flags(stored, into.get("no_rope_layers"), num_layers(into))
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The list, unless what was kept says the same."""
        still = config.positions.no_rope_layers
        chunked = config.window.chunk_layers
        if chunked == self._flags(config.extra, still, config.num_layers):
            return
        flags = chunked or _turning(still, config.num_layers)
        into[self.key] = [_CHUNKED if f else _FULL for f in flags]

    def _flags(
        self, stored: Mapping[str, Any], still: tuple[int, ...] | None, layers: int
    ) -> tuple[int, ...] | None:
        kinds = stored.get(self.key)
        if kinds is None:
            return None
        is_list = isinstance(kinds, list | tuple) and len(kinds) == layers
        if not is_list or any(k not in (_CHUNKED, _FULL) for k in kinds):
            raise MappingError(
                f"{self.key} is {str(kinds)[:80]}",
                hint=f"{_FULL!r} or {_CHUNKED!r} for each of {layers} layers",
            )
        flags = tuple(int(k == _CHUNKED) for k in kinds)
        return None if flags == _turning(still, layers) else flags


def _turning(still: tuple[int, ...] | None, layers: int) -> tuple[int, ...]:
    return tuple(1 - s for s in still or (0,) * layers)


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
