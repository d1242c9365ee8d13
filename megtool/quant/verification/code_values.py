"""Stored codes and scales of weights, compared with the qparams that calibration chose.

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
from megtool.checkpoint.parallel_scan import run_jobs
from megtool.checkpoint.read import CheckpointReader
from megtool.checkpoint.storage.files import Files
from megtool.lint.finding import Finding, error
from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.scales import modelopt_block, modelopt_exponent, modelopt_scale
from megtool.number_formats.small_floats import E2M1, E4M3, FP4, eight_bit, single
from megtool.quant.qparams import Floats, QParams, WeightQParams
from megtool.quant.verification.step_sizes import MatrixIndices, map_part
from megtool.quant.verification.weight_error import WeightPair, WeightPart, split_weight

_LARGEST: Mapping[str, float] = {"fp8": 448.0, "int8": 127.0, "int4rows": 7.0}
_WRONG = "outputs are wrong in every engine"


def check_codes(
    weights: Sequence[WeightPair],
    qparams: QParams,
    source: CheckpointReader,
    catalogue: Catalogue,
    *,
    threads: int,
) -> list[Finding]:
    """Weights whose codes were chosen, and are others in what was written (`catalogue`)."""
    chosen = {
        w.name: t
        for w in weights
        if (t := qparams.weights.get(w.name.removesuffix(".weight"))) and t.codes is not None
    }
    wrong: dict[str, tuple[int, int]] = {}  # how many, and the first
    lock = threading.Lock()
    codes_only = {
        n: tuple(p for p in ps if p.part.role == CODES) for n, ps in catalogue.packed.items()
    }
    with CheckpointReader(replace(catalogue, packed=codes_only), Files()) as codes:

        def work(part: WeightPart) -> None:
            view = codes.open_canonical(part.written)
            stored = single(view.read().reshape(-1), view.dtype.name)
            end = part.start + stored.size
            packing = catalogue[part.weight.written.stored].packing or ""
            expected = _code_values(packing, chosen[part.weight.name], part.start, end)
            off = stored != expected
            if not off.any():
                return
            first = part.start + int(off.argmax())
            with lock:
                count, before = wrong.get(part.weight.name, (0, first))
                wrong[part.weight.name] = (count + int(off.sum()), min(before, first))

        some = [w for w in weights if w.name in chosen and _fits(w, chosen[w.name])]
        run_jobs(
            [job for w in some for job in split_weight(w, source, codes)], work, threads=threads
        )
    out = [
        _codes_error(w.name, "its settled codes do not suit its shape")
        for w in weights
        if w.name in chosen and not _fits(w, chosen[w.name])
    ]
    for w in weights:
        if w.name in wrong:
            count, first = wrong[w.name]
            index = list(divmod(first, w.shape[1]))
            text = f"{count:,} codes are not those that were settled, the first at {index}"
            out.append(_codes_error(w.name, text))
    return out


def _codes_error(name: str, text: str) -> Finding:
    return error("codes", name.removesuffix(".weight"), text, _WRONG)


def _fits(w: WeightPair, treatment: WeightQParams) -> bool:
    return treatment.codes is not None and treatment.codes.shape == w.shape


def _code_values(packing: str, treatment: WeightQParams, start: int, end: int) -> Floats:
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


def check_scales(
    weights: Sequence[WeightPair], qparams: QParams, catalogue: Catalogue
) -> Iterator[Finding]:
    """Weights whose scales are not, to the last bit, those of the amax that was settled."""
    by_stored_name: dict[str, list[WeightQParams]] = defaultdict(list)
    for w in weights:
        if t := qparams.weights.get(w.name.removesuffix(".weight")):
            by_stored_name[w.written.stored].append(t)
    for w in weights:
        t = qparams.weights.get(w.name.removesuffix(".weight"))
        if t is None or t.amax is None:
            continue
        amax = t.amax
        if not amax.ndim:  # one scale of all that is stored as one
            tops = [o.amax for o in by_stored_name[w.written.stored]]
            if any(top is None for top in tops):
                continue
            amax = np.asarray(max(float(top.max()) for top in tops if top is not None), np.float32)
        scales = _read_scales(w, catalogue)
        if scales is None:
            continue  # that it has no scales is told elsewhere
        scale, second = scales
        if scale.size != amax.size:
            text = f"has {scale.size:,} scales, and {amax.size:,} were settled"
            yield error("scales", t.module, text, _WRONG)
            continue
        packing = (catalogue[w.written.stored].packing or "").partition(":")[0]
        expected = _compute_scales(packing, amax.reshape(-1), second)
        off = expected != scale.reshape(-1)
        if off.any():
            first = int(off.argmax())
            text = (
                f"{int(off.sum()):,} of {off.size:,} scales are not those that were settled: number"
                f" {first} is {scale.reshape(-1)[first]:.6g}, not {expected[first]:.6g}"
            )
            yield error("scales", t.module, text, _WRONG)


def _read_scales(w: WeightPair, catalogue: Catalogue) -> tuple[Floats, float] | None:
    """The scales of a weight's own rows, and the one of the whole tensor (1 if there is none)."""
    scale, second = None, 1.0
    lines = MatrixIndices.of(w.written, w.shape)
    for stored in catalogue.packed.get(w.written.stored, ()):
        if stored.part.role == SCALE and lines is not None:
            values = lines.pick(map_part(catalogue, stored), stored.part, 0, w.shape[0], each=False)
            scale = None if values is None else single(values, stored.part.dtype)
        elif stored.part.role == SCALE_2 and math.prod(stored.part.shape) == 1:
            value = single(np.array(map_part(catalogue, stored)), stored.part.dtype)
            second = float(value.reshape(-1)[0])
    return None if scale is None else (scale, second)


def _compute_scales(name: str, amax: Floats, second: float) -> Floats:
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
