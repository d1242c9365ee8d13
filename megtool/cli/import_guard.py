"""Refuses to import large libraries into a process that has too little memory left for them.

What OpenBLAS and torch cannot allocate while they are imported ends the process, some with a signal
and some with Ctrl-C's exit status, so there is nothing to catch: the limit is read before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from megtool.errors import OutOfMemoryError

MIB = 1 << 20
NEEDED_BYTES = {
    "numpy": 192 * MIB,
    "torch": 768 * MIB,
    "matplotlib": 128 * MIB,
    "tokenizers": 64 * MIB,
}
"""Address space that a library needs with all that is imported beside it, and for the smallest
work."""

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_THREADS = {"torch": "OMP_NUM_THREADS", "tokenizers": "RAYON_NUM_THREADS"}
_BYTES_PER_THREAD = 96 * MIB  # a stack, and the part of the address space that malloc reserves


class ImportGuard:
    """The first of `sys.meta_path`: it finds no module, and stops the import of large ones.

    numpy gets one thread for its OpenBLAS unless `OPENBLAS_NUM_THREADS` says otherwise: only plots
    multiply matrices with it, small ones, and each thread costs time and 40 MiB of address space.
    torch gets what it would have without. It and tokenizers get no more threads than fit into half
    of what is left.
    """

    def __init__(self) -> None:
        self._is_set = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing.

        Raises:
            OutOfMemoryError: the limit of the address space leaves less than the module needs.
        """
        if (needed := NEEDED_BYTES.get(name)) is None:
            return None
        left = find_free_bytes()
        if left is not None and left < needed:
            raise OutOfMemoryError(
                f"{name} needs {needed // MIB:,} MiB of address space, and the limit of this "
                f"process leaves {max(left, 0) // MIB:,} MiB",
                hint="raise the limit (ulimit -v)",
            )
        if name == "numpy" and _BLAS_THREADS not in os.environ:
            os.environ[_BLAS_THREADS] = "1"
            self._is_set = True
        if name == "torch" and self._is_set:
            del os.environ[_BLAS_THREADS]
            self._is_set = False
        variable = _THREADS.get(name)
        if left is not None and variable is not None and variable not in os.environ:
            fitting = max(1, (left - needed) // 2 // _BYTES_PER_THREAD)
            if fitting < len(os.sched_getaffinity(0)):
                os.environ[variable] = str(fitting)
        return None


def find_free_bytes() -> int | None:
    """The address space that the limit of this process leaves, or None without a limit."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None
    return limit - used


def guard_imports() -> None:
    """Put the guard in place, once."""
    if not any(isinstance(finder, ImportGuard) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportGuard())
