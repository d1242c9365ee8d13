"""What Megatron-LM's and Megatron-Bridge's training loops find and load, for any checkpoint.

Both have a function `_load_base_checkpoint` in their module `checkpointing` that finds a checkpoint
and returns what is in it: with `rank0` its common state alone, else a filled state dict
(Megatron-LM core_v0.16.1 and core_v0.19.0, `megatron/training/checkpointing.py`; Megatron-Bridge
0.6.2, `megatron/bridge/training/checkpointing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megtool.access.checkpoint import open_checkpoint
from megtool.errors import FormatError, UsageError
from megtool.formats import open_checkpoint as open_format
from megtool.frameworks.megatron_core.common_state import (
    current_layout,
    is_release,
    load_common_state,
)
from megtool.frameworks.megatron_core.faults import gather
from megtool.frameworks.megatron_core.strategy import core_module
from megtool.megatron_state.model_space import read_saved_layout
from megtool.megatron_state.saved_objects import saved_args
from megtool.options.layout import ParallelConfig
from megtool.run_state.common_state import read_iteration
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.location.path import is_remote
from megtool.storage.location.path import location as to_location

LM_CHECKPOINTING = "megatron.training.checkpointing"
BRIDGE_CHECKPOINTING = "megatron.bridge.training.checkpointing"
FINDERS = (
    "megatron.bridge.training.utils.checkpoint_utils",
    "megatron.bridge.training.setup",
    "megatron.bridge.training.setup_megatron_mimo",
)
"""Modules beside those that have a `checkpoint_exists` of their own."""

_OF_BUCKETS = ("dp_reshardable", "dp_zero_gather_scatter", "fully_sharded_bucket_space")
_COMPARED = (
    *("tokenizer_type", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("data_parallel_random_init", "global_batch_size"),
)
"""What Megatron-LM's `check_checkpoint_args` takes for granted in a checkpoint's args."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opener:
    """Opens checkpoints with what is known of the model."""

    known: Mapping[str, Any] = field(default_factory=dict)

    def source(self, place: Any, iteration: Any = None) -> CheckpointSource:
        """The opened checkpoint.

        Raises:
            CheckpointError: it cannot be opened.
        """
        return open_checkpoint(to_location(place), **self.known, iteration=iteration).source

    def opens(self, place: Any) -> bool:
        """Whether there is a checkpoint of any format."""
        if not place or is_of_msc(place):
            return False
        try:
            self.source(place)
        except FormatError:
            return False
        return True


def is_of_msc(place: Any) -> bool:
    """Whether a place is a URL of the multi-storage client, which core reads itself."""
    return str(place).startswith("msc://")


def is_in_store(place: Any) -> bool:
    """Whether a place is in a store of which core and the training loops know nothing."""
    return not is_of_msc(place) and is_remote(to_location(place))


def is_cores_own(place: Any) -> bool:
    """Whether core reads a folder itself, at the current layout."""
    if is_of_msc(place):
        return True
    if is_remote(to_location(place)):
        return False
    config = core_module(".core").maybe_load_config(str(place))
    if config is None or config.sharded_backend != "torch_dist":
        return False
    catalogue = open_format(to_location(place))
    common = catalogue.metadata.get("common")
    content = common.get("content_metadata") if isinstance(common, dict) else None
    kind = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    return kind not in _OF_BUCKETS or _is_current(read_saved_layout(catalogue))


def _is_current(saved: ParallelConfig) -> bool:
    """Whether the run has the layout that a checkpoint was saved at."""
    layout = current_layout()
    return layout is None or layout == replace(saved, cp=layout.cp, dp=saved.dp, vpp=layout.vpp)


def suits_core(state: Any, place: Any) -> bool:
    """Whether core's own load finds every tensor that all ranks ask for."""
    fits = is_cores_own(place)
    if fits and not is_of_msc(place):
        stored = {t.name: t.shape for t in open_format(to_location(place)).tensors}
        mapping, dicts = core_module(".mapping"), core_module(".dict_utils")
        shards, _, _ = core_module(".state_dict_utils").load_preprocess(state)
        fits = all(
            s.key in stored and (s.allow_shape_mismatch or s.global_shape == stored[s.key])
            for s in dicts.nested_values(shards)
            if isinstance(s, mapping.ShardedTensor)
        )
    return all(gather(fits))


def base_loader(
    original: Callable[..., Any], training: Any, opener: Opener, load: Callable[..., Any]
) -> Callable[..., Any]:
    """A training loop's `_load_base_checkpoint` for any checkpoint.

    `training` is the loop's module `checkpointing`, and `load` fills a state dict. A checkpoint
    that the loop finds and core reads stays theirs.
    """
    exists = training.checkpoint_exists

    def load_base(
        load_dir: Any,
        args: Any,
        rank0: bool = False,
        sharded_state_dict: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        def by_itself() -> Any:
            return original(load_dir, args, rank0, sharded_state_dict, *rest, **options)

        if load_dir is None or not opener.opens(load_dir):
            return by_itself()
        step = None if options.get("ignore_ckpt_step") else getattr(args, "ckpt_step", None)
        source = opener.source(load_dir, step)
        catalogue = source.catalogue
        is_found = not is_in_store(load_dir) and exists(str(load_dir))
        if is_found and is_cores_own(catalogue.root):
            return by_itself()
        number = read_iteration(catalogue)
        if rank0:
            state = load_common_state(source)
            state.setdefault("iteration", number or 0)
            _complete_args(source, state.get("args"), args)
        elif not any(gather(_has_shards(sharded_state_dict))):
            is_own = catalogue.format == "megatron" and _is_current(read_saved_layout(catalogue))
            if is_found and is_own and sharded_state_dict is None:
                return by_itself()
            raise UsageError(
                "the run asks for no shards of tensors, which only --ckpt-format torch_dist does",
                file=source.path,
                hint="--ckpt-format torch_dist",
            )
        else:
            strict = getattr(args, "dist_ckpt_strictness", "assume_ok_unexpected")
            state = load(sharded_state_dict, catalogue.root, strict=strict, **opener.known)
            if isinstance(state, tuple):
                state = state[0]
            _complete_args(source, state.get("args"), args)
        if hasattr(training, "set_loaded_iteration"):
            training.set_loaded_iteration(number or 0)
        return state, str(catalogue.root), is_release(source), training.CheckpointType.GLOBAL

    return load_base


def _has_shards(state: Any) -> bool:
    """Whether a state dict has sharded tensors; with `--ckpt-format torch` it has none."""
    kind = core_module(".mapping").ShardedBase
    values = core_module(".dict_utils").nested_values(state or {})
    return any(isinstance(v, kind) for v in values)


def _complete_args(source: CheckpointSource, saved: Any, own: Any) -> None:
    """Give a checkpoint's args what Megatron-LM compares and they lack: the run's own values.

    `--position-embedding-type` says what `add_position_embedding` once said; of a checkpoint that
    no run of Megatron's saved, the latter is the run's own, too.
    """
    names = {n for n in _COMPARED if saved is not None and not hasattr(saved, n)}
    if saved is not None and not saved_args(source.catalogue):
        names.add("add_position_embedding")
    for name in names:
        if getattr(own, name, None) is not None:
            setattr(saved, name, getattr(own, name))
