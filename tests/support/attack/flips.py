"""Flips and cuts of what megtool wrote, in every format: `megtool verify` has to tell each."""

from __future__ import annotations

import os
import random
from pathlib import Path

from megtool import verify
from megtool.digests.crc32c import SIDECAR
from megtool.errors import MegtoolError
from tests.support.attack import specimens
from tests.support.attack.outcome import Outcome

SMALL_BYTES = 16 << 10


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Change one file of a specimen at a time, `count` times in turn over all formats.

    A few attempts are made on some of the formats only.
    """
    outcome = Outcome("flips and cuts")
    names = list(specimens.COMMANDS)
    if count < 4 * len(names):
        names = rng.sample(["hf", "safetensors", "dcp", "torch_dist", "megatron", "zarr"], 3)
    paths = {n: find_checkpoint(p) for n, p in specimens.make(root, tuple(names)).items()}
    for name, path in paths.items():
        if (fault := find_fault(path)) is not None:
            outcome.note(f"{name} as it was written", fault)
            names.remove(name)
    for number in range(count):
        name = names[number % len(names)]
        file = choose_file(paths[name], rng)
        former, status = file.read_bytes(), file.stat()
        attempt, data = damage(file, rng)
        if data is None:
            file.unlink()
        else:
            file.write_bytes(data)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        outcome.note(f"{os.path.relpath(file, root)}: {attempt}", find_unseen(paths[name], file))
        file.write_bytes(former)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    return outcome


def find_checkpoint(path: Path) -> Path:
    """The checkpoint itself: of a save folder of `finetune`, with its log, the last iteration."""
    return max(path.glob("iter_*"), default=path) if path.is_dir() else path


def choose_file(path: Path, rng: random.Random) -> Path:
    """A random file of a checkpoint, every second time a small one."""
    if path.is_file():
        return path
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size)
    small = [p for p in files if p.stat().st_size < SMALL_BYTES]
    return rng.choice(small if small and rng.random() < 0.5 else files)


def damage(file: Path, rng: random.Random) -> tuple[str, bytes | None]:
    """A damage of a file, and its contents then (None: it is removed)."""
    data = bytearray(file.read_bytes())
    place, kind = rng.randrange(len(data)), rng.random()
    if kind < 0.6:
        bit = rng.randrange(8)
        data[place] ^= 1 << bit
        return f"bit {bit} of byte {place} flipped", bytes(data)
    if kind < 0.8:
        return f"cut to {place} bytes", bytes(data[:place])
    if kind < 0.9:
        length = min(rng.choice((1, 16, 512, 4096)), len(data) - place)
        new = bytes(length) if any(data[place : place + length]) else b"\1" * length
        data[place : place + length] = new
        return f"{length} bytes at {place} overwritten", bytes(data)
    if kind < 0.95:
        return "8 bytes appended", bytes(data) + b"\0" * 8
    return "removed", None


def find_unseen(path: Path, file: Path) -> str | None:
    """Why a damage of a file was not reported, None if it was."""
    try:
        report = verify(path, threads=1)
    except MegtoolError:
        return None
    except Exception as e:
        return f"an exception: {type(e).__name__}: {e}"
    if report.exit_status or (file.name == SIDECAR and report.verdict == "unverified"):
        return None
    return f"unseen: {report.verdict}"


def find_fault(path: Path) -> str | None:
    """What `verify` says of a checkpoint that is sound: None if it holds a digest of everything."""
    try:
        report = verify(path, threads=1)
    except MegtoolError as e:
        return f"cannot be verified: {e.message}"
    return None if report.verdict == "ok" else report.verdict
