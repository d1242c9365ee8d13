"""Dataclass fields that are options: flags, help, range, and what they need to have an effect.

A verb's options are one frozen dataclass. A field of it may itself be a group of options, which
the engine takes as it is. The command line, YAML files, the Python API and the reference page know
nothing of groups: there the options of all groups stand side by side, by their fields' names.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megtool.errors import UsageError
from megtool.storage.location.path import location

T = TypeVar("T")

REQUIRED: Any = MISSING
"""The default of an option that has to be given."""

_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCondition:
    """What has to hold for an option to have an effect, or (`is_conflict`) to be possible.

    Only an option that is one of `values` needs it; without them every one that is set. `holds`
    takes the options by name, whatever group they are in, and, where `on_facts`, what the verb has
    learned of its inputs (None otherwise). `reason` follows the flags in the message; `{names}`,
    `{it}`, `{is}` and `{has}` in it, and in `hint`, stand for the flags, and other names for
    attributes of the facts. Without a `hint` a warning is logged instead of an error.
    """

    holds: Callable[[Any, Any], bool]
    reason: str
    hint: str = ""
    on_facts: bool = False
    values: tuple[Any, ...] = ()
    is_conflict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """How one field is offered.

    `flags` are its flags in full where they do not follow from the name (`--name`, and for a
    boolean `--name/--no-name`); `alias` is another one. `minimum` and `maximum` are the least and
    greatest values allowed; values are greater than `above` and less than `below`. `needs` are
    conditions without which it has no effect, or contradicts other options. An argument has no flag
    but a position. Something is written where an option `is_written` names a location.
    """

    panel: str
    help: str
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    flags: tuple[str, ...] = ()
    alias: str | None = None
    needs: tuple[OptionCondition, ...] = ()
    is_argument: bool = False
    is_written: bool = False


def option(
    panel: str,
    text: str,
    default: Any = None,
    *,
    metavar: str | None = None,
    minimum: float | None = None,
    alias: str | None = None,
    **more: Any,
) -> Any:
    """A field that is an option: its panel and help, the least value allowed, and another flag.

    `more` are further fields of `OptionSpec`.
    """
    spec = OptionSpec(panel=panel, help=text, metavar=metavar, minimum=minimum, alias=alias, **more)
    return dataclasses.field(default=default, metadata={"option": spec})


LAYOUT = "Parallel layout"
"""The panel of layout options."""

LAYOUT_SIZES: Mapping[str, str] = {
    "tp": "Tensor-parallel ranks",
    "pp": "Pipeline-parallel ranks",
    "encoder_pp": "How many of --pp the encoder has (T5), the first ones; 0 of other models",
    "vpp": "Virtual pipeline stages per rank",
    "ep": "Expert-parallel ranks",
    "etp": "Tensor-parallel ranks of experts; default: --tp",
    "cp": "Context-parallel ranks, which split each row's tokens",
    "dp": "Data-parallel ranks",
}
"""The help of the sizes of a parallel layout.

`LayoutOptions` declares them for `reshard` and `finetune`, `RuntimeOptions` for verbs that run a
model, and `export` and `lint` on their own."""


def layout_size(
    axis: str, default: int | None = None, *, note: str = "", minimum: int = 1, **more: Any
) -> Any:
    """A field that is the size of a layout's axis; its help is that of `LAYOUT_SIZES` and `note`.

    `more` are further keywords of `option`.
    """
    text = f"{LAYOUT_SIZES[axis]}{note}."
    return option(LAYOUT, text, default, metavar="N", minimum=minimum, **more)


def argument(text: str, metavar: str, default: Any = REQUIRED, *, is_written: bool = False) -> Any:
    """A field that is a positional argument."""
    spec = OptionSpec(
        panel="Arguments", help=text, metavar=metavar, is_argument=True, is_written=is_written
    )
    return dataclasses.field(default=default, metadata={"option": spec})


def group(kind: type[Any]) -> Any:
    """A field that is a group of options; unless one is given it has the defaults of `kind`."""
    return dataclasses.field(default_factory=kind, metadata={"group": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionField:
    """One option of a dataclass: its name, its type without None, its default and its spec.

    `path` has the fields of the groups that it is in, the outermost first, and `other_paths` those
    of further groups that it is shared with.
    """

    name: str
    hint: Any
    is_optional: bool
    default: Any
    spec: OptionSpec
    path: tuple[str, ...] = ()
    other_paths: tuple[tuple[str, ...], ...] = ()

    def value(self, options: Any) -> Any:
        """Return what `options` have for this option."""
        for name in self.path:
            options = getattr(options, name)
        return getattr(options, self.name)

    @property
    def flag(self) -> str:
        """The first flag, as messages name it."""
        return self.spec.flags[0].partition("/")[0] if self.spec.flags else flag(self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags."""
        if self.spec.flags:
            return self.spec.flags
        usual = flag(self.name)
        if self.hint is bool:
            usual = f"{usual}/--no-{usual[2:]}"
        return (usual, self.spec.alias) if self.spec.alias else (usual,)

    @property
    def is_repeatable(self) -> bool:
        """It takes several values."""
        return get_origin(self.hint) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it may be, where there is a list of them."""
        return get_args(self.hint) if get_origin(self.hint) is Literal else ()

    @property
    def is_required(self) -> bool:
        """It has no default."""
        return self.default is REQUIRED

    def is_set(self, value: object) -> bool:
        """Whether `value` differs from the default."""
        return value is not None and value != () and value != self.default


def flag(name: str) -> str:
    """A field's name as a flag."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base of option dataclasses: values are converted and checked when one is built.

    None stands for the default. `not_offered` names options of a base or group that the verb does
    not take, `extra_needs` those that need more to have an effect here, `rivals` sets of options of
    which one given on the command line overrides all in a file, and which exclude each other.
    `shown_after` names options of groups and, for each, the option that it follows in help;
    `shared` those that stand in several groups, which all get the value, and are declared as in the
    first. `restated` replaces spec and default of options of a base; types stay. `panels` come
    first in the help, in this order.

    Raises:
        UsageError: a value is of the wrong type or out of its range.
    """

    not_offered: ClassVar[frozenset[str]] = frozenset()
    extra_needs: ClassVar[Mapping[OptionCondition, tuple[str, ...]]] = {}
    rivals: ClassVar[tuple[tuple[str, ...], ...]] = ()
    shown_after: ClassVar[Mapping[str, str]] = {}
    shared: ClassVar[frozenset[str]] = frozenset()
    restated: ClassVar[Mapping[str, Any]] = {}
    panels: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for entry in all_fields(type(self)):
            if entry.path:
                continue
            value = getattr(self, entry.name)
            if value is None and not entry.is_optional:
                value = entry.default
                if value is REQUIRED:
                    raise UsageError(f"{entry.flag} is missing")
            elif value is not None:
                value = convert_value(entry, value)
            object.__setattr__(self, entry.name, value)


def all_fields(cls: type[Any]) -> tuple[OptionField, ...]:
    """Return the options of a dataclass and its groups, offered or not, in the order of help.

    Arguments come first. A group stands where it is declared; a class's own fields come before
    those of its bases, bases from left to right.
    """
    if cls not in _FIELDS:
        _FIELDS[cls] = _collect_fields(cls)
    return _FIELDS[cls]


_FIELDS: dict[type[Any], tuple[OptionField, ...]] = {}


def _collect_fields(cls: type[Any]) -> tuple[OptionField, ...]:
    hints = get_type_hints(cls)
    declared = {f.name: f for f in dataclasses.fields(cls)}
    restated: Mapping[str, Any] = getattr(cls, "restated", {})
    entries: list[OptionField] = []
    for name in dict.fromkeys(_names(cls)):
        field = restated.get(name, declared.get(name))
        metadata = {} if field is None else field.metadata
        if field is not None and "option" in metadata:
            hint, is_optional = _without_none(hints[name])
            entries.append(
                OptionField(
                    name=name,
                    hint=hint,
                    is_optional=is_optional and (name not in restated or field.default is None),
                    default=field.default,
                    spec=metadata["option"],
                )
            )
        elif "group" in metadata:
            grouped = all_fields(metadata["group"])
            entries += [dataclasses.replace(e, path=(name, *e.path)) for e in grouped]
    entries = [_with_extra_needs(cls, entry) for entry in _merge_shared(cls, entries)]
    for name, before in getattr(cls, "shown_after", {}).items():
        entry = entries.pop([e.name for e in entries].index(name))
        entries.insert([e.name for e in entries].index(before) + 1, entry)
    panels: tuple[str, ...] = getattr(cls, "panels", ())
    places = {panel: n for n, panel in enumerate(panels)}

    def place(entry: OptionField) -> tuple[bool, int]:
        return not entry.spec.is_argument, places.get(entry.spec.panel, len(panels))

    return tuple(sorted(entries, key=place))


def _merge_shared(cls: type[Any], entries: list[OptionField]) -> list[OptionField]:
    """Make one entry of those of the same name, which have to be shared."""
    by_name: dict[str, OptionField] = {}
    for entry in entries:
        first = by_name.setdefault(entry.name, entry)
        if first is not entry:
            if entry.name not in getattr(cls, "shared", ()):
                raise TypeError(f"{cls.__name__} has the option {entry.name} twice")
            others = (*first.other_paths, entry.path)
            by_name[entry.name] = dataclasses.replace(first, other_paths=others)
    return list(by_name.values())


def _with_extra_needs(cls: type[Any], entry: OptionField) -> OptionField:
    extra: Mapping[OptionCondition, tuple[str, ...]] = getattr(cls, "extra_needs", {})
    needs = tuple(condition for condition, names in extra.items() if entry.name in names)
    if not needs:
        return entry
    spec = dataclasses.replace(entry.spec, needs=entry.spec.needs + needs)
    return dataclasses.replace(entry, spec=spec)


def option_fields(cls: type[Any]) -> tuple[OptionField, ...]:
    """The options that a verb offers."""
    hidden: frozenset[str] = getattr(cls, "not_offered", frozenset())
    return tuple(e for e in all_fields(cls) if e.name not in hidden)


def nest_options(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make options from values by the names of options, whatever group these are in."""
    keywords, by_group = _split_by_group(cls, values)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if "group" in field.metadata:
            inner = by_group.get(field.name, {})
            keywords[field.name] = nest_options(field.metadata["group"], inner)
    return cls(**keywords)


def replace_options(options: T, **values: Any) -> T:
    """Return `options` with other values of those named, whatever group these are in."""
    keywords, by_group = _split_by_group(type(options), values)
    for name, inner in by_group.items():
        keywords[name] = replace_options(getattr(options, name), **inner)
    return dataclasses.replace(options, **keywords)  # type: ignore[type-var]


def _split_by_group(
    cls: type[Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split values into those of the class's own fields and those of each of its groups."""
    own: dict[str, Any] = {}
    by_group: dict[str, dict[str, Any]] = {}
    for entry in all_fields(cls):
        for path in (entry.path, *entry.other_paths) if entry.name in values else ():
            part = by_group.setdefault(path[0], {}) if path else own
            part[entry.name] = values[entry.name]
    return own, by_group


def find_option(options: Any, name: str) -> Any:
    """Return the value of the option `name`, in whatever group it is; None if there is none."""
    values = (e.value(options) for e in all_fields(type(options)) if e.name == name)
    return next(values, None)


def written_locations(options: Any) -> tuple[Path, ...]:
    """The locations of a verb's options where something is written, arguments first."""
    values = (e.value(options) for e in all_fields(type(options)) if e.spec.is_written)
    return tuple(value for value in values if value is not None)


def read_locations(options: Any) -> tuple[str | Path, ...]:
    """What a verb's options name otherwise: paths, and texts that may be some."""
    values = (e.value(options) for e in all_fields(type(options)) if not e.spec.is_written)
    flat = (x for value in values for x in (value if isinstance(value, tuple) else (value,)))
    return tuple(x for x in flat if isinstance(x, str | Path))


def _names(cls: type[Any]) -> Iterator[str]:
    yield from inspect.get_annotations(cls)
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            yield from _names(base)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        parts = [a for a in get_args(hint) if a is not type(None)]
        if len(parts) < len(get_args(hint)) and len(parts) == 1:
            return parts[0], True
    return hint, False


def convert_value(entry: OptionField, value: Any, file: str | Path | None = None) -> Any:
    """`value` as the option's type.

    Raises:
        UsageError: it has another type, or is out of range; `file` is where it was read.
    """
    hint = entry.hint
    name = entry.flag if file is None else entry.flag[2:]
    if entry.is_repeatable:
        items = [value] if isinstance(value, str | Path) else value
        if isinstance(items, list | tuple) and all(isinstance(x, str | Path) for x in items):
            make = location if get_args(hint)[0] is Path else get_args(hint)[0]
            return tuple(make(x) for x in items)
    elif hint is Path and isinstance(value, str | Path):
        return location(value)
    elif entry.choices:
        if value in entry.choices:
            return value
        words = ", ".join(entry.choices)
        raise UsageError(_shown(name, value), file=file, hint=f"one of: {words}")
    elif hint is str and isinstance(value, str | Path | int | float):
        if not isinstance(value, bool):
            return str(value)
    elif hint in (int, float) and not isinstance(value, bool):
        if (number := _number(value, hint, from_text=file is not None)) is not None:
            return _in_range(entry, number, name, file)
    elif hint is bool and isinstance(value, bool):
        return value
    raise UsageError(_shown(name, value), file=file, hint=_KINDS.get(hint, "a list of texts"))


def _shown(name: str, value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else "unreadable"
    return f"{name} is {text if len(text) <= 200 else text[:197] + '...'}"


def _number(value: Any, kind: type[Any], *, from_text: bool) -> int | float | None:
    """A number of the type asked for; YAML 1.1 reads 2e-5, which has no dot, as a text."""
    if isinstance(value, int):
        if kind is int:
            return value if abs(value) < 1 << 63 else None
        try:
            return float(value)
        except OverflowError:
            return None
    if kind is int:
        return None
    if isinstance(value, float):
        return value
    try:
        return float(value) if from_text and isinstance(value, str) else None
    except ValueError:
        return None


def _in_range(entry: OptionField, number: float, name: str, file: str | Path | None) -> int | float:
    if isinstance(number, float) and not math.isfinite(number):
        raise UsageError(f"{name} is {number}", file=file, hint="a finite number")
    spec = entry.spec
    limits = (
        (spec.minimum, operator.ge, "{:g} or more"),
        (spec.above, operator.gt, "above {:g}"),
        (spec.maximum, operator.le, "at most {:g}"),
        (spec.below, operator.lt, "below {:g}"),
    )
    if not all(limit is None or fits(number, limit) for limit, fits, _ in limits):
        hint = " and ".join(words.format(limit) for limit, _, words in limits if limit is not None)
        raise UsageError(_shown(name, number), file=file, hint=hint)
    return number
