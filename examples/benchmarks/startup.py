"""How long `megtool --help` takes, and what it imports.

python examples/benchmarks/startup.py [--rounds 10]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.table import Table, parser, show, verdict

LIMIT = 0.4
COMMANDS = {"megtool --help": ["--help"], "megtool reshard --help": ["reshard", "--help"]}
HEAVY = ("torch", "transformers", "safetensors", "numpy", "awscrt")


def heavy_imports(arguments: list[str]) -> list[str]:
    """Which of the heavy packages a command imports, as Python itself reports."""
    command = [sys.executable, "-X", "importtime", "-m", "megtool", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seen = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return [name for name in HEAVY if name in seen]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.set_defaults(rounds=10)
    given = options.parse_args()
    table = Table(
        title="Start", head=("command", "s (min)", "limit", "s (median)", "heavy packages imported")
    )
    for name, arguments in COMMANDS.items():
        seconds = []
        for _ in range(given.rounds + 1):
            began = time.perf_counter()
            command = [sys.executable, "-m", "megtool", *arguments]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            seconds.append(time.perf_counter() - began)
        del seconds[0]  # writes the byte code
        heavy = heavy_imports(arguments)
        table.add(
            name,
            f"{min(seconds):.2f}",
            verdict(min(seconds), LIMIT),
            f"{statistics.median(seconds):.2f}",
            ", ".join(heavy) or "none",
            job=name,
            seconds=seconds,
            heavy=heavy,
        )
    show(given, Path(tempfile.gettempdir()), [table])


if __name__ == "__main__":
    main()
