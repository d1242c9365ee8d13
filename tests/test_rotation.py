"""Slow tests and peers' take turns: who is first, what time leaves out, what a run remembers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import rotation
from tests.support.paths import ROOT

TESTS = """
import pytest

@pytest.mark.slow
def test_slow_one():
    pass

@pytest.mark.peers
@pytest.mark.parametrize("number", range(3))
def test_peer(number):
    assert number < 2

def test_fast():
    pass
"""
NAMES = [f"tests/test_{letter}.py::test_{number}" for letter in "abc" for number in range(50)]


def run(folder: Path, minutes: int) -> list[str]:
    """Run TESTS, and return the lines of its outcome."""
    (folder / "test_turns.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.rotation", "-v", "-p"]
    command += ["no:cacheprovider", f"--rootdir={folder}", "-c", str(folder / "pytest.ini")]
    command += [f"--minutes={minutes}", f"--rotation-state={folder / 'state'}", str(folder)]
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: one\n    peers: other\n")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def test_four_commits_begin_with_each_test() -> None:
    for name in NAMES:
        assert {rotation.find_part(name, commits) for commits in range(4, 8)} == {0, 1, 2, 3}
    places = [rotation.find_part(name, 4) for name in rotation.order(NAMES, {}, 4)]
    assert places == sorted(places)


def test_the_longest_ago_is_first() -> None:
    state = dict.fromkeys(NAMES, 5) | {NAMES[7]: 3}
    del state[NAMES[9]]
    for commits in range(4):
        assert rotation.order(NAMES, state, commits)[:2] == [NAMES[9], NAMES[7]]


@pytest.mark.parametrize("text", ["", "[1]", '{"a": null}', '{"a": "b"}'])
def test_a_broken_state_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "state").write_text(text)
    assert rotation.read_state(tmp_path / "state") == {}
    assert rotation.read_state(tmp_path / "missing") == {}


def test_a_run_remembers_what_passed(tmp_path: Path) -> None:
    lines = run(tmp_path, 10)
    assert "1 failed, 4 passed" in lines[-1]
    state = json.loads((tmp_path / "state").read_text())
    assert sorted(state) == [
        *("test_turns.py::test_peer[0]", "test_turns.py::test_peer[1]"),
        "test_turns.py::test_slow_one",
    ]
    run(tmp_path, 10)
    assert set(json.loads((tmp_path / "state").read_text()).values()) == {2}


def test_what_time_leaves_out_is_skipped_and_told(tmp_path: Path) -> None:
    lines = run(tmp_path, -1)
    assert "1 passed, 4 skipped" in lines[-1]
    assert "rotation: 4 of test_turns.py wait" in lines
    assert not (tmp_path / "state").exists()
