"""The weight of each FP8 state, and the largest magnitude in it.

Only the weights asked for are read, tile by tile: memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from itertools import product

import numpy as np

from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron.names import split_state
from megtool.dtypes import DType
from megtool.megatron_state.extra_states.names import SUFFIX, Site, parse_site
from megtool.number_formats.amax import amax
from megtool.number_formats.decode import SCALE
from megtool.number_formats.packed_parts import PackedPart
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement, narrow
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import numeric_values
from megtool.transport.reading.parallel_scan import TILE_BYTES, packed_row_depth, split_placement
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reading.shared_scan import ScanPart, run_scan
from megtool.transport.strided import Array

WEIGHT = ".weight"

_WHOLE = PackedPart(role=SCALE, dtype="float32", shape=(), spans=())
_STACKED = ("decoder.layers.", "encoder.layers.")
_DIRECT = ("float32", "float16", "bfloat16")


def find_sites(tensor: GlobalTensor, suffix: str) -> dict[Site, tuple[int, ...]]:
    """The modules whose tensor `suffix` is in a stored tensor, with the leading indices of each.

    A stored tensor may stack all layers, all experts, or both. Empty for other names.
    """
    if not tensor.name.endswith(suffix) or is_optimizer_state(tensor.name):
        return {}
    module = tensor.name.removesuffix(suffix)
    key = split_state(module)[2]
    stacked = next((p for p in _STACKED if key.startswith(p)), None)
    lead = int(stacked is not None and not key.removeprefix(stacked)[:1].isdigit())
    behind = key.partition(".experts.experts.")[2]
    lead += int(bool(behind) and not behind[:1].isdigit())
    if len(tensor.shape) < lead:
        return {}
    axes = tensor.shape[:lead]
    sizes = ".".join(map(str, axes or (1,)))
    out = {}
    for index in product(*map(range, axes)):
        spelled = f"{module}{SUFFIX}/shard_{'.'.join(map(str, index or (0,)))}_{sizes}"
        if (site := parse_site(spelled)) is not None:
            out[site] = index
    return out


def find_weights(tensors: Iterable[GlobalTensor]) -> dict[Site, Placement]:
    """The placement of each module's weight, for weights of two dimensions."""
    out: dict[Site, Placement] = {}
    for t in tensors:
        for site, index in find_sites(t, WEIGHT).items():
            if len(t.shape) == len(index) + 2:
                lo, hi = index_box(t, index)
                out[site] = narrow(Placement.identity(t.name, t.shape), lo, hi)
    return out


def index_box(
    tensor: GlobalTensor, index: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of a stored tensor at its leading indices."""
    tail = tensor.shape[len(index) :]
    return (*index, *(0 for _ in tail)), (*(i + 1 for i in index), *tail)


def read_weight_amaxes(
    catalogue: Catalogue,
    sites: Collection[Site],
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    scan: ScanPart | None = None,
) -> dict[Site, float]:
    """The largest magnitude of the weights of these modules; NaN where one holds NaN.

    Modules whose weight is not stored are left out. `progress` is called with bytes. With `scan`,
    workers share it out.

    Raises:
        StorageError: a file cannot be read.
        SourceChangedError: one changed meanwhile.
    """
    placements = find_weights(catalogue.tensors)
    out = {site: 0.0 for site in sites if site in placements}
    jobs: list[tuple[Site, Placement]] = []
    for site in out:
        place = placements[site]
        stored = catalogue[place.stored]
        cuts = split_placement(place, stored.dtype.itemsize, packed_row_depth(place, stored))
        jobs += [(site, narrow(place, lo, hi)) for _, lo, hi in cuts]
    with CheckpointReader(catalogue, Files()) as reader:

        def work(job: tuple[Site, Placement]) -> float:
            view, top = reader.open_canonical(job[1]), 0.0
            with closing(view.tiles(TILE_BYTES)) as tiles:
                for _, tile in tiles:
                    top = float(np.maximum(top, tile_amax(tile, view.dtype)))
                    if progress is not None:
                        progress(tile.nbytes)
            return top

        results = run_scan(
            scan,
            jobs,
            work,
            name=lambda job: repr((job[1].stored, job[1].base, job[1].shape)),
            size=lambda job: numel(job[1].shape) * catalogue[job[1].stored].dtype.itemsize,
            threads=threads,
        )
    for (site, _), top in zip(jobs, results, strict=True):
        if top is not None:
            out[site] = float(np.maximum(out[site], top))
    catalogue.check_unchanged()
    return out


def tile_amax(values: Array, kind: DType) -> float:
    """The largest magnitude of elements as they are stored; NaN if one is NaN."""
    if not values.size:
        return 0.0
    if kind.name in _DIRECT:
        return float(amax(values, kind.name, _WHOLE, (0,), (values.size,)))
    return float(np.abs(numeric_values(values, kind)).max())


def count_weight_bytes(catalogue: Catalogue, sites: Collection[Site]) -> int:
    """The bytes of the weights of these modules."""
    placements: Mapping[Site, Placement] = find_weights(catalogue.tensors)
    return sum(
        int(np.prod(p.shape)) * catalogue[p.stored].dtype.itemsize
        for site, p in placements.items()
        if site in sites
    )
