"""Table: what the scripts share of a command line, and results as Markdown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megtool import __version__


def parser(description: str, *, gib: float | None = 4) -> argparse.ArgumentParser:
    """The options all scripts have."""
    out = argparse.ArgumentParser(description=description.splitlines()[0])
    if gib is not None:
        out.add_argument("--gib", type=float, default=gib, help="size of the checkpoint")
    out.add_argument("--dir", type=Path, help="where to write; default: the temporary folder")
    out.add_argument("--rounds", type=int, default=5, help="how often each job is timed")
    out.add_argument("--table", type=Path, help="also write what is printed to this file")
    out.add_argument("--json", type=Path, help="also write all figures to this file")
    out.add_argument(
        "--realtime",
        action="store_true",
        help="run cp and the jobs before all other processes (needs root)",
    )
    return out


def workplace(given: argparse.Namespace) -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed at the end; `--realtime` takes effect here."""
    if given.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    return tempfile.TemporaryDirectory(prefix="megtool-bench-", dir=given.dir)


@dataclass(slots=True, kw_only=True)
class Table:
    """Rows of one claim; `figures` are the same as plain data."""

    title: str
    head: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    printed: int = 0

    def add(self, *cells: str, **figures: Any) -> None:
        """Add a row."""
        self.rows.append(cells)
        self.figures.append({"table": self.title, **figures})

    def markdown(self, begin: int = 0) -> str:
        """The table to paste, from row `begin` on."""
        lines = [f"### {self.title}", "", _line(self.head), "|---" * len(self.head) + "|"]
        return "\n".join([*lines, *(_line(row) for row in self.rows[begin:])])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def show(given: argparse.Namespace, folder: Path, tables: Sequence[Table], *notes: str) -> None:
    """Print the circumstances and the tables; write the files if asked.

    It can be called again as rows come in: only new ones are printed, and files are written anew.
    """
    if not any(table.printed for table in tables):
        print("\n\n".join([conditions(folder, given), *notes]))
    for table in tables:
        if table.printed < len(table.rows):
            print(f"\n{table.markdown(table.printed)}", flush=True)
            table.printed = len(table.rows)
    if given.table:
        whole = [table.markdown() for table in tables if table.rows]
        given.table.write_text("\n\n".join([conditions(folder, given), *notes, *whole]) + "\n")
    if given.json:
        given.json.write_text(json.dumps([f for t in tables for f in t.figures], indent=1))


def conditions(folder: Path, given: argparse.Namespace) -> str:
    """Date, machine and its state, in a sentence."""
    cpu = next(
        (
            line.partition(": ")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    gib = f"{given.gib:g} GiB, " if hasattr(given, "gib") else ""
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, megtool {__version__}, Python "
        f"{platform.python_version()}; {os.cpu_count()} x {cpu}, {memory:.0f} GiB memory, "
        f"Linux {platform.release()}, {file_system(folder)}; {gib}{given.rounds} rounds, "
        f"load then {load}{', SCHED_RR' if given.realtime else ''}."
    )


def file_system(folder: Path) -> str:
    """The type of the file system a folder is on."""
    folder = folder.resolve()
    best, kind = "", "unknown file system"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, name
    return kind


def times(value: float) -> str:
    """A ratio."""
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def mib(num_bytes: float) -> str:
    """A size in MiB."""
    return f"{num_bytes / 2**20:.0f}"


def verdict(value: float, limit: float | None) -> str:
    """A limit and whether it is kept."""
    if limit is None:
        return "-"
    return f"≤ {limit:g} {'✓' if value <= limit else '✗'}"
