"""A Slurm cluster of one node on this machine, with its own daemons, ports and key."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.stores.server_process import find_free_ports

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


def missing_slurm() -> str:
    """Why no cluster can be started; empty if one can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in DAEMONS if shutil.which(name, path=path) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install slurm-wlm"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd are started as root"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A running cluster; `environment` is that of its commands."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm."""
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@contextlib.contextmanager
def start_slurm(folder: Path, *, cpus: int = 4) -> Iterator[SlurmCluster]:
    """A cluster whose files are in `folder`, until the end of the `with`."""
    config = _write_config(folder, cpus)
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    environment = {**os.environ, "SLURM_CONF": str(config), "PATH": path}
    munge = [
        *("munged", "--foreground", "--force", "--socket", str(folder / "munge.socket")),
        *("--key-file", str(folder / "munge.key"), "--pid-file", str(folder / "munge.pid")),
        *("--log-file", str(folder / "munge.log"), "--seed-file", str(folder / "munge.seed")),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "daemons.log").open("wb") as log:
            for command in (munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", "node"]):
                daemons.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        cwd=folder,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
                time.sleep(0.5)
        cluster = SlurmCluster(folder=folder, environment=environment)
        _wait_until_idle(cluster)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()


def _write_config(folder: Path, cpus: int) -> Path:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    host, ports = socket.gethostname(), find_free_ports(2)
    lines = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder / 'munge.socket'}",
        "CredType": "cred/munge",
        "SlurmctldPort": str(ports[0]),
        "SlurmdPort": str(ports[1]),
        "StateSaveLocation": str(folder / "state"),
        "SlurmdSpoolDir": str(folder / "spool"),
        "SlurmctldPidFile": str(folder / "slurmctld.pid"),
        "SlurmdPidFile": str(folder / "slurmd.pid"),
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1",
        "NodeName": f"node NodeAddr=127.0.0.1 NodeHostname={host} CPUs={cpus} State=UNKNOWN",
        "PartitionName": "all Nodes=node Default=YES MaxTime=INFINITE State=UP",
    }
    config = folder / "slurm.conf"
    config.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    return config


def _wait_until_idle(cluster: SlurmCluster) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if cluster.run("sinfo", "-h", "-o", "%T").stdout.strip() == "idle":
            return
        time.sleep(0.3)
    logs = (cluster.folder / "daemons.log").read_text()
    raise RuntimeError(f"Slurm did not start:\n{logs[-4000:]}")
