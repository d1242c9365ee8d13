"""Recognize folders of zarr arrays, and find one in a save folder."""

from __future__ import annotations

from pathlib import Path

from megtool.errors import FormatError
from megtool.formats.header_reader import check_inside, parse_json, read_exact
from megtool.formats.save_folder import find_iteration

V2_NAME, V3_NAME = ".zarray", "zarr.json"
BACKEND = "zarr3"
"""The `sharded_backend` in `metadata.json`; no Megatron version uses this name."""

COMMON = "common.pt"
MANIFEST = "manifest.ocdbt"

_GROUPS = (V3_NAME, V2_NAME, ".zgroup", ".zmetadata")
_ITERATIONS = ("weights", "model_weights")


def detect(path: Path) -> bool:
    """Whether `path` is such a folder, or a save folder whose selected iteration is one."""
    if not path.is_dir():
        return False
    folder = find_array_folder(path, None)
    return (
        saved_backend(folder) in ("zarr", BACKEND)
        or is_unfinished(folder)
        or any((folder / n).is_file() for n in _GROUPS)
        or is_database(folder)
    )


def is_database(folder: Path) -> bool:
    """Whether a folder is an OCDBT database."""
    return (folder / MANIFEST).is_file()


def find_array_folder(path: Path, iteration: int | str | None) -> Path:
    """The folder of arrays: `path`, an iteration below it, or NeMo's `weights`."""
    if iteration is None and (saved_backend(path) or any((path / n).is_file() for n in _GROUPS)):
        return path
    folder = find_iteration(path, iteration) or path
    for name in _ITERATIONS:
        if saved_backend(folder / name) in ("zarr", BACKEND):
            return folder / name
    return folder


def is_unfinished(folder: Path) -> bool:
    """Whether Megatron's zarr backend was interrupted while it wrote this folder."""
    if (folder / "metadata.json").exists() or not (folder / COMMON).is_file():
        return False
    return next(folder.glob(f"*/{V2_NAME}"), None) is not None


def saved_backend(folder: Path) -> str | None:
    """The `sharded_backend` in `metadata.json`; None if there is none."""
    path = folder / "metadata.json"
    if not path.is_file():
        return None
    check_inside(folder, path.name)
    data = read_exact(path, 0, min(path.stat().st_size, 1 << 20))
    try:
        config = parse_json(data, path)
    except FormatError:
        return None
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    return backend if isinstance(backend, str) else None
