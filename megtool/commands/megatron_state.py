"""Megatron's state beside the tensors: args, iteration, objects, at a new layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.containers.pickle_writer import namespace
from megtool.checkpoint.containers.pickled import Inert, inert_global, references
from megtool.checkpoint.containers.zipped import load_object
from megtool.checkpoint.formats.header import read_exact
from megtool.checkpoint.plan import Dropped
from megtool.commands.opened import Opened
from megtool.config import ParallelConfig
from megtool.convert.megatron_args import args_from_config
from megtool.dtypes import DType
from megtool.tensors.sharded import GlobalTensor

_ARGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


def source_layout(catalogue: Catalogue) -> dict[str, int]:
    """The layout a Megatron checkpoint was saved at, as far as its args say."""
    args = catalogue.metadata.get("args")
    args = args if isinstance(args, dict) else {}
    found = {k: args.get(name) for k, name in _ARGS.items()}
    return {k: v for k, v in found.items() if isinstance(v, int) and v > 0}


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
        reason = _object_reason(name, same, parallel)
        if reason is None and held.extent is not None:
            kept[name] = _bytes(catalogue, held.extent)
        else:
            lost.append(Dropped(name=name, reason=reason or "it has no bytes of its own"))
    return kept, lost


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
    """The `_extra_state` objects Megatron asks for: one per layer and linear module, and None.

    Megatron's default strictness refuses a checkpoint that lacks one it asks for, and ignores one
    it does not. So every site that some version asks for is named: the linear modules, attention
    itself (before core 0.15), and the norms of Transformer Engine.
    """
    names: dict[str, None] = {}
    for t in tensors:
        if t.name.startswith("optimizer.") or not t.name.endswith(".weight"):
            continue
        module = t.name.removesuffix(".weight")
        site = module.rsplit(".", 1)[-1]
        layers = t.shape[0] if _STACKED.match(t.name) and t.shape else 1
        sites = [module] if site in _SITES else []
        if site == "linear_qkv":
            sites.append(module.replace("linear_qkv", "core_attention"))
        for found in sites:
            for layer in range(layers):
                names[f"{found}._extra_state/shard_{layer}_{layers}"] = None
    return {n: None for n in names if n not in have}


_STACKED = re.compile(r"(?:module\.)*decoder\.layers\.(?!\d)")
_SITES = (
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "q_layernorm",
    "k_layernorm",
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
) -> dict[str, Any]:
    """Megatron's common state: the source's with its args at the new layout, or a new one."""
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
        sizes = {k: getattr(parallel, k) for k in _ARGS}
        args |= {_ARGS[k]: v for k, v in sizes.items() if k != "vpp"}
        args |= {_ARGS["vpp"]: parallel.vpp if parallel.vpp > 1 else None}
        args["world_size"] = parallel.world_size
    common = dict(tree) if isinstance(tree, dict) else {"checkpoint_version": 3.0}
    common.setdefault("iteration", 0)
    if args:
        common["args"] = namespace(args)
    return common


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
