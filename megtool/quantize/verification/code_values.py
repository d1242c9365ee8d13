"""Compare stored codes and scales of weights with the quantization parameters of calibration.

If calibration chose codes other than the nearest ones (GPTQ) or clipped scales, no bound on single
elements applies. Codes and scales are then compared with the chosen ones, element by element.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.scales import modelopt_block, modelopt_exponent, modelopt_scale
from megtool.number_formats.small_floats import E2M1, E4M3, FP4, eight_bit, single
from megtool.process.threads import run_jobs
from megtool.quant.qparams import Floats, QParams, WeightQParams
from megtool.quantize.verification.step_sizes import MatrixIndices, map_part
from megtool.quantize.verification.weight_error import WeightPair, WeightPart, split_weight
from megtool.report.finding import Finding, error
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.reader import CheckpointReader

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
    """Compare stored codes (`catalogue`) with those that calibration chose."""
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
            differs = stored != expected
            if not differs.any():
                return
            first = part.start + int(differs.argmax())
            with lock:
                count, before = wrong.get(part.weight.name, (0, first))
                wrong[part.weight.name] = (count + int(differs.sum()), min(before, first))

        comparable = [w for w in weights if w.name in chosen and _fits(w, chosen[w.name])]
        run_jobs(
            [job for w in comparable for job in split_weight(w, source, codes)],
            work,
            threads=threads,
        )
    out = [
        _codes_error(w.name, "the calibrated codes do not have its shape")
        for w in weights
        if w.name in chosen and not _fits(w, chosen[w.name])
    ]
    for w in weights:
        if w.name in wrong:
            count, first = wrong[w.name]
            index = list(divmod(first, w.shape[1]))
            text = f"{count:,} codes differ from the calibrated ones, the first at {index}"
            out.append(_codes_error(w.name, text))
    return out


def _codes_error(name: str, text: str) -> Finding:
    return error("codes", name.removesuffix(".weight"), text, _WRONG)


def _fits(w: WeightPair, qparams: WeightQParams) -> bool:
    return qparams.codes is not None and qparams.codes.shape == w.shape


def _code_values(packing: str, qparams: WeightQParams, start: int, end: int) -> Floats:
    """The values of codes before scaling: integers, or FP4 and FP8 numbers."""
    if qparams.codes is None:
        raise ValueError(f"{qparams.module} has no calibrated codes")
    columns = qparams.codes.shape[1]
    rows = qparams.codes[start // columns : -(-end // columns)].reshape(-1)
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
    """Compare stored scales bit by bit with those of the calibrated amax."""
    by_stored_name: dict[str, list[WeightQParams]] = defaultdict(list)
    for w in weights:
        if t := qparams.weights.get(w.name.removesuffix(".weight")):
            by_stored_name[w.written.stored].append(t)
    for w in weights:
        t = qparams.weights.get(w.name.removesuffix(".weight"))
        if t is None or t.amax is None:
            continue
        amax = t.amax
        if not amax.ndim:  # one scale for all weights in one stored tensor
            amaxes = [o.amax for o in by_stored_name[w.written.stored]]
            if any(weight_amax is None for weight_amax in amaxes):
                continue
            amax = np.asarray(
                max(float(weight_amax.max()) for weight_amax in amaxes if weight_amax is not None),
                np.float32,
            )
        scales = _read_scales(w, catalogue)
        if scales is None:
            continue  # another check reports missing scales
        scale, second = scales
        if scale.size != amax.size:
            text = f"has {scale.size:,} scales, but calibration has {amax.size:,}"
            yield error("scales", t.module, text, _WRONG)
            continue
        packing = (catalogue[w.written.stored].packing or "").partition(":")[0]
        expected = _compute_scales(packing, amax.reshape(-1), second)
        differs = expected != scale.reshape(-1)
        if differs.any():
            first = int(differs.argmax())
            text = (
                f"{int(differs.sum()):,} of {differs.size:,} scales differ from the calibrated "
                f"ones: number {first} is {scale.reshape(-1)[first]:.6g}, not {expected[first]:.6g}"
            )
            yield error("scales", t.module, text, _WRONG)


def _read_scales(w: WeightPair, catalogue: Catalogue) -> tuple[Floats, float] | None:
    """The scales of a weight's rows, and the global scale of the tensor (1 if there is none)."""
    scale, second = None, 1.0
    indices = MatrixIndices.of(w.written, w.shape)
    for stored in catalogue.packed.get(w.written.stored, ()):
        if stored.part.role == SCALE and indices is not None:
            values = indices.pick(
                map_part(catalogue, stored), stored.part, 0, w.shape[0], per_element=False
            )
            scale = None if values is None else single(values, stored.part.dtype)
        elif stored.part.role == SCALE_2 and math.prod(stored.part.shape) == 1:
            value = single(np.array(map_part(catalogue, stored)), stored.part.dtype)
            second = float(value.reshape(-1)[0])
    return None if scale is None else (scale, second)


def _compute_scales(name: str, amax: Floats, second: float) -> Floats:
    """The scales of a format for given amaxes."""
    top = np.ascontiguousarray(amax, np.float32)
    with np.errstate(all="ignore"):  # another check reports global scales that are NaN or Inf
        if name == "nvfp4":
            return eight_bit("float8_e4m3fn")[modelopt_block(top, np.asarray(second, np.float32))]
        if name.startswith("mx"):
            return eight_bit("float8_e8m0fnu")[
                modelopt_exponent(top, E4M3 if name == "mxfp8" else E2M1)
            ]
        return modelopt_scale(top, _LARGEST[name])
