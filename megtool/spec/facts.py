"""What a field of a model's configuration says of itself: unit, other programs' names, effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any, Literal

Limits = Literal["finite", "positive", "not negative", "unchecked"]

_KEY = "facts"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFacts:
    """The facts of one field, beside its docstring.

    `default` is `dataclasses.MISSING` where there is none. `hf` is the key of config.json that most
    families have for it, and `megatron` the arg that Megatron has; None where its class, or a
    tensor, says it. A field that does not `changes_function` leaves the prediction of the next
    token as it is, in exact arithmetic. One that is `from_family` takes the family's word where
    args leave it at its default. `least` is the smallest integer allowed, and `limits` those of a
    number with a fraction.
    """

    default: Any
    unit: str
    hf: str | None
    megatron: str | None
    changes_function: bool
    from_family: bool
    least: int
    limits: Limits


def fact(
    unit: str,
    default: Any = MISSING,
    *,
    hf: str | None,
    megatron: str | None,
    factory: Callable[[], Any] | None = None,
    changes_function: bool = True,
    from_family: bool | None = None,
    least: int | None = None,
    limits: Limits = "finite",
) -> Any:
    """Make a dataclass field that holds its facts.

    Without a default the field is required, and an integer is then at least 1, otherwise 0. What
    Megatron has no arg for comes from the family, unless `from_family` says otherwise.
    """
    facts = FieldFacts(
        default=default,
        unit=unit,
        hf=hf,
        megatron=megatron,
        changes_function=changes_function,
        from_family=megatron is None if from_family is None else from_family,
        least=int(default is MISSING and factory is None) if least is None else least,
        limits=limits,
    )
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata={_KEY: facts})
    return dataclasses.field(default=default, metadata={_KEY: facts})


def read_facts(part: type) -> dict[str, tuple[dataclasses.Field[Any], FieldFacts]]:
    """Return the fields of a dataclass that hold facts, by name."""
    known = dataclasses.fields(part)
    return {f.name: (f, f.metadata[_KEY]) for f in known if _KEY in f.metadata}
