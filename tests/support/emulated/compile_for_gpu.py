"""Compile every Triton kernel of the product for GPUs that are not there.

    python -m tests.support.emulated.compile_for_gpu [--arch 80 --arch 100] [--kernel ssd] [--fast]

Prints a line for each kernel, architecture and shape: registers and spilled bytes of a thread,
shared memory of a block. Exits with status 1 if one does not compile, needs more than a GPU of the
architecture has, or spills more than `MOST_SPILLED` bytes in 16 bits. Compiled kernels are kept in
Triton's cache (`TRITON_CACHE_DIR`). Compiling shows nothing about results or speed.

Triton's interpreter runs kernels that no GPU takes: layouts, shared memory and registers exist in
compiled kernels alone. The driver of a GPU is replaced by one that names an architecture, and
launches are recorded, not run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megtool.kernels
from megtool.kernels import launch
from tests.support.emulated.kernel_cases import FP32, Case, cases

# Shared memory that a block may ask for, in bytes: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability" (163, 99 and 227 KiB).
SHARED_BYTES = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
}
REGISTERS = 65536  # of a block, on all of them
TENSOR_MEMORY = 512  # columns, where a GPU has any
MOST_SPILLED = 256  # bytes of a thread
FAST_ARCHS = (86, 100)


class Launch(NamedTuple):
    """One launch that was recorded: what Triton specializes a kernel by."""

    case: Case
    body: Callable[..., Any]
    args: tuple[Any, ...]
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        """The file and the function, `ssd_triton._forward`."""
        return f"{self.body.__module__.rpartition('.')[2]}.{self.body.__name__}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for launches that Triton compiles once."""
        return (self.body, *map(_specialization, self.args), *sorted(self.meta.items(), key=str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one kernel needs on one architecture; `problem` is empty if it may be launched."""

    kernel: str
    arch: int
    operation: str
    shape: str
    dtype: str
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


def _specialization(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.dtype
    if isinstance(arg, int):
        return (arg == 1, arg % 16 == 0, abs(arg) < 1 << 31)
    return type(arg)


def listed_kernels() -> set[str]:
    """The kernels that the product launches, by its source."""
    found = set()
    for path in Path(megtool.kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name("launch"), args=[ast.Name(body), *_]):
                    found.add(f"{path.stem}.{body}")
                case ast.Call(
                    func=ast.Name("launch"), args=[ast.Attribute(ast.Name(module), body), *_]
                ):
                    found.add(f"{module}.{body}")
    return found


def record(selected: Iterable[Case], arch: int = 90) -> list[Launch]:
    """The launches of cases on an architecture, each specialization once."""
    found: dict[Any, Launch] = {}
    compiled, elsewhere = launch.compiled, launch.CAPABILITY_ELSEWHERE
    for case in selected:

        class Recorder:
            """In the place of a compiled kernel."""

            def __init__(self, body: Callable[..., Any], case: Case = case) -> None:
                self.body, self.case = body, case

            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return self._add

            def _add(self, *args: Any, **meta: Any) -> None:
                one = Launch(self.case, self.body, args, meta)
                found.setdefault(one.key, one)

        launch.compiled, launch.CAPABILITY_ELSEWHERE = Recorder, arch
        try:
            case.run()
        finally:
            launch.compiled, launch.CAPABILITY_ELSEWHERE = compiled, elsewhere
    return list(found.values())


def fast(selected: Iterable[Case]) -> Iterator[Case]:
    """The first case of each operation."""
    names = set()
    for case in selected:
        if case.operation not in names:
            names.add(case.operation)
            yield case


class _Driver:
    """What Triton asks about the GPU, before it launches."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(one: Launch, arch: int) -> Result:
    """Compile what a launch would run on a GPU of an architecture."""
    from triton.runtime import driver

    driver.set_active(_Driver(arch))
    result = partial(
        Result,
        kernel=one.name,
        arch=arch,
        operation=one.case.operation,
        shape=one.case.shape,
        dtype=str(one.case.dtype).removeprefix("torch."),
    )
    start = time.perf_counter()
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stdout(complaints), _stderr_to(complaints):
            made = launch.compiled(one.body).run(*one.args, grid=(1,), warmup=True, **one.meta)
    except Exception as error:  # whatever a compiler fails with
        lines = [x for x in f"{error}\n{complaints.getvalue()}".splitlines() if x.strip()]
        reason = next((x for x in lines if "error:" in x), lines[0] if lines else "")
        return result(problem=f"does not compile: {type(error).__name__}: {reason.strip()[:300]}")
    seconds = time.perf_counter() - start
    registers, spilled = _resources(made.asm["cubin"])
    shared, warps = made.metadata.shared, made.metadata.num_warps
    problems = []
    if shared > SHARED_BYTES[arch]:
        problems.append(f"needs {shared:,} bytes of shared memory of {SHARED_BYTES[arch]:,}")
    if registers * warps * 32 > REGISTERS:
        problems.append(f"needs {registers} registers for {warps} warps")
    columns = getattr(made.metadata, "tmem_size", 0) or 0
    if columns > TENSOR_MEMORY:
        problems.append(f"needs {columns} columns of tensor memory of {TENSOR_MEMORY}")
    if spilled > MOST_SPILLED and one.case.dtype != FP32:
        problems.append(f"spills {spilled:,} bytes of {MOST_SPILLED}")
    return result(
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=shared,
        seconds=round(seconds, 2),
        problem="; ".join(problems),
    )


@contextlib.contextmanager
def _stderr_to(text: io.StringIO) -> Iterator[None]:
    """LLVM and MLIR write to the descriptor, past Python's `sys.stderr`."""
    with tempfile.TemporaryFile("w+") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            text.write(file.read())


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory (stack and spills), of a thread."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


_work: list[tuple[Launch, int]] = []  # a worker has it from the process that it was forked from


def _compile(number: int) -> Result:
    return compile_launch(*_work[number])


def compile_all(work: Sequence[tuple[Launch, int]], jobs: int) -> Iterator[Result]:
    """Compile launches, each for its architecture, some at a time, in order."""
    _work[:] = work
    if jobs <= 1:
        yield from map(_compile, range(len(work)))
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_compile, range(len(work)))


def line(result: Result) -> str:
    """One line of the table."""
    limit = SHARED_BYTES[result.arch]
    numbers = f"{result.registers:>4} {result.spilled_bytes:>7,} {result.shared_bytes:>8,}"
    return (
        f"{result.kernel:<44} sm_{result.arch:<4}{result.dtype:<9}{numbers} of {limit:,}  "
        f"{result.operation}, {result.shape}: {result.problem or 'ok'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="compile_for_gpu", description="Compile Triton's kernels without a GPU."
    )
    add = parser.add_argument
    add("--arch", type=int, action="append", choices=sorted(SHARED_BYTES), help="80 for sm_80")
    add("--kernel", action="append", help="part of a kernel's or an operation's name")
    add("--dtype", action="append", choices=["bfloat16", "float16", "float32"])
    add("--fast", action="store_true", help="one case of each operation")
    add("--json", action="store_true", help="one JSON object a line")
    add("--problems", action="store_true", help="print only kernels that have a problem")
    add("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)  # a kernel is either interpreted or compiled
    selected = list(cases())
    if options.dtype:
        selected = [c for c in selected if str(c.dtype).removeprefix("torch.") in options.dtype]
    if options.fast:
        selected = list(fast(selected))
    archs = options.arch or (FAST_ARCHS if options.fast else sorted(SHARED_BYTES))
    work = [(one, arch) for arch in archs for one in record(selected, arch)]
    if options.kernel:
        work = [
            (x, arch)
            for x, arch in work
            if any(k in x.name or k in x.case.operation for k in options.kernel)
        ]
    if not work:
        parser.error("no kernel is selected")
    failed = count = 0
    if not options.json:
        print(f"{'kernel':<44} {'arch':<7}{'dtype':<9} reg spilled   shared")
    for result in compile_all(work, options.jobs):
        count += 1
        failed += bool(result.problem)
        if result.problem or not options.problems:
            print(json.dumps(asdict(result)) if options.json else line(result), flush=True)
    names = {x.name for x, _ in work}
    print(
        f"{len(names)} kernels, {len(archs)} architectures, {count} specializations: "
        f"{count - failed} compiled and fit, {failed} did not; none was run",
        file=sys.stderr if options.json else sys.stdout,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
