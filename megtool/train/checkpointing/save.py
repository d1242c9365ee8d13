"""Save: iterations of a run as Megatron save folders, written by all ranks behind the training."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.checkpoint.containers.zip_writer import object_item
from megtool.checkpoint.formats.torch_dist_layout import COMMON_FILE, CONFIG_FILE
from megtool.checkpoint.param_groups import BY_DP, FULLY
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.storage.lock import Lock
from megtool.errors import MegtoolError, StorageError, UsageError
from megtool.model.decoder import Decoder
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.build_model import seat_of
from megtool.train.checkpointing.background_task import Behind
from megtool.train.checkpointing.host_snapshot import HostCopy, LiveRows, live
from megtool.train.checkpointing.megatron_common_state import (
    chained,
    common_of,
    plain,
    random_item,
    random_name,
)
from megtool.train.checkpointing.rank_file import RankFile, marks_of
from megtool.train.checkpointing.save_layout import WEIGHT, Layout, lay_out_run
from megtool.train.checkpointing.save_metadata import Extras
from megtool.train.checkpointing.save_template import Template
from megtool.train.checkpointing.shard_ownership import Report, Run
from megtool.train.checkpointing.staged_iteration import STAGING, IterationFolder, clean

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer

_LOG = logging.getLogger(__name__)
_NONE = "none"
_PATIENCE_S = 60.0  # for a save under way, when the run ends by an error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What all saves of a run share: what lies where, and this rank's file."""

    layout: Layout
    file: RankFile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One iteration to write: where, from which rows, and on rank 0 with what beside them."""

    place: IterationFolder
    file: RankFile
    rows: Mapping[int, Tensor] | LiveRows
    objects: Mapping[str, bytes]
    common: Mapping[str, Any]
    small: Mapping[str, bytes | Path]


class Saver:
    """Writes iterations of one run into a save folder (`torch_dist`), all ranks together.

    `folder` holds `iter_NNNNNNN/` and `latest_checkpointed_iteration.txt`; it is on a file system
    that all ranks share. Every rank makes a Saver, with the same arguments, and calls its methods
    at the same times. Whatever ends a run, and whenever: the iteration that the tracker names is
    complete, and what an unfinished save left is removed by the next Saver of the folder.

    `optimizer_format` is `fully_reshardable`, `dp_reshardable` or `none` (weights alone).
    Memory: an asynchronous save keeps one host copy of this rank's part of the state, from the
    first one (or `prepare`) on until `close`.

    Use: `with Saver(...) as saver: saver.prepare(stages, optimizer)`, in the loop
    `saver.check()` once a step and `saver.save(...)` every so many; leaving the block waits for
    what is under way.

    Raises:
        DestinationError: another run writes the folder, or it cannot be written.
        UsageError: no such format.
    """

    def __init__(
        self,
        folder: Path,
        template: Template,
        groups: ProcessGroups,
        *,
        optimizer_format: str = FULLY,
        fsync: bool = True,
        timeout_s: float = 1800.0,
        files: Files | None = None,
    ) -> None:
        if optimizer_format not in (FULLY, BY_DP, _NONE):
            raise UsageError(
                f"optimizer format {optimizer_format!r}", hint=f"{FULLY}, {BY_DP} or {_NONE}"
            )
        self.folder, self.template, self.groups = folder, template, groups
        self.optimizer_format = optimizer_format
        self._fsync, self._timeout_s = fsync, timeout_s
        self.files = files or Files()
        self._lock: Lock | None = None
        self._behind = Behind()
        self._planned: _Planned | None = None
        self._host: HostCopy | None = None
        self._kinds: dict[tuple[str, str], torch.dtype] = {}
        self._attempts = 0
        error: MegtoolError | None = None
        try:
            if groups.rank == 0:
                self._enter()
        except MegtoolError as e:
            error = e
        self._agree(error)

    def _enter(self) -> None:
        """Take the folder, and clear it of what was left there."""
        missing = [p for p in (self.folder, *self.folder.parents) if self.files.stat(p) is None]

        def make() -> None:
            for path in reversed(missing):
                self.files.mkdir(path)
            self.files.mkdir(self.folder / STAGING)

        self._lock = Lock(self.files, self.folder / STAGING / "lock", make)
        if left := clean(self.files, self.folder):
            _LOG.warning("removed what unfinished saves left: %s", ", ".join(left))

    def prepare(
        self, stages: Sequence[Decoder], optimizer: Optimizer | None, *, asynchronous: bool = True
    ) -> None:
        """Plan all saves and take the memory for host copies, so that the first save is short.

        Raises:
            MappingError: the model is not that of the template.
            UsageError: the optimizer's format cannot hold this optimizer's state.
        """
        planned = self._plan(stages, optimizer)
        if asynchronous:
            self._room(planned.layout)

    def _plan(self, stages: Sequence[Decoder], optimizer: Optimizer | None) -> _Planned:
        if self._planned is not None:
            return self._planned
        held = optimizer if self.optimizer_format != _NONE else None
        runs, dtypes = [], {}
        for state, name, start, tensor in live(stages, held):
            self._kinds[state, name] = tensor.dtype
            if state == WEIGHT:
                dtypes[name] = str(tensor.dtype).removeprefix("torch.")
            else:
                runs.append(Run(state, name, start, start + tensor.numel()))
        report = Report(seat=seat_of(self.groups), dtypes=dtypes, runs=tuple(runs))
        rank, size = self.groups.rank, self.groups.world.size
        reports = self._gather(report)
        try:
            layout = lay_out_run(self.template, reports, rank, self.optimizer_format)
        except MegtoolError as e:
            self._agree(e)
            raise
        self._agree(None)
        self._planned = _Planned(layout=layout, file=RankFile(layout, rank=rank, size=size))
        return self._planned

    def _room(self, layout: Layout) -> HostCopy:
        if self._host is None:
            pinned = self.groups.device.type == "cuda"
            self._host = HostCopy(layout, self._kinds, pinned=pinned)
        return self._host

    def save(
        self,
        iteration: int,
        stages: Sequence[Decoder],
        optimizer: Optimizer | None,
        extras: Extras,
        *,
        asynchronous: bool = False,
        copy_behind: bool = False,
    ) -> float:
        """Save an iteration; returns the seconds that training waited.

        Asynchronous, it returns once the state is copied to host memory: what happens to the
        parameters from then on changes nothing in what is written. With `copy_behind` the copy is
        made behind the next forward and backward passes as well: `wait_for_copy` has to be called
        before anything changes parameters or the optimizer's state. A save under way is waited for
        first. Otherwise it returns when the iteration is complete on disk.

        Raises:
            StorageError: it could not be written (no space, ...); or an earlier one could not.
        """
        began = time.monotonic()
        self._behind.join()
        planned = self._plan(stages, optimizer)
        held = optimizer if self.optimizer_format != _NONE else None
        if (wait := getattr(optimizer, "wait_for_parameters", None)) is not None:
            wait()
        objects = self._exchange(extras)
        self._attempts += 1
        place = IterationFolder(
            self.files,
            self.folder,
            iteration,
            number=self._attempts,
            rank=self.groups.rank,
            size=self.groups.world.size,
            fsync=self._fsync,
            timeout_s=self._timeout_s,
        )
        rows: Mapping[int, Tensor] | LiveRows
        take: Callable[[], None] | None = None
        if asynchronous:
            room = self._room(planned.layout)
            rows = room.rows
            take = room.taking(live(stages, held))
            if not copy_behind:
                take()
                take = None
        else:
            rows = LiveRows(planned.layout, live(stages, held))
        common: dict[str, Any] = {}
        small: dict[str, bytes | Path] = {}
        if self.groups.rank == 0:
            state = None if held is None else plain(held.small_state())
            common, objects = self._beside(extras, iteration, state, objects)
            small = {**self.template.small, **extras.files}
        job = _Job(
            place=place,
            file=planned.file,
            rows=rows,
            objects=objects,
            common=common,
            small=small,
        )
        if asynchronous:
            self._behind.start(take, partial(self._write, job), f"save {iteration}")
        else:
            self._write(job)
        return time.monotonic() - began

    def wait_for_copy(self) -> float:
        """Wait until a copy under way is made; returns the seconds of it. See `save`."""
        return self._behind.wait_for_copy()

    def check(self) -> None:
        """Raise what went wrong in the background since the last call, once; costs nothing.

        Raises:
            StorageError: a save failed. The iteration before it is still there.
        """
        self._behind.check()

    @property
    def is_busy(self) -> bool:
        """A save is under way in the background."""
        return self._behind.is_busy

    def finish(self) -> None:
        """Wait until no save is under way.

        Raises:
            StorageError: see `check`.
        """
        self._behind.join()

    def close(self) -> None:
        """Wait, and let go of the folder and of all memory.

        Raises:
            StorageError: see `check`.
        """
        try:
            self._behind.join()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._host = self._planned = None
        lock, self._lock = self._lock, None
        if lock is not None:
            try:
                self.files.remove(self.folder / STAGING / "lock")
                self.files.remove_empty(self.folder / STAGING)
            finally:
                lock.release()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(BaseException):  # what ended the run is raised, and nothing else
            self._behind.join(_PATIENCE_S)
        with contextlib.suppress(MegtoolError):
            self._let_go()

    # ---- what the ranks tell each other

    def _gather(self, mine: Any) -> list[Any]:
        """What every rank says, on every rank."""
        world = self.groups.world
        if world.handle is None:
            return [mine]
        said: list[Any] = [None] * world.size
        dist.all_gather_object(said, mine, group=world.handle)
        return said

    def _agree(self, error: MegtoolError | None) -> None:
        """Raise on every rank what one of them has met.

        Raises:
            MegtoolError: this rank's, or the first rank's that has one.
        """
        said = self._gather(error)
        if error is not None:
            raise error
        for found in said:
            if found is not None:
                raise found

    def _exchange(self, extras: Extras) -> dict[str, bytes]:
        """The objects of all ranks, on every rank: random state, and the extras' own."""
        mine = dict(extras.objects)
        if extras.random:
            p, groups = self.template.parallel, self.groups
            is_first = groups.replicas.rank == 0 if p.ep == 1 else True
            if is_first:
                mine[random_name(groups)] = random_item(groups)
        out: dict[str, bytes] = {}
        for said in self._gather(mine):
            out |= said
        return out

    def _beside(
        self,
        extras: Extras,
        iteration: int,
        small: Mapping[str, Any] | None,
        objects: Mapping[str, bytes],
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Common state, and all objects by name."""
        template, flat = self.template, self._planned.layout.flat if self._planned else None
        has_experts = any(".experts." in t.name for t in template.tensors)
        num_chains = 2 if template.parallel.ep > 1 and has_experts else 1
        common = common_of(
            template, extras, iteration, small, self.optimizer_format, num_chains=num_chains
        )
        out: dict[str, bytes] = {}
        if flat is not None and small is not None:
            chain = chained(small, num_chains)
            out |= {name: object_item([value]) for name, value in flat.objects.items()}
            items = [{k: object_item([plain(v)]) for k, v in inner.items()} for inner in chain]
            for prefix, number in flat.prefixes:
                out |= {f"{prefix}{k}/shard_0_1": item for k, item in items[number].items()}
        return common, out | {**template.objects, **objects}

    # ---- writing, in whichever thread

    def _write(self, job: _Job) -> None:
        place, is_first = job.place, self.groups.rank == 0
        place.begin()
        try:
            laid = job.file.lay_out(job.objects)
            if is_first:
                place.require_space(sum(f.size for f in laid.catalogue.files))
            job.file.write(place, laid, job.rows)
            place.done()
            if not is_first:
                place.wait()
                return
            metadata, last = marks_of(laid)
            place.commit(
                {
                    **job.small,
                    ".metadata": metadata,
                    COMMON_FILE: object_item(dict(job.common)),
                    CONFIG_FILE: last,
                }
            )
        except BaseException:
            with contextlib.suppress(StorageError):
                place.failed()
            if is_first:
                with contextlib.suppress(StorageError):
                    place.discard()
            raise
