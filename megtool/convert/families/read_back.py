"""Read what was written back, and refuse settings that it lost before a byte is moved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from megtool.convert.config.activation import Activation
from megtool.convert.config.keys import REQUIRED, Default, Derived, Key, OneOf
from megtool.convert.config.moe import Assumed, Noted
from megtool.convert.families.family import Family
from megtool.convert.families.nested import TEXT_CONFIG, TIED
from megtool.convert.language.canonical import VOCABULARY
from megtool.errors import MappingError, UsageError, listed
from megtool.spec.meaning import compare_functions, function_fields
from megtool.spec.model_config import CONFIG_FIELDS, ModelConfig

_BY_TENSORS = ("tied_embeddings", "shared_norm", "tied_values", "layer_kinds", "no_rope_layers")
"""Fields that files say by their tensors, or an architecture by its name."""

TENSOR_FLAGS = frozenset(w.flag for w in VOCABULARY.values() if w.flag is not None)
"""Fields that tensors say: whether there are optional ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSetting:
    """A field of a model that what was written does not say, and what it says instead."""

    field: str
    value: Any
    computed: Any

    def describe(self) -> str:
        """Name the setting as each program calls it, with both values."""
        facts = CONFIG_FIELDS[self.field]
        known = {"Megatron": facts.megatron, "Hugging Face": facts.hf}
        names = [f"{name} in {who}" for who, name in known.items() if name and name != self.field]
        called = f" ({', '.join(names)})" if names else ""
        return f"{self.field}{called} is {_short(self.value)}, which would become " + _short(
            self.computed
        )


def find_lost_settings(
    config: ModelConfig, written: ModelConfig, *, ignored: Collection[str] = ()
) -> tuple[LostSetting, ...]:
    """Return the fields in which what was written computes something else than the model."""
    return tuple(
        LostSetting(field=name, value=value, computed=computed)
        for name, (value, computed) in compare_functions(config, written).items()
        if name not in ignored
    )


def find_lost_in_class(
    config: ModelConfig,
    family: Family,
    stored: Mapping[str, Any],
    *,
    ignored: Collection[str] = (),
) -> tuple[LostSetting, ...]:
    """Return the fields of a model that keys of a config.json do not say, as the family reads it.

    `ignored` are fields that are not compared, and neither is what tensors say of the head.

    Raises:
        MappingError: the family cannot read them.
    """
    written = family.read_config(stored)
    if family.head_unties or (family.nested is not None and TIED not in stored):
        ignored = {*ignored, "tied_embeddings"}
    return find_lost_settings(config, written, ignored=ignored)


def lost_settings_error(
    lost: Sequence[LostSetting], place: str, holders: Sequence[str] = ()
) -> MappingError:
    """Make the error for settings that `place` cannot hold; `holders` are families that can."""
    first = lost[0]
    more = f"; so would {listed([s.field for s in lost[1:]])}" if lost[1:] else ""
    drops = " ".join(f"--drop-setting {s.field}" for s in lost[:4])
    return MappingError(
        f"{place} does not hold a setting that changes the function: {first.describe()}{more}",
        hint=f"{suggest_families(holders)}{drops} writes the model without "
        + ("it" if len(lost) == 1 else "them")
        + ", and records so",
        error_id="setting-lost",
    )


def suggest_families(names: Sequence[str]) -> str:
    """Return the beginning of a hint that names some families; empty if there are none."""
    return f"did you mean --family {' or '.join(names[:3])}? " if names else ""


def holds(family: Family, config: ModelConfig, ignored: Collection[str] = ()) -> bool:
    """Return whether a family's config.json holds all settings of a model."""
    both_ways = bool(family.traits.get("bidirectional"))
    has_experts = any(getattr(s, "field", None) == "num_experts" for s in family.config)
    if family.nested is not None or both_ways != config.bidirectional:
        return False
    if has_experts and not config.moe.num_experts:
        return False
    bare = config.with_fields(extra={})
    try:
        written = family.read_config(family.write_config(bare))
    except (MappingError, TypeError, ValueError, ArithmeticError, KeyError):
        return False
    return not find_lost_settings(bare, written, ignored=ignored)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def fields_called(name: str) -> tuple[str, ...]:
    """Return the fields that a setting's name stands for: a field's, Megatron's, Hugging Face's."""
    word = name.removeprefix("--").replace("-", "_")
    if word in CONFIG_FIELDS:
        return (word,)
    return tuple(n for n, facts in CONFIG_FIELDS.items() if word in (facts.megatron, facts.hf))


def without_keys(
    stored: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return stored settings without those of some names, and what these were.

    Keys of a nested text model count like others; a name that is no key is left out of the second.
    """
    out, removed = dict(stored), dict[str, Any]()
    inner = out.get(TEXT_CONFIG)
    for name in names:
        if name in out:
            removed[name] = out.pop(name)
        elif isinstance(inner, Mapping) and name in inner:
            removed[name] = inner[name]
            inner = out[TEXT_CONFIG] = {k: v for k, v in inner.items() if k != name}
    return out, removed


def without_settings(
    config: ModelConfig, family: Family | None, names: Sequence[str]
) -> tuple[ModelConfig, dict[str, Any]]:
    """Return a model without the settings of these names, and what their fields were.

    A field gets the value that the family has where nothing says another.

    Raises:
        UsageError: no model is without such a setting.
    """
    usual = usual_values(family) if family else {}
    dropped: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name in names:
        if not (fields := fields_called(name)):
            raise UsageError(
                f"--drop-setting is {name!r}, and the model has no such setting",
                hint="a field of the configuration, a key of config.json, or an arg of Megatron",
            )
        for field in fields:
            value = usual.get(field, CONFIG_FIELDS[field].default)
            if value is MISSING:
                raise UsageError(
                    f"--drop-setting is {name!r}, which every model has",
                    hint="the settings that can be dropped are named by the error that refuses one",
                )
            dropped[field], values[field] = config.get(field), value
    return config.with_fields(**values), dropped


def usual_values(family: Family) -> dict[str, Any]:
    """Return the values of fields where a family's config.json says none."""
    out: dict[str, Any] = {}
    for setting in family.settings:
        if isinstance(setting, Activation):
            out["activation"] = setting.default
        elif isinstance(setting, OneOf):
            out[setting.field] = setting.values[0]
        elif isinstance(setting, Key) and not isinstance(setting.default, Default):
            if setting.default != REQUIRED:
                out.setdefault(setting.field, setting.default)
        elif isinstance(setting, Noted):
            out.setdefault(setting.field, setting.default)
    return out | dict(family.traits)


def find_unsaid(
    config: ModelConfig, family: Family, describe: Callable[[ModelConfig], object]
) -> tuple[LostSetting, ...]:
    """Return the settings of a model that a file which nothing reads back does not say.

    `describe` makes what the file says of a configuration, and raises `MappingError` where it
    cannot be written. A setting that is not the family's usual one is said if without it the file
    would be another. What tensors or the family's class say is not looked at.
    """
    implied = {*TENSOR_FLAGS, *_BY_TENSORS}
    implied |= {s.field for s in family.settings if isinstance(s, Assumed | Derived)}
    usual = usual_values(family)
    contents = describe(config)
    out: list[LostSetting] = []
    for name in function_fields(config):
        value = usual.get(name, CONFIG_FIELDS[name].default)
        if value is MISSING or name in implied or config.get(name) == value:
            continue
        try:
            without = config.with_fields(**{name: value})
            if name in compare_functions(config, without) and describe(without) == contents:
                out.append(LostSetting(field=name, value=config.get(name), computed=value))
        except MappingError:  # the file cannot be that of such a model
            continue
    return tuple(out)
