"""Check that unquantized tensors equal the source and that norms have the expected factors."""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.convert.dialects import CanonicalView
from megtool.digests.compare import ComparedSource, ReadableView, TensorPair, compare
from megtool.digests.crc32c import Digests
from megtool.number_formats.rounding import rounded
from megtool.process.threads import run_jobs
from megtool.quant.qparams import QParams
from megtool.quantize.verification.weight_error import WeightPair, WeightPart, split_weight
from megtool.report.finding import Finding, error
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.strided import Array

Floats = NDArray[np.float32]

_ROUNDING: Mapping[str, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-21}
_WRONG = "outputs are wrong in every engine"
_FOLDED = 2.0**-7  # a larger relative change of a norm is more than a cast


def compare_unquantized(
    source: CanonicalView,
    written_view: CanonicalView,
    a: CheckpointReader,
    b: CheckpointReader,
    names: Sequence[str],
    *,
    threads: int,
) -> list[Finding]:
    """Compare tensors bit by bit with the source, or with its cast to another float dtype, and
    report NaN and Inf, also those of the source."""
    equal_types: list[TensorPair] = []
    other_types: list[TensorPair] = []
    for n in names:
        p, q = source.placements[n], written_view.placements[n]
        pair = TensorPair(name=n, a=p, b=q)
        (
            equal_types if a.open_canonical(p).dtype == b.open_canonical(q).dtype else other_types
        ).append(pair)
    written, equal_type_names = _NonFiniteCounter(reader=b), {p.name for p in equal_types}
    wrong = {
        n: delta.num_differing
        for n, delta in compare(
            equal_types, ComparedSource(reader=a), written, threads=threads
        ).items()
    }
    wrong |= _count_cast_differences(other_types, a, b, threads, written)
    out = []
    for n, count in wrong.items():
        text = f"{count:,} elements of {n}, which is not quantized, differ from the source"
        out.append(error("kept", n.removesuffix(".weight"), text, _WRONG))
    for n, count in sorted(written.counts.items()):
        text = f"{count:,} elements of {n} are NaN or Inf"
        text += ", as in the source" if n in equal_type_names and n not in wrong else ""
        out.append(error("kept-nan", n.removesuffix(".weight"), text, _WRONG))
    return out


@dataclass(slots=True, kw_only=True)
class _NonFiniteCounter(ComparedSource):
    """The written folder, and the number of NaN and Inf elements by tensor."""

    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tiles(
        self, name: str, view: ReadableView, start: int, digests: Digests | None
    ) -> Generator[tuple[int, Array], None, None]:
        """Read the tiles of a view and count their NaN and Inf."""
        with closing(ComparedSource.tiles(self, name, view, start, digests)) as tiles:
            for offset, tile in tiles:
                self.count(name, numeric_values(tile, view.dtype))
                yield offset, tile

    def count(self, name: str, values: Array) -> None:
        """Count NaN and Inf; thread-safe."""
        if values.dtype.kind != "f":
            return
        count = int(values.size - np.count_nonzero(np.isfinite(values)))
        if count:
            with self.lock:
                self.counts[name] = self.counts.get(name, 0) + count


def _count_cast_differences(
    pairs: Sequence[TensorPair],
    a: CheckpointReader,
    b: CheckpointReader,
    threads: int,
    written: _NonFiniteCounter,
) -> dict[str, int]:
    """Count the elements by tensor that differ from the source after a cast."""
    out: dict[str, int] = {}
    lock = threading.Lock()

    def work(part: WeightPart) -> None:
        u, v = a.open_canonical(part.source), b.open_canonical(part.written)
        x, y = (
            numeric_values(u.read().reshape(-1), u.dtype),
            numeric_values(v.read().reshape(-1), v.dtype),
        )
        written.count(part.weight.name, y)
        if v.dtype.name in _ROUNDING and x.dtype.kind == "f":
            with np.errstate(over="ignore"):
                x = rounded(x.astype(np.float32), v.dtype.name)
        differ = int(np.count_nonzero((x != y) & ~(np.isnan(x) & np.isnan(y))))
        if differ:
            with lock:
                out[part.weight.name] = out.get(part.weight.name, 0) + differ

    weights = [
        WeightPair(name=p.name, source=p.a, written=p.b, shape=(1, 1))
        for p in pairs
        if p.a is not None and p.b is not None
    ]
    run_jobs([job for w in weights for job in split_weight(w, a, b)], work, threads=threads)
    return out


@dataclass(slots=True)
class NormFactors:
    """Factors recovered from norms: `values` by canonical norm are what each column's input is
    multiplied by, compared with the source (NaN if the weight is zero in both). `handled` tensors
    need no further comparison."""

    values: dict[str, Floats] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    handled: set[str] = field(default_factory=set)
    num_folded: int = 0


def recover_norm_factors(
    source: CanonicalView,
    written: CanonicalView,
    a: CheckpointReader,
    b: CheckpointReader,
    names: Collection[str],
    qparams: QParams,
) -> NormFactors:
    """Recover the factors of norms `names` (weights and biases) from the two checkpoints, and
    compare them with those of calibration."""
    out = NormFactors()
    centered = bool(written.config and written.config.norms.zero_centered_norm)
    for name in sorted(names):
        norm, _, last = name.rpartition(".")
        factors = qparams.norm_scales.get(norm)
        p, q = source.placements[name], written.placements[name]
        u, v = a.open_canonical(p), b.open_canonical(q)
        x, y = (
            numeric_values(u.read(), u.dtype).astype("f4"),
            numeric_values(v.read(), v.dtype).astype("f4"),
        )
        offset = np.float32(1 if centered and last == "weight" else 0)
        if factors is None:
            if last == "weight" and not np.array_equal(_cast(x, v.dtype.name), y):
                out.values[norm] = _ratio(x + offset, y + offset)
            continue  # the comparison of unquantized tensors reports it
        out.handled.add(name)
        if factors.shape != x.shape:
            text = f"has {len(x)} columns, but calibration has {factors.size} factors"
            out.findings.append(error("norm", norm, text, _WRONG))
            continue
        expected = (x + offset) / factors - offset
        ulp = _ROUNDING.get(v.dtype.name, 2.0**-8)
        differs = ~(np.abs(y - expected) <= ulp * np.abs(expected) + np.float32(1e-30))
        if differs.any():
            untouched = np.array_equal(_cast(x, v.dtype.name), y)
            reason = "its factors are not folded in" if untouched else "not divided by its factors"
            column = int(differs.argmax())
            text = (
                f"{last} of {int(differs.sum()):,} of {differs.size:,} columns: {reason}, column "
                f"{column} "
                f"is {y[column]:.6g} where {expected[column]:.6g} is due"
            )
            out.findings.append(error("norm", norm, text, _WRONG))
        else:
            out.num_folded += last == "weight"
        if last == "weight":
            out.values[norm] = _ratio(x + offset, y + offset)
    return out


def check_norm_readers(
    factors: NormFactors, readers: Mapping[str, Sequence[str]], packed: Collection[str]
) -> list[Finding]:
    """Report unquantized modules that read a norm with folded factors.

    `readers` are the modules that read each norm. Quantized ones (`packed`) are compared with their
    norm elsewhere.
    """
    out = []
    for norm, ratio in factors.values.items():
        if not (np.abs(ratio - 1) > _FOLDED).any():  # NaN: zero on both sides
            continue
        for module in readers.get(norm, ()):
            if module not in packed:
                text = f"is not quantized, but {norm}, which it reads, was divided by factors"
                out.append(error("norm-shared", module, text, _WRONG))
    return out


def _cast(x: Floats, kind: str) -> Floats:
    return rounded(x.copy(), kind)


def _ratio(source: Floats, written: Floats) -> Floats:
    with np.errstate(all="ignore"):
        out: Floats = np.where(source == 0, np.float32(np.nan), written / source)
    return out.astype(np.float32)
