"""Carry out: an export's plan written to its stage and committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from megtool.checkpoint.commit import Stage
from megtool.checkpoint.copy import CopyReport, execute
from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.plan import Plan
from megtool.log import Progress

_LOG = logging.getLogger(__name__)


def carry_out(
    plan: Plan,
    stage: Stage,
    *,
    threads: int,
    memory_bytes: int,
    fsync: bool,
    progress: Progress,
    digest: DigestMode = DigestMode.BUFFERED,
    expected: Mapping[str, int] | None = None,
    before_commit: Callable[[Path], None] | None = None,
) -> CopyReport:
    """Write what `plan` says into `stage` and let it take its name.

    What was written stays staged where this fails, and the next run goes on from there; a log
    message says so. `before_commit` is given the folder of the whole result before it takes its
    name; what it raises is raised.

    Raises:
        StorageError, SourceChangedError, DestinationError, DigestError: see `execute` and `Stage`.
    """
    total = plan.target.catalogue.num_bytes
    try:
        with stage:
            for message in stage.messages:
                _LOG.info("%s", message)
            stage.require_space(sum(f.size for f in plan.target.catalogue.files))
            progress("export", 0, total)
            copied = execute(
                plan,
                stage,
                files=stage.files,
                threads=threads,
                memory_bytes=memory_bytes,
                digest=digest,
                progress=lambda n: progress("export", n, total),
                expected=expected,
            )
            if before_commit is not None:
                before_commit(stage.tree)
            stage.commit(fsync=fsync, threads=threads)
    except BaseException:
        if stage.describe_resume() in stage.messages:  # something was kept
            _LOG.warning("%s", stage.describe_resume())
        raise
    return copied
