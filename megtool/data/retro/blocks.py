"""Blocks: files `FIRST-LAST.hdf5` that together have the rows of a whole, as many in each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megtool.errors import FormatError

_NAME = re.compile(r"(\d+)-(\d+)\.hdf5")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Rows `begin` to `end`, and the file that has them."""

    begin: int
    end: int
    file: Path


def plan_blocks(folder: Path, num_rows: int, block_size: int) -> Iterator[RowBlock]:
    """The blocks of `num_rows` rows, named as `get_blocks` of megatron-core names them."""
    digits = math.ceil(math.log(num_rows) / math.log(10)) + 1 if num_rows else 1
    for begin in range(0, num_rows, block_size):
        end = min(num_rows, begin + block_size)
        yield RowBlock(
            begin=begin, end=end, file=folder / f"{begin:0{digits}d}-{end:0{digits}d}.hdf5"
        )


def find_blocks(folder: Path, block_size: int) -> tuple[RowBlock, ...]:
    """The blocks in a folder, which follow each other and are full except for the last.

    Raises:
        FormatError: there is none, one is missing, or two overlap.
    """
    blocks = sorted(
        (
            RowBlock(begin=int(match[1]), end=int(match[2]), file=file)
            for file in (folder.iterdir() if folder.is_dir() else ())
            if (match := _NAME.fullmatch(file.name))
        ),
        key=lambda block: (block.begin, block.end),
    )
    if not blocks:
        raise FormatError(
            "there are no blocks FIRST-LAST.hdf5",
            file=folder,
            hint="build the project to its end, or copy all of it",
            error_id="source-not-found",
        )
    row = 0
    for block in blocks:
        if block.begin > row:
            raise FormatError(
                f"rows {row} to {block.begin} are in no block",
                file=folder,
                hint="a run was interrupted: start it again, it builds the blocks that are missing",
                error_id="missing-shard",
            )
        if block.begin < row or block.end <= block.begin:
            raise FormatError(
                f"block {block.file.name} overlaps the one before, which ends at row {row}",
                file=block.file,
                hint="blocks of two runs are mixed: keep those of one block size",
            )
        if block.end - block.begin != block_size and block is not blocks[-1]:
            raise FormatError(
                f"block {block.file.name} has {block.end - block.begin} rows, and config.json says "
                f"{block_size}",
                file=block.file,
                hint="retro_block_size in config.json has to be that of the run that wrote them",
            )
        row = block.end
    if blocks[-1].end - blocks[-1].begin > block_size:
        raise FormatError(
            f"block {blocks[-1].file.name} has more than the {block_size} rows of config.json",
            file=blocks[-1].file,
            hint="retro_block_size in config.json has to be that of the run that wrote them",
        )
    return tuple(blocks)
