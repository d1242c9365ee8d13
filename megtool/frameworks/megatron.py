"""Megatron-LM, Megatron-Core and Megatron-Bridge load any checkpoint: `dist_checkpointing` over it.

    megtool.megatron.install()                                # --load takes whatever there is
    state = megtool.megatron.load(sharded_state_dict, "s3://bucket/Llama-3.1-8B")

Every rank reads its own bytes, whatever the format and the layout of the checkpoint: a Hugging Face
folder, rank files in `mp_rank_*` folders, `torch_dist` and zarr of another layout or an old
version, GGUF, local or in a store. Optimizer state comes along where the checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megtool.access.checkpoint import AdapterLocations
from megtool.convert.dialects import is_optimizer_state
from megtool.frameworks.installed import Installed
from megtool.frameworks.megatron_core.common_state import load_common_state
from megtool.frameworks.megatron_core.faults import world_size
from megtool.frameworks.megatron_core.strategy import LoadStrategy, core_module, warn_absent
from megtool.frameworks.megatron_core.training import (
    BRIDGE_CHECKPOINTING,
    FINDERS,
    LM_CHECKPOINTING,
    Opener,
    base_loader,
    is_cores_own,
    is_in_store,
    suits_core,
)
from megtool.megatron_state.param_groups import SHARDING_TYPE

__all__ = ["Installed", "LoadStrategy", "install", "load", "load_common_state"]

_OPTIONS = ("strict", "validate_access_integrity")


def load(
    sharded_state_dict: dict[str, Any],
    location: str | Path,
    *,
    strict: Any = "assume_ok_unexpected",
    validate_access_integrity: bool = True,
    family: str | None = None,
    like: str | Path | None = None,
    iteration: int | str | None = None,
    adapter: AdapterLocations = (),
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
        adapter: The folder of an adapter (LoRA), or several, to merge into the weights.

    Returns:
        The state dict with values in place of shards; with core's `return_...` also the names of
        what the model does not have, and of what the checkpoint does not have.

    Raises:
        MappingError: tensors are missing or have other shapes: all of all ranks are named.
        CheckpointError: it cannot be opened or read.
        UsageError: optimizer state is asked for, which belongs to the weights without the adapter.
    """
    mapping, validation = core_module(".mapping"), core_module(".validation")
    utils, dicts = core_module(".utils"), core_module(".dict_utils")
    strict = validation.parse_strict_flag(strict)
    utils.force_all_tensors_to_non_fp8(sharded_state_dict)
    shards, local, factories = core_module(".state_dict_utils").load_preprocess(sharded_state_dict)
    shards, plain = utils.extract_sharded_base(shards)
    if validate_access_integrity and world_size() > 1:
        validation.validate_sharding_integrity(validation.determine_global_metadata(shards)[1])
    has_states = any(is_optimizer_state(s.key) for s in dicts.nested_values(shards))
    strategy = LoadStrategy(
        location, family=family, like=like, iteration=iteration, adapter=adapter
    )
    source = strategy.open(location, optimizer=has_states)
    shards, lacking, unused = strategy.check(source, shards, strict)
    state = load_common_state(source, _sharding_type(plain))
    absent: list[str] = []
    _keep_own(state, plain, "", absent)
    dicts.merge(state, local)
    dicts.merge(state, strategy.read(source, shards, absent))
    warn_absent(source, absent)
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


def install(*, family: str | None = None, like: str | Path | None = None) -> Installed:
    """Make Megatron-Core's loading functions, and the training loops over it, take any checkpoint.

    `dist_checkpointing.load`, `load_common_state_dict`, `load_content_metadata`,
    `load_tensors_metadata` and `check_is_distributed_checkpoint` read what core itself cannot read;
    `torch_dist` folders whose tensors are what the model asks for stay core's. Megatron-LM's
    `--load` and Megatron-Bridge's `checkpoint.load` take folders without a tracker file, too,
    whether these packages are imported before or afterwards. A model without optimizer state is
    loaded as a release: the run starts at iteration 0 with a fresh optimizer.

    Call it before Megatron reads its arguments. `family` and `like` say which model it is where
    checkpoints do not.
    """
    out = Installed()
    opener = Opener(known={"family": family, "like": like})
    core, serialization = core_module(), core_module(".serialization")

    def loading(original: Any) -> Any:
        def load_any(state: Any, checkpoint_dir: Any, *args: Any, **options: Any) -> Any:
            if suits_core(state, checkpoint_dir):
                return original(state, checkpoint_dir, *args, **options)
            chosen = {k: options[k] for k in _OPTIONS if k in options}
            return load(state, checkpoint_dir, family=family, like=like, **chosen)

        return load_any

    def reading(original: Any) -> Any:
        def load_common(checkpoint_dir: Any, *args: Any, **options: Any) -> Any:
            if is_cores_own(checkpoint_dir):
                return original(checkpoint_dir, *args, **options)
            return load_common_state(opener.source(checkpoint_dir))

        return load_common

    def checking(original: Any) -> Any:
        return lambda place: opener.opens(place) or (not is_in_store(place) and original(place))

    def replace_loop(training: Any) -> None:
        out.replace(
            training, "_load_base_checkpoint", lambda f: base_loader(f, training, opener, load)
        )
        out.replace(training, "checkpoint_exists", checking)

    def describing(original: Any) -> Any:
        def load_metadata(checkpoint_dir: Any, *args: Any, **options: Any) -> Any:
            if args or options or is_cores_own(checkpoint_dir):
                return original(checkpoint_dir, *args, **options)
            strategy = LoadStrategy(family=family, like=like)
            return getattr(strategy, original.__name__)(checkpoint_dir)

        return load_metadata

    for module in (core, serialization):
        out.replace(module, "load", loading)
        out.replace(module, "load_tensors_metadata", describing)
        out.replace(module, "load_sharded_metadata", describing)
        out.replace(module, "load_common_state_dict", reading)
    for module in (core, core_module(".core")):
        out.replace(module, "check_is_distributed_checkpoint", checking)
    for name in (LM_CHECKPOINTING, BRIDGE_CHECKPOINTING):
        out.when_imported(name, replace_loop)
    for name in FINDERS:
        out.when_imported(name, lambda module: out.replace(module, "checkpoint_exists", checking))
    return out
