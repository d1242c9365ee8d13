"""Kept proof: tensors that were not quantized are the source's, and norms took their factors."""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.compare import Half, Pair, compare
from megtool.checkpoint.parallel_scan import each
from megtool.checkpoint.read import Reader, TensorView
from megtool.checkpoint.transport.cast import numbers
from megtool.checkpoint.transport.strided import Array
from megtool.convert.dialects import CanonicalView
from megtool.number_formats.rounding import rounded
from megtool.quant.qparams import Settlement
from megtool.quant.verification.findings import Finding, error
from megtool.quant.verification.weight_error import Job, Weight, jobs_of

Floats = NDArray[np.float32]

_ROUNDING: Mapping[str, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-21}
_WRONG = "outputs are wrong in every engine"
_FOLDED = 2.0**-7  # a norm that is off by more was not only cast to another type


def compare_kept(
    mine: CanonicalView, theirs: CanonicalView, a: Reader, b: Reader, names: Sequence[str], *, threads: int
) -> list[Finding]:
    """Those of `names` that are not bit for bit the source's, or its cast to another float, and
    those that hold what is no number, whether the source does or not."""
    same: list[Pair] = []
    cast: list[Pair] = []
    for n in names:
        p, q = mine.placements[n], theirs.placements[n]
        pair = Pair(name=n, a=p, b=q)
        (same if a.canonical(p).dtype == b.canonical(q).dtype else cast).append(pair)
    written, alike = _Watched(reader=b), {p.name for p in same}
    wrong = {
        n: delta.num_differing
        for n, delta in compare(same, Half(reader=a), written, threads=threads).items()
    }
    wrong |= _not_cast(cast, a, b, threads, written)
    out = []
    for n, count in wrong.items():
        text = f"{count:,} elements of {n} are not the source's, though it was to be kept"
        out.append(error("kept", n.removesuffix(".weight"), text, _WRONG))
    for n, count in sorted(written.counts.items()):
        text = f"{count:,} elements of {n} are NaN or infinity"
        text += ", as in the source" if n in alike and n not in wrong else ""
        out.append(error("kept-nan", n.removesuffix(".weight"), text, _WRONG))
    return out


@dataclass(slots=True, kw_only=True)
class _Watched(Half):
    """What was written, and how many elements of which tensors are no finite numbers."""

    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tiles(
        self, name: str, view: TensorView, start: int
    ) -> Generator[tuple[int, Array], None, None]:
        """The tiles of a view, each looked at on its way."""
        with closing(Half.tiles(self, name, view, start)) as tiles:
            for at, tile in tiles:
                self.look(name, numbers(tile, view.dtype))
                yield at, tile

    def look(self, name: str, values: Array) -> None:
        """Count in some elements; from any thread."""
        if values.dtype.kind != "f":
            return
        count = int(values.size - np.count_nonzero(np.isfinite(values)))
        if count:
            with self.lock:
                self.counts[name] = self.counts.get(name, 0) + count


def _not_cast(
    pairs: Sequence[Pair], a: Reader, b: Reader, threads: int, written: _Watched
) -> dict[str, int]:
    """How many elements of which tensors are not the source's in their own type."""
    out: dict[str, int] = {}
    lock = threading.Lock()

    def work(job: Job) -> None:
        u, v = a.canonical(job.source), b.canonical(job.written)
        x, y = numbers(u.read().reshape(-1), u.dtype), numbers(v.read().reshape(-1), v.dtype)
        written.look(job.weight.name, y)
        if v.dtype.name in _ROUNDING and x.dtype.kind == "f":
            with np.errstate(over="ignore"):
                x = rounded(x.astype(np.float32), v.dtype.name)
        differ = int(np.count_nonzero((x != y) & ~(np.isnan(x) & np.isnan(y))))
        if differ:
            with lock:
                out[job.weight.name] = out.get(job.weight.name, 0) + differ

    weights = [
        Weight(name=p.name, source=p.a, written=p.b, shape=(1, 1))
        for p in pairs
        if p.a is not None and p.b is not None
    ]
    each([job for w in weights for job in jobs_of(w, a, b)], work, threads=threads)
    return out


@dataclass(slots=True)
class Gammas:
    """Norms as they were found: `values` by canonical norm are what each column's input is now
    multiplied by, against the source (NaN where both are zero: nothing is known of that column).
    `handled` tensors need no further comparison."""

    values: dict[str, Floats] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    handled: set[str] = field(default_factory=set)
    num_folded: int = 0


def recovered(
    mine: CanonicalView, theirs: CanonicalView, a: Reader, b: Reader, names: Collection[str], settlement: Settlement
) -> Gammas:
    """The factors of the norms `names` (their weights and biases), from the two checkpoints, and
    whether they are those of the settlement."""
    out = Gammas()
    centered = bool(theirs.config and theirs.config.zero_centered_norm)
    for name in sorted(names):
        norm, _, last = name.rpartition(".")
        factors = settlement.norms.get(norm)
        p, q = mine.placements[name], theirs.placements[name]
        u, v = a.canonical(p), b.canonical(q)
        x, y = numbers(u.read(), u.dtype).astype("f4"), numbers(v.read(), v.dtype).astype("f4")
        offset = np.float32(1 if centered and last == "weight" else 0)
        if factors is None:
            if last == "weight" and not np.array_equal(_cast(x, v.dtype.name), y):
                out.values[norm] = _ratio(x + offset, y + offset)
            continue  # that it is not the source's is told where it is compared as it is
        out.handled.add(name)
        if factors.shape != x.shape:
            text = f"has {len(x)} columns, and {factors.size} factors were settled"
            out.findings.append(error("norm", norm, text, _WRONG))
            continue
        wanted = (x + offset) / factors - offset
        ulp = _ROUNDING.get(v.dtype.name, 2.0**-8)
        off = ~(np.abs(y - wanted) <= ulp * np.abs(wanted) + np.float32(1e-30))
        if off.any():
            untouched = np.array_equal(_cast(x, v.dtype.name), y)
            said = "its factors are not folded in" if untouched else "is not its factors' quotient"
            column = int(off.argmax())
            text = (
                f"{last} of {int(off.sum()):,} of {off.size:,} columns: {said}, column {column} is "
                f"{y[column]:.6g} where {wanted[column]:.6g} is due"
            )
            out.findings.append(error("norm", norm, text, _WRONG))
        else:
            out.num_folded += last == "weight"
        if last == "weight":
            out.values[norm] = _ratio(x + offset, y + offset)
    return out


def check_readers(
    gammas: Gammas, readers: Mapping[str, Sequence[str]], packed: Collection[str]
) -> list[Finding]:
    """Modules that are kept, and whose inputs come out of a norm that took factors.

    `readers` are the modules behind each norm, `packed` those that were quantized: these are held
    against the norm they were written with.
    """
    out = []
    for norm, ratio in gammas.values.items():
        if not (np.abs(ratio - 1) > _FOLDED).any():  # what is NaN is zero on both sides
            continue
        for module in readers.get(norm, ()):
            if module not in packed:
                text = f"is kept, and {norm}, whose outputs it reads, was divided by factors"
                out.append(error("norm-shared", module, text, _WRONG))
    return out


def _cast(x: Floats, kind: str) -> Floats:
    return rounded(x.copy(), kind)


def _ratio(source: Floats, written: Floats) -> Floats:
    with np.errstate(all="ignore"):
        out: Floats = np.where(source == 0, np.float32(np.nan), written / source)
    return out.astype(np.float32)
