"""Launching Triton kernels: late import, compilation at the first call, tile sizes.

A kernel's file holds plain functions whose `tl` is imported for type checkers alone. `launch`
gives them Triton's language and compiles them, so that importing a kernel's file needs no Triton.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from megtool.errors import MissingPackageError

# A tile holds a whole row; longer ones are torch's.
LONGEST_ROW = 65536
_TILE = 4096
# The GPU that tiles are for where there is none: the interpreter, and compilation for other GPUs.
CAPABILITY_ELSEWHERE = 90

_SHARED = "megtool.kernels.recurrence.chunked_triton"  # functions for kernels of other files

_lock = threading.RLock()


@cache
def is_installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python, on any device (TRITON_INTERPRET=1 when it started)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def require(device_kind: str) -> None:
    """Make sure that Triton runs on devices of a kind, such as "cuda".

    Raises:
        MissingPackageError: Triton is not installed, or does not run there.
    """
    if not is_installed():
        raise MissingPackageError(
            "kernels 'triton' were requested, but the package triton is not installed",
            hint="pip install 'triton>=3.2'",
        )
    if device_kind not in ("cuda", "xpu") and not is_interpreted():
        raise MissingPackageError(
            f"kernels 'triton' were requested on the device {device_kind!r}, where Triton does not "
            "run",
            hint="use a CUDA device, or kernels 'torch'; TRITON_INTERPRET=1 runs them on a CPU, "
            "for tests alone",
            error_id="missing-device",
        )


def compiled(body: Callable[..., Any]) -> Any:
    """Triton's form of `body`, and of the functions of kernels' files that it calls; made once."""
    with _lock:
        kernel = _COMPILED.get(body)
        if kernel is None:
            import triton
            import triton.language

            function = cast("FunctionType", body)
            names = function.__globals__
            names["tl"] = triton.language
            # The compiler looks annotations up too, and takes nothing but Triton's own.
            names["Any"] = triton.language.tensor
            for name in function.__code__.co_names:
                value = names.get(name)
                if isinstance(value, FunctionType) and value.__module__ in (
                    body.__module__,
                    _SHARED,
                ):
                    names[name] = compiled(value)
            kernel = _COMPILED[body] = triton.jit(body)
        return kernel


_COMPILED: dict[Callable[..., Any], Any] = {}


def launch(
    body: Callable[..., Any], num_programs: int, device: torch.device, *args: Any, **meta: Any
) -> None:
    """Run `num_programs` programs of the kernel `body` on `device`; none is fine."""
    if not num_programs:
        return
    kernel = compiled(body)
    device_context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        device_context = torch.cuda.device(device)
    with device_context:
        kernel[(num_programs,)](*args, **meta)


_num_for_graph = 0


@contextlib.contextmanager
def for_graph() -> Iterator[None]:
    """While the block lasts, work is chosen that can be captured: around a warm-up, so that it runs
    what the capture after it records. It counts in all threads, for backward passes that compute
    again have their own."""
    global _num_for_graph
    with _lock:
        _num_for_graph += 1
    try:
        yield
    finally:
        with _lock:
            _num_for_graph -= 1


def is_for_graph() -> bool:
    """Whether work is captured now, or will be when its warm-up has ended."""
    cuda = torch.cuda
    return _num_for_graph > 0 or (cuda.is_available() and cuda.is_current_stream_capturing())


def accumulator(x: Tensor) -> Any:
    """The dtype (Triton's) that a kernel computes in: fp64 for fp64, else fp32."""
    import triton.language as tl

    return tl.float64 if x.dtype == torch.float64 else tl.float32


def power(size: int) -> int:
    """The least power of two that is not below `size`, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def tile(row_size: int, *, elements: int = _TILE) -> dict[str, int]:
    """ROWS and BLOCK (powers of two) of a tile of full rows, and its number of warps.

    Several short rows share a tile. 16 elements a thread keep a row of 4096 in the registers of
    8 warps.
    """
    block = power(row_size)
    rows = max(1, elements // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps(rows * block)}


def warps(elements: int) -> int:
    """The number of warps for a tile: 16 elements a thread, within 1 to 16 warps."""
    return min(16, max(1, power(elements // 512)))


def has_wide_products(device: torch.device) -> bool:
    """Whether matrix products of 64 rows keep a factor outside registers (Hopper, sm_100, sm_103).

    Elsewhere every thread has its share of both, and tiles are smaller.
    """
    if device.type != "cuda":
        return CAPABILITY_ELSEWHERE // 10 in (9, 10)
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def most_programs(device: torch.device) -> int:
    """The number of programs that run at once if each computes a partial sum."""
    if device.type != "cuda":
        return 4
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)
