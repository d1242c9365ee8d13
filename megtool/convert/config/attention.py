"""Settings of attention: slopes, a single head of keys, windows and rotary bases by lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Setting, num_layers, unsupported
from megtool.convert.config.windows import skip_flags, skip_freq
from megtool.errors import MappingError
from megtool.spec.model_config import MOST_LAYERS, ModelConfig

_MPT, _TYPES, _LAYERS = "attn_config", "attention_types", "attention_layers"
_KINDS = ("global", "local")
_MPT_KNOWN: Mapping[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "alibi": (True,),
}


@dataclass(frozen=True, slots=True)
class MptAttention(Setting):
    """MPT's nested keys of attention: slopes of scores, and nothing else that MPT may have.

    The keys are kept verbatim in `extra`.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (_MPT,)

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The largest exponent of a slope."""
        nested = stored.get(_MPT) or {}
        if not isinstance(nested, Mapping):
            raise MappingError(f"{_MPT} is {nested!r}", hint="keys and values")
        for key, known in _MPT_KNOWN.items():
            if (value := nested.get(key, known[0])) not in known:
                raise unsupported(f"{_MPT}.{key}", value, f"but the family knows {known[0]!r}")
        into["alibi_bias_max"] = nested.get("alibi_bias_max", 8)
        into["qkv_clip"] = nested.get("clip_qkv") or 0.0
        into["softmax_scale"] = nested.get("softmax_scale")
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The keys, with those that were kept."""
        nested, value = dict(config.extra.get(_MPT) or {}), config.positions.alibi_bias_max
        more: dict[str, Any] = {}
        if nested.get("alibi_bias_max", 8) != value or not nested:
            more = {"alibi": True, "alibi_bias_max": int(value) if value == int(value) else value}
        attention = config.attention
        for key, number in (
            ("clip_qkv", attention.qkv_clip or None),
            ("softmax_scale", attention.softmax_scale),
        ):
            if (nested.get(key) or None) != number:
                more[key] = number
        if more:
            into[_MPT] = nested | more


@dataclass(frozen=True, slots=True)
class UnscaledScores(Setting):
    """A flag without which scores are not divided by the root of a head's size; null counts as
    false."""

    key: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The factor of scores."""
        into["softmax_scale"] = None if stored.get(self.key, True) else 1.0
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The flag, if the factor is either."""
        if (scale := config.attention.softmax_scale) not in (None, 1.0):
            usual = config.attention.head_dim**-0.5
            if abs(scale / usual - 1) > 1e-6:
                raise MappingError(
                    f"softmax_scale is {scale!r}",
                    hint=f"1, or {usual!r} in this family",
                    error_id="unsupported-model",
                )
        into[self.key] = scale != 1.0


@dataclass(frozen=True, slots=True)
class MultiQuery(Setting):
    """A flag for one head of keys and values; else there are as many as of queries."""

    reads_keys: ClassVar[tuple[str, ...]] = ("num_key_value_heads",)

    key: str = "multi_query"

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The field, after `num_heads`."""
        value = stored.get(self.key)
        into["num_kv_heads"] = 1 if value is None or value else into["num_heads"]
        return (self.key, "num_key_value_heads")

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The flag, and the number that newer releases of transformers add."""
        if config.attention.num_kv_heads not in (1, config.attention.num_heads):
            raise MappingError(
                f"num_kv_heads is {config.attention.num_kv_heads}",
                hint="in this family it is 1, or num_heads",
                error_id="unsupported-model",
            )
        into |= {
            self.key: config.attention.num_kv_heads == 1,
            "num_key_value_heads": config.attention.num_kv_heads,
        }


@dataclass(frozen=True, slots=True)
class LocalLayers(Setting):
    """GPT-Neo's windows: lists of `global` and `local`, each with how often it is repeated.

    One of all layers, which published files have beside them, comes first. The lists are kept
    verbatim in `extra`.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (_TYPES, _LAYERS, "window_size")

    default: int = 256

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Size and pattern."""
        layers, kinds = num_layers(into), stored.get(_LAYERS)
        flags = _read_local(stored.get(_TYPES) if kinds is None else [[kinds, 1]], layers)
        size = stored.get("window_size")
        size = self.default if size is None else size
        if any(flags) and not size:
            raise unsupported("window_size", size, "and layers with a window attend to nothing")
        into["window_size"] = size if any(flags) else 0
        into["window_skip_freq"] = skip_freq(flags) if any(flags) else None
        return ("window_size",) if any(flags) else ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The lists, unless those that were kept say the same."""
        flags = (0,) * config.num_layers
        if config.window.window_size:
            into["window_size"] = config.window.window_size
            flags = skip_flags(config.window.window_skip_freq, config.num_layers)
        kinds = [_KINDS[flag] for flag in flags]
        extra = config.extra
        is_kept = extra.get(_TYPES) and extra.get(_LAYERS, kinds) == kinds
        if is_kept and _read_local(extra[_TYPES], None) == flags:
            return
        into |= {_TYPES: [[kinds, 1]], _LAYERS: kinds}


def _read_local(types: Any, layers: int | None) -> tuple[int, ...]:
    """A 1 for every layer with a window, of so many layers."""
    names: list[str] = []
    try:
        for part, times in types or [[_KINDS, (layers or 0) // 2]]:
            names.extend(list(part) * min(int(times), MOST_LAYERS))
    except (TypeError, ValueError) as error:
        raise MappingError(f"{_TYPES} is {str(types)[:80]}", hint="lists of pairs") from error
    if len(names) != (len(names) if layers is None else layers) or set(names) - set(_KINDS):
        raise MappingError(
            f"{_TYPES} is {str(types)[:80]}",
            hint=f"'global' or 'local' for each of {layers} layers",
        )
    return tuple(_KINDS.index(name) for name in names)


@dataclass(frozen=True, slots=True)
class LayerRopeBases(Setting):
    """A rotary base for each layer, 0 where it does not turn. It comes after `Rope` and `Window`.

    Layers with a window have one base, and the others one. The list is kept verbatim in `extra`.
    """

    key: str = "layer_rope_theta"

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Both bases, and a flag for each layer that does not turn; no list changes nothing."""
        bases, layers = stored.get(self.key), num_layers(into)
        if bases is None:
            return ()
        if not isinstance(bases, list | tuple) or len(bases) != layers:
            raise MappingError(
                f"{self.key} is {str(bases)[:80]}", hint=f"a number for each of {layers} layers"
            )
        flags = _windows(into["window_size"], into["window_skip_freq"], layers)
        full, windowed = (
            sorted({float(b) for b, f in zip(bases, flags, strict=True) if b and f == flag})
            for flag in (0, 1)
        )
        for values, kind in ((full, "without"), (windowed, "with")):
            if len(values) > 1:
                raise MappingError(
                    f"{self.key} has {len(values)} bases for layers {kind} a window: "
                    f"{', '.join(f'{b:g}' for b in values)}",
                    hint="one for all of them, or 0 where a layer does not turn",
                    error_id="unsupported-model",
                )
        if full or windowed:
            into["rope_base"] = (full or windowed)[0]
        if full and windowed and full != windowed:
            if into["rope_scaling"]:
                raise MappingError(
                    f"{self.key} has two bases, and rotary embeddings are scaled",
                    hint="such a model is known without rope_scaling alone",
                    error_id="unsupported-model",
                )
            into["rope_local_base"] = windowed[0]
        still = tuple(int(not b) for b in bases)
        into["no_rope_layers"] = still if any(still) else None
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The list, unless it was kept."""
        if self.key in config.extra:
            return
        flags = _windows(
            config.window.window_size, config.window.window_skip_freq, config.num_layers
        )
        still = config.positions.no_rope_layers or (0,) * config.num_layers
        of_windows = config.positions.rope_local_base or config.positions.rope_base
        bases = [of_windows if flag else config.positions.rope_base for flag in flags]
        into[self.key] = [0 if s else base for s, base in zip(still, bases, strict=True)]


def _windows(size: int, freq: Any, layers: int) -> tuple[int, ...]:
    """A 1 for every layer with a window."""
    return skip_flags(freq, layers) if size else (0,) * layers
