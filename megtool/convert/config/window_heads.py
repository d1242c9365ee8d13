"""Other heads of keys and values in layers with a window (MiMo-V2-Flash): keys and args, both ways.

Sources: transformers 5.23, `models/mimo_v2_flash`; Megatron-Bridge, `models/mimo_v2_flash`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Setting, num_layers
from megtool.convert.config.windows import skip_flags, skip_freq
from megtool.errors import MappingError
from megtool.spec.layer_symbols import ATTENTION, MLP
from megtool.spec.model_config import ModelConfig

_TYPES, _PATTERN = "layer_types", "hybrid_layer_pattern"
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_SIZE, _LEFT = "sliding_window", "sliding_window_size"
_HEADS, _WINDOW_HEADS = "num_key_value_heads", "swa_num_key_value_heads"
_SCALE = "attention_value_scale"
_EVERY = 6
_FULL_GROUPS, _WINDOW_GROUPS = "full_attn_num_query_groups", "swa_num_query_groups"
WINDOW_GROUPS = _WINDOW_GROUPS
_LOCAL_BASE = "rotary_base_local"


@dataclass(frozen=True, slots=True)
class WindowHeads(Setting):
    """Which layers have a window, how many heads of keys and values these and the others have, and
    the multiplier of values, in both forms of config.json.

    Published files have `hybrid_layer_pattern`, with a 1 for every layer with a window, and
    `sliding_window_size`, the tokens before one's own; transformers `layer_types`, and twice the
    heads where there is a window. The keys are kept verbatim in `extra`, and both forms are
    written.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (
        _TYPES,
        _PATTERN,
        _SIZE,
        _LEFT,
        _HEADS,
        _WINDOW_HEADS,
        _SCALE,
    )

    default: int = 129

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Windows, heads by layer, and the multiplier; no key counts as understood."""
        into |= self._fields(stored, num_layers(into))
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Both forms, unless what was kept says the same."""
        flags = _flags(config)
        full, windowed = _heads(config, flags)
        if full is None or windowed is None:
            raise MappingError(
                f"num_kv_heads is {(config.layer_sizes or {}).get('num_kv_heads')}",
                hint="in this family it depends on whether a layer has a window",
                error_id="unsupported-model",
            )
        same = {name: config.get(name) for name in _NAMES}
        if _HEADS in config.extra and self._fields(config.extra, config.num_layers) == same:
            return
        into |= {_HEADS: full, _WINDOW_HEADS: windowed, _SCALE: config.attention.attn_value_scale}
        into[_TYPES] = [_WINDOWED if f else _FULL for f in flags]
        into[_PATTERN] = list(flags)
        if config.window.window_size:
            into |= {_SIZE: config.window.window_size - 1, _LEFT: config.window.window_size - 1}

    def _fields(self, stored: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """The fields of `_NAMES`."""
        flags = self._flags(stored, layers)
        full = _positive(stored, _HEADS, 4)
        windowed = _positive(stored, _WINDOW_HEADS, 2 * full)
        size = _positive(stored, _SIZE, self.default)
        if stored.get(_LEFT) is not None:
            size = _positive(stored, _LEFT, 0) + 1
        scale = stored.get(_SCALE, 0.707)
        numbers = tuple(windowed if f else full for f in flags)
        return {
            "num_kv_heads": max(numbers),
            "layer_sizes": {"num_kv_heads": numbers} if len(set(numbers)) > 1 else None,
            "window_size": size if any(flags) else 0,
            "window_skip_freq": skip_freq(flags) if any(flags) else None,
            "attn_value_scale": 1.0 if scale is None else scale,
        }

    def _flags(self, stored: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """A 1 for every layer with a window."""
        types, pattern = stored.get(_TYPES), stored.get(_PATTERN)
        if types is None and pattern is None:
            return tuple(int(i > 0 and (i + 1) % _EVERY != 0) for i in range(layers))
        key, known = (_TYPES, (_FULL, _WINDOWED)) if types is not None else (_PATTERN, (0, 1))
        listed = stored[key]
        is_list = isinstance(listed, list | tuple) and len(listed) == layers
        if not is_list or any(n not in known for n in listed):
            raise MappingError(
                f"{key} is {str(listed)[:80]}",
                hint=f"{known[0]!r} or {known[1]!r} for each of {layers} layers",
            )
        return tuple(int(n == known[1]) for n in listed)


_NAMES = (
    *("num_kv_heads", "layer_sizes"),
    *("window_size", "window_skip_freq", "attn_value_scale"),
)


def _positive(stored: Mapping[str, Any], key: str, default: int) -> int:
    value = stored.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise MappingError(f"{key} is {value!r}", hint="a positive integer")
    return value


def _flags(config: ModelConfig) -> tuple[int, ...]:
    return tuple(int(config.window.has_window(n)) for n in range(config.num_layers))


def _heads(config: ModelConfig, flags: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Heads of keys and values in layers without and with a window; None where they differ."""
    numbers = (config.layer_sizes or {}).get("num_kv_heads") or (
        config.attention.num_kv_heads,
    ) * len(flags)
    kinds = [
        {n for n, f in zip(numbers, flags, strict=True) if f == flag}
        or {config.attention.num_kv_heads}
        for flag in (0, 1)
    ]
    full, windowed = (next(iter(kind)) if len(kind) == 1 else None for kind in kinds)
    return full, windowed


def window_heads_args(config: ModelConfig) -> dict[str, Any]:
    """Args of such a model as Megatron-Bridge's provider calls them; none of any other."""
    attention = config.attention
    full, windowed = _heads(config, _flags(config))
    if not attention.v_head_dim or config.latent.kv_lora_rank or full is None or windowed is None:
        return {}
    return {
        "num_query_groups": full,
        "group_query_attention": full != attention.num_heads,
        _FULL_GROUPS: full,
        _WINDOW_GROUPS: windowed,
        "v_head_dim": attention.v_head_dim,
        _SCALE: attention.attn_value_scale,
        _LOCAL_BASE: config.positions.rope_local_base,
    }


def window_heads_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from the args of `window_heads_args`."""
    layers, freq = num_layers(args), args.get("window_attn_skip_freq")
    freq = tuple(freq) if isinstance(freq, list) else freq
    flags = skip_flags(freq, layers) if args.get("window_size") else (0,) * layers
    numbers = tuple(int(args[_WINDOW_GROUPS if f else _FULL_GROUPS]) for f in flags)
    base = args.get(_LOCAL_BASE)
    return {
        "num_kv_heads": max(numbers),
        "layer_sizes": {"num_kv_heads": numbers} if len(set(numbers)) > 1 else None,
        "v_head_dim": int(args["v_head_dim"]),
        "attn_value_scale": float(args[_SCALE]),
        "rope_local_base": None if base is None else float(base),
        "window_sinks": True,
        "mtp_window": True,
        "mtp_kind": ATTENTION + MLP,
    }
