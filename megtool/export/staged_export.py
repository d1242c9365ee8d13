"""The end of every export: check the destination, write the plan, commit it and report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megtool.console import Progress
from megtool.digests.crc32c import SIDECAR, TOOL, Sidecar
from megtool.errors import FormatError
from megtool.export.report import ExportReport
from megtool.options.execution import DigestMode, ExecutionOptions
from megtool.plan.copies import ReshardPlan
from megtool.plan.execute import CopyReport
from megtool.reshard.execute import peak_rss_bytes
from megtool.reshard.staged_write import make_stage, write_staged, written_files
from megtool.reshard.written_digests import count_digests, write_digests
from megtool.storage.files import Files


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedExport:
    """A planned export, with the report of what its planner decided.

    `sources` are the folders and files that are read, which the destination must not replace.
    `expected` are CRC-32C of source tensors by canonical name, compared as they are read. With
    `overflow_hint`, numbers too large for float16 are refused. `is_file`: the destination is one
    file. `start` is when the export began (`time.monotonic`). `rotation` is the record of it that
    the source has (see `Sidecar`), and `dropped_settings` are those that the user has left out.
    """

    plan: ReshardPlan
    report: ExportReport
    sources: Sequence[Path]
    expected: Mapping[str, int] | None = None
    overflow_hint: str = ""
    is_file: bool = False
    start: float
    rotation: Mapping[str, Any] | None = None
    dropped_settings: Mapping[str, Any] | None = None

    def write(
        self, destination: Path, execution: ExecutionOptions, files: Files, progress: Progress
    ) -> ExportReport:
        """Write the plan to `destination`, or only check that this is possible (`dry_run`).

        Raises:
            FormatError, StorageError, SourceChangedError, DestinationError: see `write_staged`.
        """
        stage = make_stage(
            execution,
            destination,
            files=files,
            fingerprint=self.plan.fingerprint,
            is_file=self.is_file,
            sources=self.sources,
            plan=self.plan,
        )
        catalogue = self.plan.target.catalogue
        report = replace(
            self.report,
            destination=str(destination),
            tensors=len(catalogue.tensors),
            num_bytes=catalogue.num_bytes,
            files=self._list_files(execution),
            is_dry=execution.dry_run,
        )
        if execution.dry_run:
            stage.check()
            return report

        def finish(copied: CopyReport) -> None:
            is_recorded = execution.digest_mode is not DigestMode.NONE
            write_digests(
                self.plan,
                stage,
                copied,
                execution.digest_mode,
                tensors=Sidecar(
                    names="stored",
                    tool=TOOL,
                    tensors={},
                    rotation=self.rotation if is_recorded else None,
                    dropped_settings=self.dropped_settings if is_recorded else None,
                ),
                threads=execution.num_threads,
            )

        try:
            copied = write_staged(
                self.plan,
                stage,
                execution,
                verb="export",
                progress=progress,
                expected=self.expected,
                finish=finish,
                overflow_hint=self.overflow_hint,
            )
        except FormatError as e:  # numbers that are encoded may come from several files
            e.file = e.file or self.report.source
            raise
        digests = count_digests(self.plan, stage)
        return replace(
            report,
            warnings=(*report.warnings, *stage.messages),
            seconds=time.monotonic() - self.start,
            peak_rss_bytes=peak_rss_bytes(),
            digested=digests.tensors,
            digested_files=digests.files,
            worker=copied.worker,
        )

    def _list_files(self, execution: ExecutionOptions) -> tuple[str, ...]:
        """What is written, the digests included, which a single file contains."""
        names = written_files(self.plan)
        if self.is_file or execution.digest_mode is DigestMode.NONE:
            return names
        return tuple(sorted({*names, SIDECAR}))
