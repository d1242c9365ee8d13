"""Pytest plugin: after the fast tests, slow ones and peers' take turns until time is up.

`python -m pytest -p tests.support.rotation --minutes 30` runs all other tests first. Those marked
slow or peers follow in the order of their last run, the longest ago first; a file in the cache of
this user's home holds the number of that run. Tests of which nothing is known, as on a new
machine, are in four parts by a hash of their ids, and the number of commits says which part is
first. A test that has not begun when time is up is skipped, and is among the first of the next run.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

PARTS = 4
TURN = ("rotation", "turn")
TIME_IS_UP = "time is up; it comes first in the next run"
STATE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megtool-rotation.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rotation")
    group.addoption("--minutes", type=float, default=30.0, help="begin no slow test after these")
    group.addoption("--rotation-state", type=Path, default=STATE, help="the numbers of last runs")


def read_state(path: Path) -> dict[str, int]:
    """Return the number of the last run of each test; nothing if the file is missing or broken."""
    try:
        state = json.loads(path.read_text())
        return {str(name): int(number) for name, number in state.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def write_state(path: Path, state: Mapping[str, int]) -> None:
    """Replace the file at once; a home that cannot be written leaves the choice to the commits."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(state, indent=0, sort_keys=True))
        draft.replace(path)
    except OSError as error:
        print(f"rotation: {path} is not written: {error}")


def count_commits(checkout: Path) -> int:
    """Return the number of commits up to this one; 0 outside a clone."""
    command = ["git", "-C", str(checkout), "rev-list", "--count", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return int(answer.stdout) if answer.returncode == 0 else 0


def find_part(name: str, commits: int) -> int:
    """Return the place of a test's part in the order of the parts after that many commits."""
    return (zlib.crc32(name.encode()) - commits) % PARTS


def order(names: Sequence[str], state: Mapping[str, int], commits: int) -> list[str]:
    """Sort ids of tests: the longest ago first, then the part that the commits name."""
    return sorted(names, key=lambda name: (state.get(name, 0), find_part(name, commits)))


def takes_turns(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None or (
        item.get_closest_marker("peers") is not None
    )


class Rotation:
    """The turns of one run, in the process that runs tests and in the one that counts them."""

    def __init__(self, config: pytest.Config) -> None:
        self.until = time.time() + 60 * config.getoption("--minutes")
        self.path: Path = config.getoption("--rotation-state")
        self.state = read_state(self.path)
        self.commits = count_commits(config.rootpath)
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.left_out: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        turns = {item.nodeid: item for item in items if takes_turns(item)}
        items[:] = [item for item in items if item.nodeid not in turns]
        items += [turns[name] for name in order(list(turns), self.state, self.commits)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if takes_turns(item):
            item.user_properties.append(TURN)
            if time.time() > self.until:
                pytest.skip(TIME_IS_UP)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if TURN not in map(tuple, report.user_properties):  # lists, where they come from a worker
            return
        if report.skipped and TIME_IS_UP in str(report.longrepr):
            self.left_out.add(report.nodeid)
        elif report.failed:  # at any stage: it is among the first of the next run
            self.failed.add(report.nodeid)
        elif report.skipped or report.when == "call":
            self.done.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        done = self.done - self.failed
        if done and not hasattr(session.config, "workerinput"):
            number = max(self.state.values(), default=0) + 1
            write_state(self.path, self.state | dict.fromkeys(done, number))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"rotation: {len(self.done | self.failed)} tests marked slow or peers had their turn, "
            f"{len(self.left_out)} wait for the next run (commit {self.commits}, {self.path})"
        )
        for file, count in sorted(Counter(n.partition("::")[0] for n in self.left_out).items()):
            terminalreporter.write_line(f"rotation: {count} of {file} wait")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Rotation(config), "rotation-of-slow-tests")
