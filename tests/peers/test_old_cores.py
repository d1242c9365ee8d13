"""Optimizer state that real megatron-core of several versions saved, read and given back to one.

`MEGTOOL_OLD_CORE` lists folders (as PATH does) into which older versions were installed:
`pip install --no-deps --target FOLDER megatron-core==0.14.*`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import reshard
from megtool.convert.megatron.names import split_state
from megtool.formats import open_checkpoint
from megtool.megatron_state.optimizer.fully_sharded_model_space import has_flattened_cells
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.paths import PEERS
from tests.support.peers.forked_worlds import run_forked

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

SCRIPT = PEERS / "old_core_world.py"
OLD_CORES = [p for p in os.environ.get("MEGTOOL_OLD_CORE", "").split(os.pathsep) if p]
OLD, ZERO = "fully_sharded_model_space", "dp_zero_gather_scatter"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tp": 2, "world": 4},
    "pipeline": {"pp": 2, "world": 4},
    "data": {"world": 3},
    "experts": {"ep": 2, "experts": 4, "avoid_prefix": False},
}


def run(core: str | None, folder: Path, **options: Any) -> str:
    if core is None:
        return run_forked("old_core_world.py", str(folder), json.dumps(options))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": core}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def check_states(folder: Path) -> int:
    """Every state is what the world filled in: their number."""
    from tests.support.peers.old_core_world import LAYERS, state_of

    opened = open_source(folder, verify_master_weights=True)
    opened.catalogue.check()
    count = 0
    with CheckpointReader(opened.catalogue, Files()) as reader:
        for t in opened.catalogue.tensors:
            state, _, key = split_state(t.name)
            if not state:
                continue
            head, _, rest = key.partition(".layers.")
            layer, _, suffix = rest.partition(".")
            state = "param" if state == "main" else state
            if layer.isdigit():
                whole = state_of(state, f"{head}.layers.{suffix}", (LAYERS, *t.shape))
                want = whole[int(layer)].numpy()
            else:
                want = state_of(state, key, t.shape).numpy()
            assert np.array_equal(reader.open_stored(t.name).read().view(np.float32), want), t.name
            count += 1
    return count


@pytest.mark.skipif(not OLD_CORES, reason="MEGTOOL_OLD_CORE names no folder with an old core")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("core", OLD_CORES)
def test_old_cores_model_space(core: str, layout: str, tmp_path: Path) -> None:
    options = LAYOUTS[layout]
    run(core, tmp_path / "old", sharding=OLD, **options)
    assert has_flattened_cells(open_checkpoint(tmp_path / "old"))
    assert check_states(tmp_path / "old") == (30 if "experts" in options else 27)


@pytest.mark.parametrize("layout", [*LAYOUTS, "buckets"])
def test_gathered_by_the_present_core(layout: str, tmp_path: Path) -> None:
    options = LAYOUTS.get(layout, {"bucket_size": 5000})
    run(None, tmp_path / "zero", sharding=ZERO, **options)
    assert check_states(tmp_path / "zero") >= 81


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("core", [*OLD_CORES[-1:], None], ids=lambda c: "old" if c else "present")
def test_the_present_core_loads_what_it_refuses_otherwise(
    core: str | None, sharding: str, tmp_path: Path
) -> None:
    run(core, tmp_path / "old", sharding=OLD if core else ZERO, **LAYOUTS["tensor"])
    out = tmp_path / "out"
    reshard(tmp_path / "old", out, optimizer_format=sharding, tp=1, pp=2, dp=2)
    said = run(None, out, load=True, sharding=sharding, pp=2, world=4)
    assert said.count("loaded") == 4
