"""Several workers write what one would have written, to the byte."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.checkpoint.transport import kernel_copy, work_units
from tests.support.errors import raises
from tests.support.folders import contents, file_states
from tests.support.models import tiny_llama
from tests.support.runs.worker_runs import UNIT_BYTES, run_workers

TARGETS: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf", "max_shard_size": "40KB"},
    "safetensors": {"to": "safetensors"},
    "torch_dist": {"to": "torch_dist", "tp": 2, "pp": 2},
    "by the kernel": {"to": "torch_dist", "pp": 2, "digest": "buffered"},
    "no digests": {"to": "hf", "digest": "none", "dtype": "float32"},
    "megatron": {"to": "megatron", "tp": 4},
    "dcp": {"to": "dcp"},
    "zarr": {"to": "zarr"},
    "zarr, compressed": {"to": "zarr", "compress": "zstd"},
    "tensorstore": {"to": "tensorstore"},
    "tensorstore, compressed": {"to": "tensorstore", "compress": "zstd"},
    "read back": {"to": "torch_dist", "tp": 4, "verify": True},
}


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_units, "UNIT_BYTES", UNIT_BYTES)
    monkeypatch.setattr(kernel_copy, "UNIT_BYTES", UNIT_BYTES)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("model") / "hf", parts=2)


def name_of(options: dict[str, Any]) -> str:
    return "out.safetensors" if options["to"] == "safetensors" else "out"


@pytest.mark.parametrize("target", TARGETS)
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, hf: Path, target: str) -> None:
    options = TARGETS[target] | {"threads": 1}
    name = name_of(options)
    before = file_states(hf)
    (tmp_path / "one").mkdir()
    reshard(hf, tmp_path / "one" / name, **options)
    expected = contents(tmp_path / "one" / name)
    for count in (2, 3, 8):
        root = tmp_path / str(count)
        order = random.Random(count).sample(range(count), count)
        reports = run_workers("reshard", hf, root / name, count, order, **options)
        assert contents(root / name) == expected, count
        states = [r.worker.state for r in reports]
        assert states == ["waiting"] * (count - 1) + ["published"], count
        assert [set(r.worker.missing) for r in reports[:-1]] == [
            set(order[k:]) for k in range(1, count)
        ]
        total = sum(r.worker.num_bytes for r in reports)
        late = reports[-1].num_bytes - total  # units between those of several workers
        assert late == 0 or (target == "by the kernel" and late < total // 5), count
    assert file_states(hf) == before
