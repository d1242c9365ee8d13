"""Workers that a real Slurm starts, as the job files in examples/many_hosts say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megtool import reshard
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.paths import ROOT
from tests.support.slurm import SlurmCluster, missing_slurm, start_slurm

EXAMPLES = ROOT / "examples" / "many_hosts"
OPTIONS = {"to": "torch_dist", "tp": 2, "pp": 2}
FLAGS = ("--to", "torch_dist", "--tp", "2", "--pp", "2")

pytestmark = pytest.mark.skipif(bool(missing_slurm()), reason=missing_slurm())

KILLED = """#!/bin/bash
# The megtool of task 2 dies once, by kill -9, as soon as it has begun to write.
if [ "$SLURM_PROCID" = 2 ] && [ ! -e killed ]; then
    megtool "$@" &
    until compgen -G ".out.megtool/*" > /dev/null; do sleep 0.01; done
    touch killed
    kill -9 $!
    wait $!
    exit $?
fi
exec megtool "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with start_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    folder = tiny_llama.save(tmp_path / "hf", parts=2)
    reshard(folder, tmp_path / "expected", **OPTIONS)
    return folder


def submit(cluster: SlurmCluster, folder: Path, job: Path, *options: str) -> str:
    """Run a job file on the checkpoint in `folder`, and what it printed."""
    path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    done = cluster.run(
        *("sbatch", "--wait", f"--chdir={folder}", f"--output={folder}/log-%a-%t"),
        *(f"--export=ALL,PATH={path}", "--nodes=1", "--cpus-per-task=1", "--overcommit"),
        *(*options, str(job), str(folder / "hf"), str(folder / "out"), *FLAGS),
    )
    log = "\n".join(p.read_text() for p in sorted(folder.glob("log-*")))
    assert done.returncode == 0, done.stdout + done.stderr + log
    return log


def test_tasks_of_a_job_share_a_reshard(cluster: SlurmCluster, tmp_path: Path, hf: Path) -> None:
    submit(cluster, tmp_path, EXAMPLES / "reshard.sbatch", "--ntasks-per-node=4")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert [p.name for p in (tmp_path / ".out.megtool").iterdir()] == ["published"]


def test_tasks_of_an_array_share_a_reshard(cluster: SlurmCluster, tmp_path: Path, hf: Path) -> None:
    submit(cluster, tmp_path, EXAMPLES / "reshard-array.sbatch", "--array=0-3")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_task_that_is_killed_goes_on_in_the_next_round(
    cluster: SlurmCluster, tmp_path: Path, hf: Path
) -> None:
    script = tmp_path / "task.sh"
    script.write_text(KILLED)
    script.chmod(0o755)
    job = tmp_path / "job.sbatch"
    text = (EXAMPLES / "reshard.sbatch").read_text()
    job.write_text(text.replace(" megtool ", f" {script} "))
    log = submit(cluster, tmp_path, job, "--ntasks-per-node=4")
    assert (tmp_path / "killed").exists()
    assert contents(tmp_path / "out") == contents(tmp_path / "expected"), log
