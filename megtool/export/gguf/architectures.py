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
from typing import Any

from megtool.convert.families import Family
from megtool.convert.mapping import Row, Table
from megtool.errors import MappingError
from megtool.export.gguf import tables
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
    as 1 + w; `scales_logits`: logits have a multiplier; `has_mtp`: files hold layers of multi-token
    prediction; `rounds_yarn`: that it rounds YaRN's ramp is accepted. `runs` are those of
    `_SWITCHES` that it computes, and `keys` are metadata that other architectures have not.
    `limits` are conditions under which it
    computes something else than the model, each with what that is; under `oddities` the difference
    is one that its own converter accepts. `factors` is the rope scaling whose factors it reads from
    tensors ("" for none).
    """

    name: str
    table: Table
    norms_plus_one: bool = False
    scales_logits: bool = False
    has_mtp: bool = False
    rounds_yarn: bool = False
    runs: tuple[str, ...] = ()
    keys: Callable[[ModelConfig], Mapping[str, Any]] | None = None
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
_SWITCHES: Mapping[str, Limit] = {
    "no_rope": (
        lambda c: c.no_rope_layers is not None or c.position_embedding == "none",
        "layers without rotary embedding",
    ),
    "sinks": (lambda c: c.attn_sinks, "attention sinks"),
    "gate": (lambda c: c.attn_output_gate, "a gate on the output of attention"),
    "residual_scale": (lambda c: c.residual_scale != 1, "scaled residuals"),
    "groups": (lambda c: c.router_num_groups > 1, "groups of experts"),
}
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


def _written(
    name: str, *parts: Table, limits: tuple[Limit, ...] = (), **more: Any
) -> Callable[[Family], Architecture]:
    """With names of its own, by which files are written and not read."""
    table = tuple(row for part in (tables.ENDS, *parts) for row in part)
    return lambda _: Architecture(name=name, table=table, limits=limits, **more)


def _is_full(every: int) -> Callable[[ModelConfig], bool]:
    """Other layers than each n-th are without rotary embedding."""
    return lambda c: (
        tuple(map(bool, c.no_rope_layers or [0] * c.num_layers))
        != tuple((i + 1) % every == 0 for i in range(c.num_layers))
    )


def _rotates_elsewhere(c: ModelConfig) -> bool:
    """Other layers than those with a window have rotary embedding."""
    without = tuple(map(bool, c.no_rope_layers or [0] * c.num_layers))
    return tuple(not w for w in _windows(c)) != without


def _dense_then_moe(c: ModelConfig) -> bool:
    first = min(c.moe_layers, default=0)
    return c.moe_layers != frozenset(range(first, c.num_layers))


_MIXED_LAYERS: Limit = (
    _dense_then_moe,
    "llama.cpp has experts in all layers but the first ones, the model in others",
)
_GROUPED: Limit = (
    lambda c: c.num_kv_heads != c.num_heads,
    "llama.cpp has as many heads of keys as of queries",
)
_SCATTERED_ROPE: Limit = (
    _rotates_elsewhere,
    "llama.cpp rotates in layers with a window and in no others",
)


def _expert_keys(c: ModelConfig) -> dict[str, Any]:
    """How experts are chosen and weighted."""
    out: dict[str, Any] = {
        "expert_gating_func": _SIGMOID if c.router_score == "sigmoid" else _SOFTMAX,
        "expert_weights_scale": float(c.router_scaling),
        "expert_weights_norm": not c.router_pre_softmax,
        "leading_dense_block_count": min(c.moe_layers, default=c.num_layers),
    }
    if c.moe_ffn_hidden_size:
        out["expert_shared_count"] = c.shared_ffn_hidden_size // c.moe_ffn_hidden_size
    return out


_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers


def _granite_keys(c: ModelConfig) -> dict[str, Any]:
    """Multipliers; llama.cpp divides logits by theirs."""
    scale = c.head_dim**-0.5 if c.softmax_scale is None else c.softmax_scale
    return {
        "embedding_scale": float(c.embedding_scale),
        "residual_scale": float(c.residual_scale),
        "attention.scale": float(scale),
        "logit_scale": 1 / float(c.logit_scale),
    }


def _glm_moe_keys(c: ModelConfig) -> dict[str, Any]:
    """Layers of multi-token prediction are counted as layers."""
    out = _expert_keys(c) | {"block_count": c.num_layers + c.num_mtp_layers}
    return out | ({"nextn_predict_layers": c.num_mtp_layers} if c.num_mtp_layers else {})


def _ernie_keys(c: ModelConfig) -> dict[str, Any]:
    """Which layers have experts, by a step."""
    return _expert_keys(c) | {"interleave_moe_layer_step": 1}


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
    "glm4": _written("glm4", tables.NORMS, tables.POST_NORMS, tables.ATTENTION, tables.FUSED_MLP),
    "exaone4": _written(
        "exaone4",
        tables.POST_NORMS,
        tables.ATTENTION,
        tables.MLP,
        factors="llama3",
        has_window=True,
        runs=("no_rope",),
        limits=(
            (
                lambda c: bool(c.window_size) != (c.num_layers == 64),
                "llama.cpp has windows in models of 64 layers and in no others",
            ),
            (
                lambda c: bool(c.window_size) and _differs_from_every(4)(c),
                "llama.cpp has a window in all but every fourth layer",
            ),
            (lambda c: bool(c.window_size) and _rotates_elsewhere(c), _SCATTERED_ROPE[1]),
        ),
    ),
    "cohere2": _written(
        "cohere2",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        has_window=True,
        scales_logits=True,
        runs=("no_rope",),
        limits=(
            _BIASED,
            _UNTIED,
            _OTHER_HEADS,
            (_differs_from_every(4), "llama.cpp has a window in all but every fourth layer"),
            _SCATTERED_ROPE,
        ),
    ),
    "granite": _written(
        "granite",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.MLP,
        scales_logits=True,
        runs=("residual_scale",),
        keys=_granite_keys,
    ),
    "granitemoe": _written(
        "granitemoe",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.EXPERTS,
        scales_logits=True,
        runs=("residual_scale",),
        keys=_granite_keys,
    ),
    "olmoe": _written(
        "olmoe",
        tables.NORMS,
        tables.ATTENTION,
        tables.EXPERTS,
        limits=(_BIASED, _OTHER_HEADS, _GROUPED, _NORMALIZED),
    ),
    "smollm3": _written(
        "smollm3",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.MLP,
        runs=("no_rope",),
        limits=(
            (_is_full(4), "llama.cpp has no rotary embedding in every fourth layer"),
            _IGNORES_WINDOW,
        ),
    ),
    "starcoder2": _written(
        "starcoder2",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        limits=(_EXACT_GELU,),
        oddities=(_IGNORES_WINDOW,),
    ),
    "arcee": _written(
        "arcee", tables.NORMS, tables.PAIRED_ATTENTION, tables.MLP, limits=(_BIASED,)
    ),
    "dots1": _written(
        "dots1",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        keys=_expert_keys,
        limits=(_BIASED, _GROUPED, _MIXED_LAYERS, _IGNORES_WINDOW),
    ),
    "gpt_oss": _written(
        "gpt-oss",
        tables.LATER_NORMS,
        tables.ATTENTION,
        tables.EXPERTS,
        has_window=True,
        rounds_yarn=True,
        runs=("sinks",),
        limits=(
            (_differs_from_every(2), "llama.cpp has a window in every second layer"),
            (
                lambda c: c.activation_limit != 7,
                "llama.cpp limits what experts activate to 7 (swiglu_limit)",
            ),
        ),
        oddities=(
            (
                lambda c: (c.rope_scaling or {}).get("truncate") is False,
                "llama.cpp rounds the range of YaRN's ramp to whole frequencies",
            ),
        ),
    ),
    "minimax_m2": _written(
        "minimax-m2", tables.NORMS, tables.ATTENTION, tables.EXPERTS, keys=_expert_keys
    ),
    "nemotron": _written(
        "nemotron", tables.NORMS, tables.ATTENTION, tables.MLP, norms_plus_one=True
    ),
    "glm4_moe": _written(
        "glm4moe",
        tables.with_mtp((*tables.LATER_NORMS, *tables.ATTENTION, *tables.MLP, *tables.EXPERTS)),
        has_mtp=True,
        keys=_glm_moe_keys,
        limits=(_MIXED_LAYERS,),
    ),
    "ernie4_5_moe": _written(
        "ernie4_5-moe",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        keys=_ernie_keys,
        limits=(_MIXED_LAYERS,),
    ),
    "gpt2": _written(
        "gpt2", tables.NORMS, tables.FUSED_ATTENTION, tables.MLP, limits=(_EXACT_GELU,)
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
    switches = [limit for name, limit in _SWITCHES.items() if name not in architecture.runs]
    for applies, words in (*switches, *scaled):
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
