"""The checks of options against each other: what has no effect, and what excludes what.

An option that the other options, or the checkpoint, leave no use for is refused before any work:
whoever gave it expects something else than what would happen. What only this recipe or model has no
use for is logged as a warning, so that one command line serves several of them.

Conditions stand on the fields, as `needs` of `option`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megtool.errors import UsageError
from megtool.options.field import OptionCondition, OptionField, all_fields, flag, option_fields

_LOG = logging.getLogger(__name__)


def requires(
    names: str | tuple[str, ...], hint: str = "", *, values: tuple[Any, ...] = ()
) -> OptionCondition:
    """Return the condition that one of the options (or, of one letter, arguments) is given.

    Only an option that is one of `values`, if there are any, has to meet it.
    """
    alternatives = (names,) if isinstance(names, str) else names
    shown = " or ".join(flag(n) if len(n) > 1 else n.upper() for n in alternatives)
    return OptionCondition(
        holds=lambda options, facts: any(is_given(options, name) for name in alternatives),
        reason=f"{{has}} no effect without {shown}",
        hint=hint or f"give {shown}, or leave {{it}} out",
        values=values,
    )


def needs_also(name: str, *values: Any) -> OptionCondition:
    """Return the condition that the option `name` is given, too, if this one is one of `values`."""
    return OptionCondition(
        holds=lambda options, facts: is_given(options, name),
        reason=f"needs {flag(name)}",
        hint=f"give {flag(name)} as well",
        values=values,
        is_conflict=True,
    )


def at_most(name: str, limit: str) -> OptionCondition:
    """Return the condition that the option `name` is not above the option `limit`."""
    return OptionCondition(
        holds=lambda options, facts: bool(getattr(options, name) <= getattr(options, limit)),
        reason=f"is above {flag(limit)}",
        hint=f"at most {flag(limit)}",
        is_conflict=True,
    )


def unused_with(reasons: Mapping[str, str], *values: Any) -> tuple[OptionCondition, ...]:
    """Return the conditions that none of some options is given, with which this one has no effect.

    A key is an option, or `option=value`; the text continues the sentence that names it. Only an
    option that is one of `values`, if there are any, has to meet them.
    """
    return tuple(
        OptionCondition(
            holds=_is_absent(key),
            reason=f"{{has}} no effect with {_shown(key)}, {why}",
            hint="leave out one of them",
            values=values,
        )
        for key, why in reasons.items()
    )


def excludes(reasons: Mapping[str, str], *values: Any) -> tuple[OptionCondition, ...]:
    """Return the conditions that none of some options is given, which contradict this one.

    `reasons`, each of which may be empty, and `values` are those of `unused_with`.
    """
    return tuple(
        OptionCondition(
            holds=_is_absent(key),
            reason=f"and {_shown(key)} exclude each other" + (f": {why}" if why else ""),
            hint="leave out one of them",
            values=values,
            is_conflict=True,
        )
        for key, why in reasons.items()
    )


def _is_absent(key: str) -> Callable[[Any, Any], bool]:
    name, _, value = key.partition("=")
    if value:
        return lambda options, facts: getattr(options, name) != value
    return lambda options, facts: not (getattr(options, name) and is_given(options, name))


def _shown(key: str) -> str:
    name, _, value = key.partition("=")
    return f"{flag(name)} {value}" if value else flag(name)


class OptionValues:
    """The values of options by name, whatever group they are in, and further attributes of them."""

    def __init__(self, options: Any) -> None:
        self._options = options
        self._entries = {entry.name: entry for entry in all_fields(type(options))}

    def __getattr__(self, name: str) -> Any:
        entry = self._entries.get(name)
        return getattr(self._options, name) if entry is None else entry.value(self._options)

    def is_set(self, name: str) -> bool:
        """Return whether an option differs from its default."""
        return self._entries[name].is_set(getattr(self, name))


def is_set(options: Any, name: str) -> bool:
    """Return whether an option differs from its default."""
    values = options if isinstance(options, OptionValues) else OptionValues(options)
    return values.is_set(name)


def is_given(options: Any, name: str) -> bool:
    """Return whether an option is set, and not switched off."""
    return is_set(options, name) and getattr(options, name) is not False


def check_effects(
    options: Any, facts: Any = None, *, order: Sequence[OptionCondition] = ()
) -> None:
    """Refuse options that have no effect or contradict each other, or log a warning where the
    condition says so.

    `facts` are what conditions `on_facts` look at; without them these are not checked. Conditions
    are checked in `order`, those that it lacks after them in the order of the fields.

    Raises:
        UsageError: an option could have no effect, or rules out another one; the message names all
            with the same reason.
    """
    values = OptionValues(options)
    _check_rivals(values)
    given = [entry for entry in option_fields(type(options)) if entry.is_set(entry.value(options))]
    conditions = dict.fromkeys((*order, *(c for entry in given for c in entry.spec.needs)))
    unmet: dict[tuple[str, str, bool], list[str]] = {}
    for condition in conditions:
        names = [
            _given_flag(entry, value, condition)
            for entry in given
            if condition in entry.spec.needs
            and ((value := entry.value(options)) in condition.values or not condition.values)
        ]
        is_known = facts is not None or not condition.on_facts
        if names and is_known and not condition.holds(values, facts):
            key = (condition.reason, condition.hint, condition.is_conflict)
            others = unmet.setdefault(key, [])
            others += [name for name in names if name not in others]
    for (reason, hint, is_conflict), names in unmet.items():
        words = _words(names, facts)
        if not hint:
            _LOG.warning("%s", reason.format_map(words))
            continue
        text, hint = f"{words['names']} {reason.format_map(words)}", hint.format_map(words)
        raise UsageError(text, hint=hint) if is_conflict else without_effect(text, hint)


def without_effect(text: str, hint: str) -> UsageError:
    """Return the error of an option that could have no effect."""
    return UsageError(text, hint=hint, error_id="option-without-effect")


def check_excludes(options: Any, subject: str, reasons: Mapping[str, str]) -> None:
    """Refuse options that are not possible with `subject`; `reasons` are those of `excludes`.

    Raises:
        UsageError: one of them is given.
    """
    for condition in excludes(reasons):
        if not condition.holds(OptionValues(options), None):
            raise UsageError(f"{subject} {condition.reason}", hint=condition.hint)


def _check_rivals(values: OptionValues) -> None:
    for rivals in values.rivals:
        if (given := [flag(name) for name in rivals if getattr(values, name)])[1:]:
            raise UsageError(f"{join_names(given)} exclude each other", hint="give one of them")


def _words(names: Sequence[str], facts: Any) -> dict[str, Any]:
    is_one = len(names) == 1
    return {name: getattr(facts, name) for name in getattr(facts, "__dataclass_fields__", ())} | {
        "names": join_names(names),
        "it": "it" if is_one else "them",
        "is": "is" if is_one else "are",
        "has": "has" if is_one else "have",
    }


def _given_flag(entry: OptionField, value: Any, condition: OptionCondition) -> str:
    """Return the flag that was given: that turns it off of a boolean that is false; with its value
    if the condition is for some values only."""
    if entry.hint is bool and value is False:
        return entry.flags[0].partition("/")[2] or entry.flag
    return f"{entry.flag} {value}" if condition.values else entry.flag


def join_names(names: Sequence[str]) -> str:
    """Names in a sentence: `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
