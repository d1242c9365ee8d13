"""llama.cpp's architectures of Gemma."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megtool.convert.language.mapping import Row, Table
from megtool.export.gguf import tables
from megtool.export.gguf.architecture import (
    BIASED,
    EXACT_GELU,
    Architecture,
    Choice,
    Limit,
    differs_from_every,
    list_windows,
    written,
)
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

_GEMMA: Table = (
    Row("token_embd.weight", "embed.weight"),
    Row("blk.{l}.attn_norm.weight", "layers.{l}.attn_norm.weight"),
    *(
        Row(f"blk.{{l}}.attn_{stored}.weight", f"layers.{{l}}.attn.{name}.weight")
        for stored, name in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
    ),
    Row("blk.{l}.ffn_norm.weight", "layers.{l}.mlp_norm.weight"),
    *(
        Row(f"blk.{{l}}.ffn_{name}.weight", f"layers.{{l}}.mlp.{name}.weight")
        for name in ("gate", "up", "down")
    ),
    Row("output_norm.weight", "norm.weight"),
    Row("output.weight", "head.weight", when="not tied_embeddings"),
)
"""Written only: files hold 1 + w of every norm, of which w does not always come back exactly, so
that the reader refuses them."""

_GEMMA_2: Table = (
    *_GEMMA,
    Row("blk.{l}.post_attention_norm.weight", "layers.{l}.attn_post_norm.weight"),
    Row("blk.{l}.post_ffw_norm.weight", "layers.{l}.mlp_post_norm.weight"),
)
_GEMMA_3: Table = (
    *_GEMMA_2,
    Row("blk.{l}.attn_q_norm.weight", "layers.{l}.attn.q_norm.weight"),
    Row("blk.{l}.attn_k_norm.weight", "layers.{l}.attn.k_norm.weight"),
)


def _has_other_scale(deep: int) -> Callable[[ModelConfig], bool]:
    """Scores are not multiplied as llama.cpp does: by hidden_size / num_heads in the largest model,
    which it knows by its `deep` layers, else by head_dim."""

    def differs(c: ModelConfig) -> bool:
        attention = c.attention
        size = c.hidden_size // attention.num_heads if c.num_layers == deep else attention.head_dim
        scale = (
            attention.head_dim**-0.5 if attention.softmax_scale is None else attention.softmax_scale
        )
        return not math.isclose(scale, size**-0.5, rel_tol=1e-6)

    return differs


_UNCAPPED: Limit = (
    lambda c: not c.attention.attn_softcap or not c.head.logit_softcap,
    "llama.cpp caps scores at 50 and logits at 30 where a file gives no cap, and none means no cap",
)

_ATTENTION_SCALE = "llama.cpp has another query_pre_attn_scalar for a model of this size"


def _gemma(name: str, table: Table, *limits: Limit, has_window: bool = False) -> Architecture:
    return Architecture(
        name=name,
        table=table,
        norms_plus_one=True,
        has_window=has_window,
        limits=(*limits, EXACT_GELU),
    )


_SHARED = "layers.{l}.mlp.shared."
_GEMMA_4: Table = (
    Row("blk.{l}.attn_norm.weight", "layers.{l}.attn_norm.weight"),
    Row("blk.{l}.ffn_norm.weight", "layers.{l}.mlp_norm.weight", when="l not in moe_layers"),
    Row("blk.{l}.ffn_norm.weight", _SHARED + "norm.weight"),
    Row("blk.{l}.pre_ffw_norm_2.weight", "layers.{l}.mlp_norm.weight", when="l in moe_layers"),
    Row("blk.{l}.post_ffw_norm_1.weight", _SHARED + "post_norm.weight"),
    Row("blk.{l}.post_ffw_norm_2.weight", "layers.{l}.mlp.post_norm.weight"),
    *tables.POST_NORMS,
    *tables.ATTENTION,
    *tables.MLP,
    *(Row(f"blk.{{l}}.ffn_{x}.weight", f"{_SHARED}{x}.weight") for x in ("gate", "up", "down")),
    *(row for row in tables.EXPERTS if isinstance(row, Row) and "_shexp" not in row.stored),
    Row("blk.{l}.ffn_gate_inp.scale", "layers.{l}.mlp.router.scale"),
    Row("blk.{l}.ffn_down_exps.scale", "layers.{l}.mlp.router.expert_scale"),
    Row("blk.{l}.layer_output_scale.weight", "layers.{l}.scalar"),
    Row("per_layer_token_embd.weight", "layer_embed.weight"),
    Row("per_layer_model_proj.weight", "layer_proj.weight"),
    Row("per_layer_proj_norm.weight", "layer_norm.weight"),
    Row("blk.{l}.inp_gate.weight", "layers.{l}.input_gate.weight"),
    Row("blk.{l}.proj.weight", "layers.{l}.input_proj.weight"),
    Row("blk.{l}.post_norm.weight", "layers.{l}.input_norm.weight"),
)


def _by_layer(c: ModelConfig, name: str) -> list[int]:
    return [layer.get(name) for layer in c.by_layer()]


def _sizes_of(c: ModelConfig, name: str, *, with_window: bool) -> list[int]:
    """A size in the layers with a window, or in the others."""
    sizes = zip(_by_layer(c, name), list_windows(c), strict=True)
    return sorted({n for n, has_window in sizes if has_window == with_window})


def _gemma_4_keys(c: ModelConfig) -> dict[str, Any]:
    """Sizes of heads with and without a window; which layers have keys of their own."""
    full, windowed = (
        _sizes_of(c, "head_dim", with_window=w) or [c.attention.head_dim] for w in (False, True)
    )
    return {
        "attention.key_length": full[0],
        "attention.value_length": full[0],
        "attention.key_length_swa": windowed[0],
        "attention.value_length_swa": windowed[0],
        "rope.dimension_count": full[0],
        "rope.dimension_count_swa": windowed[0],
        "attention.head_count_kv": _by_layer(c, "num_kv_heads"),
        "feed_forward_length": _by_layer(c, "ffn_hidden_size"),
        "attention.sliding_window_pattern": list(list_windows(c)),
        "attention.shared_kv_layers": len(layer_sets.shared_kv_layers(c)),
        "embedding_length_per_layer_input": c.residual.layer_input_size,
    }


def _shares_elsewhere(c: ModelConfig) -> bool:
    """Other layers than the last ones attend to keys and values of an earlier one."""
    count = len(layer_sets.shared_kv_layers(c))
    return layer_sets.shared_kv_layers(c) != frozenset(range(c.num_layers - count, c.num_layers))


def _has_unequal_heads(c: ModelConfig) -> bool:
    of = [len(_sizes_of(c, "head_dim", with_window=w)) for w in (False, True)]
    return max(of) > 1 or len(set(_by_layer(c, "num_heads"))) > 1


_GEMMA_4_LIMITS: tuple[Limit, ...] = (
    EXACT_GELU,
    BIASED,
    (_shares_elsewhere, "llama.cpp lets the last layers share keys and values, the model others"),
    (_has_unequal_heads, "llama.cpp has heads of one size in layers with a window, and in others"),
)

GEMMAS: Mapping[str, Choice] = {
    "gemma": lambda _, c: _gemma("gemma", _GEMMA),
    "gemma2": lambda _, c: _gemma(
        "gemma2",
        _GEMMA_2,
        (differs_from_every(2), "llama.cpp has a window in every second layer"),
        (_has_other_scale(46), _ATTENTION_SCALE),
        _UNCAPPED,
        has_window=True,
    ),
    "gemma3": lambda _, c: _gemma(
        "gemma3",
        _GEMMA_3,
        (differs_from_every(6), "llama.cpp has a window in all but every sixth layer"),
        (_has_other_scale(62), _ATTENTION_SCALE),
        (lambda c: bool(c.head.logit_softcap), "llama.cpp has no soft cap on the logits"),
        has_window=True,
    ),
    "gemma4": written(
        "gemma4",
        _GEMMA_4,
        has_window=True,
        factors="proportional",
        keys=_gemma_4_keys,
        limits=_GEMMA_4_LIMITS,
    ),
}
"""By the name of the family."""
