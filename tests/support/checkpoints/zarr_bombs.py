"""Chunks that expand to far more than their size, and a program that reads arrays of them."""

from __future__ import annotations

CHUNK_BYTES = 64 << 10

READ = """
import sys
from megtool.formats import open_checkpoint
from megtool.errors import FormatError
for path in sys.argv[1:]:
    from pathlib import Path
    try:
        catalogue = open_checkpoint(Path(path))
        for row in range(len(catalogue.shards)):
            catalogue.encoded_chunks.read(row)
        print("read", path)
    except FormatError as e:
        print("refused", path, e.tensor, e.message[:300])
"""


def zstd_frame(num_blocks: int, claimed: int | None = None) -> bytes:
    """A frame of blocks that each repeat one byte 128 Ki times."""
    header = b"\x00\x58" if claimed is None else b"\xc0\x58" + claimed.to_bytes(8, "little")
    block = (128 << 10) << 3 | 1 << 1
    blocks = [
        (block | (k + 1 == num_blocks)).to_bytes(3, "little") + b"\0" for k in range(num_blocks)
    ]
    return b"\x28\xb5\x2f\xfd" + header + b"".join(blocks)
