"""Settings file: a YAML of options, and what the command line says over it."""

from __future__ import annotations

import difflib
import importlib
import types
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from megtool.errors import FormatError, MissingPackageError, StorageError, UsageError
from megtool.train.config import TrainConfig
from megtool.train.config_checks import ALTERNATIVES, DTYPE_FLAGS, option_flag

_TYPE_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def load_train_config(options: Mapping[str, Any], config: str | Path | None = None) -> TrainConfig:
    """Settings from options by their names; those that are None are not given.

    `config` is a YAML file of options, which `given` overrides: what says the same in another way
    (`--epochs` against `train-iters`) is left out of it.

    Raises:
        UsageError: there is no such option, or it has no such value; the hint names the nearest.
        FormatError: the file is no YAML of options.
    """
    explicit = {k: v for k, v in options.items() if v is not None and v != []}
    values = {} if config is None else read_config_file(config)
    for rivals in (*ALTERNATIVES, DTYPE_FLAGS):
        if any(explicit.get(name) for name in rivals):
            values = {k: v for k, v in values.items() if k not in rivals}
    return TrainConfig(**values | _convert_options(explicit, None))


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The options that a YAML file holds, by their fields' names, with hyphens or underscores.

    Raises:
        FormatError: it is no YAML, no mapping, or has a key twice.
        UsageError: it names an option that there is not, or a value of another kind.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "--config needs the pyyaml package", hint="pip install 'megtool[train]'"
        ) from e
    try:
        content = yaml.safe_load(Path(path).read_bytes())
    except OSError as e:
        raise StorageError(f"cannot read: {e.strerror or e}", file=path) from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise FormatError(f"no YAML: {' '.join(str(e).split())}", file=path) from e
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise FormatError(
            f"{type(content).__name__} instead of options", file=path, hint="train-iters: 100"
        )
    out: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = _ALIASES.get(name, name)
        if name in out:
            raise FormatError(f"{key!r} stands there twice", file=path)
        if value is not None:
            out[name] = value
    return _convert_options(out, path)


_ALIASES = {
    f.metadata["also"][2:].replace("-", "_"): f.name
    for f in fields(TrainConfig)
    if f.metadata["also"]
}


def _convert_options(values: Mapping[str, Any], file: str | Path | None) -> dict[str, Any]:
    hints = get_type_hints(TrainConfig)
    out = {}
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=3, cutoff=0.5)
            suggestion = " or ".join(option_flag(n)[2:] for n in near)
            raise UsageError(
                f"there is no option {name.replace('_', '-')!r}",
                file=file,
                hint=f"is {suggestion} meant?" if near else "megtool finetune --help lists them",
            )
        out[name] = _convert_value(name, value, hints[name], file)
    return out


def _convert_value(name: str, value: Any, hint: Any, file: str | Path | None) -> Any:
    """`value` as the field's type.

    Raises:
        UsageError: it is of another kind.
    """
    kinds = _alternatives(hint)
    for kind in kinds:
        if get_origin(kind) is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list | tuple) and all(isinstance(x, str | Path) for x in items):
                return tuple(str(x) for x in items)
        elif kind is Path and isinstance(value, str | Path):
            return Path(value)
        elif kind is float and not isinstance(value, bool):
            if isinstance(value, int | float):
                return float(value)
            if isinstance(value, str) and (number := _parse_number(value)) is not None:
                return number  # YAML 1.1 reads 2e-5, which has no dot, as a text
        elif kind is str and isinstance(value, str | Path | int) and not isinstance(value, bool):
            return str(value)
        elif type(value) is kind or (isinstance(kind, str) and value == kind):
            return value
    words = [k for k in kinds if isinstance(k, str)]
    expected = f"one of: {', '.join(words)}" if words else _TYPE_NAMES.get(kinds[0], "a list of texts")
    raise UsageError(f"{option_flag(name)[2:]} is {value!r}", file=file, hint=expected)


def _alternatives(hint: Any) -> list[Any]:
    """The types of a hint, and of a Literal its words, without None."""
    if get_origin(hint) in (Union, types.UnionType):
        return [k for part in get_args(hint) for k in _alternatives(part)]
    if hint is type(None):
        return []
    if get_origin(hint) is not None and get_origin(hint) is not tuple:
        return list(get_args(hint))
    return [hint]


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
