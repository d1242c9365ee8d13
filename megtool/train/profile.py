"""Profiles of training steps: traces of torch's profiler, or ranges for Nsight Systems."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megtool.errors import UsageError
from megtool.storage.files import Files
from megtool.train.options.profile import ProfileOptions

PROFILE_FOLDER = "profile"
_NUM_ROWS = 40


class StepProfiler:
    """Profiles the steps that the options name, on this rank if they name it.

    Call `begin` before and `end` after each step; in `with`, what has begun is ended. Steps are
    divided by `torch.profiler.record_function`, whose names Nsight shows, too.

    Raises:
        UsageError: Nsight is asked for on another device than CUDA.
    """

    def __init__(
        self, options: ProfileOptions, folder: Path | None, rank: int, device: torch.device
    ) -> None:
        self._options, self._folder, self._rank = options, folder, rank
        self._is_on = options.profile is not None and rank in options.ranks
        self._has_cuda = device.type == "cuda"
        self._running = ExitStack()
        self._trace: profile | None = None
        if options.profile == "nsys" and not self._has_cuda:
            raise UsageError(
                f"--profile nsys is for CUDA, and the device is {device}", hint="--profile torch"
            )

    def begin(self, iteration: int) -> None:
        """A step follows; `iteration` are done."""
        if not self._is_on or iteration != self._options.profile_step_start:
            return
        if self._options.profile == "nsys":
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._running.callback(torch.cuda.profiler.stop)
            self._running.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))  # type: ignore[no-untyped-call]
            return
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._has_cuda
        self._trace = self._running.enter_context(
            profile(activities=kinds, record_shapes=True, profile_memory=True)
        )

    def end(self, iteration: int) -> None:
        """A step is done; `iteration` are now.

        Raises:
            StorageError: the profile cannot be written.
        """
        if not self._is_on or iteration != self._options.profile_step_end:
            return
        if self._has_cuda:
            torch.cuda.synchronize()
        self._running.close()
        if self._trace is not None and self._folder is not None:
            self._write(self._trace, self._folder / PROFILE_FOLDER)
        self._trace = None

    def _write(self, trace: profile, folder: Path) -> None:
        options = self._options
        name = (
            f"rank-{self._rank}-steps-{options.profile_step_start + 1}-{options.profile_step_end}"
        )
        table = trace.key_averages().table(
            sort_by="self_cuda_time_total" if self._has_cuda else "self_cpu_time_total",
            row_limit=_NUM_ROWS,
        )
        with tempfile.NamedTemporaryFile(prefix="megtool-", suffix=".json.gz") as file:
            trace.export_chrome_trace(file.name)
            data = file.read()
        files = Files()
        files.mkdir(folder)
        files.replace_file(folder / f"{name}.json.gz", data, f".{name}.json.gz.new")
        files.replace_file(folder / f"{name}.txt", table.encode(), f".{name}.txt.new")

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
