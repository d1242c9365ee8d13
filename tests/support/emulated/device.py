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
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

    def note_kernels(self) -> None:
        """Let captures have Triton's kernels, which its interpreter runs on copies in numpy."""
        from triton.runtime import interpreter

        run = interpreter.GridExecutor.__call__
        recorder = self.recorder

        def launch(executor: Any, *args: Any, **meta: Any) -> Any:
            if not self.is_capturing:
                return run(executor, *args, **meta)
            self.calls.append(lambda: run(executor, *args, **meta))
            recorder.note_call(len(self.calls) - 1)
            recorder.capture_pause(1)
            try:
                return run(executor, *args, **meta)
            finally:
                recorder.capture_pause(0)

        interpreter.GridExecutor.__call__ = launch


def start(library: Path) -> None:
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
        "synchronize": lambda device=None: None,
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
