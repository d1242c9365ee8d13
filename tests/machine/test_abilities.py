"""What works follows from hardware and packages, and a reason says why the rest does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megtool.machine.abilities import Ability, find_abilities
from megtool.machine.hardware import Gpu, Hardware
from megtool.machine.packages import Extra, Package

CPU = Hardware(
    system="Linux",
    python="3.11",
    torch="2.13",
    num_cpus=2,
    cpu_limit=None,
    free_bytes=1 << 30,
    max_open_files=1024,
    gpus=(),
    cuda="",
    nccl="",
)


def abilities_of(hardware: Hardware, *extras: Extra) -> dict[str, Ability]:
    return {ability.name: ability for ability in find_abilities(hardware, extras)}


def with_gpus(*capabilities: tuple[int, int]) -> Hardware:
    gpus = tuple(Gpu(name="GPU", memory_bytes=1 << 36, capability=c) for c in capabilities)
    return replace(CPU, gpus=gpus, cuda="12.8", nccl="2.27.3")


@pytest.mark.parametrize(
    ("capabilities", "fp8", "mxfp8", "several"),
    [
        (((8, 0),), False, False, False),
        (((8, 9),), True, False, False),
        (((9, 0), (9, 0)), True, False, True),
        (((9, 0), (8, 0)), False, False, True),
        (((10, 0), (10, 0)), True, True, True),
    ],
)
def test_precisions_follow_the_oldest_gpu(
    capabilities: tuple[tuple[int, int], ...], fp8: bool, mxfp8: bool, several: bool
) -> None:
    found = abilities_of(with_gpus(*capabilities))
    assert found["FP8 products in training"].works == fp8
    assert found["MXFP8 products in training"].works == mxfp8
    assert found["several GPUs"].works == several
    assert found["CUDA graphs"].works


def test_without_a_gpu() -> None:
    found = abilities_of(CPU)
    assert found["reshard, verify, quantize, export"].works
    assert found["FP8 products in training"].works
    assert "emulated" in found["FP8 products in training"].reason
    for name in ("CUDA graphs", "--kernels triton", "--kernels te", "several GPUs"):
        assert not found[name].works
        assert found[name].reason


def test_packages_say_what_is_missing() -> None:
    there = Package(name="a", required=">=1", installed="1.2", is_fitting=True)
    gone = Package(name="b", required=">=1", installed="", is_fitting=True)
    old = Package(name="c", required=">=1", installed="0.5", is_fitting=False)
    found = abilities_of(
        CPU,
        Extra(name="x", purpose="first", packages=(there,)),
        Extra(name="y", purpose="second", packages=(there, gone)),
        Extra(name="z", purpose="third", packages=(there, old)),
    )
    assert (found["first"].works, found["first"].reason) == (True, "a 1.2")
    assert not found["second"].works
    assert found["second"].reason == "b missing: pip install 'megtool[y]'"
    assert found["third"].reason == "c 0.5 is not >=1: pip install 'megtool[z]'"
