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

from megtool.checkpoint.containers.zip_writer import encode_object
from megtool.checkpoint.formats.torch_dist_layout import COMMON_FILE, CONFIG_FILE
from megtool.checkpoint.param_groups import DP_RESHARDABLE, FULLY_RESHARDABLE
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.storage.lock import LockFile
from megtool.errors import MegtoolError, StorageError, UsageError
from megtool.model.decoder import Decoder
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.build_model import rank_coordinates
from megtool.train.checkpointing.background_task import BackgroundTask
from megtool.train.checkpointing.host_snapshot import HostSnapshot, LiveShards, iterate_live_state
from megtool.train.checkpointing.megatron_common_state import (
    make_common_state,
    pack_rng_state,
    rng_object_name,
    split_chain,
    to_plain_tree,
)
from megtool.train.checkpointing.protocol import SaveMetadata
from megtool.train.checkpointing.rank_file import RankDataFile, metadata_files
from megtool.train.checkpointing.save_layout import WEIGHT, SaveLayout, plan_save_layout
from megtool.train.checkpointing.save_template import SaveTemplate
from megtool.train.checkpointing.shard_ownership import RankOwnership, StateRange
from megtool.train.checkpointing.staged_iteration import STAGING, StagedIteration, remove_unfinished

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer

_LOG = logging.getLogger(__name__)
_NONE = "none"
_PATIENCE_S = 60.0  # for a save under way, when the run ends by an error


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavePlan:
    """What all saves of a run share: what lies where, and this rank's file."""

    layout: SaveLayout
    file: RankDataFile


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveTask:
    """One iteration to write: where, from which rows, and on rank 0 with what beside them."""

    staged: StagedIteration
    file: RankDataFile
    rows: Mapping[int, Tensor] | LiveShards
    objects: Mapping[str, bytes]
    common: Mapping[str, Any]
    small: Mapping[str, bytes | Path]


class TorchDistSaver:
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
        template: SaveTemplate,
        groups: ProcessGroups,
        *,
        optimizer_format: str = FULLY_RESHARDABLE,
        fsync: bool = True,
        timeout_s: float = 1800.0,
        files: Files | None = None,
    ) -> None:
        if optimizer_format not in (FULLY_RESHARDABLE, DP_RESHARDABLE, _NONE):
            raise UsageError(
                f"optimizer format {optimizer_format!r}",
                hint=f"{FULLY_RESHARDABLE}, {DP_RESHARDABLE} or {_NONE}",
            )
        self.folder, self.template, self.groups = folder, template, groups
        self.optimizer_format = optimizer_format
        self._fsync, self._timeout_s = fsync, timeout_s
        self.files = files or Files()
        self._lock: LockFile | None = None
        self._background = BackgroundTask()
        self._planned: _SavePlan | None = None
        self._host: HostSnapshot | None = None
        self._kinds: dict[tuple[str, str], torch.dtype] = {}
        self._attempts = 0
        error: MegtoolError | None = None
        try:
            if groups.rank == 0:
                self._claim_folder()
        except MegtoolError as e:
            error = e
        self._raise_on_all_ranks(error)

    def _claim_folder(self) -> None:
        """Take the folder, and clear it of what was left there."""
        missing = [p for p in (self.folder, *self.folder.parents) if self.files.stat(p) is None]

        def make() -> None:
            for path in reversed(missing):
                self.files.mkdir(path)
            self.files.mkdir(self.folder / STAGING)

        self._lock = LockFile(self.files, self.folder / STAGING / "lock", make)
        if removed := remove_unfinished(self.files, self.folder):
            _LOG.warning("removed what unfinished saves left: %s", ", ".join(removed))

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
            self._prepare_snapshot(planned.layout)

    def _plan(self, stages: Sequence[Decoder], optimizer: Optimizer | None) -> _SavePlan:
        if self._planned is not None:
            return self._planned
        saved_optimizer = optimizer if self.optimizer_format != _NONE else None
        ranges, dtypes = [], {}
        for state, name, start, tensor in iterate_live_state(stages, saved_optimizer):
            self._kinds[state, name] = tensor.dtype
            if state == WEIGHT:
                dtypes[name] = str(tensor.dtype).removeprefix("torch.")
            else:
                ranges.append(StateRange(state, name, start, start + tensor.numel()))
        report = RankOwnership(
            coordinates=rank_coordinates(self.groups), dtypes=dtypes, ranges=tuple(ranges)
        )
        rank, size = self.groups.rank, self.groups.world.size
        reports = self._gather(report)
        try:
            layout = plan_save_layout(self.template, reports, rank, self.optimizer_format)
        except MegtoolError as e:
            self._raise_on_all_ranks(e)
            raise
        self._raise_on_all_ranks(None)
        self._planned = _SavePlan(layout=layout, file=RankDataFile(layout, rank=rank, size=size))
        return self._planned

    def _prepare_snapshot(self, layout: SaveLayout) -> HostSnapshot:
        if self._host is None:
            pinned = self.groups.device.type == "cuda"
            self._host = HostSnapshot(layout, self._kinds, pinned=pinned)
        return self._host

    def save(
        self,
        iteration: int,
        stages: Sequence[Decoder],
        optimizer: Optimizer | None,
        metadata: SaveMetadata,
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
        self._background.join()
        planned = self._plan(stages, optimizer)
        saved_optimizer = optimizer if self.optimizer_format != _NONE else None
        if optimizer is not None:
            optimizer.wait_for_parameters()
        objects = self._gather_objects(metadata)
        self._attempts += 1
        staged = StagedIteration(
            self.files,
            self.folder,
            iteration,
            number=self._attempts,
            rank=self.groups.rank,
            size=self.groups.world.size,
            fsync=self._fsync,
            timeout_s=self._timeout_s,
        )
        rows: Mapping[int, Tensor] | LiveShards
        copy: Callable[[], None] | None = None
        if asynchronous:
            snapshot = self._prepare_snapshot(planned.layout)
            rows = snapshot.rows
            copy = snapshot.copy_fn(iterate_live_state(stages, saved_optimizer))
            if not copy_behind:
                copy()
                copy = None
        else:
            rows = LiveShards(planned.layout, iterate_live_state(stages, saved_optimizer))
        common: dict[str, Any] = {}
        small: dict[str, bytes | Path] = {}
        if self.groups.rank == 0:
            state = (
                None if saved_optimizer is None else to_plain_tree(saved_optimizer.small_state())
            )
            common, objects = self._make_common_state(metadata, iteration, state, objects)
            small = {**self.template.small, **metadata.files}
        task = _SaveTask(
            staged=staged,
            file=planned.file,
            rows=rows,
            objects=objects,
            common=common,
            small=small,
        )
        if asynchronous:
            self._background.start(copy, partial(self._write, task), f"save {iteration}")
        else:
            self._write(task)
        return time.monotonic() - began

    def wait_for_copy(self) -> float:
        """Wait until a copy under way is made; returns the seconds of it. See `save`."""
        return self._background.wait_for_copy()

    def check(self) -> None:
        """Raise what went wrong in the background since the last call, once; costs nothing.

        Raises:
            StorageError: a save failed. The iteration before it is still there.
        """
        self._background.check()

    @property
    def is_busy(self) -> bool:
        """A save is under way in the background."""
        return self._background.is_busy

    def finish(self) -> None:
        """Wait until no save is under way.

        Raises:
            StorageError: see `check`.
        """
        self._background.join()

    def close(self) -> None:
        """Wait, and let go of the folder and of all memory.

        Raises:
            StorageError: see `check`.
        """
        try:
            self._background.join()
        finally:
            self._release()

    def _release(self) -> None:
        self._host = self._planned = None
        lock, self._lock = self._lock, None
        if lock is not None:
            try:
                self.files.remove(self.folder / STAGING / "lock")
                self.files.remove_empty(self.folder / STAGING)
            finally:
                lock.release()

    def __enter__(self) -> TorchDistSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(BaseException):  # what ended the run is raised, and nothing else
            self._background.join(_PATIENCE_S)
        with contextlib.suppress(MegtoolError):
            self._release()

    # ---- what the ranks tell each other

    def _gather(self, value: Any) -> list[Any]:
        """What every rank says, on every rank."""
        world = self.groups.world
        if world.handle is None:
            return [value]
        values: list[Any] = [None] * world.size
        dist.all_gather_object(values, value, group=world.handle)
        return values

    def _raise_on_all_ranks(self, error: MegtoolError | None) -> None:
        """Raise on every rank what one of them has met.

        Raises:
            MegtoolError: this rank's, or the first rank's that has one.
        """
        errors = self._gather(error)
        if error is not None:
            raise error
        for other_error in errors:
            if other_error is not None:
                raise other_error

    def _gather_objects(self, metadata: SaveMetadata) -> dict[str, bytes]:
        """The objects of all ranks, on every rank: random state, and the extras' own."""
        local_objects = dict(metadata.objects)
        if metadata.random:
            p, groups = self.template.parallel, self.groups
            is_first = groups.replicas.rank == 0 if p.ep == 1 else True
            if is_first:
                local_objects[rng_object_name(groups)] = pack_rng_state(groups)
        out: dict[str, bytes] = {}
        for rank_objects in self._gather(local_objects):
            out |= rank_objects
        return out

    def _make_common_state(
        self,
        metadata: SaveMetadata,
        iteration: int,
        small: Mapping[str, Any] | None,
        objects: Mapping[str, bytes],
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Common state, and all objects by name."""
        template, buckets = self.template, self._planned.layout.buckets if self._planned else None
        has_experts = any(".experts." in t.name for t in template.tensors)
        num_chains = 2 if template.parallel.ep > 1 and has_experts else 1
        common = make_common_state(
            template, metadata, iteration, small, self.optimizer_format, num_chains=num_chains
        )
        out: dict[str, bytes] = {}
        if buckets is not None and small is not None:
            chain = split_chain(small, num_chains)
            out |= {name: encode_object([value]) for name, value in buckets.objects.items()}
            items = [
                {k: encode_object([to_plain_tree(v)]) for k, v in inner.items()} for inner in chain
            ]
            for prefix, number in buckets.prefixes:
                out |= {f"{prefix}{k}/shard_0_1": item for k, item in items[number].items()}
        return common, out | {**template.objects, **objects}

    # ---- writing, in whichever thread

    def _write(self, task: _SaveTask) -> None:
        staged, is_first = task.staged, self.groups.rank == 0
        staged.begin()
        try:
            planned = task.file.plan(task.objects)
            if is_first:
                staged.require_space(sum(f.size for f in planned.catalogue.files))
            task.file.write(staged, planned, task.rows)
            staged.mark_done()
            if not is_first:
                staged.wait()
                return
            metadata, last = metadata_files(planned)
            staged.commit(
                {
                    **task.small,
                    ".metadata": metadata,
                    COMMON_FILE: encode_object(dict(task.common)),
                    CONFIG_FILE: last,
                }
            )
        except BaseException:
            with contextlib.suppress(StorageError):
                staged.mark_failed()
            if is_first:
                with contextlib.suppress(StorageError):
                    staged.discard()
            raise
