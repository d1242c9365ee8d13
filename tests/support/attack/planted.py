"""Links, FIFOs, devices and folders where a run writes: none is opened or replaced."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from itertools import product
from pathlib import Path

from tests.support.attack import specimens
from tests.support.attack.child import run
from tests.support.attack.outcome import Outcome
from tests.support.folders import file_states

VICTIM = b"somebody's own data\n"
MAKERS = ("safetensors", "torch_dist", "ocdbt", "fp8", "vllm", "gguf", "trained")


def _socket(path: Path, victim: Path) -> None:
    former = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(former)


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link to a file": lambda path, victim: path.symlink_to(victim / "file"),
    "link to a folder": lambda path, victim: path.symlink_to(victim),
    "link to nothing": lambda path, victim: path.symlink_to(victim / "new"),
    "hard link": lambda path, victim: path.hardlink_to(victim / "file"),
    "FIFO": lambda path, victim: os.mkfifo(path),
    "socket": _socket,
    "device": lambda path, victim: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    "folder": lambda path, victim: (path / "inner").mkdir(parents=True),
}
STAGED = ("", "lock", "journal", "tree", "tree/config.json", "old", "files")
"""Places in a staging folder; the first is the folder itself."""
IN_RUN = (
    ".megtool",
    ".megtool/iter_0000002.0",
    "log.jsonl",
    "finetune.json",
    "latest_checkpointed_iteration.txt",
    "iter_0000002",
    "data",
)
"""Places in the DST of `finetune`."""


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Plant one thing at a time, in every place of every verb, `count` in all."""
    outcome = Outcome("planted files")
    specimens.make(root, ("fp8",))
    attempts = [
        (maker, place, plant)
        for maker in MAKERS
        for place, plant in product(IN_RUN if maker == "trained" else (*STAGED, "DST"), PLANTS)
    ]
    rng.shuffle(attempts)
    for maker, place, plant in attempts[:count]:
        outcome.note(
            f"{plant} at {place or 'the staging folder'} of {maker}",
            _try(root, maker, place, plant),
        )
    return outcome


def _try(root: Path, maker: str, place: str, plant: str) -> str | None:
    folder = root / "planted"
    shutil.rmtree(folder, ignore_errors=True)
    victim = folder / "home"
    victim.mkdir(parents=True)
    (victim / "file").write_bytes(VICTIM)
    out = folder / specimens.SINGLE_FILES.get(maker, "out")
    arguments = specimens.command(root, maker, out)
    if maker == "trained":
        path = out / place
    elif place == "DST":
        path = out
        arguments = [*arguments, "--overwrite"]
    else:
        path = folder / f".{out.name}.megtool" / place
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        PLANTS[plant](path, victim)
    except PermissionError:
        return None  # only root makes devices
    before = os.lstat(path)
    untouched = file_states(victim)
    source = file_states(root / "source")
    done = run(arguments)
    if fault := done.fault:
        return fault
    is_followed = (place == "DST" and plant.startswith("link")) or (
        place == "data" and plant == "link to a folder"  # a cache may be anywhere
    )
    if not is_followed and file_states(victim) != untouched:
        return f"the target of a plant was written (status {done.status})"
    if file_states(root / "source") != source:
        return "the source was changed"
    if place == "DST" and plant in ("FIFO", "socket", "device"):
        after = os.lstat(path) if os.path.lexists(path) else None
        if after is None or stat.S_IFMT(after.st_mode) != stat.S_IFMT(before.st_mode):
            return f"a {plant} was replaced"
    if done.status == 0 and maker != "trained" and not is_followed:
        written = [out, *out.rglob("*")] if out.is_dir() else [out]
        if any(p.is_symlink() or not (p.is_file() or p.is_dir()) for p in written if p != path):
            return "the result holds a plant"
    return None
