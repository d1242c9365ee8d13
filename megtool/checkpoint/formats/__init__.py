"""The checkpoint formats, and detection of the format of a path."""

from __future__ import annotations

import importlib
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, cast

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.storage.files import Files
from megtool.errors import FormatError, UsageError


class FormatModule(Protocol):
    """The functions of a format's module.

    A module of a writable format also has a `plan_*_layout`, which returns a `Destination`; its
    arguments differ, and its writer in `reshard/writers/` calls it.
    """

    def detect(self, path: Path) -> bool:
        """Whether the path looks like this format; reads a few bytes at most."""

    def open_checkpoint(self, path: Path, *, iteration: int | str | None = None) -> Catalogue:
        """The catalogue of the checkpoint, from its headers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """One format, or several that share a module; `--to` and `Catalogue.format` use its `names`.

    `description` is for the error message if no format matches. `name_patterns` and `is_file` are a
    quick filter: `detect` is called only for folders with a name that matches a pattern, and for
    files if `is_file`.
    """

    names: tuple[str, ...]
    module: str
    description: str
    name_patterns: tuple[str, ...] = ()
    is_file: bool = False
    writable: bool = True

    def may_match(self, names: Sequence[str] | None) -> bool:
        """Whether a folder with these names, or a file (None), may have this format."""
        if names is None:
            return self.is_file
        return any(fnmatchcase(n, p) for p in self.name_patterns for n in names)

    def load(self) -> FormatModule:
        """The module that reads (and writes) the format; imported at first use."""
        return cast(FormatModule, importlib.import_module(self.module))


RANK_SHARDED_FORMATS = ("torch_dist", "dcp", "megatron")
"""Formats whose files hold the shards of ranks; the others hold whole tensors."""

ARRAY_FORMATS = ("zarr", "tensorstore", "ocdbt")
"""Formats with one array per tensor, in folders or in one database."""

HF_SUBFOLDER_FORMATS = (*RANK_SHARDED_FORMATS, *ARRAY_FORMATS)
"""Formats that store the small files of Hugging Face in a subfolder `hf/`."""

FORMATS: tuple[CheckpointFormat, ...] = (
    CheckpointFormat(
        names=ARRAY_FORMATS,
        module="megtool.checkpoint.formats.zarr",
        description="a folder of zarr arrays",
        name_patterns=(
            "zarr.json",
            ".zgroup",
            ".zarray",
            ".zmetadata",
            "manifest.ocdbt",
            "metadata.json",
            "common.pt",
            "iter_*",
            "release",
            "weights",
        ),
    ),
    CheckpointFormat(
        names=("torch_dist", "dcp"),
        module="megtool.checkpoint.formats.torch_dist",
        description="a Megatron save folder or a folder with .metadata",
        name_patterns=(".metadata", "metadata.json", "*.distcp", "iter_*", "release", "weights"),
    ),
    CheckpointFormat(
        names=("megatron",),
        module="megtool.checkpoint.formats.megatron_legacy",
        description="a folder with mp_rank_* folders",
        name_patterns=("mp_rank_*", "iter_*", "release"),
    ),
    CheckpointFormat(
        names=("gguf",),
        module="megtool.checkpoint.formats.gguf",
        description="a .gguf file",
        is_file=True,
        writable=False,
    ),
    CheckpointFormat(
        names=("deepspeed",),
        module="megtool.checkpoint.formats.deepspeed",
        description="a DeepSpeed folder global_step*",
        name_patterns=("global_step*", "*_model_states.pt", "zero"),
        writable=False,
    ),
    CheckpointFormat(
        names=("hf", "safetensors"),
        module="megtool.checkpoint.formats.safetensors",
        description="a folder with config.json or *.safetensors, or one .safetensors file",
        name_patterns=("config.json", "*.safetensors*"),
        is_file=True,
    ),
)


def open_checkpoint(path: str | Path, *, iteration: int | str | None = None) -> Catalogue:
    """Open the checkpoint at `path`, of any format; `iteration` chooses one of a save folder.

    Raises:
        FormatError: there is no checkpoint in a known format, or it is damaged.
    """
    path = Path(path)
    checkpoint_format = detect_format(path)
    if iteration is not None and "iter_*" in checkpoint_format.name_patterns:
        # Iterations of one save folder may be of different formats.
        from megtool.checkpoint.formats.save_folder import find_iteration

        path = find_iteration(path, iteration) or path
        checkpoint_format = detect_format(path)
    return checkpoint_format.load().open_checkpoint(path, iteration=iteration)


def detect_format(path: Path) -> CheckpointFormat:
    """The first of `FORMATS` that recognizes `path`.

    Raises:
        FormatError: none does, or the path does not exist.
    """
    status = Files().stat(path)
    if status is None:
        raise FormatError(
            "does not exist", file=path, hint="check the path", error_id="source-not-found"
        )
    names = Files().names(path) if stat.S_ISDIR(status.st_mode) else None
    for checkpoint_format in FORMATS:
        if checkpoint_format.may_match(names) and checkpoint_format.load().detect(path):
            return checkpoint_format
    files = [n for n in names or () if n.endswith(".gguf")]
    raise FormatError(
        "it is not a checkpoint: megtool looked for " + "; ".join(f.description for f in FORMATS),
        file=path,
        hint=f"name the file: {path / files[0]}" if files else "give the folder that holds it",
        error_id="not-a-checkpoint",
    )


def find_format(name: str) -> CheckpointFormat:
    """The format called `name`.

    Raises:
        UsageError: there is none.
    """
    for checkpoint_format in FORMATS:
        if name in checkpoint_format.names:
            return checkpoint_format
    writable = ", ".join(n for f in FORMATS for n in f.names if f.writable)
    raise UsageError(f"there is no format {name!r}", hint=f"writable: {writable}")
