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
