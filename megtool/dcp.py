"""`torch.distributed.checkpoint` over any checkpoint: a reader with its planner, and a writer.

    dcp.load(model.state_dict(), storage_reader=megtool.dcp.Reader("s3://bucket/run/iter_0005000"))

Every rank reads its own part of each tensor and nothing else, whatever the format and the layout of
the checkpoint. Names may be those of Hugging Face, of Megatron, or the checkpoint's own.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as read_state_dict
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from megtool.access.checkpoint import Checkpoint, open_checkpoint
from megtool.access.fit import refuse_misfits
from megtool.access.naming import NamedTensors, fitting_namings
from megtool.access.read_boxes import BoxReader
from megtool.access.state_dict import TensorRequest, fill_tensors
from megtool.checkpoint.storage.location import is_remote, require_local
from megtool.checkpoint.storage.location import location as to_location
from megtool.errors import MappingError, UsageError

__all__ = ["Planner", "Reader", "Writer", "load"]


class Reader(StorageReader):
    """A storage reader over a checkpoint of any format, local or in a store.

    Without `naming`, tensors are known by all names that they have: those of Hugging Face, of
    Megatron and the stored ones, so that a model of either kind finds its own. `prefix` comes
    before each name, for state dicts such as `{"model": model.state_dict()}` (`prefix="model."`).
    The other arguments are those of `megtool.open`.

    Raises:
        CheckpointError: it cannot be opened, or its tensors do not fit its model.
    """

    def __init__(
        self,
        location: str | Path | Checkpoint,
        *,
        naming: str | None = None,
        prefix: str = "",
        family: str | None = None,
        like: str | Path | None = None,
        iteration: int | str | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self._open = {"family": family, "like": like, "iteration": iteration}
        self._naming, self._prefix, self._threads = naming, prefix, threads
        self._opened(location)

    def _opened(self, location: str | Path | Checkpoint) -> None:
        self.checkpoint = open_checkpoint(location, **self._open, optimizer=False)  # type: ignore[arg-type]
        self._named: dict[str, tuple[NamedTensors, BoxReader]] | None = None

    @property
    def by_name(self) -> dict[str, tuple[NamedTensors, BoxReader]]:
        """The naming that each name belongs to, and what reads it."""
        if self._named is None:
            self._named = {}
            source = self.checkpoint.source
            for named in fitting_namings(source, self._naming):
                if named.naming == "hf":
                    named = _with_tied_head(named)
                reader = BoxReader(
                    source.catalogue, named.source, named.target, threads=self._threads
                )
                for name in named.tensors:
                    self._named.setdefault(name, (named, reader))
        return self._named

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of another checkpoint if one is named."""
        if checkpoint_id is not None and str(checkpoint_id) != str(self.checkpoint.location):
            self._opened(str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this may be a checkpoint: opening it says more."""
        return bool(str(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """All tensors as single chunks, of which planners take what a rank needs."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, (named, _) in self.by_name.items():
            size = torch.Size(named.tensors[name].shape)
            kind = getattr(torch, named.dtypes[name].name, None)
            if isinstance(kind, torch.dtype):
                entries[self._prefix + name] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=kind),
                    size=size,
                    chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
                )
        return Metadata(state_dict_metadata=entries)

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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, all of it in one go, into the planner's tensors.

        Raises:
            CheckpointError: a read failed.
        """
        requests: dict[int, tuple[NamedTensors, BoxReader, list[TensorRequest]]] = {}
        resolved = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise MappingError(
                    "it is no tensor, and this reader has tensors alone",
                    file=self.checkpoint.location,
                    tensor=item.storage_index.fqn,
                    hint="load tensors with this reader, and other values from their own file",
                )
            name = item.storage_index.fqn.removeprefix(self._prefix)
            named, reader = self.by_name[name]
            target = planner.resolve_tensor(item).detach()
            resolved.append((item, target))
            lo = tuple(item.storage_offsets)
            hi = tuple(a + n for a, n in zip(lo, item.lengths, strict=True))
            shape = named.tensors[name].shape
            requests.setdefault(id(reader), (named, reader, []))[2].append(
                TensorRequest(name=name, shape=shape, lo=lo, hi=hi, local=target)
            )
        for named, reader, boxes in requests.values():
            fill_tensors(reader, named.tensors, boxes)
        for item, target in resolved:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


_HEAD = "lm_head.weight"


def _with_tied_head(named: NamedTensors) -> NamedTensors:
    """The tensors, and the output matrix of a tied model, which files lack and state dicts have."""
    embedding = named.target.placements.get("embed.weight")
    if _HEAD in named.tensors or embedding is None or not embedding.is_identity:
        return named
    tied = replace(named.tensors[embedding.stored], name=_HEAD)
    return replace(
        named,
        tensors={**named.tensors, _HEAD: tied},
        dtypes={**named.dtypes, _HEAD: named.dtypes[embedding.stored]},
    )


class Planner(DefaultLoadPlanner):
    """torch's own planner, whose error names every tensor that is missing or has another shape."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Compare all names and shapes before anything is read.

        Raises:
            MappingError: some do not fit.
        """
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None:
            return
        stored = metadata.state_dict_metadata
        missing = [n for n in self.state_dict if n not in stored]
        misshapen = {}
        for name, tensor in self.state_dict.items():
            entry = stored.get(name)
            if not isinstance(tensor, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
                continue
            if tensor.shape != entry.size:
                misshapen[name] = f"{name} is {list(tensor.shape)}, and here {list(entry.size)}"
        refuse_misfits(
            f"the state dict's {len(self.state_dict)} entries",
            missing=[] if self.allow_partial_load else missing,
            misshapen=misshapen,
        )


def load(state_dict: dict[str, Any], location: str | Path | Checkpoint, **options: Any) -> None:
    """Fill a state dict: `dcp.load` with `Reader(location, **options)` and `Planner()`.

    Raises:
        CheckpointError: see `Reader`.
    """
    read_state_dict(state_dict, storage_reader=Reader(location, **options), planner=Planner())


class Writer(FileSystemWriter):
    """A storage writer that leaves a Hugging Face folder, `torch_dist` or another format.

        dcp.save(model.state_dict(), storage_writer=megtool.dcp.Writer("out", to="hf", like="hf"))

    Ranks write torch's own files into `.NAME.dcp` beside the destination, which all have to see;
    then one of them turns these into the format, with digests of everything, and removes them. The
    destination appears with one rename. `options` are those of `megtool.reshard`.

    Raises:
        UsageError: the destination is in a store, and `staging` names no folder.
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
        super().__init__(self._staging)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish torch's checkpoint, convert it, and remove it.

        Raises:
            MegtoolError: the conversion failed; torch's checkpoint stays.
        """
        from megtool.commands.api import make_function

        super().finish(metadata, results)
        make_function("reshard")(self._staging, self._location, **self._options)
        shutil.rmtree(self._staging)
