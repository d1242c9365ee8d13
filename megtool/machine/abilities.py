"""What of megtool this machine can run, and why not the rest."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from megtool.errors import MissingPackageError
from megtool.machine.hardware import Gpu, Hardware
from megtool.machine.packages import Extra

_MXFP8_CAPABILITY = (10, 0)
"""Products with a scale for each 32 elements: Blackwell. Source: the same guide."""

_NO_GPU = "no GPU that torch sees"
_LAUNCHERS = ("torchrun", "srun", "mpirun")
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """Something that megtool does, whether it works here, and why or how."""

    name: str
    works: bool
    reason: str


def find_abilities(hardware: Hardware, extras: Sequence[Extra]) -> tuple[Ability, ...]:
    """What works with this hardware and these packages."""
    return (
        Ability(
            name="reshard, verify, quantize, export",
            works=True,
            reason="no GPU is needed; sizes are bounded by --memory, not by the model",
        ),
        *(_of_extra(extra) for extra in extras if extra.name != "te"),
        _kernels_triton(hardware),
        _kernels_te(hardware),
        *_kernels_of_packages(hardware),
        _on_gpu(hardware, "CUDA graphs", "--cuda-graph-impl local"),
        _fp8(hardware),
        _mxfp8(hardware),
        _several_gpus(hardware),
        _launchers(),
        _engines(),
    )


def _of_extra(extra: Extra) -> Ability:
    missing = [p.name for p in extra.packages if not p.installed]
    other = [
        f"{p.name} {p.installed} is not {p.required}"
        for p in extra.packages
        if p.installed and not p.is_fitting
    ]
    if missing:
        reason = f"{', '.join(missing)} missing: {extra.command}"
    elif other:
        reason = f"{'; '.join(other)}: {extra.command}"
    else:
        reason = ", ".join(f"{p.name} {p.installed}" for p in extra.packages)
    return Ability(name=extra.purpose, works=not missing, reason=reason)


def _on_gpu(hardware: Hardware, name: str, reason: str) -> Ability:
    works = bool(hardware.gpus)
    return Ability(name=name, works=works, reason=reason if works else _NO_GPU)


def _kernels_triton(hardware: Hardware) -> Ability:
    name = "--kernels triton"
    if find_spec("triton") is None:
        return Ability(name=name, works=False, reason="triton missing: pip install triton")
    return _on_gpu(hardware, name, "fused kernels; the default on a GPU")


def _kernels_te(hardware: Hardware) -> Ability:
    from megtool.kernels.transformer_engine.library import load

    name = "--kernels te"
    try:
        load()
    except MissingPackageError as e:
        return Ability(name=name, works=False, reason=f"{e.message}; {e.hint}")
    return _on_gpu(hardware, name, "Transformer Engine's kernels")


def _kernels_of_packages(hardware: Hardware) -> Iterator[Ability]:
    """Kernels of other packages; without a GPU they are named where they are installed."""
    import torch

    from megtool.kernels.choices import find_peers

    for peer in find_peers(torch.device("cuda" if hardware.gpus else "cpu")):
        name = f"--kernels {peer.name}"
        if peer.problem:
            yield Ability(name=name, works=False, reason=peer.problem)
            continue
        takes = f"; auto takes it for {', '.join(peer.operations)}" if peer.operations else ""
        reason = f"{peer.installed} runs {peer.runs}{takes}"
        works = bool(hardware.gpus)
        yield Ability(name=name, works=works, reason=reason if works else f"{reason}; {_NO_GPU}")


def _fp8(hardware: Hardware) -> Ability:
    name = "FP8 products in training"
    if not hardware.gpus:
        return Ability(name=name, works=True, reason="emulated on the CPU: right, and slow")
    from megtool.optim.fp8.linear import LEAST_CAPABILITY

    return _by_capability(hardware.gpus, name, LEAST_CAPABILITY)


def _mxfp8(hardware: Hardware) -> Ability:
    name = "MXFP8 products in training"
    if not hardware.gpus:
        return Ability(name=name, works=True, reason="emulated on the CPU: right, and slow")
    return _by_capability(hardware.gpus, name, _MXFP8_CAPABILITY)


def _by_capability(gpus: Sequence[Gpu], name: str, least: tuple[int, int]) -> Ability:
    text = f"compute capability {least[0]}.{least[1]} or later"
    old = [g for g in gpus if g.capability is None or g.capability < least]
    if old:
        return Ability(name=name, works=False, reason=f"it needs {text}: {old[0].name} has less")
    return Ability(name=name, works=True, reason=text)


def _several_gpus(hardware: Hardware) -> Ability:
    name = "several GPUs"
    if len(hardware.gpus) < 2:
        there = f"{len(hardware.gpus)} GPUs here" if len(hardware.gpus) != 1 else "1 GPU here"
        return Ability(name=name, works=False, reason=f"{there}; several processes run on the CPU")
    works = bool(hardware.nccl)
    return Ability(
        name=name, works=works, reason=f"NCCL {hardware.nccl}" if works else "torch has no NCCL"
    )


def _launchers() -> Ability:
    places = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", os.defpath)
    there = [name for name in _LAUNCHERS if shutil.which(name, path=places)]
    return Ability(
        name="many hosts",
        works=True,
        reason=f"launchers: {', '.join(there) or 'none'}; --worker I/N needs none",
    )


def _engines() -> Ability:
    there = [text for name, text in _ENGINES.items() if find_spec(name) is not None]
    return Ability(
        name="engines that load checkpoints through megtool",
        works=bool(there),
        reason=", ".join(there) or f"none of {', '.join(_ENGINES.values())} is installed",
    )
