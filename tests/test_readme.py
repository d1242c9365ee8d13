"""The README is short, names every command, and its links lead somewhere.

Its commands are run with those of the other pages, in test_docs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from megtool.cli.app import app


@pytest.fixture(scope="module")
def readme(checkout: Path) -> str:
    return (checkout / "README.md").read_text()


def test_it_is_short(readme: str) -> None:
    assert len(readme.splitlines()) <= 200
    assert len(readme.encode()) <= 12 * 1024


def test_nothing_is_left_to_fill_in(readme: str) -> None:
    assert "@@" not in readme


def test_it_names_every_command(readme: str) -> None:
    table = readme.split("## Commands")[1].split("## Formats")[0]
    commands = typer.main.get_command(app).commands
    assert [name for name in commands if f"| `megtool {name}" not in table] == []


def test_its_links_lead_to_files(readme: str, checkout: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", readme)
    assert len(targets) > 20
    assert [x for x in targets if not (checkout / x).exists()] == []
