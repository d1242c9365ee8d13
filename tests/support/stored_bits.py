"""Bits of stored tensors, turned over."""

from __future__ import annotations

from pathlib import Path

from megtool.formats import open_checkpoint


def flip(folder: Path, name: str) -> None:
    """Flip one bit in the middle of a stored tensor's first shard."""
    catalogue = open_checkpoint(folder)
    row = catalogue.shards.of(catalogue.index[name]).start
    offset = int(catalogue.locate(catalogue.shards.tensor[[row]] * 0 + row).offset[0])
    path = catalogue.path(int(catalogue.extents.file[row]))
    data = bytearray(path.read_bytes())
    data[offset + 70] ^= 0x10
    path.write_bytes(data)
