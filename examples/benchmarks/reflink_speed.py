"""A reshard where the file system shares blocks: a loop-mounted XFS, against a plain `cp` on it.

python examples/benchmarks/reflink_speed.py [--gib 4] [--dir DIR] [--rounds 5]

Needs root, `mkfs.xfs` (package xfsprogs) and a kernel with XFS; says what is missing otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.race import Entrant, race
from bench.synthetic import llama
from bench.table import Table, parser, show, times, verdict, workplace

LIMIT = 0.02


class Unavailable(Exception):
    """This machine cannot mount XFS; the message says why."""


@contextmanager
def mounted(folder: Path, gib: float) -> Iterator[Path]:
    """A new XFS with reflinks in a file, mounted below `folder`."""
    if os.geteuid() != 0:
        raise Unavailable("mounting needs root")
    if shutil.which("mkfs.xfs") is None:
        raise Unavailable("there is no mkfs.xfs (install xfsprogs)")
    image, point = folder / "image", folder / "xfs"
    point.mkdir()
    with image.open("wb") as out:
        out.truncate(int((3 * gib + 2) * 2**30))
    run("mkfs.xfs", "-q", "-m", "reflink=1", str(image))
    run("mount", "-o", "loop", str(image), str(point))
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def run(*command: str) -> None:
    """Run a command.

    Raises:
        Unavailable: it failed; with its words.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")


def main() -> None:
    """Measure and print."""
    given = parser(__doc__ or "").parse_args()
    head = ("job", "threads", "s", "fastest cp s", "x fastest cp", "limit")
    head = (*head, "x cp around it (median)", "spread", "new space")
    table = Table(title="Shared blocks on XFS, without fsync", head=head)
    shared = {"digest": "buffered"}  # digests of everything need copies of everything
    jobs = {
        "HF → torch_dist PP2": {"to": "torch_dist", "pp": 2, **shared},
        "HF → torch_dist PP2, --digest none": {"to": "torch_dist", "pp": 2, "digest": "none"},
        "HF → HF": {"to": "hf", **shared},
    }
    with workplace(given) as folder:
        try:
            with mounted(Path(folder), given.gib) as root:
                made = llama(root / "hf", given.gib)
                entrants = [
                    Entrant(
                        name=name,
                        options={**options, "threads": threads, "fsync": False},
                        ideal_bytes=2 * made.num_bytes,
                        limit=LIMIT,
                    )
                    for name, options in jobs.items()
                    for threads in (1, 2)
                ]
                scratch = root / "scratch"
                settings = {"rounds": given.rounds, "fsync": False, "space": True}
                found = race(entrants, made.folder, scratch, **settings)
                for result in found:
                    table.add(
                        result.entrant.name,
                        str(result.entrant.options["threads"]),
                        f"{min(result.seconds):.4f}",
                        f"{result.copy_least:.2f}",
                        f"{result.least:.4f}",
                        verdict(result.least, LIMIT),
                        f"{result.median:.4f}",
                        f"{times(min(result.pairs))}-{times(max(result.pairs))}",
                        f"{result.new_space / made.num_bytes:.1%}",
                        job=result.entrant.name,
                        least=result.least,
                        seconds=result.seconds,
                        new_space=result.new_space,
                        num_bytes=made.num_bytes,
                    )
                show(given, root, [table])
        except Unavailable as e:
            print(f"skipped: {e}")


if __name__ == "__main__":
    main()
