"""Two runs at once, one inside the other's destination: neither silently replaces the other."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

from megtool.staging.stage import Stage
from tests.support.attack import specimens
from tests.support.attack.child import PATIENCE, run, start
from tests.support.attack.outcome import Outcome
from tests.support.folders import contents

MAKERS = ("hf", "torch_dist", "safetensors", "fp8", "vllm", "trained")


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Pairs of verbs, the outer or the inner one first and stopped while it writes."""
    outcome = Outcome("nested writers")
    specimens.make(root, ("fp8",))
    for _ in range(count):
        outer, inner = rng.choice(MAKERS[:2] + MAKERS[3:]), rng.choice(MAKERS)
        is_outer_first = rng.random() < 0.5
        first = "outer" if is_outer_first else "inner"
        name = f"{outer} with {inner} inside, the {first} one first"
        outcome.note(name, _try(root, outer, inner, is_outer_first=is_outer_first))
    return outcome


def _try(root: Path, outer: str, inner: str, *, is_outer_first: bool) -> str | None:
    folder = root / "nested"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    expected = {}
    for name, maker in (("outer", outer), ("inner", inner)):
        alone = folder / f"alone {name}"
        run(specimens.command(root, maker, alone))
        expected[name] = _comparable(alone)
    destinations = {"outer": folder / "out", "inner": folder / "out" / "sub"}
    order = ["outer", "inner"] if is_outer_first else ["inner", "outer"]
    makers = {"outer": outer, "inner": inner}
    first = start(
        specimens.command(root, makers[order[0]], destinations[order[0]]), setup=_stop_when_locked
    )
    if not _wait_until_stopped(first.pid, folder):
        return f"the first run did not stop: {first.wait().err[-300:]}"
    more = [] if order[1] == "inner" or makers["outer"] == "trained" else ["--overwrite"]
    second = run([*specimens.command(root, makers[order[1]], destinations[order[1]]), *more])
    os.kill(first.pid, signal.SIGCONT)
    results = dict(zip(order, (first.wait(), second), strict=True))
    for name, result in results.items():
        if fault := result.fault:
            return f"{name}: {fault}"
        actual, whole = _comparable(destinations[name]) or {}, expected[name] or {}
        if result.status == 0 and any(actual.get(n) != data for n, data in whole.items()):
            return f"{name} ended well, and its result is not there"
    if outer != "trained" and all(result.status == 0 for result in results.values()):
        return "both ended well"  # `finetune` adds to its folder, and replaces nothing in it
    return None


def _stop_when_locked() -> None:
    """Make this process stop itself when it has locked its destination."""
    enter = Stage.__enter__

    def stop(stage: Stage) -> Stage:
        entered = enter(stage)
        os.kill(os.getpid(), signal.SIGSTOP)
        return entered

    Stage.__enter__ = stop  # type: ignore[method-assign]


def _wait_until_stopped(pid: int, folder: Path) -> bool:
    """Wait for a child that stops itself; `finetune`, which stages later, is stopped here."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "TZ":
            return state == "T"
        if any(p.name == ".megtool" for p in folder.rglob(".megtool")):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.002)
    return False


def _comparable(path: Path) -> dict[str, bytes] | None:
    """The tensor data of a result: what two runs of the same command have the same."""
    found = contents(path)
    suffixes = (".safetensors", ".distcp", ".gguf")
    return found and {n: d for n, d in found.items() if n == "" or n.endswith(suffixes)}
