"""Processors, memory and GPUs of this machine, as far as this process may use them."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

from megtool.plan.memory import free_memory

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that torch sees; `capability` is its compute capability, None on AMD's."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What this process may use.

    `cpu_limit` is the processor time that a container has, in processors, and None without a limit;
    `free_bytes` the memory that can still be allocated. `cuda` and `nccl` are the versions that
    torch is built with, empty where it has none.
    """

    system: str
    python: str
    torch: str
    num_cpus: int
    cpu_limit: float | None
    free_bytes: int | None
    max_open_files: int
    gpus: tuple[Gpu, ...]
    cuda: str
    nccl: str


def find_hardware() -> Hardware:
    """Ask the system, and torch."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            gpus.append(
                Gpu(
                    name=properties.name,
                    memory_bytes=properties.total_memory,
                    capability=None if torch.version.hip else (properties.major, properties.minor),
                )
            )
    return Hardware(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        num_cpus=len(os.sched_getaffinity(0)),
        cpu_limit=_cpu_limit(_CGROUP),
        free_bytes=free_memory(),
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=tuple(gpus),
        cuda=f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda or "",
        nccl=_nccl_version(),
    )


def _nccl_version() -> str:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _cpu_limit(root: Path) -> float | None:
    """The quota of a container's control group (version 2), in processors."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
