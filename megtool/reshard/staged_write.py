"""Write a plan into a staging folder and commit it to its destination."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megtool.checkpoint.commit import StagingFolder
from megtool.checkpoint.copy import CopyReport, execute
from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.parallel_scan import default_threads
from megtool.checkpoint.plan import ReshardPlan
from megtool.console import Progress
from megtool.errors import FormatError
from megtool.reshard.staged_headers import check_headers
from megtool.reshard.written_digests import write_digests

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a plan is written: threads, the memory of all their buffers, digests, and fsync."""

    threads: int = field(default_factory=lambda: default_threads(None))
    memory_bytes: int = 128 << 20
    digest: DigestMode = DigestMode.ALL
    fsync: bool = True


def write_staged(
    plan: ReshardPlan,
    stage: StagingFolder,
    options: WriteOptions,
    *,
    verb: str,
    progress: Progress,
    expected: Mapping[str, int] | None = None,
    finish: Callable[[CopyReport], None] | None = None,
    overflow_hint: str = "",
) -> CopyReport:
    """Write a plan into `stage` and commit it to its destination.

    If this fails, the staged data stay where that is possible, the next run resumes from them, and
    a log message says so.

    Args:
        plan: What is written.
        stage: Where it is written until it is complete.
        options: How it is written.
        verb: What `progress` calls the operation.
        progress: Is called with bytes written and their total.
        expected: CRC-32C of source tensors by canonical name, compared as they are read.
        finish: Is called when all data are staged, before the commit: for files that are known only
            then, for checks, and for the digests (`write_digests`), which are those of stored
            tensors and files without it. What it raises is raised.
        overflow_hint: Refuse numbers that are too large for float16, with this hint, and discard
            the stage. Without it they are a warning.

    Raises:
        FormatError: with `overflow_hint`, some numbers became infinite; or what is staged cannot be
            read back.
        StorageError, SourceChangedError, DestinationError, DigestError: see `execute` and `Stage`.
    """
    total = plan.target.catalogue.num_bytes
    try:
        with stage:
            for message in stage.messages:
                _LOG.info("%s", message)
            stage.require_space(sum(f.size for f in plan.target.catalogue.files))
            progress(verb, 0, total)
            copied = execute(
                plan,
                stage,
                files=stage.files,
                threads=options.threads,
                memory_bytes=options.memory_bytes,
                digest=options.digest,
                progress=lambda n: progress(verb, n, total),
                expected=expected,
            )
            if copied.overflowed and overflow_hint:
                stage.discard()
                raise FormatError(
                    copied.overflows, tensor=next(iter(copied.overflowed)), hint=overflow_hint
                )
            if copied.overflowed:
                stage.messages.append(copied.overflows)
                _LOG.warning("%s", copied.overflows)
            if finish is not None:
                finish(copied)
            else:
                write_digests(plan, stage, copied, options.digest, threads=options.threads)
            check_headers(plan, stage)
            stage.commit(fsync=options.fsync, threads=options.threads)
    except BaseException:
        if stage.describe_resume() in stage.messages:  # there is something to resume from
            _LOG.warning("%s", stage.describe_resume())
        raise
    return copied


def written_files(plan: ReshardPlan) -> tuple[str, ...]:
    """Relative paths of all files that a plan writes."""
    target = plan.target
    names = [f.path for f in target.catalogue.files]
    return tuple(sorted([*names, *(path for path, _ in target.iter_small_files())]))
