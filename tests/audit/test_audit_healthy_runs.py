"""No alarms on 200 healthy saves: of megtool's training, and of real megatron-core's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megtool import audit
from tests.support.models import tiny_text
from tests.support.runs.finetune_runs import save_lines, tune

pytestmark = pytest.mark.slow

BF16: dict[str, Any] = {"dtype": "bfloat16"}
CORE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, fully reshardable": BF16,
    "bf16, buckets": {**BF16, "kind": "dp_reshardable", "bucket_size": 9000},
    "bf16, legacy": {**BF16, "kind": "legacy"},
    "bf16, not distributed": {**BF16, "distributed": False},
    "fp16 with skipped steps": {"dtype": "float16", "loss_scale": 2.0**24, "steps": 18},
    "fp16, not distributed": {"dtype": "float16", "loss_scale": 2.0**18, "distributed": False},
    "SGD": {**BF16, "optimizer": "sgd", "distributed": False},
    "frozen embedding": {**BF16, "frozen": "embedding"},
    "a high rate": {**BF16, "lr": 2e-2, "beta2": 0.95, "kind": "dp_reshardable"},
    "experts": {**BF16, "experts": 4},
    "idle experts": {**BF16, "experts": 4, "idle": [1, 3]},
    "tensor-parallel": {**BF16, "world": 2, "layout": {"tp": 2}},
    "data-parallel buckets": {**BF16, "world": 2, "kind": "dp_reshardable"},
}
OWN: dict[str, dict[str, Any]] = {
    "bf16 masters": {"bf16": True},
    "fp32": {},
    "fp16": {"fp16": True},
    "SGD": {"optimizer": "sgd", "lr": 1e-2},
    "Muon": {"optimizer": "muon"},
    "LoRA": {"lora_rank": 4},
    "a long warmup": {"lr_warmup_iters": 8},
}


def assert_healthy(run: Path, saves: int) -> None:
    report = audit(run)
    assert [f.text() for f in report.findings] == []
    assert len(report.saves) >= saves
    assert all(s.read_bytes for s in report.saves)
    quick = audit(run, quick=True)
    assert [f.text() for f in quick.findings] == []


@pytest.mark.peers
@pytest.mark.parametrize("case", CORE)
def test_real_megatron_core_trains_without_alarms(tmp_path: Path, case: str) -> None:
    pytest.importorskip("megatron.core")
    from tests.support.peers.forked_worlds import run_forked

    options = {"folder": str(tmp_path / "run"), "steps": 10, "every": 1, **CORE[case]}
    run_forked("audited_world.py", "train", json.dumps(options))
    assert_healthy(tmp_path / "run", 8 if "fp16" in case else 10)


@pytest.mark.parametrize("case", OWN)
def test_own_training_is_without_alarms(tmp_path: Path, case: str) -> None:
    model = tiny_text.save(tmp_path / "model")
    data = save_lines(tmp_path)
    tune(model, tmp_path / "run", data, save_interval=1, train_iters=10, **OWN[case])
    assert_healthy(tmp_path / "run", 10)
