"""Megatron-LM, Megatron-Core and Megatron-Bridge load any checkpoint: `dist_checkpointing` over it.

    megtool.megatron.install()                                # --load takes whatever there is
    state = megtool.megatron.load(sharded_state_dict, "s3://bucket/Llama-3.1-8B")

Every rank reads its own bytes, whatever the format and the layout of the checkpoint: a Hugging Face
folder, rank files in `mp_rank_*` folders, `torch_dist` and zarr of another layout or an old
version, GGUF, local or in a store. Optimizer state comes along where the checkpoint has it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megtool.access.checkpoint import open_checkpoint
from megtool.access.installed import Installed
from megtool.access.live_objects import live_value
from megtool.access.megatron_common import (
    current_layout,
    is_release,
    load_common_state,
    stacked_names,
)
from megtool.access.megatron_faults import MegatronFaults, gather, world_size
from megtool.access.megatron_keys import (
    KeyBox,
    MegatronKeys,
    PlacedBox,
    megatron_keys,
    split_flat_range,
)
from megtool.access.state_dict import TensorRequest, fill_tensors
from megtool.checkpoint.formats import open_checkpoint as open_format
from megtool.checkpoint.formats.save_folder import TRACKER
from megtool.checkpoint.megatron_metadata import read_object
from megtool.checkpoint.param_groups import SHARDING_TYPE
from megtool.checkpoint.storage.location import is_remote
from megtool.checkpoint.storage.location import location as to_location
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron import is_vocabulary, split_state
from megtool.convert.rank_tensors import LocalTensor, whole_tensor
from megtool.errors import CheckpointError, FormatError, MappingError, MissingPackageError, listed
from megtool.reshard.megatron.checkpoint_objects import plan_objects
from megtool.reshard.megatron.common_state import read_iteration
from megtool.reshard.megatron.model_space import read_saved_layout
from megtool.reshard.source import CheckpointSource
from megtool.tensors.sharded import GlobalTensor

__all__ = ["Installed", "LoadStrategy", "install", "load", "load_common_state"]

_LOG = logging.getLogger(__name__)
_EXTRA = "._extra_state"


def _core(module: str = "") -> Any:
    """A module of `megatron.core.dist_checkpointing`.

    Raises:
        MissingPackageError: megatron-core is not installed.
    """
    import importlib

    try:
        return importlib.import_module(f"megatron.core.dist_checkpointing{module}")
    except ImportError as e:
        raise MissingPackageError(
            f"Megatron's checkpoints need megatron-core: {e}", hint="pip install megatron-core"
        ) from e


def load(
    sharded_state_dict: dict[str, Any],
    location: str | Path,
    *,
    strict: Any = "assume_ok_unexpected",
    validate_access_integrity: bool = True,
    family: str | None = None,
    like: str | Path | None = None,
    iteration: int | str | None = None,
) -> Any:
    """`megatron.core.dist_checkpointing.load` from a checkpoint of any format and layout.

    Tensors are filled in place, from the part of the checkpoint that is theirs. Nothing is read
    before all ranks know that every tensor is there and has its shape. What the checkpoint does not
    have beside tensors (random state, extra states, the iteration) keeps the values of
    `sharded_state_dict`, and one warning names it.

    Args:
        sharded_state_dict: What `sharded_state_dict()` of models and optimizers made.
        location: The checkpoint: a folder, a save folder or a file; a path or a URL.
        strict: Core's `StrictHandling`: what happens if tensors are missing or left over.
        validate_access_integrity: Check, as core does, that ranks ask for every part once.
        family: The model family, if the checkpoint names none.
        like: A Hugging Face folder to take the configuration from.
        iteration: Which iteration of a save folder; by default the latest.

    Returns:
        The state dict with values in place of shards; with core's `return_...` also the names of
        what the model does not have, and of what the checkpoint does not have.

    Raises:
        MappingError: tensors are missing or have other shapes: all of all ranks are named.
        CheckpointError: it cannot be opened or read.
    """
    mapping, validation = _core(".mapping"), _core(".validation")
    utils, dicts = _core(".utils"), _core(".dict_utils")
    strict = validation.parse_strict_flag(strict)
    utils.force_all_tensors_to_non_fp8(sharded_state_dict)
    shards, local, factories = _core(".state_dict_utils").load_preprocess(sharded_state_dict)
    shards, plain = utils.extract_sharded_base(shards)
    if validate_access_integrity and world_size() > 1:
        validation.validate_sharding_integrity(validation.determine_global_metadata(shards)[1])
    has_states = any(is_optimizer_state(s.key) for s in dicts.nested_values(shards))
    strategy = LoadStrategy(location, family=family, like=like, iteration=iteration)
    source = strategy.open(location, optimizer=has_states)
    shards, lacking, unused = strategy.check(source, shards, strict)
    state = load_common_state(source, _sharding_type(plain))
    absent: list[str] = []
    _keep_own(state, plain, "", absent)
    dicts.merge(state, local)
    dicts.merge(state, strategy.read(source, shards, absent))
    _warn_absent(source, absent)
    state = mapping.apply_factory_merges(state, factories)
    if validation.StrictHandling.requires_returning_mismatch_keys(strict):
        return state, unused, lacking
    return state


def _sharding_type(plain: Mapping[str, Any]) -> str | None:
    """The sharding type of the optimizer state that a state dict asks for."""
    parts = [plain.get("optimizer")]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get(SHARDING_TYPE), str):
                return str(part[SHARDING_TYPE])
            parts += [v for k, v in part.items() if isinstance(k, int)]
    return None


def _keep_own(state: dict[Any, Any], own: Mapping[Any, Any], path: str, absent: list[str]) -> None:
    """Add to `state` what it lacks of a state dict's own values."""
    for key, value in own.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in state:
            state[key] = value
            absent.append(name)
        elif isinstance(state[key], dict) and isinstance(value, Mapping):
            _keep_own(state[key], value, name, absent)


def _warn_absent(source: CheckpointSource, absent: Sequence[str]) -> None:
    if absent and (not dist.is_initialized() or dist.get_rank() == 0):
        _LOG.warning(
            "%s does not have %s: the run's own values stay", source.path, listed(absent, 20)
        )


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
        threads: int | None = None,
    ) -> None:
        base = getattr(_core(".strategies.torch"), "LoadShardedStrategy", None)
        if base is not None:  # an abstract class, until core 0.16
            base.register(type(self))
        self._location, self._threads = location, threads
        self._open = {"family": family, "like": like, "iteration": iteration}
        self._source: CheckpointSource | None = None
        self._keys: list[MegatronKeys] = []
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
        """
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
        validation = _core(".validation")
        keys = [s.key for s in _core(".dict_utils").nested_values(sharded_state_dict)]
        source = self.open(checkpoint_dir, optimizer=any(map(is_optimizer_state, keys)))
        strict = validation.StrictHandling.ASSUME_OK_UNEXPECTED
        shards = self.check(source, sharded_state_dict, strict)[0]
        absent: list[str] = []
        state = self.read(source, shards, absent)
        _warn_absent(source, absent)
        return state

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """All tensors by Megatron's keys, without data."""
        kind = _core(".mapping").ShardedTensor
        keys = next(self._candidates(self.open(checkpoint_dir), {}))
        out = {}
        for t in keys.target.tensors:
            empty = torch.empty(t.shape, dtype=getattr(torch, t.dtype.name), device="meta")
            out[t.name] = kind.from_rank_offsets(t.name, empty).without_data()
        return out

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """All tensors and objects by Megatron's keys, without data."""
        kind = _core(".mapping").ShardedObject
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
        validation = _core(".validation")
        handling = validation.StrictHandling
        faults = MegatronFaults()
        for shard in self._tensors(shards):
            self._find_fault(source, shards, shard, faults)
        everyone = MegatronFaults()
        for each in gather(faults):
            everyone.missing |= each.missing
            everyone.misshapen |= each.misshapen
            everyone.requested |= each.requested
        raising = (handling.ASSUME_OK_UNEXPECTED, handling.RAISE_UNEXPECTED, handling.RAISE_ALL)
        everyone.check(source, lenient=strict not in raising)
        lacking: set[str] = set(everyone.missing)
        unused: set[str] = set()
        if handling.requires_global_app_metadata(strict):
            asked_states = {state for state, _ in everyone.requested}
            tensors = next(self._candidates(source, shards)).tensors
            unused = {
                t.name
                for (state, key), t in tensors.items()
                if state in asked_states and (state, t.name) not in everyone.requested
            }
        if strict is handling.RAISE_ALL:
            validation.maybe_report_missing_and_unexpected_keys(unused, set(), True)
        elif strict in (handling.LOG_ALL, handling.LOG_UNEXPECTED):
            validation.maybe_report_missing_and_unexpected_keys(unused, lacking, False)
        if lacking:
            shards = validation.adjust_non_strict_load(shards, lacking)
        return shards, lacking, unused

    def _find_fault(
        self, source: CheckpointSource, shards: Any, shard: Any, faults: MegatronFaults
    ) -> None:
        place = self._place(source, shards, shard)
        if isinstance(place, PlacedBox):
            faults.requested.add((split_state(shard.key)[0], place.tensor.name))
        elif place is None:
            faults.missing[shard.key] = None
        else:
            text = f"{shard.key} is {list(shard.global_shape)}, and here {list(place)}"
            faults.misshapen[shard.key] = text

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
        except CheckpointError as e:
            more = "the tensors are filled in part: load them again, or do not use them"
            e.hint = f"{e.hint}; {more}" if e.hint else more
            raise
        values |= self._objects(source, shards, absent)
        state = _core(".dict_utils").dict_list_map_outplace(lambda s: values[id(s)], shards)
        return state

    def _tensors(self, shards: Any) -> list[Any]:
        kind = _core(".mapping").ShardedTensor
        return [s for s in _core(".dict_utils").nested_values(shards) if isinstance(s, kind)]

    def _vocab_rows(self, shards: Any) -> int:
        """The rows of the padded vocabulary, 0 on a rank that has none of it."""
        tensors = self._tensors(shards)
        rows = [t.global_shape[0] for t in tensors if is_vocabulary(split_state(t.key)[2])]
        return max(rows, default=0)

    def _candidates(self, source: CheckpointSource, shards: Any) -> Iterator[MegatronKeys]:
        """The tensors under the keys of each of Megatron's classes, the likely one first."""
        if self._source is not source:
            rows = self._vocab_rows(shards)
            self._source, self._keys = source, []
            self._more = megatron_keys(source, rows, threads=self._threads)
        yield from self._keys
        for keys in self._more:
            self._keys.append(keys)
            yield keys

    def _place(
        self, source: CheckpointSource, shards: Any, shard: Any
    ) -> PlacedBox | tuple[int, ...] | None:
        """Where a shard lies; a shape if the tensor has another one; None if there is none."""
        sizes = (*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape)
        box = KeyBox(
            key=shard.key,
            shape=tuple(shard.global_shape),
            lo=tuple(shard.global_offset),
            hi=tuple(a + n for a, n in zip(shard.global_offset, sizes, strict=True)),
        )
        other: tuple[int, ...] | None = None
        for keys in self._candidates(source, shards):
            place = keys.place(box, any_shape=shard.allow_shape_mismatch)
            if isinstance(place, PlacedBox):
                return place
            other = other or place
        return other

    def _requests(
        self, source: CheckpointSource, shards: Any, shard: Any
    ) -> list[tuple[MegatronKeys, GlobalTensor, TensorRequest]]:
        """The boxes to read for a shard, each with the memory for it."""
        place = self._place(source, shards, shard)
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
        kind = _core(".mapping").ShardedObject
        objects = [s for s in _core(".dict_utils").nested_values(shards) if isinstance(s, kind)]
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
            tensors = next(self._candidates(source, shards)).target.tensors
            moved = plan_objects(source, tensors, layout, "torch_dist").objects
            out |= moved | {s: o for n, o in moved.items() for s in stacked_names(n, source)}
        return out


def _is_empty(value: Any) -> bool:
    """Whether an extra state holds nothing."""
    if value is None:
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    buffer: Callable[[], Any] | None = getattr(value, "getbuffer", None)
    return buffer is not None and len(buffer()) == 0


def install(*, family: str | None = None, like: str | Path | None = None) -> Installed:
    """Make Megatron-Core's loading functions, and Megatron-LM's `--load`, take any checkpoint.

    `dist_checkpointing.load`, `load_common_state_dict`, `load_content_metadata` and
    `check_is_distributed_checkpoint` read what core itself cannot read; `torch_dist` folders whose
    tensors are what the model asks for stay core's. If Megatron-LM's `megatron.training` is
    imported, `--load` takes folders without a tracker file, too. A model without optimizer state is
    loaded as a release: the run starts at iteration 0 with a fresh optimizer.

    Call it before Megatron reads its arguments. `family` and `like` say which model it is where
    checkpoints do not.
    """
    out = Installed()
    known = {"family": family, "like": like}
    core, serialization = _core(), _core(".serialization")

    def loading(original: Any) -> Any:
        def load_any(state: Any, checkpoint_dir: Any, *args: Any, **options: Any) -> Any:
            if _suits_core(state, checkpoint_dir):
                return original(state, checkpoint_dir, *args, **options)
            chosen = {k: options[k] for k in _OPTIONS if k in options}
            return load(state, checkpoint_dir, **known, **chosen)  # type: ignore[arg-type]

        return load_any

    def reading(original: Any) -> Any:
        def load_common(checkpoint_dir: Any, *args: Any, **options: Any) -> Any:
            if _is_cores_own(checkpoint_dir):
                return original(checkpoint_dir, *args, **options)
            return load_common_state(_source(checkpoint_dir, known))

        return load_common

    def checking(original: Any) -> Any:
        return lambda place: original(place) or _opens(place, known)

    for module in (core, serialization):
        out.replace(module, "load", loading)
        out.replace(module, "load_common_state_dict", reading)
    for module in (core, _core(".core")):
        out.replace(module, "check_is_distributed_checkpoint", checking)
    training = sys.modules.get("megatron.training.checkpointing")
    if training is not None:
        out.replace(training, "_load_base_checkpoint", lambda f: _base_loader(f, training, known))
        out.replace(training, "checkpoint_exists", checking)
    return out


_OPTIONS = ("strict", "validate_access_integrity")
_OF_BUCKETS = ("dp_reshardable", "dp_zero_gather_scatter", "fully_sharded_bucket_space")


def _source(place: Any, known: Mapping[str, Any], iteration: Any = None) -> CheckpointSource:
    return open_checkpoint(to_location(place), **known, iteration=iteration).source


def _opens(place: Any, known: Mapping[str, Any]) -> bool:
    """Whether there is a checkpoint of any format."""
    if not place:
        return False
    try:
        _source(place, known)
    except FormatError:
        return False
    return True


def _is_cores_own(place: Any) -> bool:
    """Whether core reads a folder itself, at the current layout."""
    if is_remote(to_location(place)):
        return False
    config = _core(".core").maybe_load_config(str(place))
    if config is None or config.sharded_backend != "torch_dist":
        return False
    catalogue = open_format(to_location(place))
    common = catalogue.metadata.get("common")
    content = common.get("content_metadata") if isinstance(common, dict) else None
    kind = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    if kind not in _OF_BUCKETS:
        return True
    layout, saved = current_layout(), read_saved_layout(catalogue)
    return layout is None or layout == replace(saved, cp=layout.cp, dp=saved.dp, vpp=layout.vpp)


def _suits_core(state: Any, place: Any) -> bool:
    """Whether core's own load finds every tensor that all ranks ask for."""
    fits = _is_cores_own(place)
    if fits:
        stored = {t.name: t.shape for t in open_format(to_location(place)).tensors}
        mapping, dicts = _core(".mapping"), _core(".dict_utils")
        shards, _, _ = _core(".state_dict_utils").load_preprocess(state)
        fits = all(
            s.key in stored and (s.allow_shape_mismatch or s.global_shape == stored[s.key])
            for s in dicts.nested_values(shards)
            if isinstance(s, mapping.ShardedTensor)
        )
    return all(gather(fits))


def _base_loader(original: Any, training: Any, known: Mapping[str, Any]) -> Any:
    """Megatron-LM's `_load_base_checkpoint` for any checkpoint."""

    def load_base(load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **options: Any) -> Any:
        if load_dir is None or not _opens(load_dir, known):
            return original(load_dir, args, rank0, *rest, **options)
        source = _source(load_dir, known, getattr(args, "ckpt_step", None))
        folder = source.catalogue.root
        if (
            _is_cores_own(folder)
            and not is_remote(to_location(load_dir))
            and (to_location(load_dir) / TRACKER).is_file()
        ):
            return original(load_dir, args, rank0, *rest, **options)
        release = is_release(source)
        if rank0:
            state = load_common_state(source)
        else:
            shards = rest[0] if rest else options["sharded_state_dict"]
            strict = getattr(args, "dist_ckpt_strictness", "assume_ok_unexpected")
            state = load(shards, source.catalogue.root, strict=strict, **known)
            if isinstance(state, tuple):
                state = state[0]
        number = read_iteration(source.catalogue)
        if hasattr(training, "set_loaded_iteration"):
            training.set_loaded_iteration(number or 0)
        return state, str(folder), release, training.CheckpointType.GLOBAL

    return load_base
