"""`torch.distributed.checkpoint` over any checkpoint: a reader with its planner, and a writer.

    dcp.load(model.state_dict(), storage_reader=megtool.dcp.Reader("s3://bucket/run/iter_0005000"))

Every rank reads its own part of each tensor and nothing else, whatever the format and the layout of
the checkpoint. Names may be those of Hugging Face, of Megatron, or the checkpoint's own.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
)
from torch.distributed.checkpoint.state_dict_loader import load as read_state_dict
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from megtool.access.checkpoint import Checkpoint
from megtool.access.extra_states import (
    is_empty,
    is_extra_state,
    kept_states,
    refuse_foreign_states,
    warn_kept,
)
from megtool.access.fit import FILLED_IN_PART, describe_obstacles, refuse_misfits, require_memory
from megtool.access.optimizer_state import ABSENT
from megtool.access.state_dict import TensorRequest, fill_tensors
from megtool.access.state_dict_entries import (
    AbsentStateEntry,
    Entry,
    SettingEntry,
    StateDictEntries,
    StepEntry,
    TensorEntry,
    ValueEntry,
)
from megtool.access.tensor_finder import NamingIndex, TensorMatch
from megtool.commands.options.reshard import ReshardOptions
from megtool.convert.dialects import is_optimizer_state
from megtool.dtypes import dtype as named_dtype
from megtool.errors import DestinationError, MappingError, MegtoolError, UsageError, listed
from megtool.formats import find_format
from megtool.options.config_file import build_options
from megtool.process.gc_pause import paused_collection
from megtool.run_state.state_dict_groups import PARAMS, STEP
from megtool.storage.location.path import is_remote, require_local
from megtool.storage.location.path import location as to_location

__all__ = ["Planner", "Reader", "Writer", "load"]

_LOG = logging.getLogger(__name__)
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "momentum")
_WITHOUT_OPTIMIZER = ("hf", "safetensors")


class Reader(StorageReader):
    """A storage reader over a checkpoint of any format, local or in a store.

        state = {"model": weights, "optim": states}  # of torch's `get_state_dict`
        dcp.load(state, storage_reader=megtool.dcp.Reader("ckpt"))

    Without `naming`, tensors are known by all names that they have: those of Hugging Face, of
    Megatron, of torchtitan and the stored ones, so that a model of either kind finds its own, alone
    or as the part `model`. `prefix` is what else comes before each name. Entries of `optim` or
    `optimizer` are the optimizer's state, steps and param groups. `masters` fills float32
    parameters with the master weights, which bfloat16 weights are roundings of: by default where
    the optimizer is loaded, too. A model may be wrapped (compiled, data-parallel); modules keep
    extra states that the checkpoint lacks. The other arguments are those of `megtool.open`.

    Raises:
        CheckpointError: it cannot be opened, or its tensors do not fit its model.
    """

    def __init__(
        self,
        location: str | Path | Checkpoint,
        *,
        naming: str | None = None,
        prefix: str = "",
        masters: bool | None = None,
        family: str | None = None,
        like: str | Path | None = None,
        iteration: int | str | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self._open = {"family": family, "like": like, "iteration": iteration}
        self._naming, self._prefix, self._threads = naming, prefix, threads
        self._masters = masters
        self._opened(location)

    def _opened(self, location: str | Path | Checkpoint) -> None:
        self._entries = StateDictEntries(
            location,
            self._open,
            naming=self._naming,
            prefix=self._prefix,
            threads=self._threads,
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint; opened without its optimizer state, unless it was open already."""
        return self._entries.checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of another checkpoint if one is named."""
        if checkpoint_id is not None and str(checkpoint_id) != str(self.checkpoint.location):
            self._opened(str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this may be a checkpoint: opening it says more."""
        return bool(str(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Tensors as single chunks, of which planners take what a rank needs."""
        return Metadata(state_dict_metadata=_MetadataOfEntries(self._entries))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the headers are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @paused_collection()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, all of it in one go, into the planner's tensors.

        Settings that the checkpoint does not have keep their values, and a warning names them.

        Raises:
            MappingError: tensors cannot hold what is stored; all are named, and nothing was read.
            FormatError: an extra state would run code when its module gets it.
            CheckpointError: a read failed; the hint says that tensors are filled in part.
        """
        requests: dict[int, tuple[NamingIndex, list[TensorRequest]]] = {}
        resolved = []
        unchanged: dict[str, None] = {}
        absent: dict[str, Any] = {}
        for item in plan.items:
            entry = self._entries.find(item.storage_index.fqn)
            if isinstance(entry, AbsentStateEntry):
                name = item.dest_index.fqn
                absent[name] = getattr(planner, "state_dict", {}).get(name)
                continue
            if item.type is LoadItemType.BYTE_IO:
                self._give_value(item, entry, planner, unchanged)
                continue
            target = planner.resolve_tensor(item).detach()
            resolved.append((item, target))
            if isinstance(entry, StepEntry):
                target.fill_(entry.value)
                continue
            if not isinstance(entry, TensorEntry):
                raise self._no_tensor(item)
            match = self._tensor_for(entry, target)
            lo = tuple(item.storage_offsets)
            hi = tuple(a + n for a, n in zip(lo, item.lengths, strict=True))
            requests.setdefault(id(match.naming), (match.naming, []))[1].append(
                TensorRequest(name=match.name, shape=match.tensor.shape, lo=lo, hi=hi, local=target)
            )
        _refuse_obstacles(requests.values(), self.checkpoint.location)
        states = {r.name for _, boxes in requests.values() for r in boxes if is_extra_state(r.name)}
        refuse_foreign_states(self.checkpoint.source.catalogue, states)
        try:
            for naming, boxes in requests.values():
                fill_tensors(naming.reader, naming.named.tensors, boxes)
        except MegtoolError as e:
            e.add_hint(FILLED_IN_PART)
            raise
        for item, target in resolved:
            planner.commit_tensor(item, target)
        self._warn_kept(unchanged)
        warn_kept(kept_states(absent, ()), self.checkpoint.location)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _tensor_for(self, entry: TensorEntry, target: torch.Tensor) -> TensorMatch:
        """The tensor to read: the master weight where `masters` says so."""
        masters = self._entries.has_optimizer if self._masters is None else self._masters
        if masters and entry.name and target.dtype == torch.float32:
            return self._entries.main_weight(entry) or entry.match
        return entry.match

    def _give_value(
        self, item: ReadItem, entry: Entry | None, planner: LoadPlanner, unchanged: dict[str, None]
    ) -> None:
        """Give the planner a value that is no tensor, or note that its own stays."""
        value: Any = ABSENT
        if isinstance(entry, SettingEntry):
            name = f"{entry.optimizer}.param_groups.{entry.group}.{PARAMS}"
            params = getattr(planner, "state_dict", {}).get(name)
            value = self._entries.setting(entry, params)
            if value is ABSENT and entry.key in _HYPERPARAMETERS:
                unchanged[entry.key] = None
        elif isinstance(entry, ValueEntry):
            value = self._entries.value(entry)
            if value is ABSENT:
                unchanged[entry.name] = None
        else:
            raise self._no_tensor(item)
        if value is not ABSENT:
            data = io.BytesIO()
            torch.save(value, data)
            data.seek(0)
            planner.load_bytes(item, data)

    def _no_tensor(self, item: ReadItem) -> MappingError:
        return MappingError(
            "the state dict has a tensor there or the checkpoint has one, and the other has not",
            file=self.checkpoint.location,
            tensor=item.storage_index.fqn,
            hint="load other values than tensors from their own file",
        )

    def _warn_kept(self, unchanged: Iterable[str]) -> None:
        if unchanged:
            _LOG.warning(
                "%s does not have %s of these parameters: the state dict's own values stay",
                self.checkpoint.location,
                listed([*unchanged], 20),
            )


def _refuse_obstacles(
    requests: Iterable[tuple[NamingIndex, list[TensorRequest]]], file: str | Path
) -> None:
    """Refuse tensors that cannot hold what is stored, all of them at once.

    Raises:
        MappingError: there are some.
    """
    targets = {
        r.name: (r.local, naming.named.dtypes[r.name]) for naming, boxes in requests for r in boxes
    }
    refuse_misfits(
        f"the state dict's {len(targets)} tensors",
        missing=[],
        misshapen={},
        mistyped=describe_obstacles(targets),
        file=file,
        hint="nothing was loaded",
    )


class _MetadataOfEntries(dict[str, TensorStorageMetadata | BytesStorageMetadata]):
    """Metadata of entries, made when they are targets for.

    To iterate gives all tensors by their stored names, or by those of the reader's naming.
    """

    def __init__(self, entries: StateDictEntries) -> None:
        super().__init__()
        self._entries = entries

    def __missing__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        entry = self._entries.find(name)
        described = None if entry is None else _describe(entry)
        if described is None:
            raise KeyError(name)
        self[name] = described
        return described

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The metadata of an entry."""
        try:
            return self[name]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> Any:
        """All names."""
        return self._complete().keys()

    def values(self) -> Any:
        """All metadata."""
        return self._complete().values()

    def items(self) -> Any:
        """All names, with their metadata."""
        return self._complete().items()

    def _complete(self) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        return {name: self[name] for name in self._entries.names() if name in self}


def _describe(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata | None:
    """What planners are told of an entry; None of a tensor whose type torch does not have."""
    if isinstance(entry, TensorEntry):
        kind = getattr(torch, entry.match.dtype.name, None)
        if not isinstance(kind, torch.dtype):
            return None
        return _of_tensor(entry.match.tensor.shape, kind)
    if isinstance(entry, StepEntry):
        return _of_tensor((), torch.float32)
    return BytesStorageMetadata()


def _of_tensor(shape: Sequence[int], kind: torch.dtype) -> TensorStorageMetadata:
    size = torch.Size(shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=kind),
        size=size,
        chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )


class Planner(DefaultLoadPlanner):
    """torch's own planner, whose error names every tensor that does not fit.

    One that is missing, has another shape or cannot hold what is stored. Extra states of modules
    that are empty are not loaded.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Compare all names, shapes and types before anything is read.

        Raises:
            MappingError: some do not fit.
            UsageError: some are on the meta device, and torch cannot tell where else to put them.
        """
        flat = flatten_state_dict(state_dict)[0]
        on_meta = [n for n, t in flat.items() if isinstance(t, torch.Tensor) and t.is_meta]
        if not torch.distributed.is_initialized():
            require_memory(on_meta)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._num_entries = len(self.state_dict)
        self.state_dict = {
            n: v for n, v in self.state_dict.items() if not (is_extra_state(n) and is_empty(v))
        }
        if metadata is None:
            return
        stored = metadata.state_dict_metadata
        missing = [n for n in self.state_dict if n not in stored]
        misshapen, values = {}, {}
        for name, value in self.state_dict.items():
            entry = stored.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                continue
            if not name.endswith(f".{STEP}"):
                values[name] = value, named_dtype(str(entry.properties.dtype))
            if isinstance(value, torch.Tensor) and value.shape != entry.size:
                misshapen[name] = f"{name} is {list(value.shape)}, and here {list(entry.size)}"
        refuse_misfits(
            f"the state dict's {len(self.state_dict)} entries",
            missing=[] if self.allow_partial_load else missing,
            misshapen=misshapen,
            mistyped=describe_obstacles(values),
        )

    def create_local_plan(self) -> LoadPlan:
        """Torch's plan; without what was left out, which torch's own would look for again."""
        if self.metadata is None or len(self.state_dict) == self._num_entries:
            return super().create_local_plan()
        return create_default_local_load_plan(
            self.state_dict, self.metadata, not self.allow_partial_load
        )


def load(state_dict: dict[str, Any], location: str | Path | Checkpoint, **options: Any) -> None:
    """Fill a state dict: `dcp.load` with `Reader(location, **options)` and `Planner()`.

    Raises:
        CheckpointException: of torch, whose `failures` have the error of each rank: a
            `MappingError` that names all entries that do not fit, or what `Reader` raises.
    """
    with paused_collection():
        read_state_dict(state_dict, storage_reader=Reader(location, **options), planner=Planner())


class Writer(FileSystemWriter):
    """A storage writer that leaves a Hugging Face folder, `torch_dist` or another format.

        dcp.save(model.state_dict(), storage_writer=megtool.dcp.Writer("out", to="hf", like="hf"))

    Ranks write torch's own files into `.NAME.dcp` beside the destination, which all have to see;
    then one of them turns these into the format, with digests of everything, and removes them. The
    destination appears with one rename. `options` are those of `megtool.reshard`.

    Raises:
        UsageError: there is no such format or option; or the destination is in a store, and
            `staging` names no folder.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        to: str = "hf",
        staging: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._location = to_location(location)
        if staging is None and is_remote(self._location):
            raise UsageError(
                "a destination in a store needs a folder on this machine, too",
                file=self._location,
                hint="staging=FOLDER, which all ranks see",
            )
        place = self._location.parent if staging is None else to_location(staging)
        require_local(place, "staging")
        self._staging = place / f".{self._location.name}.dcp"
        self._options = {"to": to, **options}
        find_format(to)
        build_options(
            ReshardOptions,
            {"source": self._staging, "destination": self._location, **self._options},
        )
        super().__init__(self._staging)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan of torch's files, unless the format cannot hold what is in it.

        Raises:
            UsageError: there is optimizer state in it, and Hugging Face folders have none.
        """
        states = [i.index.fqn for i in plan.items if is_optimizer_state(i.index.fqn)]
        is_left_out = self._options.get("optimizer_format") == "none"
        if states and self._options["to"] in _WITHOUT_OPTIMIZER and not is_left_out:
            raise UsageError(
                f"{self._options['to']!r} has no place for the optimizer's state, such as "
                f"{states[0]!r}",
                file=self._location,
                hint='to="torch_dist" holds it; optimizer_format="none" leaves it out',
            )
        out: SavePlan = super().prepare_local_plan(plan)
        return out

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are, unless there is something at the destination already.

        Raises:
            DestinationError: there is, and `overwrite` is not given.
        """
        place = self._location
        is_free = not place.exists() or (place.is_dir() and not any(place.iterdir()))
        if not is_free and not self._options.get("overwrite"):
            with suppress(OSError):
                self._staging.rmdir()  # nothing is in it yet
            raise DestinationError(
                "the destination already exists",
                file=place,
                hint="choose another destination, or replace this one with overwrite=True",
                error_id="destination-exists",
            )
        out: list[SavePlan] = super().prepare_global_plan(plans)
        return out

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish torch's checkpoint, convert it, and remove it.

        Raises:
            MegtoolError: the conversion failed; torch's checkpoint stays, and the hint says where.
        """
        from megtool.commands.api import make_function

        super().finish(metadata, results)
        try:
            make_function("reshard")(self._staging, self._location, **self._options)
        except MegtoolError as e:
            more = f"what was saved is in {self._staging}, and `megtool reshard` converts it"
            e.add_hint(more)
            raise
        shutil.rmtree(self._staging)
