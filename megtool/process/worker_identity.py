"""Which worker of how many a process is, as an option or its launcher says."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megtool.errors import UsageError

MAX_WORKERS = 1 << 20
WORKERS_VARIABLE = "MEGTOOL_WORKERS"
"""The number of workers, for launchers that do not tell it."""

Environment = Mapping[str, str]

_WHOLE = "--worker 0/1 does the whole work in this process"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Worker `index` (from 0) of `count`; `origin` says where that comes from."""

    index: int
    count: int
    origin: str = "--worker"

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_WORKERS:
            raise UsageError(
                f"the number of workers is {self.count} ({self.origin})",
                hint=f"1 to {MAX_WORKERS:,}",
            )
        if not 0 <= self.index < self.count:
            raise UsageError(
                f"the worker is {self.index} of {self.count} ({self.origin})",
                hint=f"indices count from 0: the last of {self.count} is {self.count - 1}",
            )

    def __str__(self) -> str:
        return f"worker {self.index} of {self.count}"


def parse_worker(text: str | None, environment: Environment | None = None) -> WorkerIdentity | None:
    """The identity that the option `--worker` gives; None if this process does everything.

    `text` is `I/N`, or a launcher of `LAUNCHERS`, whose variables then have to be set; None: there
    is one worker; `auto`: as torchrun, Open MPI, MPICH or Slurm's `srun` started this process, or
    a Kubernetes indexed job with `MEGTOOL_WORKERS`, the innermost of them.

    Raises:
        UsageError: it says neither, or the variables contradict each other.
    """
    environment = os.environ if environment is None else environment
    identity: WorkerIdentity | None
    if text is None:
        return None
    if text == "auto":
        identity = find_worker(environment)
    elif text in LAUNCHERS:
        identity = LAUNCHERS[text](environment)
        if identity is None:
            raise UsageError(
                f"--worker is {text!r}, which has not started this process",
                hint=f"its variables are not set; --worker I/N names a worker, and {_WHOLE}",
            )
    else:
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        if match is None:
            known = ", ".join(["auto", *LAUNCHERS])
            raise UsageError(
                f"--worker is {text!r}",
                hint=f"for example 0/4, the first of four workers; or {known}",
            )
        identity = WorkerIdentity(int(match[1]), int(match[2]))
    return None if identity is None or identity.count == 1 else identity


def find_worker(environment: Environment) -> WorkerIdentity | None:
    """The identity that the innermost launcher gives, or None.

    Tasks of a job array and pods of an indexed job often do different things, so they count only
    if they are named: `--worker slurm-array`, or `MEGTOOL_WORKERS` for Kubernetes. Launchers number
    processes in their own ways: torchrun's ranks need not be those of the Slurm tasks around it.

    Raises:
        UsageError: what the launcher says is incomplete.
    """
    identities = (LAUNCHERS[name](environment) for name in _AUTOMATIC)
    return next((identity for identity in identities if identity is not None), None)


def _torchrun(environment: Environment) -> WorkerIdentity | None:
    return _pair(environment, "RANK", "WORLD_SIZE", "torchrun")


def _open_mpi(environment: Environment) -> WorkerIdentity | None:
    return _pair(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI")


def _mpich(environment: Environment) -> WorkerIdentity | None:
    return _pair(environment, "PMI_RANK", "PMI_SIZE", "MPICH")


def _slurm(environment: Environment) -> WorkerIdentity | None:
    """Tasks of a step (`srun`); the batch script itself is task 0 of all, and is no worker."""
    if "SLURM_STEP_NUM_TASKS" in environment:
        return _pair(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "Slurm")
    if "SLURM_STEP_ID" in environment:
        return _pair(environment, "SLURM_PROCID", "SLURM_NTASKS", "Slurm")
    return None


def _slurm_array(environment: Environment) -> WorkerIdentity | None:
    """Tasks of a job array, times those of a step in each."""
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "STEP", "COUNT")]
    if names[0] not in environment:
        return None
    number, least, most, count = (_number(environment, names[n]) for n in (0, 1, 2, 4))
    step = _number(environment, names[3]) if names[3] in environment else 1
    index, rest = divmod(number - least, max(step, 1))
    if rest or index >= count or (count - 1) * step != most - least:
        raise UsageError(
            f"task {number} of the job array {least}-{most}:{step} of {count} has no index",
            hint="--worker slurm-array needs an array such as 0-7, or 1-15:2, without gaps; "
            "--worker I/N works for any",
        )
    inner = _slurm(environment)
    if inner is None:
        return WorkerIdentity(index, count, names[0])
    origin = f"{names[0]} and SLURM_PROCID"
    return WorkerIdentity(index * inner.count + inner.index, count * inner.count, origin)


def _kubernetes(environment: Environment) -> WorkerIdentity | None:
    if WORKERS_VARIABLE not in environment or "JOB_COMPLETION_INDEX" not in environment:
        return None
    return _pair(environment, "JOB_COMPLETION_INDEX", WORKERS_VARIABLE, "Kubernetes")


LAUNCHERS: Mapping[str, Callable[[Environment], WorkerIdentity | None]] = {
    "torchrun": _torchrun,
    "openmpi": _open_mpi,
    "mpich": _mpich,
    "slurm": _slurm,
    "slurm-array": _slurm_array,
    "kubernetes": _kubernetes,
}
"""How each launcher tells a process which one it is."""

_AUTOMATIC = ("torchrun", "openmpi", "mpich", "slurm", "kubernetes")
"""Innermost first: torchrun may run inside a task of Slurm, and not the other way around."""


def _pair(environment: Environment, rank: str, count: str, launcher: str) -> WorkerIdentity | None:
    """The identity from two variables.

    Raises:
        UsageError: one of them is missing, though the other tells of several processes.
    """
    if rank not in environment and count not in environment:
        return None
    for present, missing in ((rank, count), (count, rank)):
        if missing not in environment:
            if _number(environment, present) <= (present == count):
                return None
            raise UsageError(
                f"{present} is {environment[present]}, and {missing} is not set",
                hint=f"{launcher} sets both; --worker I/N names a worker, and {_WHOLE}",
            )
    origin = f"{launcher}'s {rank} and {count}"
    return WorkerIdentity(_number(environment, rank), _number(environment, count), origin)


def _number(environment: Environment, name: str) -> int:
    text = environment.get(name)
    if text is None or not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise UsageError(
            f"the environment variable {name} is {text!r}, not a number",
            hint=f"--worker I/N names a worker, and {_WHOLE}",
        )
    return int(text)
