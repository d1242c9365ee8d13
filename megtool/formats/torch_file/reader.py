"""One file of `torch.save` with a model's state dict in it (`torch_file`; read only).

`.pt`, `.pth`, `.bin` and `.ckpt` of any program: the state dict may be all of the file, or lie
under keys (`model`, `state_dict`, `app.model`), which the names of its tensors then begin with.
"""

from __future__ import annotations

import re
from pathlib import Path

from megtool.errors import UsageError
from megtool.formats.header_reader import read_start
from megtool.formats.state_dict_file import make_catalogue, read_state_dict_file
from megtool.pickles.storage_stream import STREAM_MAGIC
from megtool.tensors.catalogue import Catalogue

_ZIP_START = re.compile(
    rb"PK\x03\x04.{26}[^/]*/(?:data\.pkl|\.format_version|byteorder)", re.DOTALL
)
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_HEAD_BYTES = 512


def detect(path: Path) -> bool:
    """Detect a file of `torch.save`, by its suffix or its first bytes."""
    if not path.is_file():
        return False
    if path.name.lower().endswith(_SUFFIXES):
        return True
    head = read_start(path, _HEAD_BYTES)
    return head.startswith(STREAM_MAGIC) or _ZIP_START.match(head) is not None


def open_checkpoint(path: Path, *, iteration: int | str | None = None) -> Catalogue:
    """The catalogue of the tensors of a file, by their keys joined with dots.

    Which model it is has to be said: the file does not. Tensors in lists or under numbers, such as
    those of an optimizer, are `ignored`.

    Raises:
        FormatError: the file is damaged or hostile, or holds no state dict.
        UsageError: an iteration is requested.
    """
    if iteration is not None:
        raise UsageError(
            f"a file has no iterations, so there is no iteration {iteration}",
            file=path,
            hint="leave out --iteration",
        )
    part = read_state_dict_file(path, "")
    return make_catalogue("torch_file", path, [part], metadata={}, auxiliary_files={}, warnings=[])
