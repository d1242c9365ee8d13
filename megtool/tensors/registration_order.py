"""Megatron's registration order: the order of one rank's parameters in its modules.

The distributed optimizer lays its buckets out in this order reversed, and nothing on disk says
which it was: Transformer Engine registers the norm it fuses into the next linear layer after
attention's output projection, Megatron's own layers register it before. Sources: megatron-core
0.16.1, `models/{gpt/gpt,bert/bert,T5/t5}_model.py`,
`transformer/{transformer_layer,attention,mlp}.py`,
`transformer/moe/{moe_layer,shared_experts,experts}.py`,
`transformer/multi_latent_attention.py`; transformer_engine 2.x,
`pytorch/module/layernorm_linear.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megtool.errors import MappingError

_NORM = (
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.layer_norm_bias",
    "input_layernorm.weight",
    "input_layernorm.bias",
)
_ATTENTION = (
    "self_attention.core_attention.softmax_offset",
    "self_attention.core_attention.indexer.linear_wq_b.weight",
    "self_attention.core_attention.indexer.linear_wk.weight",
    "self_attention.core_attention.indexer.k_norm.weight",
    "self_attention.core_attention.indexer.k_norm.bias",
    "self_attention.core_attention.indexer.linear_weights_proj.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_proj.post_layernorm.weight",
    "self_attention.linear_proj.post_layernorm.bias",
)
_QKV = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.q_layernorm.bias",
    "self_attention.k_layernorm.weight",
    "self_attention.k_layernorm.bias",
)
_LATENT = (
    "self_attention.linear_q_proj.layer_norm_weight",
    "self_attention.linear_q_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.kv_layernorm.weight",
)
_DELTA_STATE = ("self_attention.dt_bias", "self_attention.A_log")
_DELTA_NORM = (
    "self_attention.in_proj.layer_norm_weight",
    "self_attention.in_proj.layer_norm_bias",
)
_DELTA_NET = (
    "self_attention.in_proj.weight",
    "self_attention.conv1d.weight",
    "self_attention.out_norm.weight",
    "self_attention.out_proj.weight",
    *(f"self_attention.{x}_proj.weight" for x in ("beta", "f_a", "f_b", "g_a", "g_b")),
)
_CONV = ("mixer.conv1d.weight", "mixer.conv1d.bias")
_MAMBA_STATE = ("mixer.dt_bias", "mixer.A_log", "mixer.D")
_MAMBA_NORM = ("mixer.in_proj.layer_norm_weight", "mixer.in_proj.layer_norm_bias")
_MAMBA_OUT = ("mixer.norm.weight", "mixer.out_proj.weight")
_SHORT_CONV = (
    "short_conv.in_proj.layer_norm_weight",
    "short_conv.in_proj.weight",
    "short_conv.in_proj.bias",
    "short_conv.conv1d.weight",
    "short_conv.conv1d.bias",
    "short_conv.out_proj.weight",
    "short_conv.out_proj.bias",
)
_CROSS = (
    "self_attention.relative_pos_emb.relative_attention_bias.weight",
    "pre_cross_attn_layernorm.weight",
    "pre_cross_attn_layernorm.bias",
    "cross_attention.linear_proj.weight",
    "cross_attention.linear_proj.bias",
    "cross_attention.linear_q.weight",
    "cross_attention.linear_q.bias",
    "cross_attention.linear_kv.weight",
    "cross_attention.linear_kv.bias",
)
_MLP = (
    "pre_mlp_layernorm.weight",
    "pre_mlp_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_bias",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
    "mlp.linear_fc2.post_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.bias",
    "mlp.router.weight",
    "mlp.router.bias",
    "mlp.router.scale",
    "mlp.router.per_expert_scale",
    "mlp.fc1_latent_proj.weight",
    "mlp.fc2_latent_proj.weight",
)
_SHARED_EXPERTS = (
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.layer_norm_weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc1.bias",
    "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_experts.linear_fc2.bias",
    "mlp.shared_experts.linear_fc2.post_layernorm.weight",
    "mlp.post_moe_layernorm.weight",
    "post_ffn_layernorm.weight",
    "input_gate.weight",
    "input_proj.weight",
    "input_post_layernorm.weight",
)
_MTP = ("enorm.weight", "enorm.bias", "hnorm.weight", "hnorm.bias", "eh_proj.weight")
_SECTIONS = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "position_embeddings.weight",  # T5Model's second name for them
    "embedding.tokentype_embeddings.weight",
    "embedding.norm.weight",
    "embedding.norm.bias",
    "embedding.layer_embeddings.weight",
    "embedding.layer_proj.weight",
    "embedding.layer_norm.weight",
    "encoder_relative_pos_emb.relative_attention_bias.weight",
    "decoder_relative_pos_emb.relative_attention_bias.weight",
    "encoder.layers",
    "encoder.final_layernorm.weight",
    "encoder.final_layernorm.bias",
    "decoder.layers",
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    "decoder.final_norm.weight",
    "decoder.final_norm.bias",
    "mtp.layers",
    "lm_head.dense.weight",
    "lm_head.dense.bias",
    "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias",
    "output_layer.weight",
    "output_layer.bias",
    "binary_head.weight",
    "binary_head.bias",
    "pooler.dense.weight",
    "pooler.dense.bias",
    "score.weight",
    "score.bias",
    "score_dense.weight",
    "score_dense.bias",
)
_LAYER = re.compile(
    r"(decoder|encoder|mtp)\.layers\.(\d+)\."
    r"(?:(transformer_layer|mtp_model_layer)\.(?:layers\.(\d+)\.)?)?(.+)"
)
_EXPERT = re.compile(r"mlp\.experts\.experts\.linear_fc([12])\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One registration order.

    `fused_norms`: a layer's first norm belongs to the linear layer behind it (Transformer Engine).
    `grouped_experts`: all experts' first matrices come before all their second ones. `conv_first`:
    a Mamba mixer's convolution comes before its other parameters (megatron-core 0.19 and later).
    """

    fused_norms: bool
    grouped_experts: bool
    conv_first: bool = True

    def __str__(self) -> str:
        layers = "Transformer Engine's" if self.fused_norms else "Megatron's own"
        experts = "grouped" if self.grouped_experts else "sequential"
        mixers = "" if self.conv_first else ", mixers of megatron-core up to 0.18"
        return f"{layers} layers, {experts} experts{mixers}"

    def position(self, key: str, expert: int = 0) -> tuple[int, ...]:
        """The position of a parameter in registration order; positions compare in that order.

        `key` is a global per-layer name (`decoder.layers.3.mlp.linear_fc1.weight`); expert
        matrices are named without their index, which is `expert`.

        Raises:
            MappingError: a name that no known module has.
        """
        match = _LAYER.fullmatch(key)
        if match is None:
            if key not in _SECTIONS:
                raise _unknown(key)
            return (_SECTIONS.index(key),)
        section, layer, inner, suffix = match[1], int(match[2]), match[3], match[5]
        place = (_SECTIONS.index(f"{section}.layers"), layer)
        if section == "mtp" and inner is None:
            if suffix in _MTP:
                return (*place, _MTP.index(suffix))
            if suffix.startswith("final_layernorm."):
                return (*place, len(_MTP) + 1)
            raise _unknown(key)
        return (*place, len(_MTP), int(match[4] or 0), *self._inside(key, suffix, expert))

    def _inside(self, key: str, suffix: str, expert: int) -> tuple[int, ...]:
        """The position of a parameter inside its transformer layer."""
        if match := _EXPERT.fullmatch(suffix):
            matrix = 2 * int(match[1]) + (match[2] == "bias")
            within = (matrix, expert) if self.grouped_experts else (expert, matrix)
            return (len(self._layer), *within)
        if suffix in _SHARED_EXPERTS:
            return (len(self._layer) + 1, _SHARED_EXPERTS.index(suffix))
        if suffix not in self._layer:
            raise _unknown(key)
        return (self._layer.index(suffix),)

    @property
    def _layer(self) -> tuple[str, ...]:
        return _LAYERS[self.fused_norms, self.conv_first]


_FUSED = (*(n for n in _NORM if "input" in n), *_ATTENTION, *_NORM[:2], *_QKV, *_LATENT)
_LOCAL = (*_NORM, *_ATTENTION, *_QKV, *_LATENT)


def _mamba(fused: bool, conv_first: bool) -> tuple[str, ...]:
    """A Mamba-2 mixer; the norm of Megatron's own layers is registered behind it."""
    projection = (*(_MAMBA_NORM if fused else ()), "mixer.in_proj.weight")
    first = (_CONV, _MAMBA_STATE, projection) if conv_first else (_MAMBA_STATE, projection, _CONV)
    own = ("norm.weight", "norm.bias", *(() if fused else _MAMBA_NORM))
    return (*(name for part in first for name in part), *_MAMBA_OUT, *own)


def _delta_net(fused: bool) -> tuple[str, ...]:
    """A gated delta net; the norm of Megatron's own layers is registered before it."""
    first = (*_DELTA_STATE, *_DELTA_NORM) if fused else (*_DELTA_NORM, *_DELTA_STATE)
    return (*first, *_DELTA_NET)


def _layer(fused: bool, conv_first: bool) -> tuple[str, ...]:
    """Everything in a layer but experts. A mixer beside attention is registered before it, behind
    the norm of both."""
    mamba = _mamba(fused, conv_first)
    parallel = (f"mamba_{n}" for n in mamba if n.startswith("mixer."))
    rest = (*_SHORT_CONV, *_CROSS, *_MLP)
    return (*parallel, *(_FUSED if fused else _LOCAL), *_delta_net(fused), *mamba, *rest)


_LAYERS = {(fused, conv): _layer(fused, conv) for fused in (True, False) for conv in (True, False)}

ORDERS = tuple(
    Order(fused_norms=fused, grouped_experts=grouped, conv_first=conv)
    for conv in (True, False)
    for fused in (True, False)
    for grouped in (True, False)
)
"""All known orders, the most common first."""


def likely_orders(
    implementation: str | None, grouped_gemm: bool | None, *, conv_first: bool = True
) -> list[Order]:
    """All known orders, those first that a checkpoint's args make likely.

    `implementation` is Megatron's `transformer_impl`, `grouped_gemm` its `moe_grouped_gemm`.
    """
    wants_fused = implementation != "local"
    wants_grouped = grouped_gemm is not False

    def unlikely(order: Order) -> int:
        layers = 2 * (order.fused_norms != wants_fused) + (order.grouped_experts != wants_grouped)
        return layers + 4 * (order.conv_first != conv_first)

    return sorted(ORDERS, key=unlikely)


def registered(keys: Sequence[tuple[str, int]], order: Order) -> list[int]:
    """Indices of `(key, expert)` pairs as they are registered."""
    return sorted(range(len(keys)), key=lambda i: order.position(*keys[i]))


def _unknown(key: str) -> MappingError:
    return MappingError(
        f"where {key!r} stands among a rank's parameters is not known",
        tensor=key,
        hint="optimizer state in buckets cannot be assigned to parameters; fully_reshardable state "
        "can (--to torch_dist), and --optimizer-format none omits it",
    )
