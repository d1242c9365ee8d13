"""Declarative keys that map a config.json to `ModelConfig` fields, both ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.language.expression import evaluate
from megtool.errors import MappingError
from megtool.spec.model_config import CONFIG_FIELDS, MOST_LAYERS, ModelConfig

REQUIRED = "required"


class Setting(ABC):
    """One line of a configuration table, read and written."""

    __slots__ = ()

    counts_layers: ClassVar[bool] = False
    """Whether it says what layers are by their numbers, which change where some are left out."""

    @abstractmethod
    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Put ModelConfig fields into `into`; returns the stored keys it understood."""

    @abstractmethod
    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Put stored keys into `into`."""

    def complete(self, into: dict[str, Any], unsaid: Collection[str]) -> tuple[str, ...]:
        """Set its field if Megatron's args cannot say it (`unsaid`); returns the key that would."""
        return ()

    def numbers_branches(self) -> bool:
        """Whether it says of every layer that it is one branch, as Megatron's HybridModel does."""
        return False


@dataclass(frozen=True, slots=True)
class Key(Setting):
    """A stored key that is a field, under another name.

    `default` is used where the key is absent or null: a value, or `Default("expression")` over the
    fields read before it. `absent` is the value where the key is not there, if that is another one,
    or a table of such values by `model_type`.
    """

    key: str
    field: str
    default: Any = REQUIRED
    absent: Any = None

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The key's value, or its default."""
        value = stored.get(self.key, _for_type(self.absent, stored))
        if value is None:
            if self.default == REQUIRED:
                raise MappingError(f"the configuration lacks {self.key!r}")
            value = self.default
            if isinstance(value, Default):
                value = evaluate(value.expression, into)
        into[self.field] = value
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The field's value; two fields under one key have to agree."""
        value = config.get(self.field)
        if into.setdefault(self.key, value) != value:
            raise MappingError(
                f"{self.field} is {value!r}, but {self.key!r} is already {into[self.key]!r}: "
                "the family has one key for both"
            )


@dataclass(frozen=True, slots=True)
class Larger(Setting):
    """A stored key that is a field and `by`, another field: positions, with those never used."""

    key: str
    field: str
    by: str
    default: int

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The key's value, or its default, less the other field, which is read before it."""
        value = stored.get(self.key)
        into[self.field] = (self.default if value is None else value) - into[self.by]
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The sum of both."""
        into[self.key] = config.get(self.field) + config.get(self.by)


@dataclass(frozen=True, slots=True)
class Default:
    """A default computed from fields read before, such as `hidden_size // num_heads`."""

    expression: str


@dataclass(frozen=True, slots=True)
class Only(Setting):
    """A stored key for which the family knows one value, or an absence (or null) that means it.

    The value may be a `Default("expression")` over the fields read before it. `absent` is another
    value that the absence means, which is refused.
    """

    key: str
    value: Any
    absent: Any = None

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Refuse any other value."""
        value = stored.get(self.key, self.absent)
        if value is None:
            return ()  # null stays null
        want = self.value
        if isinstance(want, Default):
            want = evaluate(want.expression, into)
        if value != want:
            raise MappingError(
                f"the configuration says {self.key}={value!r}, but the family knows {want!r}",
                error_id="unsupported-model",
            )
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The one value; null is not written."""
        value = self.value
        if isinstance(value, Default):
            value = evaluate(value.expression, config)
        if self.key not in config.extra and value is not None:
            into[self.key] = value


@dataclass(frozen=True, slots=True)
class Refused(Setting):
    """A value of a stored key that the family cannot convert, and why."""

    key: str
    value: Any
    reason: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Refuse the value."""
        if stored.get(self.key) == self.value:
            raise MappingError(
                f"the configuration says {self.key}={self.value!r}: {self.reason}",
                hint="no Megatron layout can represent this model",
                error_id="unsupported-model",
            )
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class OneOf(Setting):
    """A stored key that is a field and may have any of `values`; the first is the default."""

    key: str
    field: str
    values: tuple[Any, ...]

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The key's value, if the family knows it."""
        value = stored.get(self.key)
        value = self.values[0] if value is None else value
        if value not in self.values:
            raise MappingError(
                f"the configuration says {self.key}={value!r}, "
                f"but the family knows {', '.join(map(repr, self.values))}",
                error_id="unsupported-model",
            )
        into[self.field] = value
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The field's value, if the family knows it."""
        value = config.get(self.field)
        if value not in self.values:
            raise MappingError(
                f"{self.field} is {value!r}, "
                f"but the family knows {', '.join(map(repr, self.values))}",
                error_id="unsupported-model",
            )
        into[self.key] = value


@dataclass(frozen=True, slots=True)
class Derived(Setting):
    """A field without a stored key: it always is the value of an expression."""

    field: str
    expression: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The expression over the fields read before it."""
        into[self.field] = evaluate(self.expression, into)
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Nothing, but refuse another value."""
        value, want = config.get(self.field), evaluate(self.expression, config)
        if value != want:
            raise MappingError(
                f"{self.field} is {value!r}, but in this family it is always "
                f"{self.expression} = {want!r}",
                error_id="unsupported-model",
            )


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


def _for_type(value: Any, stored: Mapping[str, Any]) -> Any:
    return value.get(str(stored.get("model_type"))) if isinstance(value, Mapping) else value


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


def num_layers(fields: Mapping[str, Any]) -> int:
    """The number of layers, checked before anything as long as it is made.

    Raises:
        MappingError: it is missing, or no possible number.
    """
    n = fields.get("num_layers")
    if isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= MOST_LAYERS:
        raise MappingError(f"num_layers is {n!r}", hint=f"an integer from 1 to {MOST_LAYERS:,}")
    return n


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
        size = stored.get(self.key, _for_type(self.default, stored)) or 0
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
            if _for_type(self.default, config.extra):
                into[self.key] = None
            return
        into[self.key] = 2 * (window.window_size - 1) if self.both_sides else window.window_size
        if self.switch:
            into[self.switch] = True
        freq = window.window_skip_freq
        if freq is not None:
            flags = skip_flags(freq, config.num_layers)
            into["layer_types"] = [_WINDOWED if f else _FULL for f in flags]


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


@dataclass(frozen=True, slots=True)
class EmbeddingSwitch(Setting):
    """A flag that multiplies embeddings by an expression (muP); else they are as they are."""

    key: str
    scale: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The field, after those of the expression."""
        into["embedding_scale"] = evaluate(self.scale, into) if stored.get(self.key) else 1.0
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The flag, if the field has either value."""
        scale = evaluate(self.scale, config)
        if config.embedding.embedding_scale not in (1.0, scale):
            raise MappingError(
                f"embedding_scale is {config.embedding.embedding_scale!r}",
                hint=f"1, or {scale!r} in this family",
                error_id="unsupported-model",
            )
        into[self.key] = config.embedding.embedding_scale != 1.0


def read_settings(
    settings: Sequence[Setting], stored: Mapping[str, Any], traits: Mapping[str, Any]
) -> ModelConfig:
    """A ModelConfig from stored keys; keys that no setting understands go to `extra`.

    `traits` are fields that the family fixes. A setting that reads nested keys puts those that it
    does not understand into `extra` itself.

    Raises:
        MappingError: a key is missing or has an impossible value.
    """
    values: dict[str, Any] = dict(traits)
    understood: set[str] = set()
    for setting in settings:
        understood.update(setting.read(stored, values))
    nested = values.pop("extra", {})
    if unknown := values.keys() - CONFIG_FIELDS.keys():
        raise MappingError(f"{sorted(unknown)} are no fields of ModelConfig")
    extra = {k: v for k, v in stored.items() if k not in understood} | nested
    return ModelConfig.from_fields(**values, extra=extra)


def write_settings(
    settings: Sequence[Setting], config: ModelConfig, constants: Mapping[str, Any]
) -> dict[str, Any]:
    """Stored keys of a ModelConfig: `constants`, overridden by `extra`, then the settings."""
    out: dict[str, Any] = {}
    for setting in settings:
        setting.write(config, out)
    return {**constants, **config.extra, **out}
