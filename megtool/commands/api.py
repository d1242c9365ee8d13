"""The Python API: every verb as a function that takes its options by keyword."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, get_args

from megtool.commands.verbs import BY_API, Verb
from megtool.options.config_file import build_options
from megtool.options.field import OptionField, option_fields


class VerbFunction:
    """A verb as `megtool.reshard(source, destination, tp=3)`.

    Arguments, and options that have to be given, may be positional. Options are keywords of the
    command line's names; `config` is a YAML file of them where the verb takes one. Other keywords
    (`progress`) go to the function that does the work.

    A verb may have the name of a package (`megtool.reshard`); attributes that are not the
    function's are then the package's, so that `import megtool.source.checkpoint` still finds it.
    """

    def __init__(self, verb: Verb) -> None:
        self._verb = verb
        self.__name__ = self.__qualname__ = verb.api
        self.__module__ = "megtool"
        self.__doc__ = verb.options.__doc__
        self.__signature__ = inspect.Signature(_parameters(verb))

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        """Do the work and return the report."""
        entries = option_fields(self._verb.options)
        names = positional_names(entries)
        if len(positional) > len(names):
            raise TypeError(f"{self.__name__}() takes {len(names)} positional arguments")
        given = dict(zip(names, positional, strict=False))
        if twice := given.keys() & keywords:
            raise TypeError(f"{self.__name__}() got {min(twice)!r} twice")
        known = {entry.name for entry in entries}
        config = keywords.pop("config", None) if self._verb.has_config else None
        callbacks = {k: v for k, v in keywords.items() if k not in known and k in self._callbacks()}
        given |= {k: v for k, v in keywords.items() if k not in callbacks}
        return self._verb.call(build_options(self._verb.options, given, config), callbacks)

    def _callbacks(self) -> set[str]:
        """What the function takes besides options."""
        return {"progress", *inspect.signature(self._verb.function).parameters}

    def __getattr__(self, name: str) -> Any:
        package = sys.modules.get(f"megtool.{self.__dict__.get('__name__')}")
        if package is None:
            raise AttributeError(name)
        return getattr(package, name)

    def __repr__(self) -> str:
        return f"<function megtool.{self.__name__}>"


def make_function(api: str) -> VerbFunction:
    """The function of a verb.

    Raises:
        AttributeError: there is no such verb.
    """
    if api not in BY_API:
        raise AttributeError(f"module 'megtool' has no attribute {api!r}")
    return VerbFunction(BY_API[api])


def positional_names(entries: tuple[OptionField, ...]) -> list[str]:
    """The options that may be positional: arguments, then those that have to be given."""
    arguments = [e.name for e in entries if e.spec.is_argument]
    return arguments + [e.name for e in entries if e.is_required and e.name not in arguments]


def _parameters(verb: Verb) -> list[inspect.Parameter]:
    entries = option_fields(verb.options)
    positional = positional_names(entries)
    by_name = {entry.name: entry for entry in entries}
    ordered = [by_name[name] for name in positional]
    ordered += [entry for entry in entries if entry.name not in positional]
    return [
        inspect.Parameter(
            entry.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if entry.name in positional
            else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if entry.is_required else entry.default,
            annotation=annotation(entry),
        )
        for entry in ordered
    ]


def annotation(entry: OptionField) -> str:
    """What the function takes for an option, as source text."""
    hint = entry.hint
    if entry.is_repeatable:
        item = "str | Path" if get_args(hint)[0] is Path else "str"
        text = f"{item} | Sequence[{item}]"
    elif entry.choices:
        text = f"Literal[{', '.join(map(repr, entry.choices))}]".replace("'", '"')
    else:
        text = "str | Path" if hint is Path else hint.__name__
    return f"{text} | None" if entry.is_optional else text
