"""Settled weights: written codes and scales are those that were settled, wherever any were.

What calibration chose for outputs (codes that are not the nearest, scales that cut off) no bound on
single elements can judge: it is held against the settlement itself, element by element.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.parallel_scan import each
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.scales import modelopt_block, modelopt_exponent, modelopt_scale
from megtool.number_formats.small_floats import E2M1, E4M3, FP4, eight_bit, single
from megtool.quant.qparams import Floats, Settlement, Treatment
from megtool.quant.verification.findings import Finding, error
from megtool.quant.verification.step_sizes import Lines, map_part
from megtool.quant.verification.weight_error import Job, Weight, jobs_of

_LARGEST: Mapping[str, float] = {"fp8": 448.0, "int8": 127.0, "int4rows": 7.0}
_WRONG = "outputs are wrong in every engine"


def check_codes(
    weights: Sequence[Weight],
    settlement: Settlement,
    source: Reader,
    catalogue: Catalogue,
    *,
    threads: int,
) -> list[Finding]:
    """Weights whose codes were chosen, and are others in what was written (`catalogue`)."""
    chosen = {
        w.name: t
        for w in weights
        if (t := settlement.treatments.get(w.name.removesuffix(".weight"))) and t.codes is not None
    }
    wrong: dict[str, tuple[int, int]] = {}  # how many, and the first
    lock = threading.Lock()
    alone = {n: tuple(p for p in ps if p.part.role == CODES) for n, ps in catalogue.packed.items()}
    with Reader(replace(catalogue, packed=alone), Files()) as codes:

        def work(job: Job) -> None:
            view = codes.canonical(job.written)
            found = single(view.read().reshape(-1), view.dtype.name)
            end = job.start + found.size
            packing = catalogue[job.weight.written.stored].packing or ""
            wanted = _meaning(packing, chosen[job.weight.name], job.start, end)
            off = found != wanted
            if not off.any():
                return
            first = job.start + int(off.argmax())
            with lock:
                count, before = wrong.get(job.weight.name, (0, first))
                wrong[job.weight.name] = (count + int(off.sum()), min(before, first))

        some = [w for w in weights if w.name in chosen and _suits(w, chosen[w.name])]
        each([job for w in some for job in jobs_of(w, source, codes)], work, threads=threads)
    out = [
        _differ(w.name, "its settled codes do not suit its shape")
        for w in weights
        if w.name in chosen and not _suits(w, chosen[w.name])
    ]
    for w in weights:
        if w.name in wrong:
            count, first = wrong[w.name]
            at = list(divmod(first, w.shape[1]))
            text = f"{count:,} codes are not those that were settled, the first at {at}"
            out.append(_differ(w.name, text))
    return out


def _differ(name: str, text: str) -> Finding:
    return error("codes", name.removesuffix(".weight"), text, _WRONG)


def _suits(w: Weight, treatment: Treatment) -> bool:
    return treatment.codes is not None and treatment.codes.shape == w.shape


def _meaning(packing: str, treatment: Treatment, start: int, end: int) -> Floats:
    """What settled codes stand for before they are scaled: integers, or the bits of floats."""
    if treatment.codes is None:
        raise ValueError(f"{treatment.module} has no codes")
    columns = treatment.codes.shape[1]
    rows = treatment.codes[start // columns : -(-end // columns)].reshape(-1)
    skipped = start // columns * columns
    codes = np.ascontiguousarray(rows[start - skipped : end - skipped])
    name = packing.partition(":")[0]
    if name in ("mxfp4", "nvfp4"):
        values = np.array([*FP4, *(-v for v in FP4)], np.float32)
        return np.asarray(values[codes.view(np.uint8) & 15], np.float32)
    if name in ("fp8", "mxfp8"):
        return np.asarray(eight_bit("float8_e4m3fn")[codes.view(np.uint8)], np.float32)
    return codes.astype(np.float32)


def check_scales_settled(
    weights: Sequence[Weight], settlement: Settlement, catalogue: Catalogue
) -> Iterator[Finding]:
    """Weights whose scales are not, to the last bit, those of the amax that was settled."""
    together: dict[str, list[Treatment]] = defaultdict(list)
    for w in weights:
        if t := settlement.treatments.get(w.name.removesuffix(".weight")):
            together[w.written.stored].append(t)
    for w in weights:
        t = settlement.treatments.get(w.name.removesuffix(".weight"))
        if t is None or t.amax is None:
            continue
        amax = t.amax
        if not amax.ndim:  # one scale of all that is stored as one
            tops = [o.amax for o in together[w.written.stored]]
            if any(top is None for top in tops):
                continue
            amax = np.asarray(max(float(top.max()) for top in tops if top is not None), np.float32)
        found = _stored(w, catalogue)
        if found is None:
            continue  # that it has no scales is told elsewhere
        scale, second = found
        if scale.size != amax.size:
            text = f"has {scale.size:,} scales, and {amax.size:,} were settled"
            yield error("scales", t.module, text, _WRONG)
            continue
        packing = (catalogue[w.written.stored].packing or "").partition(":")[0]
        wanted = _scales(packing, amax.reshape(-1), second)
        off = wanted != scale.reshape(-1)
        if off.any():
            first = int(off.argmax())
            text = (
                f"{int(off.sum()):,} of {off.size:,} scales are not those that were settled: number"
                f" {first} is {scale.reshape(-1)[first]:.6g}, not {wanted[first]:.6g}"
            )
            yield error("scales", t.module, text, _WRONG)


def _stored(w: Weight, catalogue: Catalogue) -> tuple[Floats, float] | None:
    """The scales of a weight's own rows, and the one of the whole tensor (1 if there is none)."""
    scale, second = None, 1.0
    lines = Lines.of(w.written, w.shape)
    for one in catalogue.packed.get(w.written.stored, ()):
        if one.part.role == SCALE and lines is not None:
            found = lines.pick(map_part(catalogue, one), one.part, 0, w.shape[0], each=False)
            scale = None if found is None else single(found, one.part.dtype)
        elif one.part.role == SCALE_2 and math.prod(one.part.shape) == 1:
            value = single(np.array(map_part(catalogue, one)), one.part.dtype)
            second = float(value.reshape(-1)[0])
    return None if scale is None else (scale, second)


def _scales(name: str, amax: Floats, second: float) -> Floats:
    """The scales that a format has for largest magnitudes."""
    top = np.ascontiguousarray(amax, np.float32)
    with np.errstate(all="ignore"):  # a second scale that is no number is told elsewhere
        if name == "nvfp4":
            return eight_bit("float8_e4m3fn")[modelopt_block(top, np.asarray(second, np.float32))]
        if name.startswith("mx"):
            return eight_bit("float8_e8m0fnu")[
                modelopt_exponent(top, E4M3 if name == "mxfp8" else E2M1)
            ]
        return modelopt_scale(top, _LARGEST[name])
