"""Declarative keys that map a config.json to `ModelConfig` fields, both ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

from megtool.convert.language.expression import evaluate
from megtool.errors import MappingError
from megtool.spec.model_config import CONFIG_FIELDS, MOST_LAYERS, ModelConfig

REQUIRED = "required"


class Setting(ABC):
    """One line of a configuration table, read and written."""

    __slots__ = ()

    names_keys: ClassVar[tuple[str, ...]] = ("key",)
    """Its fields that are keys, or lists of them; those that end in `_key` are, too."""
    reads_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that it reads whatever its fields say."""
    counts_layers: ClassVar[bool] = False
    """Whether it says what layers are by their numbers, which change where some are left out."""

    @abstractmethod
    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Put ModelConfig fields into `into`; returns the stored keys it understood."""

    @abstractmethod
    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Put stored keys into `into`."""

    @property
    def stored_keys(self) -> tuple[str, ...]:
        """Every key of a config.json that it may read."""
        out = list(self.reads_keys)
        for member in fields(cast(Any, self)):
            if member.name in self.names_keys or member.name.endswith("_key"):
                value = getattr(self, member.name)
                out += value if isinstance(value, tuple) else (value,)
        return tuple(k for k in out if k and isinstance(k, str))

    def known_values(self) -> dict[str, str]:
        """Return what is said of keys that may have few values: others are refused."""
        return {}

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
        value = stored.get(self.key, for_type(self.absent, stored))
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
    value that the absence means, which is refused. A key that the class does not declare is not
    written.
    """

    key: str
    value: Any
    absent: Any = None
    is_written: bool = True

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Refuse any other value."""
        value = stored.get(self.key, self.absent)
        if value is None and self.key in stored and self.value is True:
            value = False  # as Python reads null
        if value is None:
            return ()  # null stays null
        want = self.value
        if isinstance(want, Default):
            want = evaluate(want.expression, into)
        if value != want:
            raise unsupported(self.key, value, f"but the family knows {want!r}")
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The one value; null is not written."""
        value = self.value
        if isinstance(value, Default):
            value = evaluate(value.expression, config)
        if self.is_written and self.key not in config.extra and value is not None:
            into[self.key] = value

    def known_values(self) -> dict[str, str]:
        """The one value, or its expression."""
        value = self.value
        return {self.key: value.expression if isinstance(value, Default) else repr(value)}


@dataclass(frozen=True, slots=True)
class Refused(Setting):
    """A value of a stored key that the family cannot convert, and why."""

    key: str
    value: Any
    reason: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Refuse the value."""
        value = stored.get(self.key)
        is_false = value is None and self.key in stored and self.value is False  # as Python reads
        if value == self.value or is_false:
            raise unsupported(self.key, self.value, f"and {self.reason}")
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Nothing."""

    def known_values(self) -> dict[str, str]:
        """The value that is refused."""
        return {self.key: f"not {self.value!r}"}


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
            known = ", ".join(map(repr, self.values))
            raise unsupported(self.key, value, f"but the family knows {known}")
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

    def known_values(self) -> dict[str, str]:
        """All of them."""
        return {self.key: " or ".join(map(repr, self.values))}


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


def for_type(value: Any, stored: Mapping[str, Any]) -> Any:
    """Return a value, or the one of the configuration's `model_type` out of a table of them."""
    return value.get(str(stored.get("model_type"))) if isinstance(value, Mapping) else value


def num_layers(fields: Mapping[str, Any]) -> int:
    """The number of layers, checked before anything as long as it is made.

    Raises:
        MappingError: it is missing, or no possible number.
    """
    n = fields.get("num_layers")
    if isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= MOST_LAYERS:
        raise MappingError(f"num_layers is {n!r}", hint=f"an integer from 1 to {MOST_LAYERS:,}")
    return n


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


def unsupported(key: str, value: object, why: str) -> MappingError:
    """Make the error for a value of a key that would change what the model computes.

    A key in a table, `table.key`, can be dropped with the table alone.
    """
    return MappingError(
        f"the configuration says {key}={value!r}, {why}",
        hint=f"--drop-setting {key.partition('.')[0]} takes the model to be without it, which is "
        "another function",
        error_id="unsupported-setting",
    )


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
    config = ModelConfig.from_fields(**values, extra=extra)
    _check_computable(config)
    return config


def _check_computable(config: ModelConfig) -> None:
    """Refuse sizes of which programs make something else, each in its own way."""
    if config.moe.num_experts and not config.moe.moe_ffn_hidden_size:
        raise MappingError(
            f"there are {config.moe.num_experts} experts, and moe_ffn_hidden_size is 0",
            hint="the width of an expert",
        )
    turning = int(config.attention.head_dim * config.positions.rotary_percent)
    if config.latent.kv_lora_rank:
        turning = config.latent.qk_rope_head_dim
    if config.positions.position_embedding == "rope" and turning % 2:
        raise MappingError(
            f"{turning} elements of a head turn, of head_dim {config.attention.head_dim} "
            f"(rotary_percent is {config.positions.rotary_percent!r})",
            hint="elements turn in pairs",
            error_id="unsupported-model",
        )


def write_settings(
    settings: Sequence[Setting], config: ModelConfig, constants: Mapping[str, Any]
) -> dict[str, Any]:
    """Stored keys of a ModelConfig: `constants`, overridden by `extra`, then the settings."""
    out: dict[str, Any] = {}
    for setting in settings:
        setting.write(config, out)
    return {**constants, **config.extra, **out}
