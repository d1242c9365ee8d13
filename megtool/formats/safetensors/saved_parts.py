"""Files of `torch.distributed.checkpoint` with a part of each tensor, as their headers say.

`HuggingFaceStorageWriter` with `save_distributed` writes `shard-00001-model-00001-of-00001
.safetensors` and so on, one by each rank. Where in the whole tensor a part begins is in the
header's `DCP_SHARDING_INFO`; how large that is, is nowhere. Source: torch 2.9,
`distributed/checkpoint/{_hf_utils,filesystem}.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.formats.header_reader import DAMAGED, parse_json
from megtool.formats.safetensors.header import SafetensorsEntry, SafetensorsHeader
from megtool.tensors.box import Boxes, Ints
from megtool.tensors.catalogue import StoredFile
from megtool.tensors.sharded import GlobalTensor, Shards, widest

PARTS_KEY = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_PART = re.compile(r"shard-(\d{5})-.*\.safetensors")
_WAY_OUT = "copy the files of all ranks; config.json beside them says which shapes are whole"


@dataclass(frozen=True, slots=True)
class SavedParts:
    """Tensors of which files have parts, their shards, and each shard's file and bytes."""

    tensors: list[GlobalTensor]
    shards: Shards
    file: NDArray[np.int32]
    offset: Ints
    length: Ints


def read_saved_parts(
    root: Path,
    files: Sequence[StoredFile],
    headers: Sequence[SafetensorsHeader],
    *,
    has_config: bool,
) -> SavedParts | None:
    """Join the parts that headers describe; None where every file has whole tensors.

    Raises:
        FormatError: a description is damaged, files of ranks are missing, or there is one alone and
            no configuration that says the whole shapes.
    """
    offsets = [_offsets(h, root / f.path) for f, h in zip(files, headers, strict=True)]
    names = [(root / f.path).name for f in files]
    numbers = [int(m[1]) if (m := _PART.fullmatch(name)) else None for name in names]
    if not any(any(map(any, of.values())) for of in offsets) and not any(
        n is not None and of for n, of in zip(numbers, offsets, strict=True)
    ):
        return None
    _check_files(root, files, numbers if root.is_dir() else [], has_config=has_config)
    pieces: dict[str, list[tuple[int, SafetensorsEntry, tuple[int, ...]]]] = {}
    for number, (header, of) in enumerate(zip(headers, offsets, strict=True)):
        for entry in header.entries:
            start = of.get(entry.name, (0,) * len(entry.shape))
            if len(start) != len(entry.shape):
                raise FormatError(
                    f"its part begins at {list(start)}, and its shape is {list(entry.shape)}",
                    file=root / files[number].path,
                    tensor=entry.name,
                    hint=DAMAGED,
                )
            pieces.setdefault(entry.name, []).append((number, entry, start))
    tensors = [_whole(name, parts, root, files) for name, parts in pieces.items()]
    rows = [(t, *piece) for t, parts in enumerate(pieces.values()) for piece in parts]
    ndim = widest(tensors)
    boxes = [
        (
            [*start, *[0] * (ndim - len(start))],
            [*(a + n for a, n in zip(start, e.shape, strict=True)), *[1] * (ndim - len(start))],
        )
        for _, _, e, start in rows
    ]
    file = np.array([number for _, number, _, _ in rows], np.int32)
    return SavedParts(
        tensors=tensors,
        shards=Shards(np.array([t for t, *_ in rows], np.int32), Boxes.of(boxes, ndim), file),
        file=file,
        offset=np.array([headers[n].start + e.begin for _, n, e, _ in rows], np.int64),
        length=np.array([e.end - e.begin for _, _, e, _ in rows], np.int64),
    )


def _offsets(header: SafetensorsHeader, file: Path) -> dict[str, tuple[int, ...]]:
    """Where each part of a file begins, by tensor."""
    text = header.metadata.get(PARTS_KEY)
    if text is None:
        return {}
    value = parse_json(text.encode(), file)
    out: dict[str, tuple[int, ...]] = {}
    for name, part in value.items() if isinstance(value, dict) else ():
        start = part.get(_OFFSETS) if isinstance(part, dict) else None
        if not isinstance(start, list) or not all(
            type(x) is int and 0 <= x < 1 << 48 for x in start
        ):
            raise FormatError(
                f"{PARTS_KEY} does not say where the part begins",
                file=file,
                tensor=name,
                hint=DAMAGED,
            )
        out[name] = tuple(start)
    return out


def _check_files(
    root: Path,
    files: Sequence[StoredFile],
    numbers: Sequence[int | None],
    *,
    has_config: bool,
) -> None:
    present = {n for n in numbers if n is not None}
    first = 0 if 0 in present else 1  # ranks are counted from 1
    if missing := sorted(set(range(first, max(present, default=0) + 1)) - present):
        raise FormatError(
            f"it has parts of tensors, and file {missing[0]} of the ranks is missing",
            file=root,
            hint=_WAY_OUT,
            error_id="missing-shard",
        )
    if len(files) == 1 and not has_config:
        raise FormatError(
            "it has parts of tensors, and nothing says that there are no others",
            file=root / files[0].path if files[0].path else root,
            hint=_WAY_OUT,
            error_id="missing-shard",
        )


def _whole(
    name: str,
    parts: Sequence[tuple[int, SafetensorsEntry, tuple[int, ...]]],
    root: Path,
    files: Sequence[StoredFile],
) -> GlobalTensor:
    """The tensor that parts make; holes and overlaps are found by the catalogue."""
    _, first, _ = parts[0]
    for number, entry, _ in parts:
        if (entry.dtype, len(entry.shape)) != (first.dtype, len(first.shape)):
            raise FormatError(
                f"is {entry.dtype} of {len(entry.shape)} dimensions here, and {first.dtype} of "
                f"{len(first.shape)} in {files[parts[0][0]].path!r}",
                file=root / files[number].path,
                tensor=name,
                hint=DAMAGED,
            )
    ends = [[a + n for a, n in zip(start, e.shape, strict=True)] for _, e, start in parts]
    return GlobalTensor(
        name=name, shape=tuple(map(max, zip(*ends, strict=True))), dtype=first.dtype
    )
