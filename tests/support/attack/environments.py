"""Hostile surroundings of a run: each ends in one sentence and a documented status."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

from tests.support.attack import specimens
from tests.support.attack.child import ChildRun, run
from tests.support.attack.outcome import Outcome
from tests.support.folders import contents, file_states
from tests.support.runs.unprivileged import obey_permissions

Setup = Callable[[], None]
SILENT = frozenset(("a closed pipe", "stdout closed", "stderr closed"))
"""Where a sentence cannot be read by anybody."""

ENVIRONMENT: dict[str, dict[str, str | None]] = {
    "no HOME": {"HOME": None},
    "HOME of nothing": {"HOME": "/nowhere"},
    "no TMPDIR": {"TMPDIR": "/nowhere"},
    "locale C": {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "stdout of ASCII": {"PYTHONIOENCODING": "ascii"},
    "an empty environment": {"HOME": None, "PATH": None, "LANG": None, "TERM": None, "USER": None},
}


def _limit(what: int, value: int) -> Setup:
    return lambda: resource.setrlimit(what, (value, value))


def _no_threads() -> None:
    os.setgid(65534)
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _deleted_folder() -> None:
    folder = Path(f"/tmp/deleted-{os.getpid()}")
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


SETUPS: dict[str, Setup] = {
    "a deleted working directory": _deleted_folder,
    "no threads": _no_threads,
    "files of 4 KiB": _limit(resource.RLIMIT_FSIZE, 4 << 10),
    "files of 64 KiB": _limit(resource.RLIMIT_FSIZE, 64 << 10),
    "12 open files": _limit(resource.RLIMIT_NOFILE, 12),
    "7 open files": _limit(resource.RLIMIT_NOFILE, 7),
    "memory of 64 MiB more": lambda: _limit_memory(64 << 20),
    "memory of 8 MiB more": lambda: _limit_memory(8 << 20),
    "stdin closed": lambda: os.close(0),
    "stdout closed": lambda: os.close(1),
    "stderr closed": lambda: os.close(2),
    "a closed pipe": lambda: _closed_pipe(1),
    "stderr a closed pipe": lambda: _closed_pipe(2),
    "stdout full": lambda: _set(os.dup2(os.open("/dev/full", os.O_WRONLY), 1)),
    "umask of 777": lambda: _set(os.umask(0o777)),
    "SIGPIPE as the system has it": lambda: _set(signal.signal(signal.SIGPIPE, signal.SIG_DFL)),
}


def _set(_: object) -> None:
    """For the effect of an argument."""


def _limit_memory(more: int) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))


def _closed_pipe(fd: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, fd)


DENIED = {
    "hf": ("config.json", "tokenizer.json", "model-00001-of-*.safetensors", "megtool.json", ""),
    "torch_dist": (".metadata", "common.pt", "__0_0.distcp", "metadata.json", "megtool.json", ""),
    "megatron": ("mp_rank_00", "mp_rank_00/model_optim_rng.pt", ""),
    "zarr": ("model.norm.weight", "*.norm.weight/*", ""),
    "trained": ("latest_checkpointed_iteration.txt", "iter_0000002", "iter_0000002/.metadata"),
}
"""Files and folders of a source that cannot be read."""

MAKERS = ("torch_dist", "safetensors", "fp8", "vllm", "trained")


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Every environment with every verb, `count` in all, in a fixed order that is shuffled."""
    outcome = Outcome("environments")
    specimens.make(root, ("fp8", *DENIED))
    root.chmod(0o755)
    attempts: list[tuple[str, Callable[[], str | None]]] = [
        (f"{maker} with {name}", partial(_surround, root, maker, name))
        for name, maker in product((*SETUPS, *ENVIRONMENT), (*MAKERS, "inspect", "verify"))
    ]
    for kind, names in DENIED.items():
        for name, verb in product(names, ("inspect", "verify", "reshard", "quantize")):
            title = f"{verb} of {kind} without permission for {name or 'it'}"
            attempts.append((title, partial(_deny, root, kind, name, verb)))
    for maker in MAKERS:
        attempts.append((f"{maker} to a full disk", partial(_fill_disk, root, maker)))
        attempts.append((f"{maker} to a folder that is read-only", partial(_lock, root, maker)))
    for verb in ("inspect", "verify", "--help", "recipe"):
        attempts.append((f"{verb} | head -1", partial(_cut_output, root, verb)))
    rng.shuffle(attempts)
    for title, attempt in attempts[:count]:
        before = file_states(root / "source")
        fault = attempt()
        if fault is None and file_states(root / "source") != before:
            fault = "the source was changed"
        outcome.note(title, fault)
    return outcome


def _command(root: Path, maker: str, out: Path) -> list[object]:
    if maker in ("inspect", "verify"):
        return [maker, root / "torch_dist"]
    return specimens.command(root, maker, out)


def _destination(root: Path, maker: str) -> Path:
    folder = root / "surrounded"
    _remove(folder)
    folder.mkdir()
    folder.chmod(0o777)
    return folder / specimens.SINGLE_FILES.get(maker, "out")


def _surround(root: Path, maker: str, name: str) -> str | None:
    out = _destination(root, maker)
    setup = SETUPS.get(name) or partial(_change_environment, ENVIRONMENT[name])
    done = run(_command(root, maker, out), setup=setup)
    result = None if maker == "trained" else out
    return _judge(done, result, is_silent=name in SILENT or "stderr" in name, name=name)


def _judge(
    done: ChildRun, out: Path | None, *, is_silent: bool = False, name: str = ""
) -> str | None:
    """What is wrong about an end, or about what it left at `out`."""
    fault = done.fault
    if fault and is_silent and "without a sentence" in fault:
        fault = None
    if fault and name.startswith("memory") and done.status is not None:
        fault = None  # where nothing can be allocated, native code aborts
    if fault and name.startswith("SIGPIPE") and done.status == -signal.SIGPIPE:
        fault = None
    has_result = out is not None and out.exists()
    if fault is None and done.status not in (0, 7) and has_result and name != "stdout full":
        fault = f"status {done.status}, and a result under the final name"
    if fault is None and done.status == 0 and not is_silent and "error:" in done.err:
        fault = f"status 0, and an error: {done.err[-200:]}"
    return fault


def _change_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _deny(root: Path, kind: str, pattern: str, verb: str) -> str | None:
    path = specimens.path_of(root, kind)
    target = next(iter(sorted(path.rglob(pattern))), None) if pattern else path
    if target is None:
        return None
    out = _destination(root, "out")
    arguments: list[object] = [verb, path]
    if verb == "reshard":
        arguments += [out, "--to=safetensors"]
    if verb == "quantize":
        arguments += [out, "--recipe=fp8_per_channel"]
    mode = target.stat().st_mode
    target.chmod(0)
    try:
        done = run(arguments, setup=obey_permissions)
    finally:
        target.chmod(mode)
    fault = _judge(done, out)
    if fault is None and done.status != 0 and os.fspath(target.name) not in done.err:
        fault = f"{target.name} is not named: {done.err.strip()[-200:]}"
    return fault


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """Mount a file system of `size` bytes; whether that was possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    is_mounted = libc.mount(b"none", bytes(folder), b"tmpfs", 0, f"size={size}".encode()) == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            libc.umount2(bytes(folder), 2)


def _fill_disk(root: Path, maker: str) -> str | None:
    folder = root / "disk"
    folder.mkdir(exist_ok=True)
    with small_disk(folder, 96 << 10) as is_mounted:
        setup = None if is_mounted else SETUPS["files of 64 KiB"]
        out = folder / specimens.SINGLE_FILES.get(maker, "out")
        done = run(specimens.command(root, maker, out), setup=setup)
        fault = _judge(done, None)
        if fault is None and done.status == 0:
            fault = "a result that does not fit was written"
        if fault is None and maker != "trained" and out.exists():
            fault = "a result under the final name"
    _remove(folder)
    return fault


def _lock(root: Path, maker: str) -> str | None:
    out = _destination(root, maker)
    out.parent.chmod(0o555)
    done = run(_command(root, maker, out), setup=obey_permissions)
    out.parent.chmod(0o755)
    fault = _judge(done, out)
    if fault is None and (done.status == 0 or contents(out.parent)):
        fault = f"status {done.status}, in a folder that cannot be written"
    return fault


def _cut_output(root: Path, verb: str) -> str | None:
    """A real pipe to `head`, in a process of its own."""
    arguments = [verb, os.fspath(root / "torch_dist")]
    if verb == "inspect":
        arguments.append("--tensors")
    if verb == "--help":
        arguments = ["finetune", verb]
    if verb == "recipe":
        arguments = ["recipe", "show", "fp8"]
    command = f'"{sys.executable}" -m megtool {" ".join(arguments)} | head -1'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return done.stderr.strip()[-300:] or None


def _remove(path: Path) -> None:
    if path.exists():
        for folder in [path, *(p for p in path.rglob("*") if p.is_dir() and not p.is_symlink())]:
            folder.chmod(0o755)
    shutil.rmtree(path, ignore_errors=True)
