"""Verbs with their defaults on the emulated GPU, at 2,048 and 4,096 tokens a row.

What is seen is that GPU code runs, and by which kernels; not that it is fast, and not its bits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.emulated.device import build

pytest.importorskip("transformers")

WAYS: dict[str, set[str]] = {
    "finetune": {"varlen"},
    "finetune 4096": {"varlen"},
    "finetune unpacked": {"fused"},
    "finetune graphs": {"varlen", "varlen, captured"},
    "finetune fp32": {"flex"},
    "finetune dropout": {"tiles"},
    "finetune recompute": {"varlen"},
    "finetune mistral": {"varlen"},
    "finetune gemma2": {"flex"},
    "finetune qwen3_moe": {"varlen"},
    "finetune gpt_oss 4096": {"varlen"},
    "finetune deepseek_v3": {"varlen"},
    "finetune nemotron_h": {"varlen"},
    "finetune qwen3_next": {"varlen"},
    "finetune mpt": {"tiles"},
    "finetune llama4": {"varlen"},
}
"""The ways that attention takes in each run (`kernels.attention.dot_product.choose_way`)."""
MORE = ("quantize", "quantize mistral", "quantize smoothquant", "engine")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the emulated GPU with")
    if torch.version.cuda is not None:
        pytest.skip("a torch with CUDA cannot be given another device")
    return build(tmp_path_factory.mktemp("device"), compiler)


def run(library: Path, folder: Path, checkout: Path, *names: str) -> dict[str, dict[str, Any]]:
    """What the runs of these names tell, by name."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.emulated.default_runs"),
            *(str(library), str(folder), *names),
        ],
        cwd=checkout,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-8000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name')]
    assert [row["name"] for row in rows] == list(names)
    wrong = [f"{row['name']}: {row['error']}" for row in rows if row["error"]]
    assert not wrong, "\n".join(wrong)
    return {row["name"]: row for row in rows}


def check_waits(row: dict[str, Any]) -> None:
    """The host waits for the device once a step with the loss, and once with the gradients."""
    places = {wait.partition(" at ")[2].partition(":")[0] for wait in row["waits"]}
    assert places <= {"train/loop.py", "train/evaluation.py", "optim/optimizer.py"}, row["waits"]
    assert len(row["waits"]) <= 6


def test_packed_rows_take_varlen_kernels(library: Path, checkout: Path, tmp_path: Path) -> None:
    row = run(library, tmp_path, checkout, "finetune")["finetune"]
    assert set(row["ways"]) == WAYS["finetune"]
    check_waits(row)


@pytest.mark.slow
def test_every_verb_runs_by_its_defaults(library: Path, checkout: Path, tmp_path: Path) -> None:
    rows = run(library, tmp_path, checkout, *WAYS, *MORE)
    assert {name: set(rows[name]["ways"]) for name in WAYS} == WAYS
    assert "varlen" in rows["engine"]["ways"]  # a prompt behind what was read of it
    for name in ("finetune", "finetune unpacked", "finetune graphs", "finetune mistral"):
        check_waits(rows[name])
