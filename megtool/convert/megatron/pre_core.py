"""Names and args of pre-core Megatron, and of Megatron-DeepSpeed, translated to megatron-core's.

A model there is either modules in modules (`language_model.encoder.layers.0.attention...`) or a
pipeline, whose layers are numbered from the first one to the last, embedding and norms included
(`3.self_attention...`). Rows of queries, keys and values lie as in the core from
`checkpoint_version` 2 on. Source: megatron/model/{gpt_model,language_model}.py of
Megatron-DeepSpeed, and `fix_query_key_value_ordering` of Megatron-LM's checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megtool.convert.megatron.names import split_optimizer
from megtool.convert.megatron.rank_parameters import Box
from megtool.tensors.sharded import GlobalTensor

_PARTS = (
    (".attention.", ".self_attention."),
    (".query_key_value.", ".linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    (".dense_h_to_4h.", ".linear_fc1."),
    (".dense_4h_to_h.", ".linear_fc2."),
)
_ROOTS = (
    (re.compile(r"language_model\.(?:encoder|transformer)\."), "decoder."),
    (re.compile(r"language_model\.(?=embedding\.|output_layer\.)"), ""),
    (re.compile(r"word_embeddings_for_head\."), "output_layer."),
)
_NUMBERED = re.compile(r"(\d+)\.(.+)")
_LAYER = re.compile(r"(\d+)\.input_layernorm\.weight")
_EMBEDDINGS = ("word_embeddings.weight", "position_embeddings.weight")


def core_names(names: Iterable[str]) -> dict[str, str]:
    """The core's name for each stored name (optimizer state included); empty if none is classic."""
    split = {name: split_optimizer(name) for name in names}
    weights = {key for _, _, key in split.values()}
    layers = sorted(int(m[1]) for m in map(_LAYER.fullmatch, weights) if m)
    if not layers and not any(n.startswith("language_model.") for n in weights):
        return {}
    number = {layer: i for i, layer in enumerate(layers)}
    renamed = {key: _renamed(key, number) for key in weights}
    return {
        name: name.removesuffix(key) + renamed[key]
        if name.endswith(key)
        else name.replace(key, renamed[key])
        for name, (_, _, key) in split.items()
    }


def _renamed(key: str, number: Mapping[int, int]) -> str:
    for pattern, root in _ROOTS:
        if match := pattern.match(key):
            return _core(root + key[match.end() :])
    if key.startswith("tied_modules.embed."):
        return "embedding." + key.removeprefix("tied_modules.embed.")
    if (match := _NUMBERED.fullmatch(key)) and number:
        layer, tail = int(match[1]), match[2]
        if layer in number:
            return _core(f"decoder.layers.{number[layer]}.{tail}")
        if tail in _EMBEDDINGS and layer < min(number):
            return f"embedding.{tail}"
        if tail in ("weight", "bias") and layer > max(number):
            return f"decoder.final_layernorm.{tail}"
        if tail in ("lm_head.weight", "word_embeddings.weight"):
            return "output_layer.weight"
    return key


def _core(key: str) -> str:
    for old, new in _PARTS:
        key = key.replace(old, new)
    return key


def has_classic_args(format: str, tensors: Iterable[GlobalTensor]) -> bool:
    """Whether a checkpoint's args are those of pre-core Megatron, or of Megatron-DeepSpeed."""
    return format == "deepspeed" or any(is_classic_rank_name(t.name) for t in tensors)


def is_classic_rank_name(name: str) -> bool:
    """Whether a stored name is that of a rank's file whose model is nested modules."""
    return _CLASSIC.match(name) is not None


_CLASSIC = re.compile(r"[^/]+/model_optim_rng/model\d*/language_model/")


def order_qkv_rows(boxes: Sequence[Box], version: float, head_dim: int) -> tuple[Box, ...]:
    """Return a rank's rows of queries, keys and values in the order in which an old file has them.

    In the core and since version 2 they lie as `[heads, 3, head_dim]`, in version 1 as `[heads,
    head_dim, 3]`, before as `[3, heads, head_dim]`. `boxes` are the rank's part of the whole.

    Raises:
        ValueError: the rows are not those of whole heads.
    """
    (((first, *low), (last, *high)),) = boxes
    num_heads, rest = divmod(last - first, 3 * head_dim)
    if rest:
        raise ValueError(f"{last - first} rows are not 3 x heads x {head_dim}")

    def rows(start: int, count: int) -> Box:
        return (first + start, *low), (first + start + count, *high)

    heads, parts = range(num_heads), range(3)
    if version >= 2:
        return tuple(boxes)
    if version >= 1:
        return tuple(
            rows((h * 3 + p) * head_dim + d, 1)
            for h in heads
            for d in range(head_dim)
            for p in parts
        )
    return tuple(rows((h * 3 + p) * head_dim, head_dim) for p in parts for h in heads)


def core_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The args of Megatron-DeepSpeed in megatron-core's spelling."""
    out = dict(args)
    norm = str(out.get("normalization", "layernorm")).lower()
    out["normalization"] = "RMSNorm" if norm == "rmsnorm" else "LayerNorm"
    heads, groups = out.get("num_attention_heads"), out.pop("num_key_value_heads", None)
    if groups is not None and "num_query_groups" not in out:
        out["group_query_attention"] = groups != heads
        out["num_query_groups"] = groups
    if out.get("use_rotary_position_embeddings"):
        out["position_embedding_type"] = "rope"
    elif out.get("add_position_embedding", True):
        out.setdefault("position_embedding_type", "learned_absolute")  # Megatron's default
    return out
