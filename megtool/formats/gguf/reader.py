"""GGUF files, whole or split, as llama.cpp writes them (`gguf`; read only)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megtool.errors import FormatError, UsageError
from megtool.formats.gguf.header import GgufEntry, GgufHeader, read_header
from megtool.formats.header_reader import check_inside, read_start
from megtool.number_formats.decode import CODES, SCALE
from megtool.number_formats.gguf import NVFP4_BLOCKS, NVFP4_ROWS, block
from megtool.number_formats.packed_parts import WHOLE, PackedPart, PartSpan
from megtool.tensors.box import Boxes
from megtool.tensors.catalogue import (
    Catalogue,
    Extents,
    IgnoredTensor,
    StoredFile,
    StoredPart,
)
from megtool.tensors.sharded import Shards, padded_shapes, widest

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 10_000


def detect(path: Path) -> bool:
    """Whether this is a file with the suffix or the magic bytes of GGUF."""
    return path.is_file() and (path.suffix == ".gguf" or read_start(path, 4) == b"GGUF")


def open_checkpoint(path: Path, *, iteration: int | str | None = None) -> Catalogue:
    """The catalogue of a GGUF file, or of all parts of a split one, given any part.

    Shapes are row-major, the reverse of what GGUF calls `ne`. Tensors in a block format are
    float32 with `packing` `gguf:NAME`; NVFP4 weights that have a scale of the whole (`NAME.scale`)
    are of two parts. `metadata` holds `gguf` (all key-values; arrays as lists)
    and `architecture`.

    Raises:
        FormatError: the header is truncated, hostile, or of an unsupported version.
        UsageError: an iteration is requested.
    """
    if iteration is not None:
        raise UsageError(
            f"GGUF files have no iterations, so there is no iteration {iteration}", file=path
        )
    file = StoredFile.stat(path, "")
    header = read_header(path, file.size)
    count = header.values.get("split.count", 1)
    if type(count) is int and count > 1:
        return _open_parts(path, count)
    return _catalogue(path, [file], [header])


def open_as_stored(path: Path) -> Catalogue:
    """The catalogue of one file with every stored tensor as one of its own.

    Raises:
        FormatError: the header is truncated, hostile, or of an unsupported version.
    """
    file = StoredFile.stat(path, "")
    return _catalogue(path, [file], [read_header(path, file.size)], as_stored=True)


def _open_parts(path: Path, count: int) -> Catalogue:
    match = _PART.fullmatch(path.name)
    if not match or int(match[3]) != count or count > _MAX_PARTS:
        raise FormatError(
            f"is one of {count} parts, but its name does not have the part number",
            file=path,
            hint="give split files the names llama.cpp wrote: NAME-00001-of-00003.gguf",
        )
    files, headers = [], []
    for part in range(count):
        name = f"{match[1]}-{part + 1:05d}-of-{count:05d}.gguf"
        check_inside(path.parent, name)
        files.append(StoredFile.stat(path.parent, name))
        headers.append(read_header(path.parent / name, files[-1].size))
        values = headers[-1].values
        declared = (values.get("split.no"), values.get("split.count"))
        if declared != (part, count):
            raise FormatError(
                f"is declared as part {declared[0]} of {declared[1]} (counted from 0)",
                file=path.parent / name,
                hint="parts are swapped, or belong to different models",
            )
    total = headers[0].values.get("split.tensors.count")
    count_in_files = sum(len(h.entries) for h in headers)
    if total is not None and total != count_in_files:
        raise FormatError(
            f"{total} tensors are expected in all parts, {count_in_files} are present",
            file=path,
            hint="a part belongs to another model",
            error_id="missing-shard",
        )
    return _catalogue(path.parent, files, headers)


def _catalogue(
    root: Path, files: list[StoredFile], headers: list[GgufHeader], *, as_stored: bool = False
) -> Catalogue:
    entries: list[tuple[int, int, GgufEntry]] = [
        (row, h.start + e.offset, e)
        for row, h in enumerate(headers)
        for e in sorted(h.entries, key=lambda e: e.offset)
    ]
    packed, ignored = (
        ({}, {})
        if as_stored
        else _pair_scales(entries, [root / f.path if f.path else root for f in files])
    )
    entries = [e for e in entries if e[2].tensor.name not in ignored]
    tensors = [
        replace(e.tensor, packing=NVFP4_BLOCKS) if e.tensor.name in packed else e.tensor
        for _, _, e in entries
    ]
    file = np.array([row for row, _, _ in entries], np.int32)
    shapes = padded_shapes(tensors, widest(tensors))
    values: dict[str, Any] = headers[0].values
    out = Catalogue(
        format="gguf",
        root=root,
        files=files,
        tensors=tensors,
        shards=Shards(
            np.arange(len(tensors), dtype=np.int32), Boxes(np.zeros_like(shapes), shapes), file
        ),
        extents=Extents(
            file=file,
            offset=np.array([offset for _, offset, _ in entries], np.int64),
            length=np.array([e.num_bytes for _, _, e in entries], np.int64),
        ),
        metadata={"gguf": values, "architecture": values.get("general.architecture")},
        packed=packed,
        ignored=list(ignored.values()),
    )
    out.check()
    return out


def _pair_scales(
    entries: Sequence[tuple[int, int, GgufEntry]], paths: Sequence[Path]
) -> tuple[dict[str, tuple[StoredPart, ...]], dict[str, IgnoredTensor]]:
    """The parts of NVFP4 weights that a tensor `NAME.scale` multiplies, of one number or one for
    each expert; and the tensors that are none of the model's, by name.

    Source: `_nvfp4_pack` of llama.cpp's conversion/base.py.

    Raises:
        FormatError: a scale has another shape.
    """
    by_name = {e.tensor.name: (file, start, e) for file, start, e in entries}
    packed: dict[str, tuple[StoredPart, ...]] = {}
    ignored: dict[str, IgnoredTensor] = {}

    def ignore(entry: GgufEntry, reason: str) -> None:
        name = entry.tensor.name
        ignored[name] = IgnoredTensor(name=name, reason=reason, num_bytes=entry.num_bytes)

    for file, start, entry in entries:
        e = entry.tensor
        if e.packing != NVFP4_ROWS or not e.name.endswith(".weight"):
            continue
        stem = e.name.removesuffix("weight")
        if (activation := by_name.get(f"{stem}input_scale")) is not None:
            ignore(activation[2], "the scale of its inputs")
        scale = by_name.get(f"{stem}scale")
        if scale is None:
            continue
        factor = scale[2].tensor
        of_experts = len(e.shape) > 2 and factor.shape == e.shape[:1]
        if factor.dtype.name != "float32" or not (of_experts or factor.shape == (1,)):
            raise FormatError(
                f"{factor.name!r}, the scale of a weight {list(e.shape)}, is {factor.dtype} "
                f"{list(factor.shape)}",
                file=paths[file],
                tensor=e.name,
                hint="one float32 number for the weight, or one for each expert",
            )
        elements, num_bytes = block("NVFP4")
        last = len(e.shape) - 1
        codes = PackedPart(
            role=CODES,
            dtype="uint8",
            shape=(*e.shape[:-1], e.shape[-1] // elements, num_bytes),
            spans=(
                *(PartSpan(d) for d in range(last)),
                PartSpan(last, elements),
                PartSpan(WHOLE),
            ),
        )
        whole = PackedPart(
            role=SCALE,
            dtype="float32",
            shape=factor.shape,
            spans=(PartSpan(0 if of_experts else WHOLE),),
        )
        ignore(scale[2], f"it is part of {e.name}")
        packed[e.name] = (
            StoredPart(part=codes, file=file, offset=start),
            StoredPart(part=whole, file=scale[0], offset=scale[1]),
        )
    return packed, ignored
