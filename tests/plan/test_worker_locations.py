"""Where a unit's source bytes are is found for all its tensors at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard
from megtool.formats.torch_dist import reader as torch_dist
from tests.support.models import tiny_llama


@pytest.mark.parametrize("layout", [{"to": "hf"}, {"to": "torch_dist", "tp": 4}])
def test_each_source_file_is_opened_once_by_a_unit(
    layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tensors of `torch_dist` are zip items in few files, which would be opened for each."""
    tiny_llama.save(tmp_path / "hf", num_hidden_layers=6)
    reshard(tmp_path / "hf", tmp_path / "tp2", to="torch_dist", tp=2, fsync=False)
    opened: Counter[int] = Counter()
    look = torch_dist._Locator._look_into

    def count(self: Any, rows: Any) -> None:
        opened[int(self._catalogue.extents.file[rows[0]])] += 1
        look(self, rows)

    monkeypatch.setattr(torch_dist._Locator, "_look_into", count)
    reshard(tmp_path / "tp2", tmp_path / "out", **layout, threads=1, digest="all", fsync=False)
    files = len(list((tmp_path / "tp2").rglob("*.distcp")))
    written = len([p for p in (tmp_path / "out").rglob("*") if p.stat().st_size > 50_000])
    assert len(opened) == files
    assert max(opened.values()) <= written + 2
