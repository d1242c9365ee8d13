"""What llama.cpp's architectures are to the writer of GGUF files, and what they cannot run.

llama.cpp builds a graph of its own for every architecture, and what no key of the file says is
fixed in its source: which layers have a window, what scores are multiplied by, whether the chosen
experts' shares add up to one. A model that differs in such a point would load and be wrong, so it
is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.convert.config.windows import skip_flags
from megtool.convert.families.family import Family
from megtool.convert.families.nested import TEXT_CONFIG
from megtool.convert.language.mapping import Table
from megtool.export.gguf import tables
from megtool.export.gguf.block_encoder import Change
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

Limit = tuple[Callable[[ModelConfig], bool], str]


YARN_KINDS = ("", "deepseek", "mistral", "unscaled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One of llama.cpp's architectures.

    `name` is `general.architecture`; `table` names its tensors. `norms_plus_one`: norms are stored
    as 1 + w; `scales_logits`: logits have a multiplier; `has_mtp`: files hold layers of multi-token
    prediction; `rounds_yarn`: that it rounds YaRN's ramp is accepted. `runs` are those of
    `SWITCHES` that it computes, and `keys` are metadata that other architectures have not.
    `changes` are what its files have in place of a model's numbers, by the names of canonical
    tensors without those of layers; `lists` are keys of numbers, one for each layer, and canonical
    tensors that hold them; `constants` are tensors that a model has not. `is_latent`: keys and
    values are projected by two tensors.
    `limits` are conditions under which it computes something else than the model, each with what
    that is; under `oddities` the difference is one that its own converter accepts. `factors` is the
    rope scaling whose factors it reads from tensors ("" for none), and `yarn` says whose
    temperature of YaRN it has (`YARN_KINDS`).
    """

    name: str
    table: Table
    is_latent: bool = False
    norms_plus_one: bool = False
    scales_logits: bool = False
    has_mtp: bool = False
    rounds_yarn: bool = False
    runs: tuple[str, ...] = ()
    keys: Callable[[ModelConfig], Mapping[str, Any]] | None = None
    changes: Callable[[ModelConfig], Mapping[str, Change]] | None = None
    lists: tuple[tuple[str, str], ...] = ()
    constants: Callable[[ModelConfig], Mapping[str, NDArray[np.float32]]] | None = None
    has_window: bool = False
    factors: str = ""
    yarn: str = ""
    limits: tuple[Limit, ...] = ()
    oddities: tuple[Limit, ...] = ()


def _is_partly_moe(c: ModelConfig) -> bool:
    return len(layer_sets.moe_layers(c)) != c.num_layers


def list_windows(c: ModelConfig) -> tuple[bool, ...]:
    """Which layers have a window."""
    flags = skip_flags(c.window.window_skip_freq, c.num_layers)
    return tuple(bool(c.window.window_size and flag) for flag in flags)


def differs_from_every(n: int) -> Callable[[ModelConfig], bool]:
    """Not every layer but each n-th has a window."""
    return lambda c: list_windows(c) != tuple((i + 1) % n != 0 for i in range(c.num_layers))


def lacks_rope_elsewhere(every: int) -> Callable[[ModelConfig], bool]:
    """Other layers than each n-th are without rotary embedding."""
    return lambda c: (
        tuple(map(bool, c.positions.no_rope_layers or [0] * c.num_layers))
        != tuple((i + 1) % every == 0 for i in range(c.num_layers))
    )


EXACT_GELU: Limit = (
    lambda c: c.mlp.activation == "gelu",
    "llama.cpp approximates GELU by tanh, and the model's is exact (hidden_activation)",
)
IGNORES_WINDOW: Limit = (
    lambda c: bool(c.window.window_size),
    "llama.cpp attends to all tokens, the model to a sliding window",
)
PARTLY_MOE: Limit = (_is_partly_moe, "llama.cpp has experts in every layer, the model in some")
NORMALIZED: Limit = (
    lambda c: not c.router.router_pre_softmax,
    "llama.cpp does not bring the chosen experts' shares to one (norm_topk_prob)",
)
UNNORMALIZED: Limit = (
    lambda c: c.router.router_pre_softmax,
    "llama.cpp brings the chosen experts' shares to one (norm_topk_prob)",
)
SWITCHES: Mapping[str, Limit] = {
    "no_rope": (
        lambda c: (
            c.positions.no_rope_layers is not None or c.positions.position_embedding == "none"
        ),
        "layers without rotary embedding",
    ),
    "sinks": (lambda c: c.attention.attn_sinks, "attention sinks"),
    "gate": (lambda c: c.attention.attn_output_gate, "a gate on the output of attention"),
    "residual_scale": (lambda c: c.residual.residual_scale != 1, "scaled residuals"),
    "groups": (lambda c: c.router.router_num_groups > 1, "groups of experts"),
}
SCALED_SHARES: Limit = (
    lambda c: c.router.router_scaling != 1,
    "llama.cpp does not multiply the shares of experts (routed_scaling_factor)",
)
SCALED_LOGITS: Limit = (lambda c: c.head.logit_scale != 1, "scaled logits")


OTHER_HEADS: Limit = (
    lambda c: c.attention.num_heads * c.attention.head_dim != c.hidden_size,
    "llama.cpp has heads of hidden_size / num_heads elements",
)
UNTIED: Limit = (
    lambda c: not c.embedding.tied_embeddings,
    "llama.cpp has no output matrix beside the embedding",
)
BIASED: Limit = (
    lambda c: c.attention.qkv_bias or c.attention.attn_out_bias or c.mlp.mlp_bias,
    "llama.cpp has no biases",
)
BIASED_OUTPUTS: Limit = (
    lambda c: c.attention.attn_out_bias or c.mlp.mlp_bias,
    "llama.cpp has biases of queries, keys and values alone",
)
Choice = Callable[[Family, ModelConfig], Architecture]


def written(
    name: str,
    *parts: Table,
    ends: Table = tables.ENDS,
    limits: tuple[Limit, ...] = (),
    **more: Any,
) -> Choice:
    """Choose the architecture that llama.cpp calls `name`, of which files are written, not read."""
    table = tuple(row for part in (ends, *parts) for row in part)
    return lambda _, c: Architecture(name=name, table=table, limits=limits, **more)


def _dense_then_moe(c: ModelConfig) -> bool:
    first = min(layer_sets.moe_layers(c), default=c.num_layers)
    return layer_sets.moe_layers(c) != frozenset(range(first, c.num_layers))


MIXED_LAYERS: Limit = (
    _dense_then_moe,
    "llama.cpp has experts in all layers but the first ones, the model in others",
)
GROUPED: Limit = (
    lambda c: c.attention.num_kv_heads != c.attention.num_heads,
    "llama.cpp has as many heads of keys as of queries",
)


def expert_keys(c: ModelConfig) -> dict[str, Any]:
    """How experts are chosen and weighted."""
    out: dict[str, Any] = {
        "expert_gating_func": SIGMOID if c.router.router_score == "sigmoid" else _SOFTMAX,
        "expert_weights_scale": float(c.router.router_scaling),
        "expert_weights_norm": not c.router.router_pre_softmax,
        "leading_dense_block_count": min(layer_sets.moe_layers(c), default=c.num_layers),
    }
    if c.moe.moe_ffn_hidden_size:
        out["expert_shared_count"] = c.moe.shared_ffn_hidden_size // c.moe.moe_ffn_hidden_size
    return out


def group_keys(c: ModelConfig) -> dict[str, Any]:
    """Groups of experts, of which the best are looked at."""
    return expert_keys(c) | {
        "expert_group_count": max(1, c.router.router_num_groups),
        "expert_group_used_count": max(1, c.router.router_topk_groups),
    }


_SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers


def list_sections(c: ModelConfig, default: tuple[int, ...]) -> list[int]:
    """How many pairs of a head turn by each of three positions, which are the same in text."""
    text = c.extra.get(TEXT_CONFIG) or c.extra
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return [*(scaling.get("mrope_section") or default), 0, 0, 0, 0][:4]


def standing_pairs(c: ModelConfig, default: tuple[int, ...]) -> int:
    """Pairs of a head beyond those that positions are told apart for, where these take turns.

    llama.cpp turns them by a fourth position, which is 0 in text.
    """
    sections = list_sections(c, default)
    pairs = range(int(c.attention.head_dim * c.positions.rotary_percent) // 2)
    return sum(pair >= 3 * sections[pair % 3] for pair in pairs)


def granite_keys(c: ModelConfig) -> dict[str, Any]:
    """Multipliers; llama.cpp divides logits by theirs."""
    attention = c.attention
    scale = attention.head_dim**-0.5 if attention.softmax_scale is None else attention.softmax_scale
    return {
        "embedding_scale": float(c.embedding.embedding_scale),
        "residual_scale": float(c.residual.residual_scale),
        "attention.scale": float(scale),
        "logit_scale": 1 / float(c.head.logit_scale),
    }
