"""Rewrite: a checkpoint written again as it is, but for its FP8 scaling: `fix` and `strip`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.storage.files import Files
from megtool.commands.job import Manner, carry_out, plan_job
from megtool.commands.megatron.amax_report import AmaxHow, AmaxWish
from megtool.commands.megatron.groups import BY_DP
from megtool.commands.megatron.optimizer import sharding_type
from megtool.commands.reshard_report import ReshardReport
from megtool.commands.scaling.found import require, scaling_of
from megtool.commands.selection import Selection
from megtool.commands.sizes import parse_size
from megtool.commands.target import Request
from megtool.errors import UsageError
from megtool.log import Progress

FORMATS = ("torch_dist", "megatron")


def rewrite(
    source: Path,
    destination: Path,
    how: AmaxHow,
    *,
    iteration: str | None,
    family: str | None,
    like: Path | None,
    threads: int | None,
    memory: str,
    overwrite: bool,
    dry_run: bool,
    fsync: bool,
    progress: Progress,
) -> ReshardReport:
    """Write `source` to `destination` in its own format and layout, with its states as `how` says.

    Raises:
        UsageError: there is no FP8 state in it, or its format is not Megatron's.
        MegtoolError: see `reshard`; nothing is left at the destination.
    """
    began = time.monotonic()
    chosen = Selection(iteration=iteration, family=family, like=like, for_format="torch_dist")
    opened = chosen.open(source)
    catalogue = opened.catalogue
    scaling = scaling_of(opened)
    if how == "rebuild":
        require(scaling, opened)
    elif not (scaling.states or scaling.empty):
        raise UsageError(f"{source} holds no extra states", hint="there is nothing to strip")
    if catalogue.format not in FORMATS:
        raise UsageError(
            f"{source} is of format {catalogue.format!r}, and FP8 states are written again in "
            f"{' and '.join(FORMATS)}",
            hint=f"megtool reshard SRC DST --to torch_dist --amax {how}",
        )
    in_buckets = opened.side.states and sharding_type(catalogue) == BY_DP
    request = Request(
        to=catalogue.format,
        layout={},
        optimizer=BY_DP if in_buckets and catalogue.format == "torch_dist" else None,
        destination=destination,
        amax=AmaxWish(how=how),
    )
    manner = Manner(
        threads=threads or min(8, os.cpu_count() or 1),
        memory_bytes=parse_size(memory, "memory"),
        digest=DigestMode("buffered"),
        strict=False,
        overwrite=overwrite,
        dry_run=dry_run,
        fsync=fsync,
    )
    job = plan_job(opened, None, request, manner)
    return carry_out(job, manner, Files(), progress, began=began)
