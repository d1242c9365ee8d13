"""The check that no option is given which could have no effect.

An option that the other options, or the checkpoint, leave no use for is refused before any work:
whoever gave it expects something else than what would happen. What only this recipe or model has no
use for is logged as a warning, so that one command line serves several of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from megtool.errors import UsageError
from megtool.options.field import OptionCondition, OptionField, option_fields

_LOG = logging.getLogger(__name__)


def requires(name: str, hint: str) -> OptionCondition:
    """The condition that the option (or, of one letter, the argument) `name` is given as well."""
    shown = "--" + name.replace("_", "-") if len(name) > 1 else name.upper()
    return OptionCondition(
        holds=lambda options, facts: is_set(options, name),
        reason=f"{{has}} no effect without {shown}",
        hint=hint,
    )


def is_set(options: Any, name: str) -> bool:
    """Whether an option differs from its default."""
    entry = next(e for e in option_fields(type(options)) if e.name == name)
    return entry.is_set(entry.value(options))


def check_effects(
    options: Any, facts: Any = None, *, order: Sequence[OptionCondition] = ()
) -> None:
    """Refuse options that have no effect, or log a warning where the condition says so.

    `facts` are what conditions `on_facts` look at; without them these are not checked. Conditions
    are checked in `order`, those that it lacks after them in the order of the fields.

    Raises:
        UsageError: an option could have no effect; the message names all with the same reason.
    """
    given = [entry for entry in option_fields(type(options)) if entry.is_set(entry.value(options))]
    conditions = dict.fromkeys((*order, *(c for entry in given for c in entry.spec.needs)))
    unmet: dict[tuple[str, str], list[OptionField]] = {}
    for condition in conditions:
        entries = [entry for entry in given if condition in entry.spec.needs]
        is_known = facts is not None or not condition.on_facts
        if entries and is_known and not condition.holds(options, facts):
            names = unmet.setdefault((condition.reason, condition.hint), [])
            names += [entry for entry in entries if entry not in names]
    for (reason, hint), entries in unmet.items():
        words = _words(entries, facts)
        if not hint:
            _LOG.warning("%s", reason.format_map(words))
            continue
        text = f"{words['names']} {reason.format_map(words)}"
        raise UsageError(text, hint=hint.format_map(words), error_id="option-without-effect")


def _words(entries: Sequence[OptionField], facts: Any) -> dict[str, Any]:
    """What stands for names in braces."""
    number = len(entries)
    return {name: getattr(facts, name) for name in getattr(facts, "__dataclass_fields__", ())} | {
        "names": join_names([_given_flag(entry) for entry in entries]),
        "it": "it" if number == 1 else "them",
        "is": "is" if number == 1 else "are",
        "has": "has" if number == 1 else "have",
    }


def _given_flag(entry: OptionField) -> str:
    """The flag that was given: of a boolean that is on by default the one that turns it off."""
    if entry.hint is bool and entry.default is True:
        return entry.flags[0].partition("/")[2] or entry.flag
    return entry.flag


def join_names(names: Sequence[str]) -> str:
    """Names in a sentence: `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
