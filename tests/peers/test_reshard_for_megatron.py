"""What megatron-core saved is resharded, and megatron-core loads it under the new layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.errors import LayoutError
from megtool.formats import open_checkpoint
from tests.support.peers.forked_worlds import run_forked

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.peers


def run_world(action: str, folder: Path, **options: Any) -> str:
    return run_forked("megatron_world.py", action, str(folder), json.dumps(options))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("megatron") / "save"
    run_world("save", folder, layouts=[{"tp": 2}])
    return folder


LAYOUTS: list[dict[str, int]] = [{"tp": 1}, {"tp": 1, "pp": 2}, {"tp": 1, "pp": 2, "vpp": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_megatron_loads_what_was_resharded(
    saved: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    report = reshard(saved, tmp_path / "out", **layout)
    assert report.layout | layout == report.layout
    assert not [d for d in report.dropped if d.is_lost]
    assert verify(saved, tmp_path / "out").verdict == "equal"
    args = open_checkpoint(tmp_path / "out").metadata["args"]
    assert args["tensor_model_parallel_size"] == layout["tp"]
    assert args["num_layers"] == 4
    out = run_world("load", tmp_path / "out", layouts=[layout, {"tp": 2}])
    assert out.count("loaded") == 2


def test_there_and_back(saved: Path, tmp_path: Path) -> None:
    reshard(saved, tmp_path / "a", tp=1, pp=4)
    reshard(tmp_path / "a", tmp_path / "b", tp=2, pp=1)
    assert verify(saved, tmp_path / "b").verdict == "equal"
    assert run_world("load", tmp_path / "b", layouts=[{"tp": 2}]).count("loaded") == 1


def test_a_layout_that_megatron_could_not_load_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError):
        reshard(saved, tmp_path / "out", tp=3)
    assert not (tmp_path / "out").exists()
