"""Megatron's `torch` format laid out ahead of its data: files of torch.save in folders of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megtool.checkpoint.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.checkpoint.containers.torch_file import lay_out_torch_file
from megtool.checkpoint.formats.save_folder import TRACKER, folder_name
from megtool.errors import UsageError
from megtool.tensors.sharded import GlobalTensor, Shards, widest


def lay_out(
    files: Mapping[str, Any],
    *,
    iteration: int | None,
    small: Mapping[str, bytes] | None = None,
) -> Destination:
    """Lay out `.pt` files given by their path in the folder of the iteration, and by their trees.

    A tree holds plain values, inert nodes whose references have their bytes attached, and
    `GlobalTensor` leaves, one for each tensor to come. A leaf that occurs twice in a file is one
    tensor under two names. `iteration` names the folder inside the save folder, `release` when
    None. `small` are further files by their path beside the folders of ranks.

    Raises:
        UsageError: two tensors have one name, elements are packed, or a storage has no bytes.
        TypeError: a value in a tree cannot be pickled.
    """
    folder = f"{folder_name(iteration)}/"
    stored: list[StoredFile] = []
    tensors: list[GlobalTensor] = []
    offsets: list[int] = []
    owners: list[int] = []
    fragments: list[tuple[int, int, bytes]] = []
    names = set[str]()
    for number, (path, tree) in enumerate(files.items()):
        laid = lay_out_torch_file(tree)
        for tensor in laid.tensors:
            if tensor.name in names:
                raise UsageError("two files hold a tensor of this name", tensor=tensor.name)
            names.add(tensor.name)
        stored.append(StoredFile(path=folder + path, size=laid.size))
        tensors += laid.tensors
        offsets += laid.offsets
        owners += [number] * len(laid.tensors)
        fragments += [(number, at, data) for at, data in laid.fragments]
    rows = [
        (i, [0] * len(t.shape), t.shape, owner)
        for i, (t, owner) in enumerate(zip(tensors, owners, strict=True))
    ]
    catalogue = Catalogue(
        format="megatron",
        root=Path(),
        files=stored,
        tensors=tensors,
        shards=Shards.build(rows, widest(tensors)),
        extents=Extents(
            file=np.array(owners, np.int32),
            offset=np.array(offsets, np.int64),
            length=np.array([t.num_bytes for t in tensors], np.int64),
        ),
        metadata={"iteration": iteration},
    )
    return Destination(
        catalogue=catalogue,
        fragments=fragments,
        small={folder + name: data for name, data in (small or {}).items()},
        last={TRACKER: (folder_name(None) if iteration is None else str(iteration)).encode()},
    )
