"""Heads of other sizes in layers without a window (Gemma 4): the keys of config.json, both ways.

Published files say the sizes of those layers by `global_head_dim` and
`num_global_key_value_heads`, later releases of transformers layer by layer in `per_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Setting, num_layers
from megtool.convert.config.shared import WIDTH, shared_args, shared_fields
from megtool.convert.config.windows import skip_flags
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

GLOBAL_SIZE = _SIZE = "global_head_dim"
_BY_LAYER, _HEADS = "per_layer_config", "num_global_key_value_heads"
_TIED = "attention_k_eq_v"
_FIELDS = (("head_dim", "head_dim"), ("num_key_value_heads", "num_kv_heads"))


@dataclass(frozen=True, slots=True)
class GlobalHeads(Setting):
    """Sizes of heads and numbers of key and value heads, by layer, and whose values are keys.

    It comes after `Window`. The keys are kept verbatim in `extra`.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (
        "head_dim",
        "num_key_value_heads",
        _SIZE,
        _BY_LAYER,
        _HEADS,
        _TIED,
    )

    head_dim: int = 256
    global_head_dim: int = 512

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The sizes by layer, and the largest of each."""
        sizes = self._sizes(stored, _full_layers(into, num_layers(into)))
        into["layer_sizes"] = sizes
        into |= {name: max(numbers) for name, numbers in sizes.items()}
        into["tied_values"] = None
        if stored.get(_TIED):
            into["tied_values"] = _full_layers(into, num_layers(into))
        return (_TIED,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The sizes of layers with a window and of the others, unless `extra` says the same."""
        full = _full_layers(_window(config), config.num_layers)
        names = {name for _, name in _FIELDS}
        if config.layer_sizes is None or not names <= config.layer_sizes.keys():
            raise MappingError(
                "it is not known which layers have heads of which size",
                hint="--like a folder with the model's config.json",
                error_id="unsupported-model",
            )
        if any(config.attention.tied_values or ()) and config.attention.tied_values != full:
            raise MappingError(
                f"tied_values is {config.attention.tied_values!r}",
                hint="in this family values are keys in every layer without a window, or in none",
                error_id="unsupported-model",
            )
        into[_TIED] = any(config.attention.tied_values or ())
        tied = {_TIED: into[_TIED]}
        is_said = all(key in config.extra for key, _ in _FIELDS)
        sizes = {name: config.layer_sizes[name] for name in names}
        if is_said and self._sizes({**config.extra, **tied}, full) == sizes:
            return
        of = config.at_layer(full.index(0) if 0 in full else 0)
        into |= {key: of.get(name) for key, name in _FIELDS}
        into[_BY_LAYER] = {
            str(n): {key: config.at_layer(n).get(name) for key, name in _FIELDS}
            for n, is_full in enumerate(full)
            if is_full
        }

    def _sizes(
        self, stored: Mapping[str, Any], full: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        plain = {
            "head_dim": stored.get("head_dim") or self.head_dim,
            "num_key_value_heads": stored.get("num_key_value_heads"),
        }
        listed = stored.get(_BY_LAYER)
        if listed is None:
            other = {"head_dim": stored.get(_SIZE) or self.global_head_dim}
            if stored.get(_TIED) and stored.get(_HEADS) is not None:
                other["num_key_value_heads"] = stored[_HEADS]
            listed = {n: other for n, is_full in enumerate(full) if is_full}
        if not isinstance(listed, Mapping) or not all(
            isinstance(table, Mapping) for table in listed.values()
        ):
            raise MappingError(f"{_BY_LAYER} is {str(listed)[:80]}", hint="tables by layer")
        # transformers pads numbers with zeros to one length.
        tables = {str(n).lstrip("0") or "0": table for n, table in listed.items()}
        if unknown := [n for n in tables if n not in map(str, range(len(full)))]:
            raise MappingError(
                f"{_BY_LAYER} has a layer {unknown[0]!r}", hint=f"there are {len(full)} layers"
            )
        known = {key for key, _ in _FIELDS}
        if other_keys := {key for table in tables.values() for key in table} - known:
            raise MappingError(
                f"{_BY_LAYER} says {sorted(map(str, other_keys))[0]!r} of a layer",
                hint=f"known: {', '.join(sorted(known))}",
                error_id="unsupported-model",
            )
        rows = [plain | dict(tables.get(str(n), {})) for n in range(len(full))]
        if wrong := [row for row in rows if not all(_is_size(row[key]) for key, _ in _FIELDS)]:
            raise MappingError(f"the heads of a layer are {wrong[0]}", hint="positive integers")
        return {name: tuple(int(row[key] or 0) for row in rows) for key, name in _FIELDS}


def global_args(config: ModelConfig) -> dict[str, Any]:
    """Args from the sizes of heads by layer, as Megatron-Bridge's provider calls them.

    None where sizes do not go by which layers have a window.
    """
    full = _full_layers(_window(config), config.num_layers)
    of = {
        name: [{n for n, f in zip(numbers, full, strict=True) if f == kind} for kind in (0, 1)]
        for name, numbers in (config.layer_sizes or {}).items()
        if name != WIDTH
    }
    if set(of) != {n for _, n in _FIELDS} or any(
        len(k) > 1 for kinds in of.values() for k in kinds
    ):
        return {}
    windowed, whole = (
        [next(iter(of[name][kind] or of[name][1 - kind])) for _, name in _FIELDS] for kind in (0, 1)
    )
    return {
        "kv_channels": windowed[0],
        "num_query_groups": windowed[1],
        "group_query_attention": windowed[1] != config.attention.num_heads,
        _SIZE: whole[0],
        _HEADS: whole[1],
        _TIED: any(config.attention.tied_values or ()),
        **shared_args(config),
    }


def global_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from the args of `global_args`."""
    layers, freq = num_layers(args), args.get("window_attn_skip_freq")
    fields: dict[str, Any] = {
        "window_size": bool(args.get("window_size")),
        "window_skip_freq": tuple(freq) if isinstance(freq, list) else freq,
    }
    full = _full_layers(fields, layers)
    pairs = ((args["kv_channels"], args[_SIZE]), (args["num_query_groups"], args[_HEADS]))
    sizes = {
        name: tuple(int(pair[f]) for f in full)
        for (_, name), pair in zip(_FIELDS, pairs, strict=True)
    }
    largest = {name: max(numbers) for name, numbers in sizes.items()}
    out = {"tied_values": full if args.get(_TIED) else None} | largest
    return out | shared_fields(args, fields | {"num_layers": layers, "layer_sizes": sizes})


def _window(config: ModelConfig) -> dict[str, Any]:
    return {
        "window_size": config.window.window_size,
        "window_skip_freq": config.window.window_skip_freq,
    }


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _full_layers(fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """A 1 for every layer without a window."""
    if not fields.get("window_size"):
        return (1,) * layers
    return tuple(1 - int(f) for f in skip_flags(fields.get("window_skip_freq"), layers))
