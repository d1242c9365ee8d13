"""What folders hold: tensors, files, times of change and staging folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

if TYPE_CHECKING:
    import torch


def stored_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor in a folder of safetensors, or in one file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {
        name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
        for file in files
        for name, t in safetensors.deserialize(file.read_bytes())
    }


def torch_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a folder of safetensors, as torch has it."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes] | None:
    """Contents of all files below a folder (of the file itself); None where there is nothing."""
    if not folder.exists():
        return None
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def file_states(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Contents, mode and time of change of all files: what a source must keep."""
    return {
        os.fspath(p.relative_to(folder)): (p.read_bytes(), s.st_mode, s.st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file() and (s := p.stat())
    }


def staging_folders(folder: Path) -> Iterable[str]:
    """Names of staging folders in `folder`."""
    return sorted(p.name for p in folder.glob(".*.megtool"))


Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def read_config(folder: Path) -> dict[str, Any]:
    """Its config.json."""
    loaded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return loaded


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], *, parts: int = 1
) -> Path:
    """A Hugging Face folder of torch tensors, in one file or in `parts` with an index."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if parts == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        chosen = {n: tensors[n] for n in names[part::parts]}
        save_file(chosen, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
