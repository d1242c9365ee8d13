"""GB/s of bfloat16 that each number format is encoded at, beside a copy of the same bytes.

python examples/benchmarks/packing_speed.py [--mib 64] [--rounds 5] [--threads 1,2] [--tile 256]

A matrix is encoded tile by tile, as it would be between reading and writing: scales that are of
more than a tile are given, all others are found in the same pass. `copy` is numpy's, of the same
tiles by the same threads into as many bytes as were read, `cp` that of a file in the page cache;
`amax` is the search that scales of whole tensors and channels need before.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from bench.table import Table, parser, show, times, verdict, workplace

from megtool.number_formats.amax import amax, merge
from megtool.number_formats.decode import CODES, SCALE_2
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import Index, PackedPart
from megtool.number_formats.scales import modelopt_scale, modelopt_second

# How many times the time of `cp` each may take.
TARGETS = {
    "fp8:tensor": 3,
    "fp8:channel": 3,
    "fp8:128x128": 3,
    "int8:channel": 3,
    "int4rows:128": 3,
    "int4:128": 3,
    "mxfp8:32": 3,
    "mxfp4:32": 8,
    "nvfp4:16": 8,
}
COLUMNS = 4096

Tile = tuple[Index, Index]
Work = Callable[[Tile], object]


def tiles(rows: int, kib: int) -> list[Tile]:
    """Boxes of about `kib` of bfloat16, of 128 rows where these need not be whole."""
    high = 128
    wide = max(128, kib * 1024 // 2 // high // 128 * 128)
    return [
        ((r, c), (r + high, min(c + wide, COLUMNS)))
        for r in range(0, rows, high)
        for c in range(0, COLUMNS, wide)
    ]


def matrix(mib: float) -> np.ndarray:
    """Weights as bfloat16 bits."""
    rows = max(128, int(mib * 2**20) // 2 // COLUMNS // 128 * 128)
    x = np.random.default_rng(0).standard_normal((rows, COLUMNS), np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def encoding(packing: str, x: np.ndarray) -> tuple[Work, Work]:
    """The encoding of a tile, and the search for its largest magnitudes."""
    parts = layout(packing, x.shape)
    out = {p.role: np.empty(p.shape, "u1" if p.role == CODES else "f4") for p in parts[:1]}
    if parts[0].dtype == "int32":
        out[CODES] = np.empty(parts[0].shape, "<i4")
    if parts[0].dtype == "int8":
        out[CODES] = np.empty(parts[0].shape, "i1")
    whole = parts[2] if len(parts) > 2 else parts[1]
    top = np.maximum(amax(x, "bfloat16", whole, (0, 0), x.shape), 1e-9)
    role = whole.role
    known = (
        modelopt_second(top)
        if role == SCALE_2
        else modelopt_scale(top, 448 if packing[0] == "f" else 127)
    )
    first = packing.partition(":")[2] in ("tensor", "channel") or role == SCALE_2

    def one(tile: Tile) -> None:
        lo, hi = tile
        given = {}
        if first:
            given[role] = cut(whole, known, lo, hi)
        box = x[lo[0] : hi[0], lo[1] : hi[1]]
        made = encode(packing, parts, box, "bfloat16", lo, hi, scales=given)
        cut(parts[0], out[CODES], lo, hi)[...] = made[CODES]

    total = np.zeros(whole.shape, np.float32)

    def look(tile: Tile) -> None:
        lo, hi = tile
        box = x[lo[0] : hi[0], lo[1] : hi[1]]
        merge(total, amax(box, "bfloat16", whole, lo, hi), whole, lo, hi)

    return one, look


def cut(part: PackedPart, array: np.ndarray, lo: Index, hi: Index) -> np.ndarray:
    """What a tile needs of a part."""
    begin, end = part.window(lo, hi)
    return array[tuple(slice(a, b) for a, b in zip(begin, end, strict=True))] if begin else array


def seconds(work: Work, todo: list[Tile], threads: int) -> float:
    """The time `threads` take for all tiles."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))
        begin = time.perf_counter()
        if threads == 1:
            for tile in todo:
                work(tile)
        else:
            shares = [todo[i::threads] for i in range(threads)]
            list(pool.map(lambda share: [work(t) for t in share], shares))
        return time.perf_counter() - begin


def file_copy(folder: Path, x: np.ndarray) -> float:
    """The time `cp` takes for a file of the same bytes."""
    source, copied = folder / "source", folder / "copied"
    if not source.exists():
        x.tofile(source)
    begin = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", source, copied], check=True)
    took = time.perf_counter() - begin
    copied.unlink()
    return took


def main() -> None:
    """Time every format in turn, round by round, and print the table."""
    options = parser(__doc__, gib=None)
    options.add_argument("--mib", type=float, default=64, help="bytes of bfloat16")
    options.add_argument("--tile", type=int, default=256, help="KiB of bfloat16 a tile")
    options.add_argument("--threads", default="1,2", help="how many, separated by commas")
    given: argparse.Namespace = options.parse_args()
    x = matrix(given.mib)
    copied = np.zeros_like(x)

    def copy(tile: Tile) -> None:
        lo, hi = tile
        index = (slice(lo[0], hi[0]), slice(lo[1], hi[1]))
        np.copyto(copied[index], x[index])

    todo = tiles(len(x), given.tile)
    table = Table(
        title=f"Encoding bfloat16, tiles of {given.tile} KiB",
        head=("format", "threads", "GB/s", "amax GB/s", "x copy", "x cp", "target"),
    )
    works = {packing: encoding(packing, x) for packing in TARGETS}
    with workplace(given) as folder:
        cp = min(file_copy(Path(folder), x) for _ in range(given.rounds))
        table.add("cp", "1", f"{x.nbytes / cp / 1e9:.2f}", "", "", "1", "")
        for threads in map(int, given.threads.split(",")):
            best: dict[str, float] = {}
            for _ in range(given.rounds):
                jobs = {"copy": copy}
                for packing, (one, look) in works.items():
                    jobs |= {packing: one, f"{packing} amax": look}
                for name, work in jobs.items():
                    took = seconds(work, todo, threads)
                    best[name] = min(took, best.get(name, took))
            rate = {name: x.nbytes / took / 1e9 for name, took in best.items()}
            least = best["copy"]
            table.add("copy", str(threads), f"{rate['copy']:.2f}", "", "1", times(least / cp), "")
            for packing, limit in TARGETS.items():
                ratio = best[packing] / cp
                table.add(
                    packing,
                    str(threads),
                    f"{rate[packing]:.2f}",
                    f"{rate[packing + ' amax']:.2f}",
                    times(best[packing] / least),
                    times(ratio),
                    verdict(ratio, limit),
                    job=packing,
                    threads=threads,
                    gbs=rate[packing],
                    amax_gbs=rate[packing + " amax"],
                    ratio=ratio,
                )
        show(given, Path(folder), [table])


if __name__ == "__main__":
    main()
