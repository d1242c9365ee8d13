"""Second copies of shards, as two catalogues that can be compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.pickles.zip_tensor import StorageViews, locate_tensor_item
from megtool.storage.files import opened
from megtool.tensors.box import Boxes
from megtool.tensors.catalogue import Catalogue, Extents, ShardOffsets
from megtool.tensors.sharded import GlobalTensor, Shards, padded_shapes


def pair_replicas(catalogue: Catalogue) -> tuple[Catalogue, Catalogue]:
    """The shards that have replicas, and those replicas, under the same names.

    Each replica is a separate tensor in both: `<tensor> [<box>] in <file>`.
    """
    rows = np.array([r.shard for r in catalogue.replicas], np.int64)
    s, e = catalogue.shards, catalogue.extents
    tensors = []
    for number, copy in enumerate(catalogue.replicas):
        stored = catalogue.tensors[s.tensor[copy.shard]]
        shape = s.boxes.shape[copy.shard, : len(stored.shape)]
        lo = s.boxes.lo[copy.shard, : len(stored.shape)]
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(lo.tolist(), shape.tolist(), strict=True))
        name = f"{stored.name} [{box}] in {catalogue.files[copy.file].path} ({number})"
        tensors.append(replace(stored, name=name, shape=tuple(shape.tolist())))
    boxes = padded_shapes(tensors, s.boxes.ndim)
    shards = Shards(
        np.arange(len(tensors), dtype=np.int32),
        Boxes(np.zeros_like(boxes), boxes),
        np.zeros(len(tensors), np.int32),
    )
    first = Extents(
        file=e.file[rows], offset=e.offset[rows], length=e.length[rows], contained=e.contained
    )
    second = Extents(
        file=np.array([r.file for r in catalogue.replicas], np.int32),
        offset=np.array([r.offset for r in catalogue.replicas], np.int64),
        length=np.array([r.length for r in catalogue.replicas], np.int64),
        contained=e.contained,
    )

    def make_catalogue(extents: Extents) -> Catalogue:
        return Catalogue(
            format=catalogue.format,
            root=catalogue.root,
            files=catalogue.files,
            tensors=tensors,
            shards=shards,
            extents=extents,
        )

    originals, copies = make_catalogue(first), make_catalogue(second)
    originals.locate_contained = lambda ids: catalogue.locate(rows[ids])
    copies.locate_contained = lambda ids: _locate(copies, ids)
    return originals, copies


def _locate(copies: Catalogue, ids: NDArray[np.int64]) -> ShardOffsets:
    """Locate the raw bytes of the copies inside their items."""
    offset, strides = np.zeros(len(ids), np.int64), {}
    views: StorageViews = {}
    for k, row in enumerate(ids.tolist()):
        tensor: GlobalTensor = copies.tensors[row]
        path = copies.path(int(copies.extents.file[row]))
        with opened(path) as fd:
            location = locate_tensor_item(
                fd,
                int(copies.extents.offset[row]),
                int(copies.extents.length[row]),
                file=path,
                tensor=tensor.name,
                views=views,
            )
        if location.dtype is not tensor.dtype or location.shape != tensor.shape:
            raise FormatError(
                f"a replica holds {list(location.shape)} {location.dtype}, not "
                f"{list(tensor.shape)} {tensor.dtype}",
                file=path,
                tensor=tensor.name,
            )
        offset[k] = location.offset
        if location.strides is not None:
            strides[k] = location.strides
    return ShardOffsets(offset=offset, strides=strides)
