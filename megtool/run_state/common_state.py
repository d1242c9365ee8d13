"""Megatron's common state (args, iteration, param groups) at a new layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron.args import args_from_config
from megtool.convert.megatron.parallel_args import layout_args, layout_fields
from megtool.dtypes import DType
from megtool.formats.save_folder import folder_name
from megtool.formats.torch_dist.integrity import INTEGRITY_FILE
from megtool.megatron_state.param_groups import (
    build_common_optimizer,
    build_content_metadata,
    optimizer_args,
)
from megtool.megatron_state.random_state import (
    RERUN,
    RNG,
    is_rerun_idle,
    is_rerun_object,
    is_rng_object,
)
from megtool.megatron_state.ranks.objects import MODELOPT
from megtool.megatron_state.saved_objects import saved_args, vocab_divisor
from megtool.options.layout import ParallelConfig
from megtool.pickles.reader import Inert, inert_global
from megtool.pickles.writer import make_namespace
from megtool.plan.copies import DroppedItem
from megtool.run_state.state_dict_groups import read_any_groups
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import CONFIG_FIELDS, ModelConfig
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor


def read_source_layout(catalogue: Catalogue) -> dict[str, int]:
    """The layout that a Megatron checkpoint was saved at, as far as its args state it."""
    args = saved_args(catalogue)
    layout = layout_fields(args) if args else {}
    return {k: v for k, v in layout.items() if isinstance(v, int)}


def make_common_state(
    source: CheckpointSource,
    parallel: ParallelConfig,
    tensors: Sequence[GlobalTensor],
    dtype: DType | None,
    optimizer: str | None = None,
    *,
    target: str = "torch_dist",
    objects: Collection[str] = (),
    config: ModelConfig | None = None,
) -> dict[str, Any]:
    """Megatron's common state: the source's with its args at the new layout, or a new one.

    `optimizer` is the sharding type of the state written, None where the source's param groups
    stay as they are. `target` is the format, and `objects` are the names of the objects in it,
    which the args describe. `config` counts layers as the tensors' names do (None: the source's).
    """
    tree = source.catalogue.metadata.get("common")
    source_args = tree.get("args") if isinstance(tree, dict) else None
    known = (
        dict(source_args.state)
        if isinstance(source_args, Inert) and isinstance(source_args.state, dict)
        else {}
    )
    if source.model is not None and source.model.dropped:
        known = _without_dropped(known, source.model.dropped, saved_args(source.catalogue))
    args: dict[str, Any] = dict(known)
    if source.model is not None:
        weights = [t.dtype.name for t in tensors if t.dtype.is_float]
        name = max(set(weights), key=weights.count) if weights else "float32"
        args = args_from_config(
            config or source.model.config,
            parallel,
            dtype=name,
            divisible_by=vocab_divisor(source.catalogue),
            base_args={} if dtype is not None and not known else known,
        )
        if not known or dtype is not None:
            args["params_dtype"] = inert_global("torch", name)
            args |= {"bf16": name == "bfloat16", "fp16": name == "float16"}
    elif known:
        args |= layout_args(parallel)
    common = dict(tree) if isinstance(tree, dict) else {}
    # Rows of queries, keys and values are written in the order of this version; without one,
    # Megatron takes files for those of version 0, and reorders them as it loads.
    version = common.get("checkpoint_version")
    if not isinstance(version, int | float) or version < 2:
        common["checkpoint_version"] = 3.0
    common.setdefault("iteration", 0)
    common = {k: v for k, v in common.items() if not MODELOPT.fullmatch(str(k))}
    if not any(is_rerun_object(name) for name in objects):
        common.pop(RERUN, None)
    has_state = any(is_optimizer_state(t.name) for t in tensors)
    if args:
        is_trained = bool(known and read_iteration(source.catalogue))
        has_rng = any(is_rng_object(name) or name == RNG for name in objects)
        args |= _saving_args(optimizer, has_state, target)
        if is_trained:
            absent = {"no_save_optim": not has_state, "no_save_rng": not has_rng}
            args |= {k: no or None for k, no in absent.items() if bool(args.get(k)) != no}
        common["args"] = make_namespace(args)
    _set_optimizer(common, source, has_state, tensors, parallel, optimizer)
    if target != "torch_dist":
        common.pop("content_metadata", None)
    return common


def _without_dropped(
    known: Mapping[str, Any], dropped: Mapping[str, Any], stated: Mapping[str, Any]
) -> dict[str, Any]:
    """Args without the settings that the user has left out, which `stated` are already."""
    fields = {CONFIG_FIELDS[name].megatron for name in dropped if name in CONFIG_FIELDS}
    remaining = {k: v for k, v in known.items() if k not in dropped or k in fields}
    return {k: stated.get(k) if k in fields else v for k, v in remaining.items()}


def _saving_args(optimizer: str | None, has_state: bool, target: str) -> dict[str, Any]:
    """The args that describe how a checkpoint was saved."""
    out: dict[str, Any] = {"ckpt_format": "torch" if target == "megatron" else "torch_dist"}
    if has_state and optimizer is not None:
        out |= optimizer_args(optimizer)
    return out


def _set_optimizer(
    common: dict[str, Any],
    source: CheckpointSource,
    has_state: bool,
    tensors: Sequence[GlobalTensor],
    parallel: ParallelConfig,
    optimizer: str | None,
) -> None:
    """Set the optimizer's part of the common state for its sharding type."""
    if not has_state:
        common.pop("optimizer", None)
        content = common.get("content_metadata")
        if isinstance(content, dict):
            common["content_metadata"] = {
                k: v for k, v in content.items() if k != "distrib_optim_sharding_type"
            }
        return
    groups = read_any_groups(source.catalogue)
    if optimizer is None:
        if groups and "optimizer" not in common:
            common["optimizer"] = build_common_optimizer(groups.for_chain(1), None)
        return
    has_experts = any(".experts." in t.name for t in tensors)
    length = 2 if parallel.ep > 1 and has_experts else 1
    inner = groups.for_chain(length) if groups else [{} for _ in range(length)]
    common["optimizer"] = build_common_optimizer(inner, optimizer)
    common["content_metadata"] = build_content_metadata(common.get("content_metadata"), optimizer)


def read_iteration(catalogue: Catalogue) -> int | None:
    """The iteration a checkpoint was saved at; None for a release."""
    iteration = catalogue.metadata.get("iteration")
    if not isinstance(iteration, int) or catalogue.root.name == folder_name(None):
        return None
    return iteration


_RECOVERABLE = ("args", "checkpoint_version", "content_metadata")
_OPTIMIZER = ("optimizer", "opt_param_scheduler", "lr_scheduler")
_PROGRESS = ("iteration", "num_floating_point_operations_so_far", "rng_state")
"""What only a run that goes on needs: nothing is lost where its optimizer state is left out."""


def _lost_args(source: CheckpointSource, target: str) -> str:
    """Why no config.json holds the model's args, or "" where one does."""
    if target == "safetensors":
        return "a file of tensors holds no configuration of their model"
    if (source.model is not None and source.model.family is not None) or (
        "config.json" in source.attachments()
    ):
        return ""
    return f"{target!r} holds the model's configuration as a config.json, which needs --family NAME"


def account_for_common(
    source: CheckpointSource,
    written: Mapping[str, Any] | None,
    target: str,
    *,
    has_groups: bool = False,
) -> tuple[list[str], list[str], list[DroppedItem]]:
    """What becomes of each part of the common state: moved, derived, or dropped with a reason.

    `written` is the target's, None where the format has none: there the args become the model's
    config.json, if its family is known, and an iteration of 0 has no information. `has_groups` says
    that the optimizer's groups are entries of the target's state dict.
    """
    source_state = source.catalogue.metadata.get("common")
    moved: list[str] = []
    derived: list[str] = []
    dropped: list[DroppedItem] = []
    recoverable = (*_RECOVERABLE, *(["optimizer"] if has_groups else ()))
    if source.catalogue.format == "dcp":
        source_state = None  # its parts are objects, which are listed
    for key, value in source_state.items() if isinstance(source_state, dict) else ():
        name = f"common state: {key}"
        if MODELOPT.fullmatch(str(key)) and source.catalogue.format == "megatron":
            continue  # the first rank's; every rank's object is listed
        if written is not None and key in written:
            (moved if written[key] is value else derived).append(name)
        elif written is None and key == "args" and (reason := _lost_args(source, target)):
            dropped.append(DroppedItem(name=name, reason=reason, is_lost=target != "safetensors"))
        elif written is None and (key in recoverable or (key == "iteration" and value == 0)):
            derived.append(name)
        else:
            is_harmless = key == "content_metadata"
            is_unused = key in (*_OPTIMIZER, *_PROGRESS) and not source.view.states
            is_idle = key == RERUN and is_rerun_idle(source.catalogue)
            reason = f"{target!r} has no place for it"
            if key == RERUN:
                reason = "rerun state belongs to the ranks of the old layout"
            elif is_unused:
                reason = "its optimizer state is left out"
            is_lost = not (is_harmless or is_unused or is_idle)
            dropped.append(DroppedItem(name=name, reason=reason, is_lost=is_lost))
    if (source.catalogue.root / INTEGRITY_FILE).is_file():
        reason = "checksums of the source's files; megtool.json has digests of the tensors"
        dropped.append(DroppedItem(name=INTEGRITY_FILE, reason=reason, is_lost=False))
    return moved, derived, dropped
