"""How a checkpoint is written: resources, digests, checks, and how it takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from megtool.options.field import OptionCondition, option
from megtool.options.groups import OUTPUT, CopyResources, Publishing, WorkerShare
from megtool.options.sizes import parse_size
from megtool.process.threads import count_threads
from megtool.process.worker_identity import WorkerIdentity, parse_worker


class DigestMode(StrEnum):
    """Which bytes are digested: all, those that pass through buffers anyway, or none."""

    ALL = "all"
    BUFFERED = "buffered"
    NONE = "none"


_WRITES = OptionCondition(
    holds=lambda options, facts: not options.dry_run,
    reason="{has} no effect with --dry-run, which writes nothing",
    hint="leave one of them out",
)


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions(CopyResources, Publishing, WorkerShare):
    """How a checkpoint is planned, written and checked."""

    digest: Literal["all", "buffered", "none"] | None = option(
        OUTPUT,
        "Digest all tensors and files; or those that pass through a buffer, so that the rest can "
        "share blocks with the source where the file system allows it, or be copied by the store "
        "that both are in; or none. Default: all, but buffered within one store.",
    )
    verify: bool = option(
        OUTPUT,
        "Read the result back before it is put in place, and compare it with SRC bit by bit.",
        False,
        needs=(_WRITES,),
    )
    strict: bool = option(
        OUTPUT, "Fail if something would be dropped that no option leaves out.", False
    )

    @property
    def digest_mode(self) -> DigestMode:
        """Which bytes are digested: all, unless the option says otherwise."""
        return DigestMode(self.digest or "all")

    @property
    def memory_bytes(self) -> int:
        """The most memory of all threads' buffers."""
        return parse_size(self.memory, "memory")

    @property
    def num_threads(self) -> int:
        """The number of threads; one per core, at most 8, unless the option says it."""
        return self.threads or count_threads()

    @property
    def worker_identity(self) -> WorkerIdentity | None:
        """Which of several processes this is, None if it does everything."""
        return parse_worker(self.worker)


@dataclass(frozen=True, kw_only=True)
class LargeExecution(ExecutionOptions):
    """How a checkpoint is written whose tensors are computed, which takes larger buffers."""

    memory: str = option(
        OUTPUT,
        "Most memory for buffers (at least 384 KiB per thread).",
        "256MiB",
        metavar="SIZE",
    )


WITHOUT_CHECKS = frozenset({"digest", "verify", "strict"})
"""The options of `ExecutionOptions` that only `reshard` offers."""
