"""Megatron's tensor names: one table for every decoder family, stacked or one key per layer."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megtool.convert.language.mapping import (
    Cat,
    Dropped,
    Grouped,
    Padded,
    Qkv,
    Row,
    Stacked,
    Table,
    stack_layers,
)
from megtool.convert.megatron import compressed as megatron_compressed
from megtool.convert.megatron import mixers as megatron_mixers
from megtool.convert.megatron import moe as megatron_moe
from megtool.convert.megatron.moe import mtp_rows

_L = "decoder.layers.{l}."
_A = _L + "self_attention."
_M = _L + "mlp."
_ATTN, _MLP = "layers.{l}.attn.", "layers.{l}.mlp."
_EXPERT, _SHARED = _MLP + "experts.{e}.", _MLP + "shared."
_DENSE, _MOE = "l in dense_layers", "l in moe_layers"
_NOT_MLA = "not kv_lora_rank and not is_compressed and l in attn_layers"
_OWN_KV = f"l not in shared_kv_layers and {_NOT_MLA}"

# Megatron's two layer implementations name the norms differently; fused Transformer Engine names
# are written, and a mixture of experts has its norm outside the MLP.
_DECODER: Table = (
    Row("embedding.word_embeddings.weight", Padded("embed.weight")),
    Row(
        "embedding.position_embeddings.weight",
        "positions.weight",
        when="position_embedding == 'learned'",
    ),
    Row(
        _A + "linear_qkv.layer_norm_weight",
        "layers.{l}.attn_norm.weight",
        also=(_L + "input_layernorm.weight",),
        when=f"{_NOT_MLA} and not l in parallel_layers",
    ),
    Row(
        _A + "linear_qkv.layer_norm_bias",
        "layers.{l}.attn_norm.bias",
        also=(_L + "input_layernorm.bias",),
        when=f"{_NOT_MLA} and not l in parallel_layers",
    ),
    Row(
        _A + "linear_qkv.weight",
        Qkv(_ATTN + "q.weight", _ATTN + "k.weight", _ATTN + "v.weight"),
        when=f"not attn_output_gate and l not in tied_value_layers and {_OWN_KV}",
    ),
    Row(
        _A + "linear_qkv.weight",
        Grouped(_ATTN + "q.weight", _ATTN + "k.weight", by="num_kv_heads"),
        when=f"l in tied_value_layers and {_OWN_KV}",
    ),
    Row(
        _A + "linear_qkv.weight",
        Qkv(
            _ATTN + "q.weight",
            _ATTN + "k.weight",
            _ATTN + "v.weight",
            gate=_ATTN + "gate.weight",
        ),
        when=f"attn_output_gate and {_OWN_KV}",
    ),
    Row(
        _A + "linear_qkv.bias",
        Qkv(_ATTN + "q.bias", _ATTN + "k.bias", _ATTN + "v.bias"),
        when=f"not attn_output_gate and l not in tied_value_layers and {_OWN_KV}",
    ),
    Row(
        _A + "linear_qkv.bias",
        Grouped(_ATTN + "q.bias", _ATTN + "k.bias", by="num_kv_heads"),
        when=f"l in tied_value_layers and {_OWN_KV}",
    ),
    *(
        Row(f"{_A}linear_qkv.{part}", f"{_ATTN}q.{part}", when="l in shared_kv_layers")
        for part in ("weight", "bias")
    ),
    *(
        Row(
            f"{_A}{x}_layernorm.{kind}",
            f"{_ATTN}{x}_norm.{kind}",
            when=f"{_NOT_MLA} and qk_norm_of != 'each'",
        )
        for x in "qk"
        for kind in ("weight", "bias")
    ),
    *(
        Row(
            f"{_A}{x}_layernorm.weight",
            Stacked(f"{_ATTN}{x}_norms.{{{over}}}.weight", over),
            when=f"{_NOT_MLA} and qk_norm_of == 'each'",
        )
        for x, over in ("qh", "kg")
    ),
    Row(_A + "linear_proj.weight", _ATTN + "o.weight"),
    Row(_A + "linear_proj.bias", _ATTN + "o.bias"),
    Row(
        _M + "linear_fc1.layer_norm_weight",
        "layers.{l}.mlp_norm.weight",
        also=(_L + "pre_mlp_layernorm.weight",),
        when=_DENSE,
    ),
    Row(
        _M + "linear_fc1.layer_norm_bias",
        "layers.{l}.mlp_norm.bias",
        also=(_L + "pre_mlp_layernorm.bias",),
        when=_DENSE,
    ),
    Row(
        _L + "pre_mlp_layernorm.weight",
        "layers.{l}.mlp_norm.weight",
        also=(_M + "linear_fc1.layer_norm_weight",),
        when=_MOE,
    ),
    Row(
        _L + "pre_mlp_layernorm.bias",
        "layers.{l}.mlp_norm.bias",
        also=(_M + "linear_fc1.layer_norm_bias",),
        when=_MOE,
    ),
    Row(
        _M + "linear_fc1.weight",
        Cat(_MLP + "gate.weight", _MLP + "up.weight"),
        when=f"gated and {_DENSE}",
    ),
    Row(_M + "linear_fc1.weight", _MLP + "up.weight", when=f"not gated and {_DENSE}"),
    Row(
        _M + "linear_fc1.bias",
        Cat(_MLP + "gate.bias", _MLP + "up.bias"),
        when=f"gated and {_DENSE}",
    ),
    Row(_M + "linear_fc1.bias", _MLP + "up.bias", when=f"not gated and {_DENSE}"),
    Row(_M + "linear_fc2.weight", _MLP + "down.weight", when=_DENSE),
    Row(_M + "linear_fc2.bias", _MLP + "down.bias", when=_DENSE),
    Row(_M + "router.weight", _MLP + "router.weight", when=_MOE),
    Row(
        _M + "experts.experts.linear_fc1.weight",
        Stacked(Cat(_EXPERT + "gate.weight", _EXPERT + "up.weight"), "e"),
        when=f"gated and {_MOE}",
    ),
    Row(
        _M + "experts.experts.linear_fc1.weight",
        Stacked(_EXPERT + "up.weight", "e"),
        when=f"not gated and {_MOE}",
    ),
    Row(
        _M + "experts.experts.linear_fc2.weight",
        Stacked(_EXPERT + "down.weight", "e"),
        when=_MOE,
    ),
    Row(
        _M + "shared_experts.linear_fc1.weight",
        Cat(_SHARED + "gate.weight", _SHARED + "up.weight"),
        when=f"gated and shared_ffn_hidden_size and {_MOE}",
    ),
    Row(
        _M + "shared_experts.linear_fc1.weight",
        _SHARED + "up.weight",
        when=f"not gated and shared_ffn_hidden_size and {_MOE}",
    ),
    Row(
        _M + "shared_experts.linear_fc2.weight",
        _SHARED + "down.weight",
        when=f"shared_ffn_hidden_size and {_MOE}",
    ),
    *megatron_moe.WRITTEN,
    *megatron_compressed.WRITTEN,
    *megatron_mixers.WRITTEN,
    Row("decoder.final_norm.weight", "norm.weight", when="parallel_layers"),
    Row("decoder.final_layernorm.weight", "norm.weight", also=("decoder.final_norm.weight",)),
    Row("decoder.final_layernorm.bias", "norm.bias", also=("decoder.final_norm.bias",)),
    Row("score_dense.weight", "score_dense.weight"),  # Megatron has no head like these
    Row("score_dense.bias", "score_dense.bias"),
    Row("score.weight", "score.weight"),
    Row("score.bias", "score.bias"),
    Row("output_layer.weight", Padded("head.weight"), when="not tied_embeddings"),
    Dropped(
        "output_layer.weight",
        "a copy of the tied embedding",
        when="tied_embeddings",
        copy_of="embed.weight",
    ),
    Dropped("*optimizer.distributed.*", "optimizer state in buckets: not in model space"),
)

_READ: Table = megatron_moe.READ


def _per_layer(first: Table, second: Table) -> Table:
    written = (*_DECODER, *first)
    read = (*second, *_READ)
    return (*written, *mtp_rows((*written, *read)), *read)


PER_LAYER: Table = _per_layer(megatron_mixers.WHOLE, megatron_mixers.PARTS)
"""Parameters as modules have them: those of mixers are whole."""

IN_PARTS: Table = _per_layer(megatron_mixers.PARTS, megatron_mixers.WHOLE)
"""Tensors as checkpoints with global shapes have them."""

STACKED: Table = stack_layers(PER_LAYER)

SINGLETONS: Table = (*megatron_moe.SINGLETONS, *IN_PARTS)
"""The same with experts one by one, and gate and up rows apart."""

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

# Master weights are `param` in Megatron's fully reshardable state and `fp32_param` elsewhere.
MAIN = "main"
_MAIN_NAMES = ("param", "fp32_param", "master_param")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.(\w+)\)\.bucket_idx_(\d+)\.(\w+)"
)
"""Names of the flat tensors of `dp_reshardable`."""

_PARTS = r"(?:(?!chained_\d)\w+\.){0,3}?"
"""Parts of a state dict that has its optimizer further down: `app.optim`, `actor.optimizer`."""

# A weight may itself be called `param`: behind `exp_avg` that is no state.
_STATE_LAST = re.compile(
    rf"{_PARTS}optim(?:izer)?\.state\.(.+)\."
    r"(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|master_param|step)"
    rf"|{_PARTS}optim(?:izer)?\.state\.(?!(?:exp_avg|exp_avg_sq|(?:fp32_|master_)?param)\.)(.+)\."
    r"((?:fp32_)?param)"
)
_WRAPPERS = re.compile(
    r"(?:module\.)*(?:(?:model\.(?:module\.)*|language_model\.)"
    r"(?=decoder\.|embedding\.|output_l|mtp\.))?"
)
_CROSS_ATTENTION = re.compile(r"\.cross_attention\.(?!attn\.|encoder\.)")
_RETRIEVAL = re.compile(r"\.cross_attention\.(?:attn|encoder)\.")
_LAYER_KEY = re.compile(r"(?:decoder|encoder)\.layers\.\d+\.")
_VOCABULARY = re.compile(
    r"(?:^|\.)(?:(?:word|layer)_embeddings\.weight|output_layer\.(?:weight|bias))$"
)


def split_state(name: str) -> tuple[str, str, str]:
    """A stored name as (state, spelling of the state, module key).

    Model weights have the state `""`; master weights are `main`, whatever they are spelled.
    Wrappers (`module.`) are taken off the key.
    """
    state, spelled, name = split_optimizer(name)
    wrapper = _WRAPPERS.match(name)
    return state, spelled, name[wrapper.end() :] if wrapper else name


def split_optimizer(name: str) -> tuple[str, str, str]:
    """A stored name as (state, spelling of the state, name of the weight).

    The state comes before the weight's name, or, in what torch.distributed.checkpoint makes of an
    optimizer, behind it.
    """
    if "optim" not in name:  # as most names
        return "", "", name
    if match := _STATE_LAST.fullmatch(name):
        name, spelled = match[1] or match[3], match[2] or match[4]
    elif match := _STATE.fullmatch(name):
        spelled, name = match[1], match[2]
    else:
        return "", "", name
    return MAIN if spelled in _MAIN_NAMES else spelled, spelled, name


_MEGATRON = re.compile(
    r"decoder\.(layers\.(?!\d+\.(self_attn|fc[12]|final_layer_norm))|final_layernorm\.|final_norm\.)"
    r"|embedding\.word_embeddings\."
)


def is_megatron(names: Iterable[str]) -> bool:
    """Some of the names are Megatron's, and not those of fairseq's decoders (OPT)."""
    return any(_MEGATRON.match(split_state(n)[2]) for n in names)


def is_encoder_decoder(names: Iterable[str]) -> bool:
    """Some layers are an encoder's and some a decoder's that attends to it: T5."""
    return any(_CROSS_ATTENTION.search(split_state(n)[2]) for n in names)


def is_retro(names: Iterable[str]) -> bool:
    """Some layers attend to retrieved neighbours: Retro, whose first such layer has the encoder.

    Its names are those of `RetroModel` (megatron/core/models/retro of megatron-core 0.15.3, the
    last release that has it).
    """
    return any(_RETRIEVAL.search(split_state(n)[2]) for n in names)


def is_per_layer(names: Iterable[str]) -> bool:
    """The names are one key per layer (no leading layer axis)."""
    return any(_LAYER_KEY.match(split_state(n)[2]) for n in names)


def is_vocabulary(name: str) -> bool:
    """The tensor's first dimension is the (padded) vocabulary."""
    return _VOCABULARY.search(name) is not None


def padded_multiple(tp: int, divisible_by: int = 128) -> int:
    """The multiple to which Megatron pads the vocabulary, so that TP ranks have equal, aligned
    rows.
    """
    return tp * divisible_by
