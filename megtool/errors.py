"""Every error megtool raises on purpose: one sentence, where it is, and a hint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class MegtoolError(Exception):
    """A failure megtool can explain.

    `message` is one sentence holding the offending value, `file` and `tensor` say where, `hint`
    says what to do next. `exit_status` is what the command line returns for the class.
    """

    exit_status = 1

    def __init__(
        self,
        message: str,
        *,
        file: str | Path | None = None,
        tensor: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.hint = hint

    def __str__(self) -> str:
        where = [f"file {self.file}"] if self.file else []
        where += [f"tensor {self.tensor}"] if self.tensor else []
        text = self.message + (f" [{', '.join(where)}]" if where else "")
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class UsageError(MegtoolError):
    """The command line or the call asks for something that makes no sense."""

    exit_status = 2


class LayoutError(UsageError):
    """The parallel layout asked for does not divide the model."""


class OutOfMemoryError(MegtoolError):
    """More memory is needed than there is; the message says how much, the hint what needs less.

    No `UsageError`, which all ranks meet alike: it may be that of a single one.
    """

    exit_status = 2


class DestinationError(UsageError):
    """The destination exists, is locked, cannot be written, or lies inside the source."""


class CheckpointError(MegtoolError):
    """A checkpoint cannot be read or written as it is."""

    exit_status = 3


class FormatError(CheckpointError):
    """Bytes on disk do not follow the format they claim: truncated, corrupt or hostile."""


class CoverageError(CheckpointError):
    """Shards leave a hole, overlap, or lie outside their tensor."""


class DigestError(CheckpointError):
    """Bytes differ from the digest recorded for them."""


class SourceChangedError(CheckpointError):
    """A source file changed while it was being read."""


class StorageError(CheckpointError):
    """The operating system refused a read or a write: full disk, quota, I/O error."""


class RecipeError(MegtoolError):
    """A recipe that says something impossible; the message lists every problem with its line."""

    exit_status = 4


class CalibrationError(MegtoolError):
    """Activations, or what was kept of them, cannot be used: NaN, none, or another model's."""

    exit_status = 4


class TrainingError(MegtoolError):
    """Training cannot go on: a loss or a gradient is no finite number, or its DST is another's."""

    exit_status = 8


class MappingError(MegtoolError):
    """Tensors cannot be mapped: unknown family, missing or left-over names, wrong shapes."""

    exit_status = 5


class UnknownFamilyError(MappingError):
    """Nothing says which model family this is, or no family is called so."""


class UnknownTensorsError(MappingError):
    """Stored tensors that no line of a table knows."""


class MissingPackageError(MegtoolError):
    """An optional package or a device is missing; the hint holds the exact `pip install`."""

    exit_status = 6


class GraphRuleError(MegtoolError):
    """A function does what a captured graph of device work cannot repeat."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names for a message: the first of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
