"""Optimizer state gathered into one object (`dp_zero_gather_scatter`), as tensors of a catalogue.

Each data-parallel group saved the dict of the legacy `distrib_optim.pt` as one object: flat fp32
buffers in a container of torch.save. They get the names of `dp_reshardable` buckets, over the same
bytes. Source: megatron-core 0.14 and 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.pickles.zip_reader import ZipArchive
from megtool.pickles.zip_tensor import locate_view, parse_storage_view
from megtool.storage.files import Files
from megtool.tensors.box import Boxes
from megtool.tensors.catalogue import Catalogue, Extents, ShardOffsets, StoredObject
from megtool.tensors.sharded import GlobalTensor, Shards, widest

COALESCED = "coalesced_buckets"
"""In `Catalogue.metadata`: true if `bucket_idx_0` holds all buckets of a buffer in order."""

_OBJECT = re.compile(
    r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.param_state/shard_0_1"
)
_HINT = "--optimizer-format none leaves the optimizer out"


def add_gathered_tensors(catalogue: Catalogue) -> Catalogue:
    """The catalogue with such objects as 1-d tensors; unchanged if there are none.

    `metadata[COALESCED]` tells whether buckets are concatenated.

    Raises:
        FormatError: an object is of another kind, or damaged.
    """
    objects = [o for o in catalogue.objects.values() if _OBJECT.fullmatch(o.name)]
    if not objects:
        return catalogue
    located: list[tuple[GlobalTensor, int, int]] = []
    coalesced = False
    files = Files()
    for stored in objects:
        number = stored.extent[0] if stored.extent else 0
        fd = files.open_read(catalogue.path(number))
        try:
            is_coalesced, tensors = _read_object(fd, stored, catalogue.path(number))
        finally:
            files.close(fd)
        located += [(t, number, offset) for t, offset in tensors]
        coalesced = coalesced or is_coalesced
    out = _add_tensors(catalogue, located)
    out.objects = {n: o for n, o in catalogue.objects.items() if not _OBJECT.fullmatch(n)}
    out.metadata = {**catalogue.metadata, COALESCED: coalesced}
    return out


def _read_object(
    fd: int, stored: StoredObject, path: Path
) -> tuple[bool, list[tuple[GlobalTensor, int]]]:
    """Whether buckets are coalesced, and every buffer's tensor with its absolute offset."""
    _, offset, length = stored.extent or (0, 0, 0)
    archive = ZipArchive(fd, offset, length, file=path)
    tree = pickle_reader.decode(archive.read_pickle(), file=path)
    tree = tree[0] if isinstance(tree, list) and len(tree) == 1 else tree
    match = _OBJECT.fullmatch(stored.name)
    prefix = match[1] if match else stored.name
    if tree is None:
        return False, []
    if not isinstance(tree, dict):
        raise _unexpected_value(tree, stored.name, path)
    out = []
    for name, node in _buffers(tree, stored.name, path):
        view = parse_storage_view(node, file=path)
        if view is None or len(view.shape) != 1 or not view.is_row_major:
            raise _unexpected_value(node, f"{prefix}.{name}", path)
        tensor = GlobalTensor(name=f"{prefix}.{name}", shape=view.shape, dtype=view.dtype)
        out.append((tensor, locate_view(archive, view, tensor=tensor.name)))
    return tree.get("buckets_coalesced") is True, out


def _buffers(tree: dict[Any, Any], name: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Every flat tensor of the dict, by its name without the prefix."""
    for number, by_dtype in tree.items():
        if not isinstance(number, int):
            continue  # `buckets_coalesced`, `per_bucket_numel` and the like
        if not isinstance(by_dtype, dict):
            raise _unexpected_value(by_dtype, name, path)
        for dtypes, states in by_dtype.items():
            pair = dtypes if isinstance(dtypes, tuple) else (dtypes, dtypes)
            if len(pair) != 2 or not all(map(pickle_reader.is_global, pair)):
                raise _unexpected_value(dtypes, name, path)
            if not isinstance(states, dict):
                raise _unexpected_value(states, name, path)
            spelled = ", ".join(f"{d.module}.{d.qualname}" for d in pair)
            for state, value in states.items():
                if isinstance(value, int):
                    continue  # `numel_unpadded`
                buckets = value if isinstance(value, list) else [value]
                for k, node in enumerate(buckets):
                    yield f"gbuf_idx_{number}.dtype_({spelled}).bucket_idx_{k}.{state}", node


def _unexpected_value(node: Any, name: str, path: Path) -> FormatError:
    return FormatError(
        f"gathered optimizer state holds {node!r:.60}", file=path, tensor=name, hint=_HINT
    )


def _add_tensors(catalogue: Catalogue, located: list[tuple[GlobalTensor, int, int]]) -> Catalogue:
    """The catalogue with further tensors, each one shard at a known offset."""
    old, count = catalogue.shards, len(catalogue.tensors)
    tensors = [*catalogue.tensors, *(t for t, _, _ in located)]
    ndim = widest(tensors)
    lo = np.zeros((len(old) + len(located), ndim), np.int64)
    hi = np.ones_like(lo)
    width = min(ndim, old.boxes.ndim)
    lo[: len(old), :width] = old.boxes.lo[:, :width]
    hi[: len(old), :width] = old.boxes.hi[:, :width]
    hi[len(old) :, 0] = [t.numel for t, _, _ in located]
    e, locate_others = catalogue.extents, catalogue.locate
    offset = np.concatenate([e.offset, np.array([start for _, _, start in located], np.int64)])

    def locate(rows: NDArray[np.int64]) -> ShardOffsets:
        contained = rows < len(old)
        inner = locate_others(rows[contained])
        places = np.flatnonzero(contained).tolist()
        out = offset[rows]
        out[contained] = inner.offset
        return ShardOffsets(offset=out, strides={places[k]: s for k, s in inner.strides.items()})

    return Catalogue(
        format=catalogue.format,
        root=catalogue.root,
        files=catalogue.files,
        tensors=tensors,
        shards=Shards(
            np.concatenate(
                [old.tensor, np.arange(count, count + len(located), dtype=np.int32)]
            ).astype(np.int32),
            Boxes(lo, hi),
            np.concatenate([old.owner, np.array([f for _, f, _ in located], np.int32)]),
        ),
        extents=Extents(
            file=np.concatenate([e.file, np.array([f for _, f, _ in located], np.int32)]),
            offset=offset,
            length=np.concatenate([e.length, np.array([t.num_bytes for t, _, _ in located])]),
            contained=True,
        ),
        objects=catalogue.objects,
        auxiliary_files=catalogue.auxiliary_files,
        metadata=catalogue.metadata,
        replicas=catalogue.replicas,
        warnings=catalogue.warnings,
        locate_contained=locate,
    )
