"""llama.cpp's architecture of each family, the names of its tensors, and what it cannot run.

llama.cpp builds a graph of its own for every architecture, and what no key of the file says is
fixed in its source: which layers have a window, what scores are multiplied by, whether the chosen
experts' shares add up to one. A model that differs in such a point would load and be wrong, so it
is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megtool.convert.families import Family
from megtool.convert.mapping import Row, Table
from megtool.errors import MappingError
from megtool.model_config import ModelConfig

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

Limit = tuple[Callable[[ModelConfig], bool], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One of llama.cpp's architectures.

    `name` is `general.architecture`; `table` names its tensors. `norms_plus_one`: norms are stored
    as 1 + w; `scales_logits`: logits have a multiplier. `limits` are conditions under which it
    computes something else than the model, each with what that is; under `oddities` the difference
    is one that its own converter accepts. `factors` is the rope scaling whose factors it reads from
    tensors ("" for none).
    """

    name: str
    table: Table
    norms_plus_one: bool = False
    scales_logits: bool = False
    has_window: bool = False
    factors: str = ""
    limits: tuple[Limit, ...] = ()
    oddities: tuple[Limit, ...] = ()


def _is_partly_moe(c: ModelConfig) -> bool:
    return len(c.moe_layers) != c.num_layers


def _windows(c: ModelConfig) -> tuple[bool, ...]:
    """Which layers have a window."""
    skip = c.window_skip_freq
    if not c.window_size or skip is None:
        return (bool(c.window_size),) * c.num_layers
    if isinstance(skip, int):
        return tuple((i + 1) % skip != 0 for i in range(c.num_layers))
    return tuple(map(bool, skip))


def _differs_from_every(n: int) -> Callable[[ModelConfig], bool]:
    """Not every layer but each n-th has a window."""
    return lambda c: _windows(c) != tuple((i + 1) % n != 0 for i in range(c.num_layers))


def _has_other_scale(deep: int) -> Callable[[ModelConfig], bool]:
    """Scores are not multiplied as llama.cpp does: by hidden_size / num_heads in the largest model,
    which it knows by its `deep` layers, else by head_dim."""

    def differs(c: ModelConfig) -> bool:
        size = c.hidden_size // c.num_heads if c.num_layers == deep else c.head_dim
        scale = c.head_dim**-0.5 if c.softmax_scale is None else c.softmax_scale
        return not math.isclose(scale, size**-0.5, rel_tol=1e-6)

    return differs


_IGNORES_WINDOW: Limit = (
    lambda c: bool(c.window_size),
    "llama.cpp attends to all tokens, the model to a sliding window",
)
_EXACT_GELU: Limit = (
    lambda c: c.activation == "gelu",
    "llama.cpp approximates GELU by tanh, and the model's is exact (hidden_activation)",
)
_UNCAPPED: Limit = (
    lambda c: not c.attn_softcap or not c.logit_softcap,
    "llama.cpp caps scores at 50 and logits at 30 where a file gives no cap, and none means no cap",
)
_PARTLY_MOE: Limit = (_is_partly_moe, "llama.cpp has experts in every layer, the model in some")
_NORMALIZED: Limit = (
    lambda c: not c.router_pre_softmax,
    "llama.cpp does not bring the chosen experts' shares to one (norm_topk_prob)",
)
_UNNORMALIZED: Limit = (
    lambda c: c.router_pre_softmax,
    "llama.cpp brings the chosen experts' shares to one (norm_topk_prob)",
)
_ATTENTION_SCALE = "llama.cpp has another query_pre_attn_scalar for a model of this size"
_SWITCHES: tuple[Limit, ...] = (
    (lambda c: c.no_rope_layers is not None, "layers without rotary embedding"),
    (lambda c: c.attn_sinks, "attention sinks"),
    (lambda c: c.attn_output_gate, "a gate on the output of attention"),
    (lambda c: c.num_mtp_layers > 0, "layers of multi-token prediction"),
    (lambda c: c.residual_scale != 1, "scaled residuals"),
)
_SCALED_LOGITS: Limit = (lambda c: c.logit_scale != 1, "scaled logits")


def _gemma(name: str, table: Table, *limits: Limit, has_window: bool = False) -> Architecture:
    return Architecture(
        name=name,
        table=table,
        norms_plus_one=True,
        has_window=has_window,
        limits=(*limits, _EXACT_GELU),
    )


_OTHER_HEADS: Limit = (
    lambda c: c.num_heads * c.head_dim != c.hidden_size,
    "llama.cpp has heads of hidden_size / num_heads elements",
)
_TIED: Limit = (lambda c: c.tied_embeddings, "llama.cpp has an output matrix beside the embedding")
_UNTIED: Limit = (
    lambda c: not c.tied_embeddings,
    "llama.cpp has no output matrix beside the embedding",
)
_BIASED: Limit = (
    lambda c: c.qkv_bias or c.attn_out_bias or c.mlp_bias,
    "llama.cpp has no biases",
)
_BIASED_OUTPUTS: Limit = (
    lambda c: c.attn_out_bias or c.mlp_bias,
    "llama.cpp has biases of queries, keys and values alone",
)
_NORMED_HEADS: Limit = (
    lambda c: c.qk_norm or c.num_layers >= 64,
    "llama.cpp normalizes queries and keys in models of 64 layers and more",
)


def _of_table(
    name: str,
    *limits: Limit,
    factors: str = "",
    has_window: bool = False,
    scales_logits: bool = False,
    oddities: tuple[Limit, ...] = (),
) -> Callable[[Family], Architecture]:
    """With the names that the family's own table has for reading."""
    return lambda family: Architecture(
        name=name,
        table=family.gguf,
        factors=factors,
        has_window=has_window,
        scales_logits=scales_logits,
        limits=limits,
        oddities=oddities,
    )


_ARCHITECTURES: Mapping[str, Callable[[Family], Architecture]] = {
    "llama": _of_table("llama", factors="llama3", oddities=(_IGNORES_WINDOW,)),
    "mixtral": _of_table(
        "llama", _PARTLY_MOE, _UNNORMALIZED, factors="llama3", oddities=(_IGNORES_WINDOW,)
    ),
    "qwen2": _of_table("qwen2", oddities=(_IGNORES_WINDOW,)),
    "qwen2_moe": _of_table("qwen2moe", _PARTLY_MOE, _NORMALIZED, oddities=(_IGNORES_WINDOW,)),
    "qwen3": _of_table("qwen3", oddities=(_IGNORES_WINDOW,)),
    "qwen3_moe": _of_table("qwen3moe", _PARTLY_MOE, _UNNORMALIZED, oddities=(_IGNORES_WINDOW,)),
    "phi3": _of_table("phi3", factors="longrope", has_window=True),
    "olmo2": _of_table("olmo2", _BIASED, _TIED, _OTHER_HEADS),
    "seed_oss": _of_table("seed_oss", _BIASED_OUTPUTS),
    "ernie4_5": _of_table("ernie4_5", _BIASED_OUTPUTS),
    "cohere": _of_table(
        "command-r", _BIASED, _UNTIED, _OTHER_HEADS, _NORMED_HEADS, scales_logits=True
    ),
    "gemma": lambda _: _gemma("gemma", _GEMMA),
    "gemma2": lambda _: _gemma(
        "gemma2",
        _GEMMA_2,
        (_differs_from_every(2), "llama.cpp has a window in every second layer"),
        (_has_other_scale(46), _ATTENTION_SCALE),
        _UNCAPPED,
        has_window=True,
    ),
    "gemma3": lambda _: _gemma(
        "gemma3",
        _GEMMA_3,
        (_differs_from_every(6), "llama.cpp has a window in all but every sixth layer"),
        (_has_other_scale(62), _ATTENTION_SCALE),
        (lambda c: bool(c.logit_softcap), "llama.cpp has no soft cap on the logits"),
        has_window=True,
    ),
}


def find_architecture(family: Family, config: ModelConfig) -> Architecture:
    """What llama.cpp calls this model.

    Raises:
        MappingError: it has no name for it here, or would compute something else.
    """
    supported = ", ".join(_ARCHITECTURES)
    if family.name not in _ARCHITECTURES:
        raise MappingError(
            f"the model is of family {family.name!r}, which is not exported to GGUF",
            hint=f"known: {supported}",
            error_id="unsupported-by-engine",
        )
    architecture = _ARCHITECTURES[family.name](family)
    for applies, words in architecture.limits:
        if applies(config):
            raise MappingError(
                f"a GGUF file of architecture {architecture.name!r} would be another model: "
                f"{words}",
                hint="--to hf writes it as it is",
                error_id="unsupported-by-engine",
            )
    scaled = () if architecture.scales_logits else (_SCALED_LOGITS,)
    for applies, words in (*_SWITCHES, *scaled):
        if applies(config):
            raise MappingError(
                f"the model has {words}, and llama.cpp's {architecture.name!r} has none",
                hint="--to hf writes it as it is",
                error_id="unsupported-by-engine",
            )
    return architecture


def list_oddities(architecture: Architecture, config: ModelConfig) -> Iterator[str]:
    """What llama.cpp does otherwise, and its own converter accepts."""
    return (words for applies, words in architecture.oddities if applies(config))
