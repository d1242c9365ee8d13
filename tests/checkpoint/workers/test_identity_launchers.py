"""Launchers start the command line, and every process does its share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megtool import reshard
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.paths import ROOT

MPIEXEC = Path(sys.executable).with_name("mpiexec")
TO = ["--to", "torch_dist", "--tp", "2", "--threads", "1"]
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"],
    "mpich": [str(MPIEXEC), "-n", "3", sys.executable],
}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny_llama.save(tmp_path / "hf", parts=2)


def launch(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_process_of_a_launcher_does_its_share(
    tmp_path: Path, hf: Path, launcher: str
) -> None:
    if launcher == "mpich" and not MPIEXEC.exists():
        pytest.skip("mpich is not installed")
    reshard(hf, tmp_path / "one", to="torch_dist", tp=2)
    out = tmp_path / "out"
    run = launch([*LAUNCHERS[launcher], "-m", "megtool", "reshard", str(hf), str(out), *TO])
    assert run.returncode == 0, run.stderr
    assert contents(out) == contents(tmp_path / "one")
    assert run.stdout.count("all are complete, and it has published the checkpoint") == 1
    assert "worker 1 of 3" in run.stdout


def test_slurm_starts_each_task_with_its_own_index(tmp_path: Path, hf: Path) -> None:
    reshard(hf, tmp_path / "one", to="torch_dist", tp=2)
    command = [sys.executable, "-m", "megtool", "reshard", str(hf), str(tmp_path / "out"), *TO]
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    states = []
    for task in ("1", "0", "1"):
        run = launch([*command, "--json"], **job | step | {"SLURM_PROCID": task})
        assert run.returncode == 0, run.stderr
        states.append(json.loads(run.stdout)["worker"]["state"])
    assert states == ["waiting", "published", "complete"]
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    batch = launch([*command[:5], str(tmp_path / "alone"), *TO, "--json"], **job)
    assert json.loads(batch.stdout)["worker"] is None


def test_the_innermost_launcher_decides_and_an_option_before_it(tmp_path: Path, hf: Path) -> None:
    command = [sys.executable, "-m", "megtool", "reshard", str(hf)]
    both = {"RANK": "1", "WORLD_SIZE": "4", "PMI_RANK": "2", "PMI_SIZE": "4"}
    run = launch([*command, str(tmp_path / "shared"), *TO, "--json"], **both)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["worker"]["missing"] == [0, 2, 3]
    assert launch([*command, str(tmp_path / "out"), *TO, "--worker", "0/1"], **both).returncode == 0
    assert (tmp_path / "out").is_dir()


def test_python_does_everything_unless_it_names_a_worker(
    tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert reshard(hf, tmp_path / "out", to="dcp").worker is None
    assert reshard(hf, tmp_path / "b", to="dcp", worker="auto").worker.missing == (1, 2, 3)
