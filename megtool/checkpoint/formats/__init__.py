"""Formats on disk: which there are, and which one a path holds."""

from __future__ import annotations

import importlib
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.storage.files import Files
from megtool.errors import FormatError, UsageError


class FormatModule(Protocol):
    """What the module of a format offers; those that can be written also have `lay_out`."""

    def detect(self, path: Path) -> bool:
        """Whether the path looks like this format; reads a few bytes at most."""

    def open_checkpoint(self, path: Path, *, iteration: int | str | None = None) -> Catalogue:
        """The catalogue of the checkpoint, from its headers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format, or two that share a module: `names` are what `--to` and `Catalogue.format` say.

    `marks` says what a path of this format shows, for the message when none does.
    """

    names: tuple[str, ...]
    module: str
    marks: str
    writable: bool = True

    def load(self) -> FormatModule:
        """The module that reads (and writes) the format; imported at first use."""
        return cast(FormatModule, importlib.import_module(self.module))


FORMATS: tuple[Format, ...] = (
    Format(
        names=("torch_dist", "dcp"),
        module="megtool.checkpoint.formats.torch_dist",
        marks="a Megatron save folder or a folder with .metadata",
    ),
    Format(
        names=("gguf",),
        module="megtool.checkpoint.formats.gguf",
        marks="a .gguf file",
        writable=False,
    ),
    Format(
        names=("hf", "safetensors"),
        module="megtool.checkpoint.formats.safetensors",
        marks="a folder with config.json or *.safetensors, or one .safetensors file",
    ),
)


def open_checkpoint(path: str | Path, *, iteration: int | str | None = None) -> Catalogue:
    """The catalogue of whatever checkpoint `path` holds; `iteration` chooses one of a save folder.

    Raises:
        FormatError: there is no checkpoint that megtool knows, or it is broken.
    """
    path = Path(path)
    return detect_format(path).load().open_checkpoint(path, iteration=iteration)


def detect_format(path: Path) -> Format:
    """The first of `FORMATS` that recognises `path`.

    Raises:
        FormatError: none does, or nothing is there.
    """
    found = Files().stat(path)
    if found is None:
        raise FormatError("does not exist", file=path, hint="check the path")
    for one in FORMATS:
        if one.load().detect(path):
            return one
    names = Files().names(path) if stat.S_ISDIR(found.st_mode) else []
    files = [n for n in names if n.endswith(".gguf")]
    raise FormatError(
        "not a checkpoint: looked for " + "; ".join(f.marks for f in FORMATS),
        file=path,
        hint=f"name the file: {path / files[0]}" if files else "give the folder that holds it",
    )


def named(name: str) -> Format:
    """The format called `name`.

    Raises:
        UsageError: there is none.
    """
    for one in FORMATS:
        if name in one.names:
            return one
    known = ", ".join(n for f in FORMATS for n in f.names if f.writable)
    raise UsageError(f"unknown format {name!r}", hint=f"known: {known}")
