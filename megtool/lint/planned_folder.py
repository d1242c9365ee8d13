"""Planned: a folder as it will be, for the rules of lint before a byte of it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.formats.quantized import QUANT_FILE
from megtool.quant.verification.stored_folder import TOKENIZERS, Folder, StoredTensor

Tiles = Callable[[str], Iterator[NDArray[np.float32]]]


def _nothing(name: str) -> Iterator[NDArray[np.float32]]:
    return iter(())


@dataclass(slots=True, kw_only=True)
class PlannedFolder(Folder):
    """`elements` gives the numbers of a small tensor by its name, `names` are its small files."""

    elements: Tiles = _nothing
    names: set[str] = field(default_factory=set)

    @property
    def has_tokenizer(self) -> bool:
        """A file of a tokenizer will be there."""
        return not self.names.isdisjoint(TOKENIZERS)

    def tiles(self, tensor: StoredTensor) -> Iterator[NDArray[np.float32]]:
        """See `Folder`."""
        return self.elements(tensor.name)


def planned_folder(
    path: Path,
    catalogue: Catalogue,
    small: Iterable[tuple[str, bytes]],
    elements: Tiles = _nothing,
) -> PlannedFolder:
    """The Hugging Face folder that `catalogue` lays out at `path`, with its small files."""
    files = dict(small)
    out = PlannedFolder(path=path, elements=elements, names=set(files))
    out.config = _json("config.json", files, out)
    out.quant = _json(QUANT_FILE, files, out)
    for row, t in enumerate(catalogue.tensors):
        file = catalogue.path(int(catalogue.extents.file[row])).name
        tensor = StoredTensor(name=t.name, dtype=t.dtype.name, shape=t.shape, file=file)
        out.tensors[t.name] = tensor
        module, _, last = t.name.rpartition(".")
        out.modules.setdefault(module, {})[last] = tensor
    return out


def _json(name: str, files: dict[str, bytes], out: Folder) -> dict[str, Any] | None:
    if name not in files:
        out.faults.append((name, "is not there"))
        return None
    try:
        value = json.loads(files[name])
    except ValueError as e:
        out.faults.append((name, f"is no JSON: {e}"))
        return None
    if not isinstance(value, dict):
        out.faults.append((name, "is no JSON object"))
        return None
    return value
