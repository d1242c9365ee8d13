"""The README tells the truth: its commands run and print what it shows, its map is the tree."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?: (?:B|KiB|MiB|GiB))?")
_ELSEWHERE = (". .venv/bin/activate",)


def commands(text: str) -> list[tuple[str, str]]:
    """Every `$ command` of the README with the output below it."""
    found: list[tuple[str, str]] = []
    for block in _BLOCK.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command.split("  #")[0].strip(), output))
    return found


def masked(text: str, folder: str = "\0") -> list[str]:
    """The words of a text without what differs between machines: figures and where it ran."""
    text = text.replace(folder, "")
    return [" ".join(_NUMBER.sub("#", line).split()) for line in text.strip().splitlines()]


def without_places(text: str) -> str:
    """What the demo prints without the lines that say where things are kept."""
    lines = text.splitlines()
    return "\n".join(x for x in lines if not x.startswith(("folder ", "page ")))


@pytest.fixture(scope="module")
def readme(checkout: Path) -> str:
    return (checkout / "README.md").read_text()


def test_every_command_prints_what_the_readme_shows(readme, checkout, tmp_path):
    pytest.importorskip("transformers")
    environment = {**os.environ, "PYTHONPATH": str(checkout), "NO_COLOR": "1"}
    shutil.copy(checkout / "README.md", tmp_path)  # the commands are run in a clone
    ran, demo = 0, ""
    for command, shown in commands(readme):
        if command == "make demo":  # what `megtool demo work` prints, but for where things are kept
            demo = shown
            continue
        if command in _ELSEWHERE:
            continue
        words = shlex.split(command)
        assert words[0] == "megtool", f"the README shows a command no test runs: {command}"
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == (2 if shown.startswith("error") else 0), done.stderr
        printed = done.stderr if shown.startswith("error") else done.stdout
        if command == "megtool demo work":
            assert masked(without_places(printed)) == masked(without_places(demo)), command
        elif shown.strip():
            assert masked(printed) == masked(shown), command
        ran += 1
    assert ran >= 5


def test_nothing_is_left_to_fill_in(readme):
    assert "@@" not in readme


def test_the_python_example_runs(readme, checkout, tmp_path):
    script = "\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    weights = (
        "from megtool.commands.demo import demo_weights\n"
        "from megtool.commands.reshard import reshard\n"
        "reshard(demo_weights(), 'work/hf')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", weights + script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_bytes, kernel_bytes = map(int, done.stdout.split())
    assert num_bytes == 2 * 134_515_008
    assert 0 < kernel_bytes <= num_bytes


def test_the_map_shows_every_file_and_its_first_line(readme, checkout):
    block = readme.split("## The map of the house")[1].split("```")[1]
    shown = {}
    folder = ""
    for line in block.strip("\n").splitlines():
        name, _, sentence = line[4:].strip().partition("  ")
        if name.endswith("/"):
            folder = name
        elif name.endswith(".py"):
            shown[folder + name] = sentence.strip()
    actual = {}
    for root in ("megtool", "converters"):
        for path in sorted((checkout / root).rglob("*.py")):
            if path.name == "__init__.py":
                continue
            first = path.read_text().split('"""')[1].strip().splitlines()[0]
            actual[path.relative_to(checkout).as_posix()] = first
    assert shown == actual
