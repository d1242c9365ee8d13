"""The choice of a target's format, names and layout."""

from __future__ import annotations

from megtool.formats import FORMATS
from megtool.reshard.target import WRITERS, load_writer


def test_every_writable_format_has_a_writer() -> None:
    assert set(WRITERS) == {name for f in FORMATS if f.writable for name in f.names}
    assert all(callable(load_writer(name).plan_layout) for name in WRITERS)
