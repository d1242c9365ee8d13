"""Kills with -9 at random moments: nothing torn under the final name, the same bytes after it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

from megtool import verify
from megtool.errors import MegtoolError
from tests.support.attack import specimens
from tests.support.attack.child import run, start
from tests.support.attack.outcome import Outcome
from tests.support.folders import contents, file_states

MAKERS = ("torch_dist", "fp8", "vllm", "trained", "megatron", "zarr", "compressed", "gguf")
"""Not `ocdbt`: its database has file names by chance."""
TIMED = ("log.jsonl", "finetune.json", "loss.png")
"""Files that hold times."""


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Kill `count` runs of all verbs in turn."""
    outcome = Outcome("kills with -9")
    specimens.make(root, ("fp8",))
    expected: dict[str, tuple[dict[str, bytes], float]] = {}
    source = file_states(root / "source")
    for number in range(count):
        maker = MAKERS[number % len(MAKERS)]
        out = root / specimens.SINGLE_FILES.get(maker, "out")
        _remove(root, out)
        if maker not in expected:
            done = run(_command(root, maker, out))
            if done.status != 0:
                raise RuntimeError(f"{maker}: {done.err}")
            expected[maker] = _stable(out), done.seconds
            _remove(root, out)
        whole, seconds = expected[maker]
        moment = rng.uniform(0, 1.02) * seconds
        child = start(_command(root, maker, out))
        time.sleep(moment)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        fault = _judge(root, maker, out, whole)
        if fault is None and file_states(root / "source") != source:
            fault = "the source was changed"
        outcome.note(f"{maker} killed after {moment:.3f} of {seconds:.3f} s", fault)
    _remove(root, root / "out")
    return outcome


def _command(root: Path, maker: str, out: Path) -> list[object]:
    arguments = specimens.command(root, maker, out)
    return [*arguments, "--save-interval=1"] if maker == "trained" else arguments


def _judge(root: Path, maker: str, out: Path, whole: dict[str, bytes]) -> str | None:
    if maker == "trained":
        for folder in sorted(out.glob("iter_*")) if out.exists() else ():
            if fault := _find_torn(folder):
                return f"{folder.name} is torn: {fault}"
    elif out.exists() and _stable(out) != whole:
        return "what is under the final name is not the whole result"
    is_there = out.exists() and maker != "trained"
    done = run(_command(root, maker, out))
    if fault := done.fault:
        return f"the second run: {fault}"
    if done.status != (2 if is_there else 0):
        return f"the second run ended with {done.status}: {done.err.strip()[-300:]}"
    if different := sorted(
        n for n in {*whole, *_stable(out)} if whole.get(n) != _stable(out).get(n)
    ):
        return f"other bytes after the second run: {', '.join(different[:4])}"
    left = [p.name for p in root.glob(".*.megtool")]
    return f"left behind: {left}" if left else None


def _find_torn(folder: Path) -> str | None:
    try:
        report = verify(folder, threads=1)
    except MegtoolError as e:
        return e.message
    return report.differences[0].text if report.differences else None


def _stable(out: Path) -> dict[str, bytes]:
    """What a run makes, without what holds times."""
    found = contents(out) or {}
    return {n: d for n, d in found.items() if n.rpartition("/")[2] not in TIMED}


def _remove(root: Path, out: Path) -> None:
    for path in (out, *root.glob(".*.megtool")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
