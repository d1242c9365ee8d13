"""Asynchronous saves of a run's iterations in Megatron's format, written by all ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.errors import MegtoolError, StorageError, UsageError
from megtool.formats.torch_dist.layout import COMMON_FILE, CONFIG_FILE
from megtool.megatron_state.param_groups import DP_RESHARDABLE, FULLY_RESHARDABLE
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.fully_shard import sharded_modules
from megtool.parallel.process_groups import ProcessGroups
from megtool.pickles.zip_writer import encode_object
from megtool.staging.destination.store_check import check_surroundings
from megtool.staging.nested_runs import check_runs_above
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath
from megtool.storage.lock import LockFile
from megtool.storage.objects.lease import Lease
from megtool.storage.objects.probe import probe_store
from megtool.train.checkpointing.background_task import BackgroundTask
from megtool.train.checkpointing.host_snapshot import (
    HostSnapshot,
    LivePiece,
    LiveShards,
    computed_weights,
    iterate_live_state,
)
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
from megtool.train.checkpointing.store_iteration import StoreIteration, remove_unfinished_objects
from megtool.train.model.build import rank_coordinates

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer

_LOG = logging.getLogger(__name__)
_NONE = "none"
_PATIENCE_S = 60.0  # to wait for a save when the run ends with an error


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavePlan:
    """What all saves of a run share: the layout, and this rank's file."""

    layout: SaveLayout
    file: RankDataFile


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveTask:
    """One iteration to write: its folder, its shards, and on rank 0 the other files."""

    staged: StagedIteration
    file: RankDataFile
    rows: Mapping[int, Tensor] | LiveShards
    objects: Mapping[str, bytes]
    common: Mapping[str, Any]
    small: Mapping[str, bytes | Path]


class TorchDistSaver:
    """Writes iterations of one run into a save folder (`torch_dist`), all ranks together.

    `folder` holds `iter_NNNNNNN/` and `latest_checkpointed_iteration.txt`, on a file system that
    all ranks share. Every rank makes a saver with the same arguments, and calls its methods at the
    same times. Whenever a run is interrupted, the iteration that the tracker names is complete, and
    the next saver of the folder removes the files of unfinished saves.

    `optimizer_format` is `fully_reshardable`, `dp_reshardable` or `none` (weights alone).
    Memory: asynchronous saves keep one host copy of this rank's part of the state, from the first
    save (or `prepare`) until `close`.

    Usage: `with TorchDistSaver(...) as saver: saver.prepare(stages, optimizer)`, then in the loop
    `saver.check()` in every step and `saver.save(...)` at intervals. Leaving the block waits for a
    save under way.

    Raises:
        DestinationError: another run writes to the folder, or it cannot be written.
        UsageError: there is no such format.
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
                f"there is no optimizer format {optimizer_format!r}",
                hint=f"{FULLY_RESHARDABLE}, {DP_RESHARDABLE} or {_NONE}",
            )
        self.folder, self.template, self.groups = folder, template, groups
        self.optimizer_format = optimizer_format
        self._fsync, self._timeout_s = fsync, timeout_s
        self.files = files or Files()
        self._lock: LockFile | Lease | None = None
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
            if self._lock is not None:
                self._lock.release()
        self._raise_on_all_ranks(error)

    def _claim_folder(self) -> None:
        """Lock the folder, and remove what unfinished saves left."""
        missing = [p for p in (self.folder, *self.folder.parents) if self.files.stat(p) is None]

        def make() -> None:
            for path in reversed(missing):
                self.files.mkdir(path)
            self.files.make_own_folder(self.folder / STAGING)

        if isinstance(self.folder, StorePath):
            self._claim_prefix(self.folder)
            return
        staging = Path(os.path.realpath(self.folder)) / STAGING
        check_runs_above(self.files, staging)
        self._lock = LockFile(self.files, self.folder / STAGING / "lock", make)
        check_runs_above(self.files, staging)  # of two runs that start at once, one sees the other
        if removed := remove_unfinished(self.files, self.folder):
            _LOG.warning("removed unfinished saves: %s", ", ".join(removed))

    def _claim_prefix(self, folder: StorePath) -> None:
        """Take the lease of a prefix in a store, and remove what unfinished saves left."""
        check_surroundings(folder, [])
        self._lock = Lease(folder / STAGING / "lock")
        probe_store(folder / STAGING)
        if removed := remove_unfinished_objects(folder):
            _LOG.warning("removed unfinished saves: %s", ", ".join(removed))

    def prepare(
        self, stages: Sequence[Decoder], optimizer: Optimizer | None, *, asynchronous: bool = True
    ) -> None:
        """Plan all saves, and allocate host memory, so that the first save is fast.

        Raises:
            MappingError: the model differs from the template.
            UsageError: the optimizer's format cannot hold this optimizer's state.
        """
        if optimizer is not None:
            optimizer.wait_for_parameters()
        planned = self._plan(stages, optimizer)
        if asynchronous:
            self._prepare_snapshot(planned.layout)

    def _plan(self, stages: Sequence[Decoder], optimizer: Optimizer | None) -> _SavePlan:
        if self._planned is not None:
            return self._planned
        saved_optimizer = optimizer if self.optimizer_format != _NONE else None
        ranges, dtypes = [], {}
        has_shards = bool(sharded_modules(stages))
        for state, name, start, tensor in self._live_state(stages, saved_optimizer):
            self._kinds[state, name] = tensor.dtype
            if state == WEIGHT:
                dtypes[name] = str(tensor.dtype).removeprefix("torch.")
            if state != WEIGHT or has_shards:
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

    def _live_state(
        self, stages: Sequence[Decoder], optimizer: Optimizer | None
    ) -> Iterator[LivePiece]:
        return iterate_live_state(stages, optimizer, self.template.carried)

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

        An asynchronous save returns once the state is copied to host memory; later changes of the
        parameters do not affect it. With `copy_behind` the copy overlaps with the next forward and
        backward passes: `wait_for_copy` has to be called before anything changes parameters or the
        optimizer's state. A synchronous save returns when the iteration is complete on disk. Both
        wait for an earlier save first.

        Raises:
            StorageError: it, or an earlier one, could not be written (no space, ...).
        """
        began = time.monotonic()
        self._background.join()
        if optimizer is not None:
            optimizer.wait_for_parameters()
        planned = self._plan(stages, optimizer)
        saved_optimizer = optimizer if self.optimizer_format != _NONE else None
        objects = self._gather_objects(metadata)
        self._attempts += 1
        staged = self._stage(iteration)
        rows: Mapping[int, Tensor] | LiveShards
        copy: Callable[[], None] | None = None
        if asynchronous:
            snapshot = self._prepare_snapshot(planned.layout)
            rows = snapshot.rows
            copy = snapshot.copy_fn(self._live_state(stages, saved_optimizer))
            if not copy_behind:
                copy()
                copy = None
        else:
            computed = computed_weights(stages)
            live = iterate_live_state(stages, saved_optimizer, self.template.carried, computed)
            rows = LiveShards(planned.layout, live, computed)
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
            self._background.start(copy, partial(self._write, task))
        else:
            self._write(task)
        return time.monotonic() - began

    def _stage(self, iteration: int) -> StagedIteration:
        is_remote = isinstance(self.folder, StorePath)
        kind: Callable[..., StagedIteration] = StoreIteration if is_remote else StagedIteration
        return kind(
            self.files,
            self.folder,
            iteration,
            number=self._attempts,
            rank=self.groups.rank,
            size=self.groups.world.size,
            fsync=self._fsync,
            timeout_s=self._timeout_s,
        )

    def wait_for_copy(self) -> float:
        """Wait until a copy under way is complete; returns the seconds it took. See `save`."""
        return self._background.wait_for_copy()

    def check(self) -> None:
        """Raise an error of the background thread since the last call, once; takes no time.

        Raises:
            StorageError: a save failed. The iteration before it still exists.
        """
        self._background.check()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way in the background."""
        return self._background.is_busy

    def finish(self) -> None:
        """Wait until no save is under way.

        Raises:
            StorageError: see `check`.
        """
        self._background.join()

    def close(self) -> None:
        """Wait, unlock the folder and free all memory.

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
        if isinstance(lock, Lease):
            lock.release()
        elif lock is not None:
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
        with contextlib.suppress(BaseException):  # only the error that ended the run is raised
            self._background.join(_PATIENCE_S)
        with contextlib.suppress(MegtoolError):
            self._release()

    # ---- communication

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        world = self.groups.world
        if world.handle is None:
            return [value]
        values: list[Any] = [None] * world.size
        dist.all_gather_object(values, value, group=world.handle)
        return values

    def _raise_on_all_ranks(self, error: MegtoolError | None) -> None:
        """Raise an error of one rank on all of them.

        Raises:
            MegtoolError: this rank's own, or that of the first rank that has one.
        """
        errors = self._gather(error)
        if error is not None:
            raise error
        for other_error in errors:
            if other_error is not None:
                raise other_error

    def _gather_objects(self, metadata: SaveMetadata) -> dict[str, bytes]:
        """The objects of all ranks, on every rank: random states, and those of `metadata`."""
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
        """The common state, and all objects by name."""
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

    # ---- writing, in either thread

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
                },
                rotation=self.template.rotation,
            )
        except BaseException:
            with contextlib.suppress(StorageError):
                staged.mark_failed()
            if is_first:
                with contextlib.suppress(StorageError):
                    staged.discard()
            raise
