"""A checkpoint made to run: opened, checked, loaded on its ranks, with the tokenizer beside it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from megtool.console import Progress, format_bytes
from megtool.errors import (
    LayoutError,
    MissingPackageError,
    OutOfMemoryError,
    UsageError,
)
from megtool.options.groups import RuntimeOptions
from megtool.options.kernels import Implementation
from megtool.options.layout import ParallelConfig
from megtool.source.checkpoint import CheckpointSource

if TYPE_CHECKING:
    import torch

    from megtool.inference.forward import Forward
    from megtool.parallel.process_groups import ProcessGroups

_LOG = logging.getLogger(__name__)

LESS_MEMORY = "--dtype bfloat16, or more processes (torchrun, --tp)"
"""What needs less memory whatever runs a model."""
_TRIED = re.compile(r"(?:tried|unable) to allocate ([\d.]+ ?(?:bytes|[KMGTPE]iB))", re.IGNORECASE)


class ProcessOptions(Protocol):
    """The options of a verb that runs a model, in one process or several."""

    @property
    def device(self) -> str | None:
        """The device; None is CUDA if there is one, else the CPU."""

    @property
    def kernels(self) -> Implementation:
        """The implementation of fused operations."""

    @property
    def threads(self) -> int | None:
        """Threads of the CPU; None is torch's own number."""

    @property
    def layout(self) -> ParallelConfig:
        """The parallel layout."""


@contextmanager
def on_ranks(
    options: ProcessOptions,
    *,
    less: str = LESS_MEMORY,
    alone: bool = False,
    **more: Any,
) -> Iterator[ProcessGroups]:
    """The processes of a layout, joined for as long as the block lasts, and its kernels chosen.

    `less` are the options that need less memory. `alone` is for one of the processes that torchrun
    started, of which the others have nothing left to do. `more` are further arguments of
    `ProcessGroups.start`.

    Raises:
        OutOfMemoryError: what the block does needs more memory than there is.
        LayoutError: there are too few processes, or too many.
        MissingPackageError: the device is not there, or the kernels.
        UsageError: there is no such kind of device.
    """
    import torch

    from megtool.kernels.dispatch import require_package, use
    from megtool.kernels.transformer_engine import library as transformer_engine
    from megtool.parallel.process_groups import ProcessGroups

    layout = options.layout
    if layout.world_size > 1 and "WORLD_SIZE" not in os.environ:
        axes = ("tp", "pp", "ep", "cp", "dp")
        axis_options = " ".join(f"--{a} {n}" for a in axes if (n := getattr(layout, a)) > 1)
        raise LayoutError(
            f"{axis_options} needs {layout.world_size} processes, and this is one",
            hint=f"torchrun --nproc-per-node {layout.world_size} -m megtool VERB ...",
        )
    device = _device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    require_package(options.kernels, device.type)
    if options.kernels == "te" and os.environ.get("RANK", "0") == "0":
        _LOG.warning("--kernels te: %s", transformer_engine.SCOPE)
    groups = (
        ProcessGroups.alone(device) if alone else ProcessGroups.start(layout, device=device, **more)
    )
    try:
        with use(options.kernels), memory_errors(device, less):
            yield groups
    finally:
        groups.stop()


@contextmanager
def memory_errors(device: torch.device, less: str = LESS_MEMORY) -> Iterator[None]:
    """Say of a block that needs more memory than there is what would need less.

    Raises:
        OutOfMemoryError: it does.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if (needed := _lacking(e)) is None:
            raise
        raise OutOfMemoryError(f"{device} has no {needed} left", hint=less) from e


def load_forward(
    source: CheckpointSource,
    manner: RuntimeOptions,
    groups: ProcessGroups,
    progress: Progress,
    *,
    keeps_mtp: bool = False,
) -> Forward:
    """The model on this rank, its weights loaded (or ready to be, `stream_layers`).

    Layers of multi-token prediction are loaded if the caller `keeps_mtp`.

    Raises:
        LayoutError: the layout does not divide the model.
        UsageError: there is no such dtype.
    """
    from megtool.inference.forward import Forward
    from megtool.inference.load import find_nan, load

    decoder = load(
        source,
        groups=groups,
        dtype=manner.dtype or ("float32" if groups.device.type == "cpu" else None),
        stream_layers=manner.stream_layers,
        keeps_mtp=keeps_mtp,
        threads=manner.threads,
        progress=progress,
    )
    return Forward(decoder, groups, find_nan=find_nan)


def _lacking(error: RuntimeError | MemoryError) -> str | None:
    """How much memory was asked for in vain, where that is the error: torch's, or numpy's."""
    import torch

    message = str(error)
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not known and "can't allocate memory" not in message:
        return None
    match = _TRIED.search(message)
    if match is None:
        return "memory"
    number, unit = match[1].split() if " " in match[1] else (match[1], "bytes")
    return format_bytes(int(number)) if unit == "bytes" else match[1]


def usual_device() -> str:
    """The kind of device that a model runs on where none is named."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        return torch.device(usual_device())
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise _no_device(name) from e
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise _no_device(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        there = f"{count} CUDA devices" if count else "no CUDA device"
        raise MissingPackageError(
            f"device {name!r}, and there is {there}",
            hint="--device cpu" if not count else f"--device cuda:0 to cuda:{count - 1}, or cpu",
            error_id="missing-device",
        )
    return device


def _no_device(name: str) -> UsageError:
    return UsageError(f"there is no device {name!r}", hint="cpu, cuda, or one of several: cuda:0")
