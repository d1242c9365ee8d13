"""Names as the user chooses them: patterns that rename."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megtool.errors import UsageError


def renamed(names: Sequence[str], renames: Sequence[str]) -> list[str]:
    """Names after `OLD=NEW` patterns, in order: each `*` of OLD is put for the same `*` of NEW.

    Raises:
        UsageError: a pattern is none, matches nothing, or gives two tensors one name.
    """
    names = list(names)
    for text in renames:
        old, equals, new = text.partition("=")
        if not equals or not old or not new or new.count("*") > old.count("*"):
            raise UsageError(f"rename {text!r}", hint="OLD=NEW, with no more * in NEW than in OLD")
        pattern = re.compile("(.*)".join(re.escape(part) for part in old.split("*")))
        hits = [(i, m) for i, n in enumerate(names) if (m := pattern.fullmatch(n))]
        if not hits:
            raise UsageError(f"rename {text!r} matches no tensor")
        for i, m in hits:
            parts, out = new.split("*"), ""
            for k, part in enumerate(parts):
                out += part + (m[k + 1] if k + 1 < len(parts) else "")
            names[i] = out
    twice = {n for n in names if names.count(n) > 1} if len(set(names)) != len(names) else set()
    if twice:
        raise UsageError(f"renaming gives two tensors the name {min(twice)!r}")
    return names
