"""Options from a YAML file, and from flags or keywords, which win over the file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from megtool.errors import FormatError, UsageError
from megtool.options.field import convert_value, flag, nest_options, option_fields
from megtool.storage.location.path import location

T = TypeVar("T")
_MAX_BYTES = 128 << 10
TAG_ERRORS = ValueError, TypeError, AttributeError, LookupError, RecursionError
"""Exceptions of PyYAML for a tag that does not fit its value, such as `!!bool x`."""


def build_options(cls: type[T], given: Mapping[str, Any], config: str | Path | None = None) -> T:
    """Options from values by their names; those that are None (or an empty list) are not given.

    `config` is a YAML file of options, which `given` overrides: what says the same in another way
    (`rivals` of the class) is left out of it.

    Raises:
        UsageError: there is no such option, or it has no such value; the hint names the nearest.
        FormatError: the file is no YAML of options.
    """
    known = {k: v for k, v in given.items() if v is not None and v != []}
    values = {} if config is None else read_options(cls, config)
    for rivals in getattr(cls, "rivals", ()):
        if any(known.get(name) for name in rivals):
            values = {k: v for k, v in values.items() if k not in rivals}
    entries = option_fields(cls)
    _check_names(cls, known, None)
    missing = [e for e in entries if e.is_required and e.name not in values | known]
    if missing:
        first = missing[0]
        what = first.spec.metavar if first.spec.is_argument else first.flag
        raise UsageError(f"{what} is missing", hint=first.spec.help)
    return nest_options(cls, values | known)


def read_options(cls: type[Any], path: str | Path) -> dict[str, Any]:
    """The options that a YAML file holds, by their fields' names, with hyphens or underscores.

    Raises:
        FormatError: it is no YAML, no mapping, or has a key twice.
        UsageError: it names an option that there is not, or a value of another type.
    """
    content = _read_yaml(location(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise FormatError(
            f"the file holds a {type(content).__name__}, not options",
            file=path,
            hint="train-iters: 100",
        )
    names = {}
    for entry in option_fields(cls):
        for shown in entry.flags:
            for part in shown.split("/"):
                if not part.startswith("--no-"):
                    names[part[2:].replace("-", "_")] = entry.name
        names[entry.name] = entry.name
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = names.get(name, name)
        if name in values:
            raise FormatError(f"{key!r} is given twice", file=path)
        if value is not None:
            values[name] = value
    _check_names(cls, values, path)
    by_name = {entry.name: entry for entry in option_fields(cls)}
    return {name: convert_value(by_name[name], value, path) for name, value in values.items()}


def _read_yaml(path: Path) -> Any:
    """The value of a small YAML file.

    Raises:
        FormatError: it is no YAML, too large, or has aliases of more than a single value, with
            which a small file can grow without end.
    """
    from megtool.storage.files import read_limited  # which imports numpy

    yaml: Any = importlib.import_module("yaml")

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if is_alias and not isinstance(node, yaml.ScalarNode):
                raise yaml.YAMLError("an alias of a list or a mapping")
            return node

    try:
        return yaml.load(read_limited(path, _MAX_BYTES), Loader=Loader)
    except (yaml.YAMLError, *TAG_ERRORS) as e:
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise FormatError(f"the file is not YAML: {reason}", file=path) from e


def _check_names(cls: type[Any], values: Mapping[str, Any], file: str | Path | None) -> None:
    names = [e.name for e in option_fields(cls) if file is None or not e.spec.is_argument]
    for name in values:
        if name not in names:
            import difflib

            near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            nearest = " or ".join(flag(n)[2:] for n in near)
            raise UsageError(
                f"there is no option {name.replace('_', '-')!r}",
                file=file,
                hint=f"is {nearest} meant?" if near else "megtool VERB --help lists them",
            )
