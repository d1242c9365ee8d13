"""One safetensors file per rank; all ranks use the same tensor names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megtool.formats.safetensors.header import SafetensorsEntry, encode_header
from megtool.formats.safetensors.reader import place_tensors, whole_shards
from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFileTensor:
    """A tensor of a rank's file: `tensor` is what a plan calls it, with the shape a plan fills;
    the file calls it `name` and says `shape`."""

    rank: int
    name: str
    shape: tuple[int, ...]
    tensor: GlobalTensor


def plan_rank_files(
    file_tensors: Sequence[RankFileTensor], ranks: int, small: Mapping[str, bytes]
) -> Destination:
    """The folder: `rank0.safetensors` and so on, with `small` beside them.

    Raises:
        FormatError: a header that is too long.
    """
    by_rank: list[list[RankFileTensor]] = [[] for _ in range(ranks)]
    for f in file_tensors:
        by_rank[f.rank].append(f)
    files, fragments, tensors, owner, offsets, lengths = [], [], [], [], [], []
    for rank, group in enumerate(by_rank):
        by_name = {f.tensor.name: f for f in group}
        entries = place_tensors([f.tensor for f in group])
        path = f"rank{rank}.safetensors"
        head = encode_header(
            [
                SafetensorsEntry(
                    by_name[e.name].name, e.dtype, by_name[e.name].shape, e.begin, e.end
                )
                for e in entries
            ],
            {"format": "pt"},
            path,
        )
        files.append(StoredFile(path=path, size=len(head) + (entries[-1].end if entries else 0)))
        fragments.append((rank, 0, head))
        for e in entries:
            tensors.append(by_name[e.name].tensor)
            owner.append(rank)
            offsets.append(len(head) + e.begin)
            lengths.append(e.end - e.begin)
    file = np.array(owner, np.int32)
    catalogue = Catalogue(
        format="trtllm-legacy",
        root=Path(),
        files=files,
        tensors=tensors,
        shards=whole_shards(tensors, file),
        extents=Extents(
            file=file, offset=np.array(offsets, np.int64), length=np.array(lengths, np.int64)
        ),
    )
    return Destination(catalogue=catalogue, fragments=fragments, small_files=dict(small))
