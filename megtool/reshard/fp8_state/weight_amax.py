"""Weights: which stored tensor each FP8 state is about, and the largest magnitude in it.

Only what is asked for is read, tile by tile: memory does not grow with the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from itertools import product

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.numeric_values import numbers
from megtool.checkpoint.parallel_scan import TILE_BYTES, each, parts, whole_rows
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.transport.strided import Array
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron import split_state
from megtool.dtypes import DType
from megtool.number_formats.amax import amax
from megtool.number_formats.decode import SCALE
from megtool.number_formats.packed_parts import PackedPart
from megtool.reshard.megatron.extra_state_names import SUFFIX, Site, site_of
from megtool.tensors.placement import Placement, narrow
from megtool.tensors.sharded import GlobalTensor

WEIGHT = ".weight"

_WHOLE = PackedPart(role=SCALE, dtype="float32", shape=(), spans=())
_STACKED = ("decoder.layers.", "encoder.layers.")
_DIRECT = ("float32", "float16", "bfloat16")


def sites_of(tensor: GlobalTensor, suffix: str) -> dict[Site, tuple[int, ...]]:
    """The modules whose `suffix` a stored tensor holds, with the leading indices of each.

    A tensor may hold those of all layers, of all experts, or both; none where it is called
    otherwise.
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
    for at in product(*map(range, axes)):
        spelled = f"{module}{SUFFIX}/shard_{'.'.join(map(str, at or (0,)))}_{sizes}"
        if (site := site_of(spelled)) is not None:
            out[site] = at
    return out


def weights_of(tensors: Iterable[GlobalTensor]) -> dict[Site, Placement]:
    """Where each module's weight lies, for those that have one of two dimensions."""
    out: dict[Site, Placement] = {}
    for t in tensors:
        for site, at in sites_of(t, WEIGHT).items():
            if len(t.shape) == len(at) + 2:
                lo, hi = box_at(t, at)
                out[site] = narrow(Placement.identity(t.name, t.shape), lo, hi)
    return out


def box_at(tensor: GlobalTensor, at: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of a stored tensor behind its leading indices."""
    rest = tensor.shape[len(at) :]
    return (*at, *(0 for _ in rest)), (*(i + 1 for i in at), *rest)


def weight_amaxes(
    catalogue: Catalogue,
    sites: Collection[Site],
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> dict[Site, float]:
    """The largest magnitude of the weights of these modules; NaN where one holds NaN.

    Modules whose weight is not stored are left out. `progress` is told of bytes.

    Raises:
        StorageError: a file cannot be read.
        SourceChangedError: one changed meanwhile.
    """
    found = weights_of(catalogue.tensors)
    out = {site: 0.0 for site in sites if site in found}
    jobs: list[tuple[Site, Placement]] = []
    for site in out:
        place = found[site]
        stored = catalogue[place.stored]
        cuts = parts(place, stored.dtype.itemsize, whole_rows(place, stored))
        jobs += [(site, narrow(place, lo, hi)) for _, lo, hi in cuts]
    lock = threading.Lock()
    with Reader(catalogue, Files()) as reader:

        def work(job: tuple[Site, Placement]) -> None:
            site, place = job
            view, top = reader.canonical(place), 0.0
            with closing(view.tiles(TILE_BYTES)) as tiles:
                for _, tile in tiles:
                    top = float(np.maximum(top, largest(tile, view.dtype)))
                    if progress is not None:
                        progress(tile.nbytes)
            with lock:
                out[site] = float(np.maximum(out[site], top))

        each(jobs, work, threads=threads)
    catalogue.check_unchanged()
    return out


def largest(values: Array, kind: DType) -> float:
    """The largest magnitude of some elements, as they lie in a file; NaN where one is."""
    if not values.size:
        return 0.0
    if kind.name in _DIRECT:
        return float(amax(values, kind.name, _WHOLE, (0,), (values.size,)))
    return float(np.abs(numbers(values, kind)).max())


def num_bytes(catalogue: Catalogue, sites: Collection[Site]) -> int:
    """The bytes of the weights of these modules."""
    found: Mapping[Site, Placement] = weights_of(catalogue.tensors)
    return sum(
        int(np.prod(p.shape)) * catalogue[p.stored].dtype.itemsize
        for site, p in found.items()
        if site in sites
    )
