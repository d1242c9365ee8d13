"""Open staged files by their headers, before the commit, whatever verb has written them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megtool.errors import FormatError, MegtoolError, StorageError, listed
from megtool.plan.copies import ReshardPlan
from megtool.source.foreign_tensors import find_foreign_tensors
from megtool.staging.stage import Stage
from megtool.tensors.catalogue import Catalogue

READBACK_HINT = "nothing was put in place; run the command again, and check memory and disk"
_STATE_HINT = "nothing was put in place; --exclude NAME leaves the tensor out"
_SAFETENSORS, _GGUF = ".safetensors", ".gguf"


class _Entry(NamedTuple):
    """A tensor as a header describes it."""

    name: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]


def check_headers(plan: ReshardPlan, stage: Stage) -> None:
    """Open every staged file of safetensors and GGUF, and find the tensors that were planned in it.

    Headers are read, and extra states, which loaders unpickle. Files of other formats are skipped:
    only all of them together say what they hold.

    Raises:
        FormatError: a file cannot be read back, or has other tensors; the staged data is discarded.
    """
    try:
        for path, planned in _planned_files(plan, stage):
            _check_file(path, planned)
    except FormatError:
        stage.discard()
        raise


def refuse_foreign_states(catalogue: Catalogue) -> None:
    """Refuse a staged checkpoint with an extra state that runs code when it is loaded.

    Raises:
        FormatError: it has one.
    """
    for name, file, problems in find_foreign_tensors(catalogue):
        raise FormatError(
            f"not written, because loading it could run code: {listed(problems)}",
            file=file,
            tensor=name,
            hint=_STATE_HINT,
            error_id="hostile-pickle",
        )


def _planned_files(plan: ReshardPlan, stage: Stage) -> Iterator[tuple[Path, set[_Entry]]]:
    """Every staged file whose header lists its tensors, with what was planned in it."""
    catalogue = plan.target.catalogue
    for number, file in enumerate(catalogue.files):
        path = stage.path("" if stage.is_file else file.path)
        if path.suffix in (_SAFETENSORS, _GGUF):
            yield path, set(_entries(catalogue, number))


def _entries(catalogue: Catalogue, number: int) -> Iterator[_Entry]:
    extents = catalogue.extents
    for row in np.flatnonzero(extents.file == number).tolist():
        tensor = catalogue.tensors[int(catalogue.shards.tensor[row])]
        yield _Entry(
            tensor.name,
            int(extents.offset[row]),
            int(extents.length[row]),
            tensor.dtype.name,
            tensor.shape,
        )


def _open_gguf(path: Path) -> Catalogue:
    from megtool.formats.gguf.reader import open_as_stored

    return open_as_stored(path)


def _open_safetensors(path: Path) -> Catalogue:
    from megtool.formats.safetensors.reader import open_as_stored

    return open_as_stored(path)


def _check_file(path: Path, planned: set[_Entry]) -> None:
    """Compare the header of a file with its plan.

    GGUF's codes are planned as bytes, and a rank's file of TensorRT-LLM under names that begin with
    the rank, with experts as rows, so fewer columns are compared there.
    """
    is_gguf = path.suffix == _GGUF
    try:
        opened = _open_gguf(path) if is_gguf else _open_safetensors(path)
    except StorageError:  # says nothing of what was written
        raise
    except MegtoolError as e:
        raise FormatError(
            f"what was written cannot be read back: {e.message}", file=path, hint=READBACK_HINT
        ) from e
    prefix = f"{path.stem}/"
    stored = {e[:n] for e in _entries(opened, 0) for n in (3, 4, 5)}
    for entry in sorted(planned):
        width = 3 if is_gguf else 4 if entry.name.startswith(prefix) else 5
        if (entry.name.removeprefix(prefix), *entry[1:width]) not in stored:
            raise FormatError(
                f"it was written as {list(entry.shape)} {entry.dtype} at byte {entry.offset:,}, "
                "and the header that is read back does not say so",
                file=path,
                tensor=entry.name,
                hint=READBACK_HINT,
            )
    refuse_foreign_states(opened)
