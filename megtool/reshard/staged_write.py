"""Staged: a plan written to its stage and committed, which then has its name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from megtool.checkpoint.commit import Stage
from megtool.checkpoint.copy import CopyReport, execute
from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.plan import Plan
from megtool.console import Progress
from megtool.errors import FormatError

_LOG = logging.getLogger(__name__)


def write_staged(
    plan: Plan,
    stage: Stage,
    *,
    what: str,
    threads: int,
    memory_bytes: int,
    digest: DigestMode,
    fsync: bool,
    progress: Progress,
    expected: Mapping[str, int] | None = None,
    finish: Callable[[CopyReport], None] | None = None,
    wider: str = "",
) -> CopyReport:
    """Write what `plan` says into `stage` and let it take its name.

    What was written stays staged where this fails, and the next run goes on from there; a log
    message says so. `what` is the verb that progress is told of. `finish` is called when all data
    are staged, before they take their name: for files that are known only then, and for checks;
    what it raises is raised. Numbers that float16 is too narrow for are a warning; with `wider`,
    which names a type that holds them (as a hint), they are refused and nothing stays staged.

    Raises:
        FormatError: with `wider`, some numbers became infinite.
        StorageError, SourceChangedError, DestinationError, DigestError: see `execute` and `Stage`.
    """
    total = plan.target.catalogue.num_bytes
    try:
        with stage:
            for message in stage.messages:
                _LOG.info("%s", message)
            stage.require_space(sum(f.size for f in plan.target.catalogue.files))
            progress(what, 0, total)
            copied = execute(
                plan,
                stage,
                files=stage.files,
                threads=threads,
                memory_bytes=memory_bytes,
                digest=digest,
                progress=lambda n: progress(what, n, total),
                expected=expected,
            )
            if copied.overflowed and wider:
                stage.discard()
                raise FormatError(
                    copied.overflows, tensor=next(iter(copied.overflowed)), hint=wider
                )
            if copied.overflowed:
                stage.messages.append(copied.overflows)
                _LOG.warning("%s", copied.overflows)
            if finish is not None:
                finish(copied)
            stage.commit(fsync=fsync, threads=threads)
    except BaseException:
        if stage.describe_resume() in stage.messages:  # something was kept
            _LOG.warning("%s", stage.describe_resume())
        raise
    return copied


def written_files(plan: Plan) -> tuple[str, ...]:
    """Relative paths of all files that a plan writes."""
    target = plan.target
    names = [f.path for f in target.catalogue.files]
    return tuple(sorted([*names, *(path for path, _ in target.all_small())]))
