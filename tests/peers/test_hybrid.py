"""Real megatron-core 0.19 saves HybridModels that megtool reads, and loads those it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard
from megtool.reshard.open_source import open_source
from tests.support.paths import PEERS

pytestmark = [pytest.mark.peers, pytest.mark.slow]

RELEASE = "megatron-core==0.19.2"


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release that has HybridModel, apart from the one that is installed."""
    folder = tmp_path_factory.mktemp("core")
    how = ["--quiet", "--no-deps", "--ignore-requires-python", "--target", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *how, RELEASE],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{RELEASE} cannot be installed here: {done.stderr[-200:]}")
    return folder


def run(core: Path, action: str, folder: Path, **options: Any) -> str:
    done = subprocess.run(
        [sys.executable, str(PEERS / "hybrid_world.py"), action, str(folder), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(core)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_megatron_loads_what_became_of_its_own_save(core: Path, tmp_path: Path) -> None:
    """Mixers cut over ranks, a pattern with chunks, and rank files on the way."""
    run(core, "save", tmp_path / "0", tp=2, pp=2, pattern="M-G-|*-M-")
    found = open_source(tmp_path / "0")
    assert found.view.is_hybrid
    assert found.view.config is not None
    assert found.view.config.layer_kinds == ("M-", "G-", "*-", "M-")
    assert found.view.dropped == []
    steps: list[dict[str, Any]] = [
        {"to": "megatron", "tp": 1, "pp": 2},
        {"to": "torch_dist", "tp": 1, "pp": 4},
        {"to": "torch_dist", "tp": 2, "pp": 1},
    ]
    for number, step in enumerate(steps):
        there = tmp_path / f"{number + 1}"
        report = reshard(tmp_path / f"{number}", there, fsync=False, verify=True, **step)
        assert not [d for d in report.dropped if d.is_lost], step
    assert "loaded" in run(core, "load", tmp_path / "2", tp=1, pp=4, pattern="M-|G-|*-|M-")
    assert "loaded" in run(core, "load", tmp_path / "3", tp=2, pp=1, pattern="M-G-*-M-")
    mine = {t.name: t.shape for t in open_source(tmp_path / "3").catalogue.tensors}
    assert mine == {t.name: t.shape for t in found.catalogue.tensors}


def test_a_gpt_becomes_a_hybrid_that_megatron_loads(core: Path, tmp_path: Path) -> None:
    """And back: the same tensors under both classes' names."""
    run(core, "save", tmp_path / "0", tp=1, pp=1, pattern="*-*-")
    reshard(tmp_path / "0", tmp_path / "1", to="torch_dist", model_class="gpt", fsync=False)
    names = {t.name for t in open_source(tmp_path / "1").catalogue.tensors}
    assert "decoder.layers.self_attention.linear_qkv.weight" in names
    reshard(
        tmp_path / "1", tmp_path / "2", to="torch_dist", model_class="hybrid", tp=2, fsync=False
    )
    assert "loaded" in run(core, "load", tmp_path / "2", tp=2, pp=1, pattern="*-*-")
