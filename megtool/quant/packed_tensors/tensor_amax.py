"""The amax of entire weights, computed before they are packed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.computed_tensors import Taking
from megtool.checkpoint.parallel_scan import each
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.transport.encoded_chunks import Readers
from megtool.checkpoint.transport.shard_locator import Locator
from megtool.checkpoint.transport.strided import Buffers
from megtool.checkpoint.transport.tile import COMPUTED_BYTES
from megtool.errors import FormatError
from megtool.number_formats.amax import amax as amax_of
from megtool.number_formats.decode import SCALE
from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.small_floats import single
from megtool.quant.packed_tensors.pack import WeightToPack

SWEPT_BYTES = 32 << 20
"""A thread looks for the amax of so much of a weight at a time."""


def find_amaxes(
    catalogue: Catalogue,
    weights: Sequence[WeightToPack],
    files: Files,
    *,
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> list[float]:
    """The amax of each weight after smoothing; uses memory for tiles only.

    Raises:
        FormatError: a weight holds NaN or infinity.
        SourceChangedError: a source file changed meanwhile.
    """
    part = PackedPart(role=SCALE, dtype="float32", shape=(), spans=())
    jobs: list[tuple[int, int, int]] = []
    for number, weight in enumerate(weights):
        rows = max(1, SWEPT_BYTES // weight.row_bytes)
        out = weight.shape[0]
        jobs += [(number, a, min(a + rows, out)) for a in range(0, out, rows)]
    amaxes = [0.0] * len(weights)
    lock, local = threading.Lock(), threading.local()
    locator = Locator(catalogue)
    with Readers(files, [catalogue]) as readers:

        def work(job: tuple[int, int, int]) -> None:
            number, first, end = job
            weight, width = weights[number], weights[number].shape[1]
            if not hasattr(local, "taking"):
                local.taking = Taking(locator, files, readers, Buffers(), tile_bytes=COMPUTED_BYTES)
            columns = weight.treatment.columns
            rows = max(1, COMPUTED_BYTES // weight.row_bytes)
            with local.taking.run(weight.placement, weight.dtype) as run:
                for a in range(first, end, rows):
                    b = min(a + rows, end)
                    values, kind = run.read(a * width, b * width), weight.dtype.name
                    if columns is not None:
                        values = single(values, kind).reshape(-1, width) * columns.astype("<f4")
                        kind = "float32"
                    flat = values.reshape(-1)
                    top = float(amax_of(flat, kind, part, (0,), (flat.size,)))
                    if not np.isfinite(top):
                        raise FormatError(
                            "elements are NaN or infinite",
                            file=catalogue.root,
                            tensor=weight.placement.canonical,
                            hint="they cannot be quantized; `megtool inspect SRC --stats` "
                            "counts them",
                        )
                    with lock:
                        amaxes[number] = max(amaxes[number], top)
            if progress is not None:
                with lock:
                    progress((end - first) * weight.row_bytes)

        each(jobs, work, threads=threads)
    catalogue.check_unchanged()
    return amaxes
