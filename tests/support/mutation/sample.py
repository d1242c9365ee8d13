"""A seeded sample of single faults, each against the tests that should see it.

python -m tests.support.mutation --seed 1 --number 8 --minutes 30

The checkout is copied; a fault is written into the copy, and the tests run there, the closest file
first, until one fails that passes without the fault (killed), all have passed (survived), or the
fault's share of the time is over (undecided).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.mutation.faults import Fault, find_faults
from tests.support.mutation.selection import TestSelection

CHECKOUT = Path(__file__).resolve().parents[3]
COPIED = ("converters", "docs", "examples", "megtool", "quant_recipes", "tests")
MOST_FILES = 12
"""Files of tests that are run for one fault."""

CONVERTERS = "converters"
KILLED, SURVIVED, UNDECIDED = "killed", "survived", "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A fault in a file, relative to the checkout, and the package that it is drawn for."""

    package: str
    file: Path
    fault: Fault

    def __str__(self) -> str:
        before, after = (" ".join(x.split()) for x in (self.fault.before, self.fault.after))
        what = self.fault.kind
        if not what.startswith(("never", "always", "break")):
            what += f": `{before[:60]}` to `{after[:60]}`"
        return f"{self.file}:{self.fault.line}: {what}"


def packages(root: Path) -> list[str]:
    """Return the names of packages that faults are drawn for."""
    folders = (p for p in (root / "megtool").iterdir() if (p / "__init__.py").exists())
    return sorted({CONVERTERS, *(p.name for p in folders if not p.is_symlink())})


def draw(root: Path, package: str, number: int, seed: int) -> list[Mutant]:
    """Return `number` faults of a package, the same for the same seed and sources."""
    folder = root / package if package == CONVERTERS else root / "megtool" / package
    every = [
        Mutant(package=package, file=path.relative_to(root), fault=fault)
        for path in sorted(folder.rglob("*.py"))
        for fault in find_faults(path.read_text())
    ]
    return random.Random(f"{seed} {package}").sample(every, min(number, len(every)))


class Copy:
    """A copy of the checkout that faults are planted into, one at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "site", ".cache")
            shutil.copytree(CHECKOUT / name, root / name, symlinks=True, ignore=ignored)
        for path in CHECKOUT.iterdir():
            if path.is_file():
                shutil.copy(path, root / path.name)
        self.tests = TestSelection(root)

    def judge(self, mutant: Mutant, seconds: float) -> str:
        """Run the tests that should see the fault, and return what they say."""
        path = self.root / mutant.file
        source, until = path.read_text(), time.monotonic() + seconds
        files = [str(p.relative_to(self.root)) for p in self.tests.find(path, MOST_FILES)]
        chosen = [*files, "-k", path.stem] if mutant.package == CONVERTERS else files
        try:
            path.write_text(mutant.fault.plant(source))
            failed = self._failures(chosen, until)
            if failed is None:
                return UNDECIDED
            if not failed:
                return f"{SURVIVED} {len(files)} files of tests"
        finally:
            path.write_text(source)
        # A test that fails without the fault, too, says nothing of it.
        if self._failures(failed, until + seconds) == []:
            return f"{KILLED} by {failed[0]}"
        return f"{UNDECIDED}, {failed[0]} fails without it"

    def _failures(self, tests: Sequence[str], until: float) -> list[str] | None:
        """Run tests up to the first failure; None if the time is over."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "-rfE", "-m", "not slow and not peers and not gpu", *tests]
        environment = {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=max(until - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            return None
        finally:  # what a test has started goes with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode in (0, 5):  # 5: all of its tests are left out by their marks
            return []
        lines = [x for x in out.splitlines() if x.startswith(("FAILED ", "ERROR "))]
        # Names of functions: what parametrizes them may hold spaces.
        return [line.split(" ", 2)[1].partition("[")[0] for line in lines] or list(tests[:1])


def run_sample(
    mutants: Sequence[Mutant], *, jobs: int, seconds: float
) -> Iterator[tuple[Mutant, str]]:
    """Yield every mutant with the verdict of the tests."""
    with tempfile.TemporaryDirectory(prefix="mutation") as folder:
        copies = [Copy(Path(folder) / str(n)) for n in range(jobs)]

        def judge(mutant: Mutant) -> tuple[Mutant, str]:
            copy = copies.pop()
            try:
                return mutant, copy.judge(mutant, seconds)
            finally:
                copies.append(copy)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(judge, mutants)


def table(verdicts: Sequence[tuple[Mutant, str]]) -> str:
    """Return the share of killed faults by package, and what was not killed, as Markdown."""
    lines = ["| package | faults | killed | survived | undecided | killed / decided |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    names = sorted({m.package for m, _ in verdicts})
    for name in (*names, "**all**"):
        said = [v.split()[0].strip(",") for m, v in verdicts if name in (m.package, "**all**")]
        killed, survived = said.count(KILLED), said.count(SURVIVED)
        share = f"{killed / (killed + survived):.0%}" if killed + survived else ""
        undecided = said.count(UNDECIDED)
        lines.append(f"| {name} | {len(said)} | {killed} | {survived} | {undecided} | {share} |")
    rest = [f"- {v}: {m}" for m, v in verdicts if not v.startswith(KILLED)]
    return "\n".join([*lines, "", *rest])


def main() -> int:
    """Draw, run and print a sample."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=4, help="faults of each package")
    parser.add_argument("--packages", nargs="*", help="only these, such as `convert optim`")
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    names = args.packages or packages(CHECKOUT)
    mutants = [m for name in names for m in draw(CHECKOUT, name, args.number, args.seed)]
    # The run of a failing test without the fault takes time, too.
    seconds = max(args.minutes * 60 * args.jobs / max(len(mutants), 1) / 1.5, 20.0)
    print(f"{len(mutants)} faults, seed {args.seed}, {seconds:.0f} s each", flush=True)
    verdicts = []
    for mutant, verdict in run_sample(mutants, jobs=args.jobs, seconds=seconds):
        print(f"{verdict}\n    {mutant}", flush=True)
        verdicts.append((mutant, verdict))
    print(f"\n{table(verdicts)}")
    return 0
