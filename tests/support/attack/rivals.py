"""Two runs of one destination at once, one killed at any moment: one whole result, one error."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

from tests.support.attack import specimens
from tests.support.attack.child import ChildRun, run, start
from tests.support.attack.kills import TIMED
from tests.support.attack.outcome import Outcome
from tests.support.folders import contents

MAKERS = ("hf", "torch_dist", "safetensors", "fp8", "gguf", "megatron", "zarr", "trained")


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Pairs of the same command, over nothing or an earlier result, with and without a kill."""
    outcome = Outcome("two writers")
    specimens.make(root, ("fp8",))
    expected: dict[str, dict[str, bytes]] = {}
    for number in range(count):
        maker = MAKERS[number % len(MAKERS)]
        has_earlier = maker != "trained" and rng.random() < 0.5
        is_killed = rng.random() < 0.7
        title = f"{maker}{' over an earlier result' if has_earlier else ''}"
        title += ", one killed" if is_killed else ""
        fault = _try(root, maker, rng, expected, has_earlier=has_earlier, is_killed=is_killed)
        outcome.note(title, fault)
    return outcome


def _try(
    root: Path,
    maker: str,
    rng: random.Random,
    expected: dict[str, dict[str, bytes]],
    *,
    has_earlier: bool,
    is_killed: bool,
) -> str | None:
    folder = root / "rivals"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    out = folder / specimens.SINGLE_FILES.get(maker, "out")
    arguments = specimens.command(root, maker, out)
    began = time.monotonic()
    if maker not in expected or has_earlier:
        done = run(arguments)
        if done.status != 0:
            return f"alone: {done.err[-300:]}"
        expected[maker] = _stable(out)
    seconds = time.monotonic() - began
    if has_earlier:
        arguments = [*arguments, "--overwrite"]
    elif out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)
    children = [start(arguments), start(arguments)]
    if is_killed:
        time.sleep(rng.uniform(0, 1.2) * min(seconds, 3.0))
        os.kill(children[0].pid, signal.SIGKILL)
    results = [child.wait() for child in children]
    if is_killed:
        results = results[1:]
    return _judge(results, maker, out, expected[maker], arguments, has_earlier=has_earlier)


def _judge(
    results: list[ChildRun],
    maker: str,
    out: Path,
    whole: dict[str, bytes],
    arguments: list[object],
    *,
    has_earlier: bool,
) -> str | None:
    for result in results:
        if fault := result.fault:
            return fault
        if result.status not in (0, 2):
            return f"status {result.status}: {result.err[-300:]}"
        if sum(line.startswith("error:") for line in result.err.splitlines()) > 1:
            return f"several errors: {result.err[-300:]}"
    if len(results) == 2 and all(result.status == 2 for result in results):
        return f"both lost: {results[0].err[-200:]} {results[1].err[-200:]}"
    is_there = out.exists() and (maker != "trained" or any(out.glob("iter_*")))
    if maker != "trained" and (is_there or has_earlier) and _stable(out) != whole:
        return "what is under the final name is not the whole result"
    done = run(arguments)  # whoever was killed, the next run ends well
    if done.fault or (done.status != 0 and not is_there):
        return f"the run after them: {done.fault or done.err[-300:]}"
    if different := sorted(n for n, data in whole.items() if _stable(out).get(n) != data):
        return f"other bytes after them: {', '.join(different[:4])}"
    left = sorted(p.name for p in out.parent.iterdir() if p != out)
    return f"left behind: {left}" if left else None


def _stable(out: Path) -> dict[str, bytes]:
    found = contents(out) or {}
    return {n: d for n, d in found.items() if n.rpartition("/")[2] not in TIMED}
