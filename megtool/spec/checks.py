"""Checks of single values of a model's configuration, by the type and facts of their field."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megtool.errors import MappingError
from megtool.spec.facts import FieldFacts, read_facts


def check_part(part: object) -> None:
    """Refuse numbers out of their field's range, and flags that are no bools.

    Raises:
        MappingError: the message names the field.
    """
    checked = _CHECKED.get(type(part))
    if checked is None:
        checked = _CHECKED[type(part)] = _checked_fields(type(part))
    for name, kind, facts in checked:
        value = getattr(part, name)
        if kind == "bool":
            if not isinstance(value, bool):
                raise MappingError(f"{name} is {value!r}", hint="true or false")
        elif kind == "bool | None":
            if value is not None and not isinstance(value, bool):
                raise MappingError(f"{name} is {value!r}", hint="true, false or nothing")
        elif kind == "int":
            check_int(name, value, facts.least)
        elif kind == "float | None":
            if value is not None and not (is_number(value) and value > 0):
                raise MappingError(f"{name} is {value!r}", hint="a positive number, or nothing")
        elif facts.limits == "not negative":
            if not (is_number(value) and value >= 0):
                raise MappingError(f"{name} is {value!r}", hint="a positive number, or 0 for none")
        elif facts.limits == "positive":
            if not (is_number(value) and value > 0):
                raise MappingError(f"{name} is {value!r}", hint="a positive number")
        elif facts.limits == "finite" and not is_number(value):
            raise MappingError(f"{name} is {value!r}", hint="a finite number")


_CHECKED: dict[type, tuple[tuple[str, str, FieldFacts], ...]] = {}


def _checked_fields(part: type) -> tuple[tuple[str, str, FieldFacts], ...]:
    kinds = ("bool", "bool | None", "int", "float", "float | None")
    return tuple(
        (name, str(field.type), facts)
        for name, (field, facts) in read_facts(part).items()
        if field.type in kinds
    )


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Refuse a word that is not one of those known.

    Raises:
        MappingError: the message names the field.
    """
    if value not in known:
        raise MappingError(f"{name} is {value!r}", hint=f"known: {', '.join(known)}")


def check_int(name: str, value: object, least: int) -> None:
    """Refuse what is no integer, or a smaller one.

    Raises:
        MappingError: the message names the field.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MappingError(f"{name} is {value!r}", hint=f"an integer of at least {least}")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_list(value: object) -> bool:
    """Return whether a value is a sequence other than a text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def are_flags(value: object, counts: tuple[int, ...]) -> bool:
    """Return whether a value is as many zeros and ones (or bools) as one of `counts`."""
    return isinstance(value, Sequence) and len(value) in counts and all(v in (0, 1) for v in value)
