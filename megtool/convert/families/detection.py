"""The families there are, and detection of the family of a checkpoint."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from megtool.convert.families.draft_heads import find_draft_head
from megtool.convert.families.family import Family
from megtool.convert.families.label_head import with_label_head
from megtool.convert.families.nested import TextConfig
from megtool.errors import MappingError, UnknownFamilyError

_PACKAGE = "megtool.converters"


def family_names() -> tuple[str, ...]:
    """Return the names of all families: the files of the converters folder."""
    return _list_modules(tuple(importlib.import_module(_PACKAGE).__path__))


@cache  # the list is asked for once a family; a folder that joins the package is another key
def _list_modules(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders)))


def family(name: str) -> Family:
    """The family called `name`.

    Raises:
        UnknownFamilyError: there is none; the hint lists those there are.
    """
    if name not in family_names():
        raise _unknown(f"unknown model family {name!r}")
    result = importlib.import_module(f"{_PACKAGE}.{name}").FAMILY
    if not isinstance(result, Family) or result.name != name:
        raise MappingError(f"converters/{name}.py has no FAMILY called {name!r}")
    return result if result.config else _with_text_model(result, {})


def families() -> tuple[Family, ...]:
    """All families."""
    return tuple(family(name) for name in family_names())


def detect_family(metadata: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, by a config.json's keys or a GGUF file's metadata.

    Looks at `architectures`, then `model_type`, then `general.architecture`.

    Raises:
        UnknownFamilyError: nothing says it, or no family is called so; or it is a draft head.
        MappingError: the family is known, and nests a text model that is not.
    """
    if (head := find_draft_head(metadata)) is not None:
        raise UnknownFamilyError(
            f"{head[0]} is a draft head ({head[1]}) of another model, and no model itself",
            hint="give the model; `inspect`, `verify`, `lint` and `reshard` take the head, under "
            "its own names",
        )
    return _with_text_model(with_label_head(_find_family(metadata), metadata), metadata)


def _with_text_model(outer: Family, metadata: Mapping[str, Any]) -> Family:
    """Return the family with the rows and settings of its text model; itself if it nests none.

    Raises:
        MappingError: the text model is of a type that the family does not know.
    """
    if outer.nested is None:
        return outer
    text = family(outer.nested.text_family(metadata))
    return replace(
        outer,
        config=(TextConfig(outer.nested, text.config),),
        hf=outer.nested.rows(text.hf),
        megatron=(*text.megatron, *(replace(t, stored="", also=()) for t in outer.towers)),
        traits=text.traits,
        ignores={**text.ignores, **outer.ignores},
        vocabulary=text.vocabulary,
        limits=(*outer.limits, *(x for x in text.limits if x not in outer.limits)),
    )


def _find_family(metadata: Mapping[str, Any]) -> Family:
    said_so = metadata.get("architectures")
    listed = said_so if isinstance(said_so, list | tuple) else ()
    architectures = tuple(x for x in listed if isinstance(x, str))
    kind, gguf = (
        x if isinstance(x := metadata.get(key), str) else None
        for key in ("model_type", "general.architecture")
    )
    if gguf == "llama" and metadata.get("llama.expert_count"):
        gguf = "llama with experts"
    if kind in family_names():  # most files are called like their model type: import no other
        named = family(kind)
        if kind in named.model_types and set(architectures) & set(named.architectures):
            return named
    candidates = families()
    for candidate in candidates:
        if set(architectures) & set(candidate.architectures):
            return candidate
    for candidate in candidates:
        if (kind and kind in candidate.model_types) or (
            gguf and gguf in candidate.gguf_architectures
        ):
            return candidate
    declared = [*architectures, *(x for x in (kind, gguf) if x)]
    if not declared:
        raise _unknown("the model family is unknown")
    raise _unknown(f"unknown model family {', '.join(map(repr, dict.fromkeys(declared)))}")


def _unknown(message: str) -> UnknownFamilyError:
    return UnknownFamilyError(
        message,
        hint=f"known: {', '.join(family_names())}; name one with --family, or add a file "
        "converters/NAME.py that defines FAMILY (converters/README.md says how)",
    )
