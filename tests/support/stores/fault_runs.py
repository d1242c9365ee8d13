"""Runs of the command line against a store, as if each were a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from megtool.checkpoint.storage import connect
from megtool.checkpoint.storage.store_index import store_index
from megtool.cli.app import main

UNSTABLE = {"seconds", "path", "source", "a", "b"}
"""Entries of reports that differ between two runs of one command, or two places of one input."""


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
    """Run a command with `--json` in this process."""
    forget_stores()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*map(str, words), "--json"])
    report = json.loads(out.getvalue()) if out.getvalue() else None
    return Ending(status, without_unstable(report), err.getvalue())
