"""Find a tokenizer in a folder, or in a checkpoint of any format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megtool.errors import FormatError
from megtool.formats import open_checkpoint
from megtool.storage.location.path import location
from megtool.tensors.catalogue import Catalogue

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer

_FOLDERS = ("hf/", "tokenizer/")
"""Folders in which Megatron checkpoints have Hugging Face files, or a saved tokenizer."""


def find_tokenizer(place: str | Path, *, iteration: int | str | None = None) -> Tokenizer:
    """The tokenizer in a folder of tokenizer files, or the one of a checkpoint of any format.

    Raises:
        FormatError: there is none, or one that cannot be read.
        MissingPackageError: transformers, or what it needs for these files, is missing.
    """
    from megtool.data.tokenizer import Tokenizer, holds_vocabulary

    path = location(place)
    if path.is_dir() and any(holds_vocabulary(p.name) for p in path.iterdir() if p.is_file()):
        return Tokenizer.from_folder(path)
    return load_tokenizer(open_checkpoint(path, iteration=iteration))


def load_tokenizer(catalogue: Catalogue) -> Tokenizer:
    """The tokenizer that an open checkpoint carries.

    Raises:
        FormatError, MissingPackageError: as `find_tokenizer`.
    """
    from megtool.data.tokenizer import Tokenizer

    try:
        return Tokenizer.load(find_tokenizer_files(catalogue))
    except FormatError as e:
        raise FormatError(
            e.message, file=e.file or catalogue.root, hint=e.hint, error_id=e.error_id
        ) from e


def find_tokenizer_files(catalogue: Catalogue) -> dict[str, Path | bytes]:
    """The small files of a model's Hugging Face folder, or those made from a GGUF tokenizer."""
    if "tokenizer.ggml.tokens" in catalogue.metadata.get("gguf", ()):
        from megtool.formats.gguf.tokenizer import convert_gguf_tokenizer as made

        return dict(made(catalogue.root))
    files = catalogue.auxiliary_files
    out: dict[str, Path | bytes] = {n: p for n, p in files.items() if "/" not in n}
    for folder in reversed(_FOLDERS):
        out |= {n.removeprefix(folder): p for n, p in files.items() if n.startswith(folder)}
    return out
