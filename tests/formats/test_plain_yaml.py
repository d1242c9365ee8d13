"""YAML beside a checkpoint's data: plain values, however hostile the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megtool.errors import FormatError
from megtool.formats.plain_yaml import read_yaml
from tests.support.errors import raises

pytest.importorskip("yaml")

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


def test_tags_and_merges_are_data(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: !!python/object/apply:os.system ['true']\n<<: {b: 1}\nc: &c [1]\nd: *c\n")
    assert read_yaml(path) == {"a": ["true"], "<<": {"b": 1}, "c": [1], "d": [1]}


@pytest.mark.parametrize(
    "text",
    [LAUGHS, "a: &a [*a]\n", "[" * 50_000, "- " * 50_000, "x: " + "9" * 50_000, "x" * 600_000],
    ids=["laughs", "a circle", "deep flow", "deep blocks", "a long number", "too long"],
)
def test_hostile_files_end_in_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with raises(FormatError, file=path):
        read_yaml(path)
