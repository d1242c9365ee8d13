"""A load strategy for Megatron-Core that reads shards from a checkpoint of any format."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megtool.access.checkpoint import AdapterLocations, open_checkpoint
from megtool.access.fit import FILLED_IN_PART
from megtool.access.live_objects import live_value
from megtool.access.state_dict import TensorRequest, fill_tensors
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron.names import is_vocabulary, split_state
from megtool.convert.rank_tensors import LocalTensor, whole_tensor
from megtool.dtypes import dtype as named_dtype
from megtool.errors import MappingError, MegtoolError, MissingPackageError, UsageError, listed
from megtool.frameworks.megatron_core.common_state import current_layout, stacked_names
from megtool.frameworks.megatron_core.faults import MegatronFaults, gather
from megtool.frameworks.megatron_core.keys import (
    KeyBox,
    MegatronKeys,
    PlacedBox,
    megatron_keys,
    split_flat_range,
)
from megtool.megatron_state.saved_objects import read_object
from megtool.run_state.checkpoint_objects import plan_objects
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.location.path import location as to_location
from megtool.tensors.sharded import GlobalTensor

_LOG = logging.getLogger(__name__)
_EXTRA = "._extra_state"


def core_module(module: str = "") -> Any:
    """A module of `megatron.core.dist_checkpointing`.

    Raises:
        MissingPackageError: megatron-core is not installed.
    """
    try:
        return importlib.import_module(f"megatron.core.dist_checkpointing{module}")
    except ImportError as e:
        raise MissingPackageError(
            f"Megatron's checkpoints need megatron-core: {e}", hint="pip install megatron-core"
        ) from e


class LoadStrategy:
    """A load strategy for core's own `dist_checkpointing.load(..., sharded_strategy=...)`.

    It reads the checkpoint at `location`, by default the folder that core is given. The other
    arguments are those of `load`.
    """

    def __init__(
        self,
        location: str | Path | None = None,
        *,
        family: str | None = None,
        like: str | Path | None = None,
        iteration: int | str | None = None,
        adapter: AdapterLocations = (),
        threads: int | None = None,
    ) -> None:
        base = getattr(core_module(".strategies.torch"), "LoadShardedStrategy", None)
        if base is not None:  # an abstract class, until core 0.16
            base.register(type(self))
        self._location, self._threads = location, threads
        self._open = {"family": family, "like": like, "iteration": iteration, "adapter": adapter}
        self._source: CheckpointSource | None = None
        self._keys: list[MegatronKeys] = []
        self._best: MegatronKeys | None = None
        self._more: Iterator[MegatronKeys] = iter(())
        self.cached_global_metadata = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects are read, too."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Every backend is read."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Every version is read."""

    def open(self, checkpoint_dir: str | Path, *, optimizer: bool = True) -> CheckpointSource:
        """Open the checkpoint.

        Raises:
            CheckpointError: it cannot be opened.
            UsageError: optimizer state is asked for, and an adapter changes the weights.
        """
        if optimizer and self._open["adapter"]:
            raise UsageError(
                "the optimizer state of the source belongs to its weights without the adapter",
                hint="load the model alone, or without an adapter",
            )
        place = checkpoint_dir if self._location is None else self._location
        return open_checkpoint(
            to_location(place),
            **self._open,  # type: ignore[arg-type]
            optimizer=optimizer,
        ).source

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path, *_: Any) -> Any:
        """Fill all shards: what core asks of a strategy.

        Raises:
            MappingError: tensors are missing or have other shapes.
            CheckpointError: it cannot be read.
        """
        validation = core_module(".validation")
        keys = [s.key for s in core_module(".dict_utils").nested_values(sharded_state_dict)]
        source = self.open(checkpoint_dir, optimizer=any(map(is_optimizer_state, keys)))
        strict = validation.StrictHandling.ASSUME_OK_UNEXPECTED
        shards = self.check(source, sharded_state_dict, strict)[0]
        absent: list[str] = []
        state = self.read(source, shards, absent)
        warn_absent(source, absent)
        return state

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """All tensors without data, by every key under which one of Megatron's classes has them.

        Core compares a model's keys with these where `strict` says so. It does not tell a strategy
        which class asks, so that keys of the others are left over: `load` knows better.
        """
        kind = core_module(".mapping").ShardedTensor
        source = self.open(checkpoint_dir)
        out = {}
        for keys in self._candidates(source, {}):
            for key, shape, dtype in keys.spelled():
                empty = torch.empty(shape, dtype=getattr(torch, dtype.name), device="meta")
                out[key] = kind.from_rank_offsets(key, empty).without_data()
        return out

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """All tensors and objects by Megatron's keys, without data."""
        kind = core_module(".mapping").ShardedObject
        names = [n for n in self.open(checkpoint_dir).catalogue.objects if n.count("/shard_") == 1]
        objects = {n: kind.empty_from_unique_key(n) for n in names}
        return {**objects, **self.load_tensors_metadata(checkpoint_dir)}

    def check(
        self, source: CheckpointSource, shards: Any, strict: Any
    ) -> tuple[Any, set[str], set[str]]:
        """Compare everything that all ranks ask for with the checkpoint, before anything is read.

        Returns what can be read, the names of what the checkpoint lacks, and of what it has more.

        Raises:
            MappingError: tensors are missing, or have other shapes.
        """
        validation = core_module(".validation")
        handling = validation.StrictHandling
        everyone = self._choose(source, shards)
        raising = (handling.ASSUME_OK_UNEXPECTED, handling.RAISE_UNEXPECTED, handling.RAISE_ALL)
        everyone.check(source, lenient=strict not in raising)
        lacking: set[str] = set(everyone.missing)
        unused: set[str] = set()
        if handling.requires_global_app_metadata(strict):
            asked_states = {state for state, _ in everyone.requested}
            unused = {
                t.name
                for (state, key), t in self._chosen(source, shards).tensors.items()
                if state in asked_states and (state, t.name) not in everyone.requested
            }
        if strict is handling.RAISE_ALL:
            validation.maybe_report_missing_and_unexpected_keys(unused, set(), True)
        elif strict in (handling.LOG_ALL, handling.LOG_UNEXPECTED):
            validation.maybe_report_missing_and_unexpected_keys(unused, lacking, False)
        if lacking:
            shards = validation.adjust_non_strict_load(shards, lacking)
        return shards, lacking, unused

    def _choose(self, source: CheckpointSource, shards: Any) -> MegatronFaults:
        """Choose the model class whose keys all ranks' shards have; what does not fit then.

        A layer of one class may have a key that is another layer's in another class, so that only
        all keys together tell which one it is.
        """
        best: MegatronFaults | None = None
        for keys in self._candidates(source, shards):
            faults = MegatronFaults()
            for shard in self._tensors(shards):
                _find_fault(keys, shard, faults)
            everyone = MegatronFaults()
            for each in gather(faults):
                everyone.missing |= each.missing
                everyone.misshapen |= each.misshapen
                everyone.mistyped |= each.mistyped
                everyone.requested |= each.requested
            if best is None or everyone.count < best.count:
                best, self._best = everyone, keys
            if not everyone.count:
                break
        return best or MegatronFaults()

    def _chosen(self, source: CheckpointSource, shards: Any) -> MegatronKeys:
        """The tensors under the keys that were chosen."""
        if self._source is not source or self._best is None:
            return next(self._candidates(source, shards))
        return self._best

    def read(self, source: CheckpointSource, shards: Any, absent: list[str]) -> Any:
        """Fill all shards; the state dict with their values. `absent` takes names of objects.

        Raises:
            CheckpointError: a read failed.
            UsageError: an element type cannot be converted.
        """
        values: dict[int, Any] = {}
        reads: dict[int, tuple[MegatronKeys, dict[str, LocalTensor], list[TensorRequest]]] = {}
        for shard in self._tensors(shards):
            shard.init_data("cpu")
            values[id(shard)] = shard.data
            for keys, tensor, request in self._requests(source, shards, shard):
                _, tensors, requests = reads.setdefault(id(keys), (keys, {}, []))
                name = f"{request.name}#{len(requests)}"
                tensors[name] = whole_tensor(tensor)
                requests.append(
                    TensorRequest(
                        name=name,
                        shape=request.shape,
                        lo=request.lo,
                        hi=request.hi,
                        local=request.local,
                    )
                )
        try:
            for keys, tensors, requests in reads.values():
                fill_tensors(keys.reader, tensors, requests)
        except MegtoolError as e:
            e.add_hint(FILLED_IN_PART)
            raise
        values |= self._objects(source, shards, absent)
        state = core_module(".dict_utils").dict_list_map_outplace(lambda s: values[id(s)], shards)
        return state

    def _tensors(self, shards: Any) -> list[Any]:
        kind = core_module(".mapping").ShardedTensor
        return [s for s in core_module(".dict_utils").nested_values(shards) if isinstance(s, kind)]

    def _vocab_rows(self, shards: Any) -> int:
        """The rows of the padded vocabulary, 0 on a rank that has none of it."""
        tensors = self._tensors(shards)
        rows = [t.global_shape[0] for t in tensors if is_vocabulary(split_state(t.key)[2])]
        return max(rows, default=0)

    def _candidates(self, source: CheckpointSource, shards: Any) -> Iterator[MegatronKeys]:
        """The tensors under the keys of each of Megatron's classes, the likely one first."""
        if self._source is not source:
            rows = self._vocab_rows(shards)
            self._source, self._keys, self._best = source, [], None
            self._more = megatron_keys(source, rows, threads=self._threads)
        yield from self._keys
        for keys in self._more:
            self._keys.append(keys)
            yield keys

    def _requests(
        self, source: CheckpointSource, shards: Any, shard: Any
    ) -> list[tuple[MegatronKeys, GlobalTensor, TensorRequest]]:
        """The boxes to read for a shard, each with the memory for it."""
        place = _place(self._chosen(source, shards), shard)
        if not isinstance(place, PlacedBox):
            raise MappingError("it is not in the checkpoint", tensor=shard.key)
        lo, shape = place.lo, tuple(b - a for a, b in zip(place.lo, place.hi, strict=True))
        data, tensor = shard.data.detach(), place.tensor

        def request(
            first: Sequence[int], end: Sequence[int], local: torch.Tensor
        ) -> tuple[MegatronKeys, GlobalTensor, TensorRequest]:
            boxed = TensorRequest(
                name=shard.key,
                shape=tensor.shape,
                lo=tuple(a + b for a, b in zip(lo, first, strict=True)),
                hi=tuple(a + b for a, b in zip(lo, end, strict=True)),
                local=local,
            )
            return place.keys, tensor, boxed

        if shard.flattened_range is not None:
            out, offset = [], 0
            span = shard.flattened_range
            for first, end in split_flat_range(shape, span.start, span.stop):
                sizes = tuple(b - a for a, b in zip(first, end, strict=True))
                count = torch.Size(sizes).numel()
                out.append(request(first, end, data[offset : offset + count].view(sizes)))
                offset += count
            return out
        local = data.reshape(shape) if data.is_contiguous() else data
        if place.fits:
            return [request([0] * len(shape), shape, local)]
        inside = [max(min(n, m - a), 0) for a, n, m in zip(lo, shape, tensor.shape, strict=True)]
        with torch.no_grad():
            local.zero_()
        part = local[tuple(slice(0, n) for n in inside)]
        return [request([0] * len(shape), inside, part)]

    def _objects(self, source: CheckpointSource, shards: Any, absent: list[str]) -> dict[int, Any]:
        """The values of all objects; their own where the checkpoint has none."""
        kind = core_module(".mapping").ShardedObject
        objects = [
            s for s in core_module(".dict_utils").nested_values(shards) if isinstance(s, kind)
        ]
        if not objects:
            return {}
        stored = self._stored_objects(source, shards)
        values: dict[int, Any] = {}
        lost: dict[str, None] = {}
        for item in objects:
            values[id(item)] = item.data
            left_out: list[str] = []
            value = None
            if item.unique_key in stored:
                tree = read_object(source.catalogue, stored[item.unique_key])
                value = live_value(tree, item.key, left_out)
            if item.unique_key in stored and not left_out:
                values[id(item)] = value
            elif _EXTRA not in item.key or not _is_empty(item.data):
                lost["extra states of modules" if _EXTRA in item.key else item.key] = None
        absent += lost
        return values

    def _stored_objects(self, source: CheckpointSource, shards: Any) -> dict[str, Any]:
        """The checkpoint's objects by the names that a model of this layout has for them."""
        catalogue = source.catalogue
        if not catalogue.objects:
            return {}
        out = dict(catalogue.objects)
        layout = current_layout()
        if source.is_canonical and layout is not None:
            tensors = self._chosen(source, shards).target.tensors
            moved = plan_objects(source, tensors, layout, "torch_dist").objects
            out |= moved | {s: o for n, o in moved.items() for s in stacked_names(n, source)}
        return out


def _place(keys: MegatronKeys, shard: Any) -> PlacedBox | tuple[int, ...] | None:
    """Where a shard lies; a shape if the tensor has another one; None if there is none."""
    sizes = (*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape)
    box = KeyBox(
        key=shard.key,
        shape=tuple(shard.global_shape),
        lo=tuple(shard.global_offset),
        hi=tuple(a + n for a, n in zip(shard.global_offset, sizes, strict=True)),
    )
    return keys.place(box, any_shape=shard.allow_shape_mismatch)


def _find_fault(keys: MegatronKeys, shard: Any, faults: MegatronFaults) -> None:
    place = _place(keys, shard)
    if isinstance(place, PlacedBox) and shard.data is not None and shard.data.is_meta:
        faults.mistyped[shard.key] = f"{shard.key} is on the meta device, without memory"
    elif isinstance(place, PlacedBox):
        kinds = named_dtype(str(shard.dtype)), place.tensor.dtype
        if len(set(kinds)) > 1 and not all(k.is_float for k in kinds):
            faults.mistyped[shard.key] = f"{shard.key} is {kinds[0]}, and here {kinds[1]}"
        faults.requested.add((split_state(shard.key)[0], place.tensor.name))
    elif place is None:
        faults.missing[shard.key] = None
    else:
        text = f"{shard.key} is {list(shard.global_shape)}, and here {list(place)}"
        faults.misshapen[shard.key] = text


def _is_empty(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    buffer: Callable[[], Any] | None = getattr(value, "getbuffer", None)
    return buffer is not None and len(buffer()) == 0


def warn_absent(source: CheckpointSource, absent: Sequence[str]) -> None:
    """Name, on one rank, what a checkpoint does not have beside tensors."""
    if absent and (not dist.is_initialized() or dist.get_rank() == 0):
        _LOG.warning(
            "%s does not have %s: the run's own values stay", source.path, listed(absent, 20)
        )
