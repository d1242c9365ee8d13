"""Rotary embedding in a config.json: bases, scaling, and which layers have it, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Default, Setting, num_layers
from megtool.convert.config.windows import skip_flags
from megtool.convert.language.expression import evaluate
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

_WINDOWED, _FULL = "sliding_attention", "full_attention"
_PART, _LENGTH = "partial_rotary_factor", "original_max_position_embeddings"
_KINDS_WITH_LENGTH = ("llama3", "yarn", "longrope", "su")
_MSCALES = ("short_mscale", "long_mscale")


@dataclass(frozen=True, slots=True)
class Rope(Setting):
    """Rotary embedding: `rope_theta` and `rope_scaling`, or newer `rope_parameters` with both.

    `base` is the default of `key`; `percent_key` is the older name of the part of a head that
    turns, `size_key` that of its number of elements (`size` where neither is there); `local_key` is
    the name of the base for layers with a window, in families that have them. The older form is
    written, which old and new readers understand; for the base of layers with a window without a
    `local_key` (`by_kind`), both, or the newer alone where the family has no `old` one. `scaling`
    is that of a configuration which says none, in the newer form. As in transformers, a table
    `rope_scaling` comes before `rope_parameters`, and a length beside the tables before one in
    them. Only families with `has_mscales` read `short_mscale` and `long_mscale`; a part of heads is
    without effect where the family `ignores_part`, has no key for it, and scales nothing. With
    `scales_windows` the older form of scaling is one of all layers, which is not known. A class
    with a `length` of its own takes it where a configuration has none beside the tables.
    """

    reads_keys: ClassVar[tuple[str, ...]] = ("rope_parameters", "rope_scaling", _LENGTH, _PART)

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
    has_mscales: bool = False
    ignores_part: bool = True
    scales_windows: bool = False
    kinds: tuple[str, ...] = ()
    length: int | None = None

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Base, part and scaling of either form; a scaling of type `default` is none."""
        scaling, local = self._tables(stored, into)
        base = scaling.pop("rope_theta", None) or stored.get(self.key) or self.base
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        kind = scaling.get("rope_type") or "default"
        percent = None
        if kind != "proportional":  # whose heads turn as wholes, in part by 0
            percent = scaling.pop("partial_rotary_factor", None)
        if self.percent_key:
            percent = stored.get(self.percent_key) if percent is None else percent
            size = stored.get(self.size_key, self.size) if self.size_key else 0
            if percent is None and size:
                percent = size / into["head_dim"]
            percent = self._default_part(kind) if percent is None else percent
            into["rotary_percent"] = float(percent)
        else:
            self._check_part(stored.get(_PART) if percent is None else percent, kind, into)
        if kind in ("default", "mrope"):
            scaling = {}  # the three positions of `mrope` are the same in text
        elif kind in _KINDS_WITH_LENGTH:
            length = self.length if stored.get(_LENGTH) is None else stored[_LENGTH]
            if length is not None and not (self.has_mscales and scaling.get(_LENGTH)):
                scaling[_LENGTH] = length  # the outer one wins, but in Phi-MoE's class
        if not self.has_mscales:
            scaling = {k: v for k, v in scaling.items() if k not in _MSCALES}
        into["rope_base"] = float(base)
        into["rope_scaling"] = scaling or None
        if local is not None:
            into["rope_local_base"] = local
        keys = ("rope_parameters", "rope_scaling", self.key, self.percent_key, self.local_key)
        return tuple(k for k in (*keys, self.size_key) if k)

    def _tables(
        self, stored: Mapping[str, Any], into: Mapping[str, Any]
    ) -> tuple[dict[str, Any], float | None]:
        """Return base and scaling in the newer form, and the base of layers with a window."""
        new, older = _table(stored, "rope_parameters"), _table(stored, "rope_scaling")
        if not self.old and self.by_kind:
            older = {}  # which classes that only know the newer form ignore
        if older and self.scales_windows:
            raise MappingError(
                f"rope_scaling is {str(older)[:80]}, and in this family it holds for layers with "
                "a window, too",
                hint="rope_parameters says it for either kind of layer",
                error_id="unsupported-setting",
            )
        if self.local_key is None and not self.by_kind:
            if not new and not older and self.scaling is not None:
                return self._defaults(into), None
            return dict(older or new), None
        local = stored.get(self.local_key) if self.local_key else None
        if _FULL not in new and _WINDOWED not in new:
            if "type" in older and "rope_type" not in older:
                raise MappingError(
                    f"rope_scaling is {older!r}, and classes of this family ignore `type`",
                    hint="`rope_type` is the key that they read",
                    error_id="unsupported-setting",
                )
            whole = older or new or (self._defaults(into) if self.scaling is not None else {})
            return _without_truncate(whole), float(local or self.local_base)
        windowed, full = dict(new.get(_WINDOWED) or {}), dict(new.get(_FULL) or {}) | dict(older)
        if (windowed.get("rope_type") or "default") != "default":
            raise MappingError(
                f"rotary scaling of layers with a window is not supported: {windowed!r}",
                error_id="unsupported-setting",
            )
        outer = stored.get(self.percent_key) if self.percent_key else None
        turning = [d for d in (windowed or full, full) if d.get("rope_type") != "proportional"]
        parts = [d.get(_PART) or outer or self._default_part(d.get("rope_type")) for d in turning]
        if len(set(parts)) > 1:
            raise MappingError(
                f"rope_parameters turns {parts[1]!r} of each head in layers with full attention, "
                f"and {parts[0]!r} in layers with a window",
                hint="in this family all layers turn the same part of a head",
                error_id="unsupported-setting",
            )
        base = windowed.get("rope_theta") or local or self.local_base
        return _without_truncate(full), float(base)

    def _default_part(self, kind: str | None) -> float:
        # Tables by kind of layer: the class knows its part for rotation without scaling alone.
        return self.percent if not self.by_kind or kind in (None, "default") else 1.0

    def _defaults(self, into: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: evaluate(x.expression, into) if isinstance(x, Default) else x
            for name, x in (self.scaling or {}).items()
        }

    def _check_part(self, percent: Any, kind: str, into: Mapping[str, Any]) -> None:
        """Refuse heads that turn in part, but where the class takes no notice of it."""
        if percent in (None, 1.0, _latent_part(into)) or (kind == "default" and self.ignores_part):
            return
        raise MappingError(
            f"the family turns whole heads, not {percent!r} of one",
            error_id="unsupported-setting",
        )

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The older form, the newer one, or both."""
        positions = config.positions
        kind = (positions.rope_scaling or {}).get("rope_type")
        if self.kinds and kind is not None and kind not in self.kinds:
            raise MappingError(
                f"rope_scaling is of the kind {kind!r}, but the family's class knows "
                f"{', '.join(map(repr, self.kinds))}",
                error_id="unsupported-model",
            )
        unsaid = [n for n in _MSCALES if n not in (positions.rope_scaling or {})]
        if self.has_mscales and positions.rope_scaling and unsaid:
            raise MappingError(
                f"rope_scaling of the kind {kind!r} has no {' and no '.join(unsaid)}, which the "
                "family's class requires beside any scaling",
                error_id="unsupported-model",
            )
        if self.old:
            into[self.key] = positions.rope_base
            # Phi-MoE's class lets the length in the table win.
            scaling = positions.rope_scaling if self.has_mscales else _without_outer_length(config)
            none = None if self.scaling is None else {"rope_type": "default"}
            into["rope_scaling"] = none if scaling is None else dict(scaling)
            if self.length is not None and positions.rope_scaling:
                into[_LENGTH] = positions.rope_scaling.get(_LENGTH) or positions.max_positions
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


def _table(stored: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table of rotary settings, empty where there is none.

    Raises:
        MappingError: it is something else.
    """
    value = stored.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise MappingError(
            f"{key} is {str(value)[:80]!r}", hint="a table of a kind and its numbers"
        )
    return value or {}


def _without_truncate(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of a kind of layers, which transformers always truncates.

    It looks for YaRN's `truncate` beside the tables of both kinds.
    """
    return {k: v for k, v in scaling.items() if k != "truncate"}


def _without_outer_length(config: ModelConfig) -> Mapping[str, Any] | None:
    """Return the scaling without a length that the configuration says beside it."""
    scaling = config.positions.rope_scaling
    if scaling is None or config.extra.get(_LENGTH) != scaling.get(_LENGTH):
        return scaling
    return {k: v for k, v in scaling.items() if k != _LENGTH}


def _latent_part(fields: Mapping[str, Any]) -> float | None:
    """The part of a head that turns in latent attention; None without it."""
    if not fields.get("kv_lora_rank"):
        return None
    turning, still = fields["qk_rope_head_dim"], fields["qk_nope_head_dim"]
    return float(turning / (turning + still))


@dataclass(frozen=True, slots=True)
class RopeTemperature(Setting):
    """Queries that are scaled by their position, after rotation: a key of the rotary scaling."""

    names_keys: ClassVar[tuple[str, ...]] = ()  # they are those of a table

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
class FixedRope(Setting):
    """Rotary embedding of a fixed base, whose only key says how many elements of a head turn."""

    size_key: str
    size: int
    base: float = 10000.0

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Base and part; null is whole heads."""
        size = stored.get(self.size_key, self.size) or into["head_dim"]
        into |= {
            "rope_base": self.base,
            "rope_scaling": None,
            "rotary_percent": size / into["head_dim"],
        }
        return (self.size_key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The number of elements, where base and scaling are the family's."""
        positions = config.positions
        if positions.rope_base != self.base or positions.rope_scaling:
            raise MappingError(
                f"rope_base is {positions.rope_base!r}, and rope_scaling "
                f"{str(positions.rope_scaling)[:80]}",
                hint=f"in this family the base is {self.base:g}, and nothing is scaled",
                error_id="unsupported-model",
            )
        into[self.size_key] = int(config.attention.head_dim * positions.rotary_percent)


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
