"""The log of a run: a line of JSON for every step and evaluation, TensorBoard, and messages."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from megtool.errors import MissingPackageError, StorageError
from megtool.storage.files import Files
from megtool.storage.location.path import is_remote

_LOG = logging.getLogger(__name__)

_MAX_LOG_BYTES = 1 << 30
_FLUSH_S = 30.0  # a log in a store is replaced this often at most

LOG_FILE = "log.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

# Names in TensorBoard, which are Megatron's.
_MEGATRON_NAMES = {
    "loss": "lm loss",
    "eval_loss": "lm loss validation",
    "lr": "learning-rate",
    "grad_norm": "grad-norm",
    "loss_scale": "loss-scale",
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "z_loss": "z_loss",
    "global_batch_size": "batch-size",
    "num_zeros": "num-zeros",
    "tokens_per_second": "tokens-per-second",
    "tflops": "throughput",
    "peak_memory_bytes": "mem-max-allocated-bytes",
}

MEASUREMENTS = frozenset({"seconds", "tokens_per_second", "tflops", "peak_memory_bytes"})
"""Fields that differ between equal runs."""

_NOT_FINITE = ("nan", "inf", "-inf")  # as `_text` writes them: JSON has no such numbers

LogLine = dict[str, Any]


class SummaryWriterProtocol(Protocol):
    """The part of TensorBoard's `SummaryWriter` that a log uses."""

    def add_scalar(self, tag: str, value: float, global_step: int) -> object:
        """Write a value of a step."""

    def close(self) -> None:
        """Flush and close."""


class RunLog:
    """The log of a run that is at `iteration`: later lines of an interrupted run are dropped.

    A line has `iteration` and either `loss` (with `lr`, `grad_norm`, ...) or `eval_loss`. Floats
    are written so that reading gives the same bits, and each line is flushed. Only rank 0 writes;
    on others `folder` is None, and nothing happens.

    Raises:
        StorageError: the log cannot be read or written.
        MissingPackageError: TensorBoard is needed and not installed.
    """

    def __init__(
        self, folder: Path | None, *, iteration: int = 0, tensorboard: bool = False
    ) -> None:
        self._file: TextIO | None = None
        self._board: SummaryWriterProtocol | None = None
        self._object: Path | None = None
        self._flushed = 0.0
        self.lines: list[LogLine] = []
        if folder is None:
            return
        path = folder / LOG_FILE
        # A new run has no lines, not even of its first evaluation.
        self.lines = [x for x in read_log(path) if x["iteration"] <= iteration and iteration]
        if is_remote(folder):
            self._object = path  # it is kept in memory, for objects cannot be appended to
            self.flush()
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = "".join(_encode_line(line) for line in self.lines)
            Files().replace_file(path, text.encode(), f".{LOG_FILE}.new")
            self._file = path.open("a", buffering=1)
        except OSError as e:
            raise StorageError(f"cannot write: {e.strerror or e}", file=path) from e
        if tensorboard:
            self._board = _open_tensorboard(folder / TENSORBOARD_FOLDER, iteration + 1)

    def flush(self) -> None:
        """Make what was written so far last; on a disk every line does.

        Raises:
            StorageError: it cannot be written.
        """
        if self._object is not None:
            text = "".join(_encode_line(line) for line in self.lines)
            Files().replace_file(self._object, text.encode(), "")
            self._flushed = time.monotonic()

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            StorageError: it cannot be written.
        """
        if self._object is not None:
            self.lines.append(dict(line))
            if time.monotonic() - self._flushed > _FLUSH_S:
                self.flush()
            return
        if self._file is None:
            return
        self.lines.append(dict(line))
        try:
            self._file.write(_encode_line(line))
        except OSError as e:
            raise StorageError(f"cannot write: {e.strerror or e}", file=self._file.name) from e
        if self._board is not None:
            for name, value in line.items():
                if name in _MEGATRON_NAMES and isinstance(value, int | float):
                    self._board.add_scalar(_MEGATRON_NAMES[name], value, line["iteration"])

    def evaluations(self) -> list[tuple[int, float]]:
        """Iterations and losses of all evaluations so far."""
        return [(x["iteration"], x["eval_loss"]) for x in self.lines if "eval_loss" in x]

    def losses(self) -> list[tuple[int, float]]:
        """Iterations and losses of all steps so far."""
        return [(x["iteration"], x["loss"]) for x in self.lines if "loss" in x]

    def close(self) -> None:
        """Flush and close the files."""
        self.flush()
        self._object = None
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._file = self._board = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_log(path: Path) -> list[LogLine]:
    """All complete lines of a log; none without a file. A line cut off by an interruption is
    skipped.

    Raises:
        FormatError: it is no regular file.
        StorageError: it cannot be read.
    """
    data = Files().read_whole(path, at_most=_MAX_LOG_BYTES) or b""
    return list(_parse_lines(data.decode(errors="replace")))


def _parse_lines(text: str) -> Iterator[LogLine]:
    for row in text.splitlines(keepends=True):
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("iteration"), int):
            yield {k: float(v) if v in _NOT_FINITE else v for k, v in line.items()}


def _encode_line(line: Mapping[str, Any]) -> str:
    plain = {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
    }
    return json.dumps(plain) + "\n"


def _open_tensorboard(folder: Path, begin: int) -> SummaryWriterProtocol:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise MissingPackageError(
            "--tensorboard needs the tensorboard package", hint="pip install 'megtool[train]'"
        ) from e
    return SummaryWriter(str(folder), purge_step=begin)


def format_line(line: Mapping[str, Any], last: int, seconds_left: float | None = None) -> str:
    """A line of a step or an evaluation in readable form."""
    progress = f"step {line['iteration']:,} of {last:,}"
    if "eval_loss" in line:
        text = f"{progress}: evaluation {line['eval_loss']:.4f} of {line['eval_labels']:,} tokens"
        right = [f"{v:.1%}" for name, v in line.items() if name.startswith("eval_eagle_")]
        return f"{text}, right drafts {', '.join(right)}" if right else text
    parts = [f"loss {line['loss']:.4f}", f"lr {line['lr']:.3g}"]
    if line.get("skipped"):
        parts.append(f"skipped, loss scale {line['loss_scale']:g}")
    else:
        parts.append(f"grad norm {line['grad_norm']:.3g}")
    parts.append(f"{line['tokens_per_second']:,.0f} tokens/s")
    if "tflops" in line:
        parts.append(f"{line['tflops']:.3g} TFLOP/s a rank")
    if seconds_left is not None:
        parts.append(f"{format_duration(seconds_left)} left")
    return f"{progress}: {', '.join(parts)}"


def format_duration(seconds: float) -> str:
    """A duration: 4:05, or 1:02:03."""
    minutes, seconds_left = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"
