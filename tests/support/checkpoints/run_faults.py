"""Faults planted into the saves of a run: edits of tensors and objects of torch_dist folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from megtool.formats import open_checkpoint
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader

Edit = Callable[[dict[str, Any]], None]


def load(folder: Path) -> dict[str, Any]:
    """All tensors and objects of a DCP folder, by name."""
    values: dict[str, Any] = {}
    _load_state_dict(
        values,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return values


def edit(folder: Path, change: Edit) -> None:
    """Load a DCP folder, change its values, and write it again with torch alone."""
    values = load(folder)
    change(values)
    kept = {
        p.name: p.read_bytes()
        for p in folder.iterdir()
        if p.is_file() and p.suffix != ".distcp" and p.name not in (".metadata", "megtool.json")
    }
    for path in [*folder.glob("*.distcp"), folder / ".metadata", folder / "megtool.json"]:
        path.unlink(missing_ok=True)
    dcp.save(values, checkpoint_id=folder, no_dist=True)
    for name, data in kept.items():
        (folder / name).write_bytes(data)


def poke(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the elements of a stored tensor where they are, in all its shards."""
    write(folder, name, change(read(folder, name)))


def read(folder: Path, name: str) -> torch.Tensor:
    """A stored tensor, as a copy."""
    catalogue = open_checkpoint(folder)
    with CheckpointReader(catalogue, Files()) as reader:
        array = reader.open_stored(name).read().copy()
    return torch.from_numpy(array).view(getattr(torch, catalogue[name].dtype.name))


def write(folder: Path, name: str, value: torch.Tensor) -> None:
    """Put elements into the shards of a stored tensor; its digests are removed."""
    catalogue = open_checkpoint(folder)
    bits = value.contiguous().view(torch.uint8).numpy().reshape(*value.shape[:-1], -1)
    item = value.element_size()
    rows = catalogue.shards.of(catalogue.index[name])
    offsets = catalogue.locate(np.arange(rows.start, rows.stop)).offset.tolist()
    for row, offset in zip(range(rows.start, rows.stop), offsets, strict=True):
        n = len(value.shape)
        lo, hi = (
            x[row, :n].tolist() for x in (catalogue.shards.boxes.lo, catalogue.shards.boxes.hi)
        )
        box = [slice(a, b) for a, b in zip(lo, hi, strict=True)]
        box[-1] = slice(lo[-1] * item, hi[-1] * item)
        with catalogue.path(int(catalogue.extents.file[row])).open("r+b") as file:
            file.seek(offset)
            file.write(np.ascontiguousarray(bits[tuple(box)]).tobytes())
    (folder / "megtool.json").unlink(missing_ok=True)


def edit_common(folder: Path, change: Edit) -> None:
    """Change the common state of a Megatron folder."""
    values = torch.load(folder / "common.pt", weights_only=False)
    change(values)
    torch.save(values, folder / "common.pt")


def copy_tensors(source: Path, target: Path, names: Callable[[str], bool]) -> None:
    """Give `target` the tensors of `source` whose names are chosen."""
    for tensor in open_checkpoint(source).tensors:
        if names(tensor.name):
            write(target, tensor.name, read(source, tensor.name))


def replace_folder(source: Path, target: Path) -> None:
    """Give `target` all files of `source` but its common state: what a stale saver writes."""
    common = (target / "common.pt").read_bytes()
    shutil.rmtree(target)
    shutil.copytree(source, target)
    (target / "common.pt").write_bytes(common)


def tensor_names(folder: Path) -> list[str]:
    """The names of all stored tensors."""
    return [t.name for t in open_checkpoint(folder).tensors]
