"""Thresholds for the quantization error of weights, by number format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megtool.convert.dialects import CanonicalView
from megtool.errors import MappingError
from megtool.number_formats.rounding import rounded
from megtool.quant.recipes.modules import list_modules
from megtool.quant.statistics.activation_sites import ActivationSite, list_activation_sites
from megtool.quantize.verification.weight_error import ErrorSums, Floats
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader


@dataclass(frozen=True, slots=True, kw_only=True)
class SqnrThreshold:
    """The least SQNR in dB of a correct weight in a format. `worst_measured` is the least SQNR of
    the weights that it was measured on. `row` is the largest relative error of a row."""

    db: float
    worst_measured: float
    row: float


SQNR_THRESHOLDS: Mapping[str, SqnrThreshold] = MappingProxyType(
    {
        "fp8": SqnrThreshold(db=25.0, worst_measured=31.5, row=0.25),
        "mxfp8": SqnrThreshold(db=25.0, worst_measured=31.4, row=0.25),
        "int8": SqnrThreshold(db=24.0, worst_measured=33.3, row=0.25),
        "int8words": SqnrThreshold(db=24.0, worst_measured=33.3, row=0.25),
        "int4": SqnrThreshold(db=9.0, worst_measured=14.6, row=0.7),
        "int4rows": SqnrThreshold(db=9.0, worst_measured=14.6, row=0.7),
        "mxfp4": SqnrThreshold(db=10.0, worst_measured=16.3, row=0.6),
        "nvfp4": SqnrThreshold(db=14.0, worst_measured=20.4, row=0.5),
        "": SqnrThreshold(db=40.0, worst_measured=49.9, row=0.05),
    }
)
"""By the first word of a packing; "" is an unquantized weight, cast to bfloat16 at worst.

`worst_measured` is the worst of 42 matrices of SmolLM2-135M and of random ones, normal and
heavy-tailed (Student's t with 3 degrees of freedom), rounded to nearest, in INT4 with a scale per
64 columns. The thresholds are at least 6 dB lower: noise of twice the amplitude, room for clipping
and for codes chosen by GPTQ. Swapped rows, nibbles in the wrong order and scales of another tensor
give 3 dB or less.

A mean over a matrix hides single rows: within the noise of FP8 one row in 400 may be zero, of INT4
one in eleven. So `row` bounds each: more than twice the largest relative error of a row of such
matrices, with 2 degrees of freedom (0.054 in FP8, 0.068 in INT8 with a scale per row, 0.30 in INT4
with one per 128 columns, 0.20 in MXFP4, 0.11 in NVFP4), and well below 1, the error of a row of
zeros (a wrong row: 1.4). A row within two half steps of the format (`ErrorSums.lost_row`) is
correct in any case: small rows under the scale of an entire matrix may round to zeros.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightComparison:
    """A weight of B compared with that of A.

    `packing` is its packing in B (`a over b` if it is quantized in A too). With `is_scaled`,
    columns were compared as they were rounded, after smoothing. `worst_row_error` is the relative
    error of the worst row, `lost_row_error` that of the worst row that rounding does not explain,
    and `most_row_error` its limit (None for two quantized weights: unknown).
    """

    tensor: str
    stored: str
    packing: str
    num_elements: int
    sqnr_db: float
    least_db: float
    cosine: float
    max_error: float
    relative_error: float
    worst_row: int
    worst_row_error: float
    num_nan: int = 0
    is_scaled: bool = False
    lost_row: int = -1
    lost_row_error: float = 0.0
    most_row_error: float | None = None

    @property
    def is_sound(self) -> bool:
        """The error is below the thresholds, and no element is NaN or Inf."""
        return not self.num_nan and self.sqnr_db >= self.least_db and not self.has_lost_row

    @property
    def has_lost_row(self) -> bool:
        """The error of a row exceeds that of the format."""
        return self.most_row_error is not None and self.lost_row_error > self.most_row_error


def compare_with_threshold(
    tensor: str,
    stored: str,
    packings: tuple[str, str],
    sums: ErrorSums,
    *,
    sqnr: float | None = None,
    scaled: bool = False,
) -> WeightComparison:
    """Compare the error of a weight with the threshold of its format.

    `packings` are those of A and B ("" is unquantized); `sqnr` replaces the threshold of the
    format. For two quantized weights the noise of both is expected.
    """
    kinds = [p.partition(":")[0] for p in packings]
    limits = [SQNR_THRESHOLDS.get(k, SQNR_THRESHOLDS["int4"]) for k in kinds]
    least_db = min(x.db for x in limits)
    row: float | None = max(x.row for x in limits)
    if all(kinds):  # a row that is small under the scale of A may be zero in A
        least_db, row = least_db - 3.0, None
    elif sqnr is not None and row is not None:
        row = max(row, 10 ** (-sqnr / 20))
    return WeightComparison(
        tensor=tensor,
        stored=stored,
        packing=" over ".join(dict.fromkeys(p for p in packings if p)) or "plain",
        num_elements=sums.count,
        sqnr_db=sums.sqnr_db,
        least_db=least_db if sqnr is None else sqnr,
        cosine=sums.cosine,
        max_error=sums.max_error,
        relative_error=sums.relative_error,
        worst_row=sums.worst_row,
        worst_row_error=sums.worst_row_error,
        num_nan=sums.num_nan,
        is_scaled=scaled,
        lost_row=sums.lost_row,
        lost_row_error=sums.lost_row_error,
        most_row_error=row,
    )


def list_norm_sites(side: CanonicalView) -> tuple[ActivationSite, ...]:
    """List the activation sites after norms; empty if the model is unknown."""
    if side.config is None or side.dialect == "identity":
        return ()
    try:
        modules = list_modules(side).modules
    except MappingError:
        return ()
    return tuple(
        p for p in list_activation_sites(modules, side.config) if p.norm and p.kind == "input"
    )


@dataclass(frozen=True, slots=True)
class ChangedNorm:
    """A norm that differs between A and B, and the factors by which B multiplies each column's
    input (NaN if the weight is zero in both)."""

    site: ActivationSite
    factors: Floats


def find_changed_norms(
    sites: Collection[ActivationSite],
    source: CanonicalView,
    written: CanonicalView,
    a: CheckpointReader,
    b: CheckpointReader,
) -> dict[str, ChangedNorm]:
    """Find norms whose weights differ by more than a cast, by canonical name."""
    out: dict[str, ChangedNorm] = {}
    centered = bool(written.config and written.config.norms.zero_centered_norm)
    offset = np.float32(1 if centered else 0)
    for site in sites:
        name = f"{site.norm}.weight"
        p, q = source.placements.get(name), written.placements.get(name)
        if p is None or q is None or source.canonical[name].shape != written.canonical[name].shape:
            continue
        u, v = a.open_canonical(p), b.open_canonical(q)
        x, y = (
            numeric_values(u.read(), u.dtype).astype("f4"),
            numeric_values(v.read(), v.dtype).astype("f4"),
        )
        x, y = x.reshape(-1), y.reshape(-1)
        if _is_cast(x, y, v.dtype.name, same_type=u.dtype == v.dtype):
            continue
        x, y = x + offset, y + offset
        with np.errstate(all="ignore"):
            factors = np.where(x == 0, np.float32(np.nan), y / x).astype(np.float32)
        if (y[x == 0] != 0).any():
            continue  # no factor explains a change from zero
        out[site.norm] = ChangedNorm(site, factors)
    return out


def _is_cast(x: Floats, y: Floats, kind: str, *, same_type: bool) -> bool:
    """Whether y is x, or its cast if the dtypes differ."""
    return np.array_equal(x, y) or (not same_type and np.array_equal(rounded(x.copy(), kind), y))
