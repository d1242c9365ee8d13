"""What a process may use is what the system says."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megtool.machine.hardware import Gpu, _cpu_limit, find_hardware


def test_hardware_is_what_the_system_says() -> None:
    hardware = find_hardware()
    assert hardware.num_cpus == len(os.sched_getaffinity(0))
    assert hardware.max_open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert hardware.torch == torch.__version__
    assert len(hardware.gpus) == torch.cuda.device_count()
    assert hardware.free_bytes is not None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < hardware.free_bytes < memory


def test_gpus_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    gpu = Gpu(name="H100", memory_bytes=80 << 30, capability=(9, 0))
    assert find_hardware().gpus == (gpu, gpu)


@pytest.mark.parametrize(
    ("text", "limit"),
    [("150000 100000\n", 1.5), ("max 100000\n", None), ("1 0", None), ("", None), (None, None)],
)
def test_the_limit_of_a_container(tmp_path: Path, text: str | None, limit: float | None) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert _cpu_limit(tmp_path) == limit
