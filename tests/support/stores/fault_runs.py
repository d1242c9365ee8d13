"""Runs of the command line against a store, as if each were a process of its own, and faults."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from megtool.cli.app import main
from megtool.console import Bar
from megtool.storage.objects.index import store_index
from megtool.storage.stores import connect
from tests.support.stores.fault_proxy import Action

UNSTABLE = {"seconds", "path", "source", "a", "b"}
"""Entries of reports that differ between two runs of one command, or two places of one input."""


Settings = tuple[Action, dict[str, Any]]


def answer(status: int, code: str) -> Settings:
    return Action.ANSWER, {"status": status, "code": code}


CURED: dict[str, Settings] = {
    "cut": (Action.CUT, {}),
    "lost reply": (Action.LOSE_REPLY, {}),
    "500 to what was done": (Action.ANSWER_AFTERWARDS, {"status": 500, "code": "InternalError"}),
    "429": answer(429, "TooManyRequests"),
    "500": answer(500, "InternalError"),
    "503": answer(503, "SlowDown"),
    "truncated to nothing": (Action.TRUNCATE, {"offset": 0}),
    "truncated by one byte": (Action.TRUNCATE, {"offset": -1}),
}
"""Faults that another attempt cures."""
REFUSED: dict[str, Settings] = {
    "400": answer(400, "ExpiredToken"),
    "403": answer(403, "AccessDenied"),
    "404": answer(404, "NoSuchKey"),
    "412": answer(412, "PreconditionFailed"),
    "shortened": (Action.SHORTEN, {"offset": -1}),
    "first bit flipped": (Action.FLIP, {"offset": 0}),
    "last bit flipped": (Action.FLIP, {"offset": -1}),
    "bit flipped": (Action.FLIP, {"offset": 333}),
}
"""Faults that no attempt cures, or that look like an answer."""
FAULTS = CURED | REFUSED


@dataclass(frozen=True)
class Ending:
    """Exit status, report without what is unstable, and what went to stderr."""

    status: int
    report: Any
    error: str


def without_unstable(value: Any) -> Any:
    """A report without the entries of `UNSTABLE`, at any depth."""
    match value:
        case dict():
            return {k: without_unstable(v) for k, v in value.items() if k not in UNSTABLE}
        case list():
            return [without_unstable(v) for v in value]
    return value


def forget_stores() -> None:
    """Forget connections and what stores said, as a new process does."""
    store_index.cache_clear()
    connect._STORES.clear()


def run(*words: object) -> Ending:
    """Run a command with `--json` in this process; however slow, it shows no progress."""
    forget_stores()
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(Bar, "_LINE_SECONDS", math.inf),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main([*map(str, words), "--json"])
    report = json.loads(out.getvalue()) if out.getvalue() else None
    return Ending(status, without_unstable(report), err.getvalue())
