"""The file that says with what a run was started: read whole, or refused with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from megtool.errors import FormatError
from megtool.train.run_identity import RUN_FILE, RunIdentity

WHOLE = RunIdentity(model={"a": 1}, data={"digest": "x"}, names=("text.txt",), exported_iteration=3)


def test_it_is_read_as_written(tmp_path: Path) -> None:
    assert RunIdentity.read(tmp_path) is None
    WHOLE.write(tmp_path)
    assert RunIdentity.read(tmp_path) == WHOLE
    assert sorted(p.name for p in tmp_path.iterdir()) == [RUN_FILE]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0" * 80,
        "[]",
        "5",
        '{"model": 5, "data": {}}',
        '{"model": {}, "data": [], "names": []}',
        '{"model": {}, "data": {}, "names": 3}',
        '{"model": {}, "data": {}, "names": [3]}',
        '{"model": {}, "data": {}, "source": {}}',
        '{"model": {}, "data": {}, "curve": null}',
        '{"model": {}, "data": {}, "unknown": 1}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_names_the_way_out(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(FormatError) as caught:
        RunIdentity.read(tmp_path)
    assert caught.value.file == str(tmp_path / RUN_FILE)
    assert "delete it" in (caught.value.hint or "")
