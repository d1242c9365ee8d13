"""Megatron's state beside the tensors: args, iteration, objects, at a new layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

from megtool.checkpoint.catalogue import Catalogue, StoredObject
from megtool.checkpoint.containers.pickle_writer import namespace
from megtool.checkpoint.containers.pickled import Inert, inert_global, references
from megtool.checkpoint.containers.zip_writer import object_item
from megtool.checkpoint.containers.zipped import load_object
from megtool.checkpoint.formats.header import read_exact
from megtool.checkpoint.formats.save_folder import folder_name
from megtool.checkpoint.formats.torch_dist_integrity import INTEGRITY_FILE
from megtool.checkpoint.plan import Dropped
from megtool.commands.megatron.groups import in_common, is_group_object, read_groups
from megtool.commands.opened import Opened
from megtool.config import ParallelConfig
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron_args import args_from_config
from megtool.convert.parallel_args import layout_args, layout_fields
from megtool.dtypes import DType
from megtool.tensors.sharded import GlobalTensor


def source_layout(catalogue: Catalogue) -> dict[str, int]:
    """The layout a Megatron checkpoint was saved at, as far as its args say."""
    args = catalogue.metadata.get("args")
    found = layout_fields(args) if isinstance(args, dict) else {}
    return {k: v for k, v in found.items() if isinstance(v, int)}


def divisible_by(catalogue: Catalogue) -> int:
    """What the vocabulary was padded to a multiple of (times TP): Megatron's default is 128."""
    args = catalogue.metadata.get("args")
    value = args.get("make_vocab_size_divisible_by") if isinstance(args, dict) else None
    return value if isinstance(value, int) and value > 0 else 128


def carried_objects(
    catalogue: Catalogue, parallel: ParallelConfig
) -> tuple[dict[str, bytes], list[Dropped]]:
    """Objects that travel as they are, byte for byte, and the rest with the reason it is left."""
    kept: dict[str, bytes] = {}
    lost: list[Dropped] = []
    same = source_layout(catalogue)
    for name, held in catalogue.objects.items():
        if is_group_object(name):  # written anew, see `groups`
            continue
        reason = _object_reason(name, same, parallel)
        if reason is None and held.extent is not None:
            kept[name] = item_of(catalogue, held)
        else:
            lost.append(Dropped(name=name, reason=reason or "it has no bytes of its own"))
    if (catalogue.root / INTEGRITY_FILE).is_file():
        reason = "checksums of the source's files; megtool.json has digests of the tensors"
        lost.append(Dropped(name=INTEGRITY_FILE, reason=reason, is_lost=False))
    return kept, lost


def item_of(catalogue: Catalogue, held: StoredObject) -> bytes:
    """An object as torch_dist keeps one, a saved list of it alone; its own bytes if it is that."""
    if held.extent is None:
        raise ValueError(f"{held.name!r} has no bytes of its own")
    data = _bytes(catalogue, held.extent)
    if held.kind != "object":
        return data
    path = catalogue.path(held.extent[0])
    with open(path, "rb") as f:
        return object_item([load_object(f.fileno(), *held.extent[1:], file=path)])


EMPTY = "an extra state that holds nothing"
_EXTRA_STATE = "._extra_state/shard_"
_EMPTY_BYTES = 2048


def is_empty_state(catalogue: Catalogue, name: str) -> bool:
    """The object is the `_extra_state` of a layer that has none (None, or a tensor of 0 bytes)."""
    held = catalogue.objects[name].extent
    if _EXTRA_STATE not in name or held is None or held[2] > _EMPTY_BYTES:
        return False
    file, offset, length = held
    with open(catalogue.path(file), "rb") as f:
        tree = load_object(f.fileno(), offset, length, file=catalogue.path(file))
    held_value = tree[0] if isinstance(tree, list) and len(tree) == 1 else tree
    return held_value is None or not any(p.data for p in references(held_value))


def extra_states(tensors: Sequence[GlobalTensor], have: Collection[str]) -> dict[str, None]:
    """The `_extra_state` objects Megatron asks for: one per layer, expert and module, and None.

    Megatron's default strictness refuses a checkpoint that lacks one it asks for, and ignores one
    it does not. So every site that some version asks for is named: the linear modules, attention
    itself (before core 0.15), and the norms of Transformer Engine.
    """
    names: dict[str, None] = {}
    if any(t.name == "output_layer.bias" for t in tensors):  # BERT's; a GPT's is not asked for
        names["output_layer._extra_state/shard_0_1"] = None
    for t in tensors:
        if t.name.startswith("optimizer.") or not t.name.endswith(".weight"):
            continue
        module = t.name.removesuffix(".weight")
        site = module.rsplit(".", 1)[-1]
        lead = int(_STACKED.match(t.name) is not None) + int(_EXPERTS in t.name)
        axes = t.shape[:lead] or (1,)
        sites = [module] if site in _SITES else []
        if site in ("linear_qkv", "linear_kv_up_proj"):
            sites.append(module.replace(site, "core_attention"))
        for found in sites:
            for at in product(*map(range, axes)):
                index = f"{'.'.join(map(str, at))}_{'.'.join(map(str, axes))}"
                names[f"{found}._extra_state/shard_{index}"] = None
    return {n: None for n in names if n not in have}


_STACKED = re.compile(r"(?:module\.)*(?:decoder|encoder)\.layers\.(?!\d)")
_EXPERTS = ".experts.experts."
_SITES = (
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "eh_proj",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "q_layernorm",
    "k_layernorm",
    "post_layernorm",
    "input_layernorm",
    "pre_mlp_layernorm",
    "enorm",
    "hnorm",
    "final_layernorm",
)


def _object_reason(name: str, have: Mapping[str, int], want: ParallelConfig) -> str | None:
    """Why an object cannot travel to another layout."""
    axes = ("tp", "pp", "dp")
    if any(have.get(k, 1) != getattr(want, k) for k in axes):
        if name.startswith("rng_state/"):
            return "random state belongs to the ranks of the old layout"
        if name.startswith("rerun_state_machine_state/"):
            return "rerun state belongs to the ranks of the old layout"
    return None


def _bytes(catalogue: Catalogue, extent: tuple[int, int, int]) -> bytes:
    file, offset, length = extent
    return read_exact(catalogue.path(file), offset, length)


def common_state(
    source: Opened,
    parallel: ParallelConfig,
    tensors: Sequence[GlobalTensor],
    dtype: DType | None,
    optimizer: str | None = None,
) -> dict[str, Any]:
    """Megatron's common state: the source's with its args at the new layout, or a new one.

    `optimizer` is the sharding type of the state written, None where the source's small state
    stays as it is.
    """
    tree = source.catalogue.metadata.get("common")
    old = tree.get("args") if isinstance(tree, dict) else None
    known = dict(old.state) if isinstance(old, Inert) and isinstance(old.state, dict) else {}
    args: dict[str, Any] = dict(known)
    if source.model is not None:
        weights = [t.dtype.name for t in tensors if t.dtype.is_float]
        name = max(set(weights), key=weights.count) if weights else "float32"
        args = args_from_config(
            source.model.config,
            parallel,
            dtype=name,
            divisible_by=divisible_by(source.catalogue),
            known={} if dtype is not None and not known else known,
        )
        if not known or dtype is not None:
            args["params_dtype"] = inert_global("torch", name)
            args |= {"bf16": name == "bfloat16", "fp16": name == "float16"}
    elif known:
        args |= layout_args(parallel)
    common = dict(tree) if isinstance(tree, dict) else {"checkpoint_version": 3.0}
    common.setdefault("iteration", 0)
    if args:
        common["args"] = namespace(args)
    _set_optimizer(common, source, tensors, parallel, optimizer)
    return common


def _set_optimizer(
    common: dict[str, Any],
    source: Opened,
    tensors: Sequence[GlobalTensor],
    parallel: ParallelConfig,
    optimizer: str | None,
) -> None:
    """The optimizer's part of the common state, as its sharding type has it."""
    if not any(is_optimizer_state(t.name) for t in tensors):
        common.pop("optimizer", None)
        content = common.get("content_metadata")
        if isinstance(content, dict):
            common["content_metadata"] = {
                k: v for k, v in content.items() if k != "distrib_optim_sharding_type"
            }
        return
    if optimizer is None:
        return
    groups = read_groups(source.catalogue)
    has_experts = any(".experts." in t.name for t in tensors)
    length = 2 if parallel.ep > 1 and has_experts else 1
    inner = groups.for_chain(length) if groups else [{} for _ in range(length)]
    common["optimizer"] = in_common(inner, optimizer)
    content = common.get("content_metadata")
    common["content_metadata"] = {
        "singleton_local_shards": False,
        **(content if isinstance(content, dict) else {}),
        "distrib_optim_sharding_type": optimizer,
        "chained_optim_avoid_prefix": True,
    }


def saved_iteration(catalogue: Catalogue) -> int | None:
    """The iteration a checkpoint was saved at; None for a release."""
    iteration = catalogue.metadata.get("iteration")
    if not isinstance(iteration, int) or catalogue.root.name == folder_name(None):
        return None
    return iteration


def rank_state(
    catalogue: Catalogue, parallel: ParallelConfig, rank: tuple[int, int, int]
) -> dict[str, Any]:
    """What one rank of a legacy checkpoint keeps for itself: random state, where the layout stays.

    `rank` is the (tensor, pipeline, expert) rank.
    """
    trees = catalogue.metadata.get("rank_trees")
    if not isinstance(trees, dict) or _is_other_layout(source_layout(catalogue), parallel):
        return {}
    for folder, (tp, pp, ep) in catalogue.metadata["ranks"].items():
        if (tp, pp or 0, ep or 0) == rank:
            tree = trees[folder]
            return {k: tree[k] for k in _OWN if isinstance(tree, dict) and k in tree}
    return {}


_OWN = (
    "rng_state",
    "random_rng_state",
    "np_rng_state",
    "torch_rng_state",
    "cuda_rng_state",
    "rng_tracker_states",
    "rerun_state_machine",
)


def _is_other_layout(have: Mapping[str, int], want: ParallelConfig) -> bool:
    return any(have.get(k, 1) != getattr(want, k) for k in ("tp", "pp", "ep"))


_DERIVED = ("args", "checkpoint_version", "content_metadata")


def lost_state(catalogue: Catalogue, target: str) -> list[Dropped]:
    """Parts of the common state that another format has no place for.

    Args become the configuration, and an iteration of 0 says nothing: they are not lost.
    """
    common = catalogue.metadata.get("common")
    if not isinstance(common, dict):
        return []
    return [
        Dropped(name=f"common state: {key}", reason=f"{target!r} has no place for it")
        for key, value in common.items()
        if key not in _DERIVED and not (key == "iteration" and value == 0)
    ]
