"""Two runs at once, one inside the other's destination: neither silently replaces the other."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

from tests.support.attack import specimens
from tests.support.attack.child import run, start
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
        run(specimens.command(root, maker, alone), timeout=120)
        expected[name] = _comparable(alone)
    destinations = {"outer": folder / "out", "inner": folder / "out" / "sub"}
    order = ["outer", "inner"] if is_outer_first else ["inner", "outer"]
    makers = {"outer": outer, "inner": inner}
    first = start(specimens.command(root, makers[order[0]], destinations[order[0]]))
    if not _stop_while_writing(first.pid, folder):
        first.wait(60)
        return None  # it was faster than the signal
    more = [] if order[1] == "inner" or makers["outer"] == "trained" else ["--overwrite"]
    second = run([*specimens.command(root, makers[order[1]], destinations[order[1]]), *more])
    os.kill(first.pid, signal.SIGCONT)
    results = dict(zip(order, (first.wait(120), second), strict=True))
    for name, result in results.items():
        if fault := result.fault:
            return f"{name}: {fault}"
        if (
            result.status == 0
            and (_comparable(destinations[name]) or {}).items() < (expected[name] or {}).items()
        ):
            return f"{name} ended well, and its result is not there"
    return None


def _stop_while_writing(pid: int, folder: Path) -> bool:
    """Stop a child as soon as it has a staging folder."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if any(p.name.endswith("megtool") for p in folder.rglob(".*")):
            os.kill(pid, signal.SIGSTOP)
            return any(p.name.endswith("megtool") for p in folder.rglob(".*"))
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return False
        except OSError:
            return False
    return False


def _comparable(path: Path) -> dict[str, bytes] | None:
    """The tensor data of a result: what two runs of the same command have the same."""
    found = contents(path)
    suffixes = (".safetensors", ".distcp", ".gguf")
    return found and {n: d for n, d in found.items() if n == "" or n.endswith(suffixes)}
