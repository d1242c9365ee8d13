"""An emulated GPU: `torch.device("cuda")` on a CPU build of torch, with CUDA's rules.

python -m tests.support.emulated.device LIBRARY auto|torch|FOLDER [pytest's arguments]

The second form of kernels spares the tests Triton's interpreter, where they do not name any; so
does the third, the folder of a release of Transformer Engine that is to be there (te_extension.py).

`build` compiles device.cpp; `start` loads it, before torch is imported, and gives `torch.cuda` a
device, streams, events and graphs. Operations run on the CPU, on the same bytes, and fail where
CUDA's would: tensors on two devices, the generator of another one, a host that waits while a graph
is captured, operands that FP8 and grouped products do not take. A capture that broke leaves its
stream behind, as torch's does. What it cannot show is asynchrony: all streams are one, and every
event has happened. Triton's kernels run in its interpreter. The variable EMULATED_MAJOR is the
device's compute capability (9: Hopper).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Call = Callable[..., tuple[Any, ...]]
SOURCE = Path(__file__).with_name("device.cpp")
GIB = 1 << 30


def build(folder: Path, compiler: str) -> Path:
    """The library, made in a folder with a C++ compiler."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    out = folder / "libdevice.so"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), "-o", str(out)]
    for part in ("include", "include/torch/csrc/api/include"):
        command += ["-isystem", str(torch / part)]
    command += ["-I", sysconfig.get_paths()["include"], f"-L{torch / 'lib'}"]
    command += [f"-Wl,-rpath,{torch / 'lib'}", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, "-ltorch"], check=True)
    return out


class Event:
    """Something that has happened once it is recorded."""

    def __init__(self, **_: Any) -> None:
        self.is_recorded = False

    def record(self, stream: Any = None) -> None:
        """It happens."""
        self.is_recorded = True

    def synchronize(self) -> None:
        """Nothing is to be waited for but what was never recorded."""
        assert self.is_recorded, "an event that was never recorded"

    wait = query = synchronize

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds."""
        return 1.0


class Stream:
    """A stream, of which there is in truth only one."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream: Stream) -> None:
        """Wait for another one."""
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        """Wait for an event."""
        event.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        event = Event() if event is None else event
        event.record()
        return event

    def synchronize(self) -> None:
        """Nothing is under way."""


class Emulation:
    """The state of the device: its streams, and the graph that is being captured."""

    def __init__(self, recorder: ctypes.CDLL) -> None:
        import torch

        self.recorder = recorder
        self.stream = self.main = Stream()
        self.is_capturing = False
        self.generator = torch.Generator(device="cuda")
        self.calls: list[Callable[[], object]] = []
        self.waits: list[str] = []
        self._is_quiet = False
        self._told = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda name: self.wait(name.decode()))
        recorder.on_wait(self._told)
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda n: self.calls[n]() and None)
        recorder.on_call(self._callback)
        emulation = self

        class CUDAGraph:
            """A capture's operations."""

            number = -1

            def replay(self) -> None:
                """Run them again."""
                if recorder.replay(self.number):
                    raise RuntimeError("a replay failed")

        class Capture:
            """`torch.cuda.graph`."""

            def __init__(self, graph: CUDAGraph, **_: Any) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                self.before, emulation.stream = emulation.stream, Stream()
                emulation.is_capturing = True
                self.graph.number = recorder.capture_begin()

            def __exit__(self, kind: Any, error: BaseException | None, *_: object) -> None:
                emulation.is_capturing = False
                recorder.capture_end()
                if error is not None and "stream is capturing" in str(error):
                    raise RuntimeError("operation failed due to a previous error during capture")
                emulation.stream = self.before

        self.graph, self.capture = CUDAGraph, Capture

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    def wait(self, name: str) -> None:
        """Note that the host waits for the device, and where: the innermost line of megtool."""
        if self._is_quiet:
            return
        frames = [f for f in traceback.extract_stack() if "/megtool/" in f.filename]
        place = frames[-1] if frames else None
        where = place and f"{place.filename.rpartition('/megtool/')[2]}:{place.lineno} {place.line}"
        self.waits.append(f"{name} at {where}")

    @contextlib.contextmanager
    def _as_kernel(self) -> Iterator[None]:
        """Around what stands for a kernel: operations in it are neither captured nor waits."""
        self._is_quiet, before = True, self._is_quiet
        if self.is_capturing:
            self.recorder.capture_pause(1)
        try:
            yield
        finally:
            self._is_quiet = before
            if self.is_capturing:
                self.recorder.capture_pause(0)

    def _note_call(self, call: Callable[[], object]) -> None:
        """Let the graph that is captured call Python here."""
        self.calls.append(call)
        self.recorder.note_call(len(self.calls) - 1)

    def note_kernels(self) -> None:
        """Let captures have Triton's kernels, which its interpreter runs on copies in numpy."""
        from triton.runtime import interpreter

        run = interpreter.GridExecutor.__call__

        def launch(executor: Any, *args: Any, **meta: Any) -> Any:
            def call() -> object:
                with self._as_kernel():
                    return run(executor, *args, **meta)

            if self.is_capturing:
                self._note_call(call)
            return call()

        interpreter.GridExecutor.__call__ = launch

    def run_on_host(self, compute: Call, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """A kernel's results, computed on copies of its tensors."""
        with self._as_kernel():
            made = tuple(x.cuda() for x in compute(*(x.cpu() for x in given)))

        def again() -> None:
            with self._as_kernel():
                for target, x in zip(made, compute(*(x.cpu() for x in given)), strict=True):
                    target.copy_(x)

        if self.is_capturing:
            self._note_call(again)
        return made

    def take_waits(self) -> list[str]:
        """The waits since the last call."""
        taken, self.waits = self.waits, []
        return taken


def start(library: Path) -> Emulation:
    """Make this process one with a GPU; torch may not have been imported before."""
    assert "torch" not in sys.modules
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Autograd's thread of the device aborts the process where it wants the interpreter at its end
    # ("terminate called without an active exception"): it is not woken then, and has a moment to
    # let go of the last backward pass's graph.
    os.environ.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0")
    atexit.register(time.sleep, 0.2)
    loaded = ctypes.CDLL(str(library))
    import torch

    emulation = Emulation(loaded)
    major = int(os.environ.get("EMULATED_MAJOR", "9"))
    facts = SimpleNamespace(
        name="emulated", major=major, minor=0, multi_processor_count=4, total_memory=140 * GIB
    )
    seeds = emulation.generator
    here: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": contextlib.nullcontext,
        "get_device_properties": lambda device=None: facts,
        "get_device_capability": lambda device=None: (major, 0),
        "get_device_name": lambda device=None: facts.name,
        "mem_get_info": lambda device=None: (100 * GIB, 140 * GIB),
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: emulation.wait("torch.cuda.synchronize"),
        "_sleep": lambda cycles: None,
        "Stream": Stream,
        "Event": Event,
        "stream": emulation.on,
        "current_stream": lambda device=None: emulation.stream,
        "default_stream": lambda device=None: emulation.main,
        "is_current_stream_capturing": lambda: emulation.is_capturing,
        "CUDAGraph": emulation.graph,
        "graph": emulation.capture,
        "graph_pool_handle": lambda: (0, 1),
        "get_rng_state": lambda device=None: seeds.get_state(),
        "set_rng_state": lambda state, device=None: seeds.set_state(state),
        "manual_seed_all": lambda seed: None,
    }
    for name, value in here.items():
        setattr(torch.cuda, name, value)
    for name in ("_lazy_init", "get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, here[name])
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        setattr(torch._C, name, lambda device, pool: None)
    if find_spec("triton") is not None:
        emulation.note_kernels()
    from tests.support.emulated import flash

    emulation.flash = flash.register("CUDA", run=emulation.run_on_host)
    return emulation


if __name__ == "__main__":
    start(Path(sys.argv[1]))
    import pytest

    from megtool.kernels import dispatch

    if Path(sys.argv[2]).is_dir():
        from tests.support.emulated.te_extension import install

        install(Path(sys.argv[2]))
    if sys.argv[2] != "auto":
        dispatch._automatic = lambda device_kind: "torch"  # type: ignore[assignment]
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[3:]]))
