"""A T5 that megatron-core saved is carried to another layout, which megatron-core loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.checkpoint.formats import open_checkpoint
from megtool.errors import LayoutError
from tests.support.paths import PEERS

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

SCRIPT = PEERS / "t5_world.py"


def run_world(action: str, folder: Path, **options: Any) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), action, str(folder), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_t5_is_carried(tmp_path: Path) -> None:
    run_world("save", tmp_path / "a", layouts=[{"tp": 1}], world=1)
    names = {t.name for t in open_checkpoint(tmp_path / "a").tensors}
    assert "encoder.layers.self_attention.linear_qkv.weight" in names
    assert "decoder.layers.cross_attention.linear_kv.weight" in names
    reshard(tmp_path / "a", tmp_path / "b", tp=2)
    reshard(tmp_path / "b", tmp_path / "c", tp=1)
    assert verify(tmp_path / "a", tmp_path / "c").verdict == "equal"
    run_world("load", tmp_path / "c", layouts=[{"tp": 1}], world=1)
    held = open_checkpoint(tmp_path / "b")
    cut = {t.name: held.shards.boxes.shape[held.shards.of(i)] for i, t in enumerate(held.tensors)}
    assert cut["decoder.layers.cross_attention.linear_q.weight"][0].tolist() == [1, 16, 32]


def test_t5_goes_through_rank_files(tmp_path: Path) -> None:
    run_world("save", tmp_path / "a", layouts=[{"tp": 1}], world=1)
    reshard(tmp_path / "a", tmp_path / "b", to="megatron", tp=2)
    assert verify(tmp_path / "a", tmp_path / "b").verdict == "equal"
    names = {t.name for t in open_checkpoint(tmp_path / "b").tensors}
    own = "mp_rank_01/model_optim_rng/model/decoder.layers.3.cross_attention.linear_kv.weight"
    assert own in names
    reshard(tmp_path / "b", tmp_path / "c", to="torch_dist", tp=1)
    assert verify(tmp_path / "a", tmp_path / "c").verdict == "equal"
    run_world("load", tmp_path / "c", layouts=[{"tp": 1}], world=1)
    with pytest.raises(LayoutError, match="encoder"):
        reshard(tmp_path / "a", tmp_path / "d", to="megatron", pp=2)
