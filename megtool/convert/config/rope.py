"""Rotary embedding in a config.json: bases, scaling, and which layers have it, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megtool.convert.config.keys import Default, Setting, num_layers
from megtool.convert.config.windows import skip_flags
from megtool.convert.language.expression import evaluate
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

_FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class Rope(Setting):
    """Rotary embedding: `rope_theta` and `rope_scaling`, or newer `rope_parameters` with both.

    `base` is the default of `key`; `percent_key` is the older name of the part of a head that
    turns, `size_key` that of its number of elements (`size` where neither is there); `local_key` is
    the name of the base for layers with a window, in families that have them. The older form is
    written, which old and new readers understand; for the base of layers with a window without a
    `local_key` (`by_kind`), both, or the newer alone where the family has no `old` one. `scaling`
    is that of a configuration which says none, in the newer form.
    """

    base: float = 10000.0
    key: str = "rope_theta"
    percent_key: str | None = None
    percent: float = 1.0
    local_key: str | None = None
    local_base: float = 10000.0
    size_key: str | None = None
    by_kind: bool = False
    old: bool = True
    size: int = 0
    scaling: Mapping[str, Any] | None = None

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Base, part and scaling of either form; a scaling of type `default` is none."""
        new = stored.get("rope_parameters")
        local = stored.get(self.local_key) if self.local_key else None
        has_local = self.local_key is not None or self.by_kind
        if has_local and isinstance(new, Mapping) and "full_attention" in new:
            windowed = new.get("sliding_attention") or {}
            if windowed.get("rope_type", "default") != "default":
                raise MappingError(
                    f"rotary scaling of layers with a window is not supported: {windowed!r}",
                    error_id="unsupported-model",
                )
            local = windowed.get("rope_theta", local)
            new = new["full_attention"]
            parts = [d.get("partial_rotary_factor") for d in (windowed, new)]
            if None not in parts and parts[0] != parts[1]:
                raise MappingError(
                    f"of heads {parts[1]!r} turns, and {parts[0]!r} in layers with a window",
                    hint="in this family heads of all layers turn in the same part",
                    error_id="unsupported-model",
                )
        older = stored.get("rope_scaling")
        if new is None and not older and self.scaling is not None:
            new = {
                name: evaluate(x.expression, into) if isinstance(x, Default) else x
                for name, x in self.scaling.items()
            }
        scaling = dict(new if new is not None else older or {})
        base = scaling.pop("rope_theta", None) or stored.get(self.key) or self.base
        percent = None
        if scaling.get("rope_type") != "proportional":  # whose heads turn as wholes, in part by 0
            percent = scaling.pop("partial_rotary_factor", None)
        if self.percent_key:
            percent = stored.get(self.percent_key) if percent is None else percent
            size = stored.get(self.size_key, self.size) if self.size_key else 0
            if percent is None and size:
                percent = size / into["head_dim"]
            percent = self.percent if percent is None else percent
            into["rotary_percent"] = float(percent)
        elif percent not in (None, 1.0, _latent_part(into)):
            raise MappingError(
                f"the family turns whole heads, not {percent!r} of one",
                error_id="unsupported-model",
            )
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        if scaling.get("rope_type", "default") in ("default", "mrope"):
            scaling = {}  # the three positions of `mrope` are the same in text
        into["rope_base"] = float(base)
        into["rope_scaling"] = scaling or None
        if has_local:
            into["rope_local_base"] = float(local or self.local_base)
        keys = ("rope_parameters", "rope_scaling", self.key, self.percent_key, self.local_key)
        return tuple(k for k in (*keys, self.size_key) if k)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The older form, the newer one, or both."""
        positions = config.positions
        if self.old:
            into[self.key] = positions.rope_base
            scaling = positions.rope_scaling
            none = None if self.scaling is None else {"rope_type": "default"}
            into["rope_scaling"] = none if scaling is None else dict(scaling)
        elif not self.by_kind:
            into["rope_parameters"] = {
                **(positions.rope_scaling or {"rope_type": "default"}),
                "rope_theta": positions.rope_base,
            }
        if self.percent_key and self.size_key:
            if positions.rotary_percent != 1 or self.size:  # absent, heads turn as wholes
                into[self.percent_key] = positions.rotary_percent
                into[self.size_key] = int(config.attention.head_dim * positions.rotary_percent)
        elif self.percent_key:
            into[self.percent_key] = positions.rotary_percent
        elif positions.rotary_percent != 1:
            raise MappingError(
                f"rotary_percent is {positions.rotary_percent!r}, but the family turns whole heads",
                error_id="unsupported-model",
            )
        if self.local_key and positions.rope_local_base is not None:
            into[self.local_key] = positions.rope_local_base
        if self.by_kind:
            local = positions.rope_local_base or positions.rope_base
            part = {"partial_rotary_factor": positions.rotary_percent} if self.percent_key else {}
            into["rope_parameters"] = {
                "full_attention": {"rope_type": "default"}
                | dict(positions.rope_scaling or {})
                | {"rope_theta": positions.rope_base}
                | part,
                "sliding_attention": {"rope_type": "default", "rope_theta": local} | part,
            }


def _latent_part(fields: Mapping[str, Any]) -> float | None:
    """The part of a head that turns in latent attention; None without it."""
    if not fields.get("kv_lora_rank"):
        return None
    turning, still = fields["qk_rope_head_dim"], fields["qk_nope_head_dim"]
    return float(turning / (turning + still))


@dataclass(frozen=True, slots=True)
class RopeTemperature(Setting):
    """Queries that are scaled by their position, after rotation: a key of the rotary scaling."""

    key: str = "llama_4_scaling_beta"
    length: str = "original_max_position_embeddings"

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The fields, from the scaling that `Rope` read before."""
        scaling = into.get("rope_scaling") or {}
        if scaling.get(self.key):
            into["attn_temperature_scale"] = float(scaling[self.key])
            into["attn_temperature_floor"] = scaling.get(self.length) or into["max_positions"]
        into["attn_temperature_rotated"] = True
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Nothing: `Rope` writes the scaling."""


@dataclass(frozen=True, slots=True)
class NoRope(Setting):
    """Layers without rotary embedding: `key` has a 0 for each; else every `every`-th is one.

    As with `Window`, the keys are kept verbatim in `extra`.
    """

    key: str = "no_rope_layers"
    every_key: str = "no_rope_layer_interval"
    every: int = 4

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """One flag a layer, or None where all turn."""
        layers, turning = num_layers(into), stored.get(self.key)
        if not turning:
            every = stored.get(self.every_key) or self.every
            turning = [int((i + 1) % every != 0) for i in range(layers)]
        if len(turning) != layers or set(turning) - {0, 1}:
            raise MappingError(
                f"{self.key} is {turning!r}", hint=f"0 or 1 for each of {layers} layers"
            )
        into["no_rope_layers"] = None if all(turning) else tuple(1 - int(t) for t in turning)
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The key, unless it was kept."""
        if self.key not in config.extra:
            flags = config.positions.no_rope_layers or (0,) * config.num_layers
            into[self.key] = [1 - f for f in flags]


@dataclass(frozen=True, slots=True)
class RopeInWindows(Setting):
    """Layers without a window have no rotary embedding. It comes after `Window`, and has no key.

    Where `key` is null, no layer turns, or with `without_key` all do.
    """

    key: str = "sliding_window"
    without_key: bool = False

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """One flag a layer, or None where all turn."""
        null = self.key in stored and not stored[self.key]
        layers = num_layers(into)
        into["no_rope_layers"] = (
            None if null and self.without_key else _no_windows(into, range(layers))
        )
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Nothing, but refuse other layers; without windows, the keys that say so."""
        layers = range(config.num_layers)
        flags = tuple(config.positions.no_rope_layers or (0,) * config.num_layers)
        window = {name: config.get(name) for name in ("window_size", "window_skip_freq")}
        want = _no_windows(window, layers) or (0,) * config.num_layers
        if flags != want and (config.window.window_size or any(flags)):
            raise MappingError(
                f"no_rope_layers is {config.positions.no_rope_layers!r}",
                hint="in this family the layers without a window have no rotary embedding",
                error_id="unsupported-model",
            )
        if not config.window.window_size and self.key not in config.extra:
            into[self.key] = None if not any(flags) else 1
            into["layer_types"] = [_FULL for _ in layers]


def _no_windows(values: Mapping[str, Any], layers: range) -> tuple[int, ...] | None:
    """A 1 for every layer without a window; None where all have one."""
    freq = values["window_skip_freq"]
    if not values["window_size"]:
        return tuple(1 for _ in layers)
    if freq is None:
        return None
    return tuple(1 - int(f) for f in skip_flags(freq, len(layers)))
