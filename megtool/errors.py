"""Every error megtool raises on purpose: one sentence, where it is, a hint, and a stable id."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class MegtoolError(Exception):
    """A failure megtool can explain.

    `message` is one sentence holding the offending value, `file` and `tensor` say where, `hint`
    says what to do next. `id` does not change when a message does: a finer one of `ERROR_IDS` where
    a script may want to tell errors of a class apart, else `default_id`. `exit_status` is what the
    command line returns for the class.
    """

    exit_status = 1
    default_id = "failure"

    def __init__(
        self,
        message: str,
        *,
        file: str | Path | None = None,
        tensor: str | None = None,
        hint: str | None = None,
        error_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.error_id = error_id
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.hint = hint

    def add_hint(self, text: str) -> None:
        """Say one more thing on what to do next."""
        self.hint = f"{self.hint}; {text}" if self.hint else text

    @property
    def id(self) -> str:
        """What kind of error it is, such as `destination-exists`."""
        return self.error_id or self.default_id

    def to_json(self) -> dict[str, Any]:
        """The error as plain data."""
        return {
            "id": self.id,
            "message": self.message,
            "file": self.file,
            "tensor": self.tensor,
            "hint": self.hint,
            "exit_status": self.exit_status,
        }

    def __str__(self) -> str:
        where = [f"file {_in_one_line(self.file)}"] if self.file else []
        where += [f"tensor {_in_one_line(self.tensor)}"] if self.tensor else []
        text = self.message + (f" [{', '.join(where)}]" if where else "")
        return f"{text}\n  hint: {self.hint}" if self.hint else text


def _in_one_line(name: str) -> str:
    """Escape line breaks of a name, which would make lines of a message."""
    return "".join(repr(c)[1:-1] if c in _LINE_BREAKS else c for c in name)


_LINE_BREAKS = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")


class RunInterrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM has ended a run before its end; `hint` says what of it is saved."""

    def __init__(self, hint: str) -> None:
        super().__init__(hint)
        self.hint = hint


class UsageError(MegtoolError):
    """The command line or the call asks for something that makes no sense."""

    exit_status = 2
    default_id = "usage"


class LayoutError(UsageError):
    """The parallel layout asked for does not divide the model."""

    default_id = "layout"


class OutOfMemoryError(MegtoolError):
    """More memory is needed than there is; the message says how much, the hint what needs less.

    No `UsageError`, which all ranks meet alike: it may be that of a single one.
    """

    exit_status = 2
    default_id = "out-of-memory"


class DestinationError(UsageError):
    """The destination exists, is locked, cannot be written, or lies inside the source."""

    default_id = "destination"


class CheckpointError(MegtoolError):
    """A checkpoint cannot be read or written as it is."""

    exit_status = 3
    default_id = "checkpoint"


class FormatError(CheckpointError):
    """Bytes on disk do not follow the format they claim: truncated, corrupt or hostile."""

    default_id = "format"


class CoverageError(CheckpointError):
    """Shards leave a hole, overlap, or lie outside their tensor."""

    default_id = "coverage"


class DigestError(CheckpointError):
    """Bytes differ from the digest recorded for them."""

    default_id = "digest-mismatch"


class SourceChangedError(CheckpointError):
    """A source file changed while it was being read."""

    default_id = "source-changed"


class StorageError(CheckpointError):
    """The operating system or a store refused a read or a write: full disk, quota, I/O error."""

    default_id = "storage"

    @property
    def id(self) -> str:
        """What kind of error it is, by the code of the operating system."""
        code = self.__cause__.errno if isinstance(self.__cause__, OSError) else None
        return self.error_id or _STORAGE_IDS.get(code or 0, self.default_id)


class RecipeError(MegtoolError):
    """A recipe that says something impossible; the message lists every problem with its line."""

    exit_status = 4
    default_id = "recipe"


class CalibrationError(MegtoolError):
    """Activations, or what was kept of them, cannot be used: NaN, none, or another model's."""

    exit_status = 4
    default_id = "calibration"


class TrainingError(MegtoolError):
    """Training cannot go on: a loss or a gradient is no finite number, or its DST is another's."""

    exit_status = 8
    default_id = "training"


class MappingError(MegtoolError):
    """Tensors cannot be mapped: unknown family, missing or left-over names, wrong shapes."""

    exit_status = 5
    default_id = "mapping"


class UnknownFamilyError(MappingError):
    """Nothing says which model family this is, or no family is called so."""

    default_id = "unknown-family"


class UnknownTensorsError(MappingError):
    """Stored tensors that no line of a table knows."""

    default_id = "unknown-tensors"


class MissingPackageError(MegtoolError):
    """An optional package or a device is missing; the hint holds the exact `pip install`."""

    exit_status = 6
    default_id = "missing-package"


class GraphRuleError(MegtoolError):
    """A function does what a captured graph of device work cannot repeat."""

    default_id = "graph-rule"


_STORAGE_IDS = {
    errno.ENOSPC: "no-space",
    errno.EDQUOT: "no-space",
    errno.EACCES: "permission-denied",
    errno.EPERM: "permission-denied",
    errno.EROFS: "permission-denied",
}

ERROR_IDS: Mapping[type[MegtoolError], Mapping[str, str]] = {
    UsageError: {
        "option-without-effect": "an option could have no effect with the others, or on this model",
        "learned-rounding": "learned rounding runs in one process, and not on this model",
    },
    DestinationError: {
        "destination-exists": "the destination exists; `--overwrite` replaces it",
        "destination-locked": "another run is writing the destination",
        "destination-not-writable": "nothing can be written there",
        "destination-in-source": "source and destination are the same, or one contains the other",
        "unsafe-store": "a store ignores what a safe commit relies on; `--unsafe-store` takes it",
        "interrupted-run": "an interrupted run left something to look at",
        "foreign-workers": "workers of another run have begun to write the destination",
    },
    FormatError: {
        "source-not-found": "there is no such file or folder",
        "not-a-checkpoint": "no format recognizes the source",
        "not-an-adapter": "there is no adapter in a form that is known",
        "iteration-not-found": "the save folder does not have the iteration",
        "incomplete-publication": "a run is publishing the checkpoint, or was stopped while it did",
        "unfinished-save": "the program that saved the checkpoint did not finish",
        "truncated-file": "a file is shorter than it should be",
        "mixed-iterations": "files of ranks are of several iterations",
        "missing-shard": "a file or a rank of the checkpoint is missing",
        "hostile-pickle": "a pickle would run code, or is made to take all time or memory",
        "slow-pattern": "a regular expression takes too long to match",
        "unsafe-path": "a name in a checkpoint leads out of its folder",
        "damaged-digests": "the stored digests cannot be read",
        "unsupported-quantization": "the codes of the weights are not decoded",
        "foreign-optimizer": "master weights of the optimizer are not the weights of the model",
        "nan-weights": "weights are NaN or Inf where a number format has neither",
        "nan-scales": "scales of quantized weights are NaN or Inf, or make the weights so",
        "no-tokenizer": "there is no tokenizer",
    },
    StorageError: {
        "no-space": "the disk or the quota is full",
        "permission-denied": "no permission, or a read-only file system",
        "no-credentials": "the credentials of a store are missing, wrong or expired",
        "wrong-region": "the bucket is in another region, which the message names",
        "throttled": "a store was overloaded, or limits the rate of requests",
        "not-implemented": "a store does not implement a request",
        "ranges-ignored": "a server does not send ranges of an object",
        "object-missing": "a store has no such object, upload or bucket",
        "condition-failed": "an object exists already, or another program has replaced it",
    },
    CalibrationError: {
        "inexact-cast": "values of weights are none of the other number format",
        "nan-activations": "activations are NaN or Inf",
        "missing-statistics": "statistics that the recipe needs are missing",
        "foreign-calibration": "a calibration is of another model, recipe or setting",
    },
    TrainingError: {
        "nan-loss": "a loss or a gradient is NaN or Inf",
        "foreign-run": "DST or `--load` belongs to another run or model",
    },
    MappingError: {
        "modelopt-quantizers": "what ModelOpt's quantizers hold would be lost",
        "missing-tensors": "tensors of the model are missing",
        "false-copy": "a tensor that should be a copy of another is none",
        "no-model-config": "the checkpoint does not say which model it is",
        "unsupported-model": "a setting of the model is not supported",
        "setting-lost": "what is written would not hold a setting that the model computes by",
        "unsupported-setting": "a setting that changes what the model computes is not supported",
        "unsupported-adapter": "an adapter is more than low-rank updates, or has no exact form",
        "foreign-adapter": "an adapter is of another model",
        "unsupported-rotation": "a rotation would change what the model computes, or has no matrix",
        "unsupported-by-engine": "the engine, or the format to write, cannot represent the model",
    },
    MissingPackageError: {
        "missing-device": "there is no such device",
    },
}
"""The finer ids, with what they mean, by the class of the error."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names for a message: the first of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
