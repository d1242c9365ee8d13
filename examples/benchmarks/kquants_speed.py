"""Speed and error of K-quants, beside llama.cpp's own quantizer in the same process.

python examples/benchmarks/kquants_speed.py [--mib 16] [--rounds 5]

Processor time of one thread each, so that other work on the machine weighs little. The peer is
`ggml_quantize_chunk` of the package xllamacpp (pip install xllamacpp), called on the same rows;
without it there are our figures alone. Errors are sums of squares, weighed by the importance of
columns where there is one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench.table import Table, parser, show, times, verdict, workplace

from megtool.number_formats.gguf import decode, encode, package, row_bytes
from megtool.number_formats.kquants import K_QUANTS, WEIGHED

COLUMNS = 4096
MOST_TIME, MOST_ERROR = 2.0, 1.003

Quantizer = Callable[[np.ndarray, str, np.ndarray | None], np.ndarray]


def find_peer() -> Quantizer | None:
    """llama.cpp's quantizer, if the package is there."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    library = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).glob("*.so"))))
    call, pointer, long = library.ggml_quantize_chunk, ctypes.c_void_p, ctypes.c_int64
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]

    def quantize(x: np.ndarray, kind: str, columns: np.ndarray | None) -> np.ndarray:
        out = np.zeros((len(x), row_bytes(f"gguf:{kind}", x.shape[1])), np.uint8)
        number = int(package().GGMLQuantizationType[kind])
        weights = None if columns is None else columns.ctypes.data
        call(number, x.ctypes.data, out.ctypes.data, 0, *x.shape, weights)
        return out

    return quantize


def error(x: np.ndarray, raw: np.ndarray, kind: str, columns: np.ndarray | None) -> float:
    """The sum of squares."""
    difference = decode(raw, f"gguf:{kind}", x.shape[1]).astype(np.float64) - x
    return float(((1.0 if columns is None else columns) * difference**2).sum())


def main() -> None:
    """Time both in turn, round by round, and print the table."""
    options = parser(__doc__, gib=None)
    options.add_argument("--mib", type=float, default=16, help="bytes of float32")
    given = options.parse_args()
    generator = np.random.default_rng(0)
    rows = max(16, int(given.mib * 2**20) // 4 // COLUMNS)
    x = (generator.standard_t(5, (rows, COLUMNS)) * 0.02).astype(np.float32)
    importance = generator.gamma(1, 1, COLUMNS).astype(np.float32)
    peer = find_peer()
    table = Table(
        title="K-quants, million weights a second by one thread",
        head=("type", "imatrix", "megtool", "llama.cpp", "x its time", "limit", "x its error"),
    )
    jobs = [(k, None) for k in K_QUANTS] + [(k, importance) for k in (*K_QUANTS, *WEIGHED)]
    with workplace(given) as folder:
        for kind, columns in jobs:
            took: dict[str, float] = {}
            coded: dict[str, np.ndarray] = {}
            for _ in range(given.rounds):
                for name, quantize in (("ours", encode), ("theirs", peer)):
                    if quantize is None:
                        continue
                    begin = time.thread_time()
                    coded[name] = quantize(x, kind, columns)
                    spent = time.thread_time() - begin
                    took[name] = min(spent, took.get(name, spent))
            figures = {"kind": kind, "imatrix": columns is not None}
            figures["ours"] = x.size / took["ours"] / 1e6
            cells = ["", "", "-", ""]
            if peer is not None:
                ratio = took["ours"] / took["theirs"]
                worse = error(x, coded["ours"], kind, columns) / error(
                    x, coded["theirs"], kind, columns
                )
                theirs = f"{x.size / took['theirs'] / 1e6:.1f}"
                cells = [theirs, times(ratio), verdict(ratio, MOST_TIME), f"{worse:.4f}"]
                figures |= {"ratio": ratio, "error": worse}
            has = "" if columns is None else "yes"
            table.add(kind, has, f"{figures['ours']:.1f}", *cells, **figures)
        show(given, Path(folder), [table])


if __name__ == "__main__":
    main()
