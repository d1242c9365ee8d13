"""Auxiliary files of a checkpoint folder, copied with the tensors: config, tokenizer."""

from __future__ import annotations

from pathlib import Path

from megtool.digests.crc32c import SIDECAR
from megtool.errors import FormatError
from megtool.formats.header_reader import list_names, stays_inside
from megtool.pickles.small_files import PICKLE_SUFFIXES, is_pickle_file
from megtool.storage.files import Files, is_regular_file
from megtool.storage.stores.json_size import MAX_PARSED_BYTES, estimate_parsed_bytes

MAX_AUXILIARY_BYTES = 64 << 20
_JSON_HINT = "no tokenizer or configuration is as large: fetch the file again"
MODELOPT_FOLDER = "modelopt_state"
"""A nested checkpoint in which ModelOpt stores its changes to the model."""

NEMO_1_CONFIG = "model_config.yaml"
"""The settings of a model that NeMo 1 saved, beside the folder of its weights."""

_FOLDERS = ("additional_chat_templates",)
_MEGATRON_FOLDERS = ("hf", "tokenizer", "context", MODELOPT_FOLDER)
_MEGATRON_FILES = ("run_config.yaml", "train_state.pt")
_PICKLED = ("context/", f"{MODELOPT_FOLDER}/", "train_state.pt")
_EXCLUDED_SUFFIXES = (
    *PICKLE_SUFFIXES,
    ".safetensors",
    ".index.json",
    ".bin",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
)


def find_auxiliary_files(folder: Path, warnings: list[str]) -> dict[str, Path]:
    """Auxiliary files by path relative to `folder`, with a warning for each that cannot be copied.

    Skipped silently: dot files, digests of megtool, subfolders (except chat templates), and files
    of tensors or their index. Skipped with a warning: files over `MAX_AUXILIARY_BYTES`, and links
    that leave the folder.
    """
    out: dict[str, Path] = {}
    names = list_names(folder)
    for place in [n for n in _FOLDERS if (folder / n).is_dir()]:
        names += [f"{place}/{n}" for n in list_names(folder / place)]
    for name in sorted(names):
        path = folder / name
        if (
            path.name.startswith(".")
            or path.name == SIDECAR
            or name.endswith(_EXCLUDED_SUFFIXES)
            or not is_regular_file(path)
        ):
            continue
        if can_copy(folder, name, warnings):
            out[name] = path
    return out


def find_megatron_auxiliary_files(folder: Path, warnings: list[str]) -> dict[str, Path]:
    """Auxiliary files of one iteration of a Megatron checkpoint, by path relative to `folder`."""
    out: dict[str, Path] = {}
    places = [p for name in _MEGATRON_FOLDERS for p in list_files(folder / name)]
    for path in [*places, *(folder / name for name in _MEGATRON_FILES)]:
        if not is_regular_file(path):
            continue
        name = path.relative_to(folder).as_posix()
        if can_copy(folder, name, warnings):
            out[name] = path
    return out


def list_files(folder: Path) -> list[Path]:
    """All files below a folder, which may be missing, sorted.

    Raises:
        FormatError: one is a FIFO, a socket or a device.
        StorageError: a folder cannot be read.
    """
    return sorted(Files().tree(folder)[0]) if folder.is_dir() else []


def can_copy(folder: Path, name: str, warnings: list[str]) -> bool:
    """Whether a file can be copied; warns if not.

    It is small, no link out of the folder, and no pickle, except where Megatron, NeMo and ModelOpt
    have some.
    """
    if not stays_inside(folder, name):
        warnings.append(f"{name} is left out: a link that leaves the folder")
    elif (folder / name).stat().st_size > MAX_AUXILIARY_BYTES:
        warnings.append(f"{name} is left out: larger than {MAX_AUXILIARY_BYTES >> 20} MiB")
    elif not has_pickles(name) and is_pickle_file(folder / name):
        warnings.append(f"{name} is left out: a pickle, which runs code when it is loaded")
    else:
        return True
    return False


def check_json_size(data: bytes | int, file: str | Path) -> None:
    """Refuse a small JSON file that would take gigabytes when it is parsed.

    `data` is its contents, or its size alone, so that a file that is too large is never read.

    Raises:
        FormatError: it has too many bytes, or too many values.
    """
    size = data if isinstance(data, int) else len(data)
    if size > MAX_AUXILIARY_BYTES:
        raise FormatError(
            f"the file has {size:,} bytes, more than the {MAX_AUXILIARY_BYTES:,} that are read",
            file=file,
            hint=_JSON_HINT,
        )
    if isinstance(data, bytes) and (parsed := estimate_parsed_bytes(data)) > MAX_PARSED_BYTES:
        raise FormatError(
            f"the values of the JSON take about {parsed >> 20:,} MiB, more than the "
            f"{MAX_PARSED_BYTES >> 20} that are allowed",
            file=file,
            hint=_JSON_HINT,
        )


def has_pickles(name: str) -> bool:
    """Whether an auxiliary file is where Megatron, NeMo and ModelOpt store pickles."""
    return name.startswith(_PICKLED)
