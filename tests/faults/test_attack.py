"""The attack on everything that megtool reads and writes, family by family, with counts.

    python -m tests.faults.test_attack [FAMILY ...] [--seed N] [--scale X] [--keep FOLDER]

A family is one of `FAMILIES`; without one all are run. The same seed makes the same attempts.
Status 1 if an attempt was not met as it should be: a damage that is not reported, an end without
status and sentence, a torn or foreign file under a final name. pytest runs a few of each family,
and all of them with the marker `slow`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.attack import specimens
from tests.support.attack.child import preload
from tests.support.attack.outcome import Outcome, format_table
from tests.support.paths import ROOT

FAMILIES = {
    "flips": 840,
    "pickles": 460,
    "planted": 448,
    "bombs": 45,
    "nested": 20,
    "kills": 104,
    "environments": 250,
    "inputs": 600,
    "disks": 300,
    "rivals": 60,
}
"""The attempts of each family in a whole attack; those that list their attempts may have fewer."""

SLOW = ("inputs", "disks", "rivals")
"""Families that make more files than the specimens first."""


def run_family(family: str, root: Path, *, seed: int, scale: float) -> Outcome:
    """Run one family, with specimens in `root`."""
    module = importlib.import_module(f"tests.support.attack.{family}")
    count = max(2, round(FAMILIES[family] * scale))
    outcome: Outcome = module.attack(root, random.Random(f"{seed} {family}"), count)
    return outcome


def main() -> int:
    """Run the families of the command line, and print what they found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the attempts")
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it")
    parser.add_argument("--json", action="store_true", help="print counts and faults as JSON")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    preload()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="attack-") as temporary:
        root = options.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        for family in options.families or FAMILIES:
            began = time.monotonic()
            outcome = run_family(family, root, seed=options.seed, scale=options.scale)
            outcomes.append(outcome)
            print(f"{outcome.family}: {time.monotonic() - began:.0f} s", file=sys.stderr)
            for fault in outcome.faults:
                print(f"  {fault}", file=sys.stderr)
    if options.json:
        rows = [{"family": o.family, "tried": o.tried, "faults": o.faults} for o in outcomes]
        print(json.dumps(rows))
    else:
        print(format_table(outcomes))
    return int(any(o.faults for o in outcomes))


def attack(*arguments: str) -> dict[str, tuple[int, list[str]]]:
    """The attack in a process of its own, whose children are forks: tries and faults by family."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.test_attack", *arguments, "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1)
    return {row["family"]: (row["tried"], row["faults"]) for row in json.loads(done.stdout)}


def test_a_sample_of_every_attack(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    root = shutil.copytree(specimens.shared_specimens(tmp_path_factory), tmp_path / "attack")
    sampled = [family for family in FAMILIES if family not in SLOW]
    found = attack(*sampled, "--scale", "0.03", "--keep", str(root))
    assert len(found) == len(sampled)
    assert sum(tried for tried, _ in found.values()) > 50
    assert {family: faults for family, (_, faults) in found.items() if faults} == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_attack(family: str) -> None:
    ((tried, faults),) = attack(family).values()
    assert tried >= 0.9 * FAMILIES[family]
    assert faults == []


if __name__ == "__main__":
    sys.exit(main())
