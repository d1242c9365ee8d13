"""The words a family's configuration is written in: keys of a JSON file and ModelConfig fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.config import CONFIG_FIELDS, ModelConfig
from megtool.convert.expression import evaluate
from megtool.errors import MappingError

REQUIRED = "required"


class Setting(ABC):
    """One line of a configuration table, read and written."""

    __slots__ = ()

    @abstractmethod
    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Put ModelConfig fields into `into`; returns the stored keys it understood."""

    @abstractmethod
    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Put stored keys into `into`."""


@dataclass(frozen=True, slots=True)
class Key(Setting):
    """A stored key that is a field, under another name.

    `default` is used where the key is absent or null: a value, or `Default("expression")` over the
    fields read before it.
    """

    key: str
    field: str
    default: Any = REQUIRED

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The key's value, or its default."""
        value = stored.get(self.key)
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
        value = getattr(config, self.field)
        if into.setdefault(self.key, value) != value:
            raise MappingError(
                f"{self.field} is {value!r}, but {self.key!r} is already {into[self.key]!r}: "
                "the family has one key for both"
            )


@dataclass(frozen=True, slots=True)
class Default:
    """A default computed from fields read before, such as `hidden_size // num_heads`."""

    expression: str


@dataclass(frozen=True, slots=True)
class Only(Setting):
    """A stored key for which the family knows one value (or an absence that means it)."""

    key: str
    value: Any

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Refuse any other value."""
        value = stored.get(self.key, self.value)
        if value != self.value:
            raise MappingError(
                f"the configuration says {self.key}={value!r}, but the family knows {self.value!r}"
            )
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The one value."""
        into[self.key] = self.value


@dataclass(frozen=True, slots=True)
class Rope(Setting):
    """Rotary embedding: `rope_theta` and `rope_scaling`, or newer `rope_parameters` with both.

    The older form is written, which old and new readers understand.
    """

    base: float = 10000.0

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Base and scaling of either form; a scaling of type `default` is none."""
        new = stored.get("rope_parameters")
        scaling = dict(new if new is not None else stored.get("rope_scaling") or {})
        base = scaling.pop("rope_theta", None) or stored.get("rope_theta") or self.base
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        if scaling.get("rope_type", "default") == "default":
            scaling = {}
        into["rope_base"] = float(base)
        into["rope_scaling"] = scaling or None
        return ("rope_parameters", "rope_scaling", "rope_theta")

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The older form."""
        into["rope_theta"] = config.rope_base
        into["rope_scaling"] = None if config.rope_scaling is None else dict(config.rope_scaling)


def read_settings(
    settings: Sequence[Setting], stored: Mapping[str, Any], traits: Mapping[str, Any]
) -> ModelConfig:
    """A ModelConfig from stored keys; keys that no setting understands go to `extra`.

    `traits` are fields that the family fixes.

    Raises:
        MappingError: a key is missing or has an impossible value.
    """
    values: dict[str, Any] = dict(traits)
    understood: set[str] = set()
    for setting in settings:
        understood.update(setting.read(stored, values))
    if unknown := values.keys() - CONFIG_FIELDS:
        raise MappingError(f"{sorted(unknown)} are no fields of ModelConfig")
    extra = {k: v for k, v in stored.items() if k not in understood}
    return ModelConfig(**values, extra=extra)


def write_settings(
    settings: Sequence[Setting], config: ModelConfig, constants: Mapping[str, Any]
) -> dict[str, Any]:
    """Stored keys of a ModelConfig: `constants`, overridden by `extra`, then the settings."""
    out: dict[str, Any] = {}
    for setting in settings:
        setting.write(config, out)
    return {**constants, **config.extra, **out}
