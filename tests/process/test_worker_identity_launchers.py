"""Launchers start the command line, and every process does its share."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megtool import reshard
from megtool.cli.app import main
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.paths import ROOT

PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
MPIEXEC = os.environ.get("MPIEXEC") or shutil.which("mpiexec", path=PROGRAMS) or "mpiexec"
"""MPICH's, whose process manager is Hydra; Open MPI has a program of this name, too."""
TO = ["--to", "torch_dist", "--tp", "2", "--threads", "1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
OPEN_MPI = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n"]
LAUNCHERS = {
    "torchrun": [*TORCHRUN, "3"],
    "openmpi": [*OPEN_MPI, "3", sys.executable],
    "mpich": [MPIEXEC, "-n", "3", sys.executable],
}

KILLED = """#!/bin/bash
# The megtool of worker 2 dies once, by kill -9, as soon as it has begun to write.
if [ "${RANK:-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" = 2 ] && mkdir killed 2> /dev/null; then
    "$@" &
    until compgen -G ".out.megtool/*" > /dev/null; do sleep 0.01; done
    kill -9 $!
    wait $!
    exit $?
fi
exec "$@"
"""


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny_llama.save(tmp_path / "hf", parts=2)


@functools.cache
def is_hydra(program: str) -> bool:
    """Whether an `mpiexec` is MPICH's."""
    if shutil.which(program) is None:
        return False
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    return "HYDRA" in said.stdout


def require(launcher: str) -> None:
    """Skip the test where a launcher is not installed."""
    if launcher == "mpich" and not is_hydra(MPIEXEC):
        pytest.skip("MPICH's mpiexec missing (on PATH, or MPIEXEC names it): pip install mpich")
    if launcher == "openmpi" and shutil.which("mpirun") is None:
        pytest.skip("mpirun missing: apt-get install openmpi-bin")


def launch(
    command: list[str], *, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        command,
        cwd=folder,
        env=env | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_process_of_a_launcher_does_its_share(
    tmp_path: Path, hf: Path, launcher: str
) -> None:
    require(launcher)
    reshard(hf, tmp_path / "one", to="torch_dist", tp=2)
    out = tmp_path / "out"
    run = launch([*LAUNCHERS[launcher], "-m", "megtool", "reshard", str(hf), str(out), *TO])
    assert run.returncode == 0, run.stderr
    assert contents(out) == contents(tmp_path / "one")
    assert run.stdout.count("all are complete, and it has published the checkpoint") == 1
    assert "worker 1 of 3" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_of_four_that_is_killed_goes_on_when_it_is_started_again(
    tmp_path: Path, hf: Path, launcher: str
) -> None:
    """torchrun starts all again by itself; the other launchers are started once more.

    Open MPI's `mpirun` ends all processes with the one that is killed. MPICH's goes on with the
    others, as it is told to.
    """
    require(launcher)
    reshard(hf, tmp_path / "expected", to="torch_dist", tp=2)
    script = tmp_path / "worker.sh"
    script.write_text(KILLED)
    script.chmod(0o755)
    words = [str(script), sys.executable, "-m", "megtool", "reshard", "hf", "out", *TO]
    start = {
        "torchrun": [*TORCHRUN, "4", "--max-restarts", "3", "--no-python"],
        "openmpi": [*OPEN_MPI, "4"],
        "mpich": [MPIEXEC, "-disable-auto-cleanup", "-n", "4"],
    }[launcher]
    paths = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    run = launch([*start, *words], folder=tmp_path, **paths)
    assert (tmp_path / "killed").is_dir()
    if launcher != "torchrun":
        assert run.returncode == 137, run.stderr
        if launcher == "mpich":
            assert "3 of 4 workers are complete; missing: 2" in run.stdout
        assert not (tmp_path / "out").exists()
        run = launch([*start, *words], folder=tmp_path, **paths)
    assert run.returncode == 0, run.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert [p.name for p in (tmp_path / ".out.megtool").iterdir()] == ["published"]


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


def test_the_pods_of_the_job_of_kubernetes_are_its_workers(
    tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job file as it is, but for the places and the sizes."""
    job = yaml.safe_load((ROOT / "examples" / "many_hosts" / "reshard-job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["spec"]["completionMode"] == "Indexed"
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # as backoffLimitPerIndex needs it
    (container,) = pod["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    assert container["command"] == ["megtool", "reshard"]
    options = [a for a in container["args"] if a.startswith("--")]
    words = ["reshard", str(hf), str(tmp_path / "out"), *options, "--tp=2", "--pp=2", "--json"]
    for index in range(job["spec"]["completions"]):
        assert not (tmp_path / "out").exists()
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        assert main(words) == 0
    reshard(hf, tmp_path / "one", to="torch_dist", tp=2, pp=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


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
