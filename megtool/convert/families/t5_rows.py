"""Rows and settings of models of an encoder and a decoder as T5 is (T5, mT5, umT5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.activation import ACTIVATIONS
from megtool.convert.config.keys import REQUIRED, Default, Derived, Key, Setting, unsupported
from megtool.convert.config.moe import Assumed, Noted
from megtool.convert.language.canonical import Weight
from megtool.convert.language.expression import Expression
from megtool.convert.language.mapping import Cat, Dropped, Grouped, Padded, Qkv, Row, Table
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

_HEADS = "num_heads * head_dim"
_ENCODER, _DECODER = "encoder.block.{l}.layer.", "decoder.block.{d}.layer."
_L, _D = "encoder.layers.{l}.", "decoder.layers.{d}."
_BIASES = "relative_num_buckets", "num_heads"
_BIAS = "SelfAttention.relative_attention_bias.weight"
_OWN_BIAS = "self_attention.relative_pos_emb.relative_attention_bias.weight"

T5_WEIGHTS: dict[str, Weight] = {
    "relative_bias.weight": Weight(_BIASES, "not relative_per_layer"),
    "layers.{l}.relative_bias.weight": Weight(_BIASES, "relative_per_layer"),
    "decoder.{d}.attn_norm.weight": Weight(("hidden_size",)),
    "decoder.{d}.attn.q.weight": Weight((_HEADS, "hidden_size")),
    "decoder.{d}.attn.k.weight": Weight((_HEADS, "hidden_size")),
    "decoder.{d}.attn.v.weight": Weight((_HEADS, "hidden_size")),
    "decoder.{d}.attn.o.weight": Weight(("hidden_size", _HEADS)),
    "decoder.{d}.cross_norm.weight": Weight(("hidden_size",)),
    "decoder.{d}.cross.q.weight": Weight((_HEADS, "hidden_size")),
    "decoder.{d}.cross.k.weight": Weight((_HEADS, "hidden_size")),
    "decoder.{d}.cross.v.weight": Weight((_HEADS, "hidden_size")),
    "decoder.{d}.cross.o.weight": Weight(("hidden_size", _HEADS)),
    "decoder.{d}.mlp_norm.weight": Weight(("hidden_size",)),
    "decoder.{d}.mlp.gate.weight": Weight(("ffn_hidden_size", "hidden_size"), "gated"),
    "decoder.{d}.mlp.up.weight": Weight(("ffn_hidden_size", "hidden_size")),
    "decoder.{d}.mlp.down.weight": Weight(("hidden_size", "ffn_hidden_size")),
    "decoder.norm.weight": Weight(("hidden_size",)),
    "decoder.relative_bias.weight": Weight(_BIASES, "not relative_per_layer"),
    "decoder.{d}.relative_bias.weight": Weight(_BIASES, "relative_per_layer"),
    "head.bias": Weight(("vocab_size",), flag="head_bias"),
}
"""Tensors of a decoder that attends to an encoder, whose layers are `layers`."""

HF_T5: Table = (
    Row("shared.weight", "embed.weight"),
    Row(
        "encoder.block.0.layer.0." + _BIAS,
        "relative_bias.weight",
        when="not relative_per_layer",
    ),
    Row(_ENCODER + "0." + _BIAS, "layers.{l}.relative_bias.weight", when="relative_per_layer"),
    Row(_ENCODER + "0.layer_norm.weight", "layers.{l}.attn_norm.weight"),
    Row(_ENCODER + "0.SelfAttention.q.weight", "layers.{l}.attn.q.weight"),
    Row(_ENCODER + "0.SelfAttention.k.weight", "layers.{l}.attn.k.weight"),
    Row(_ENCODER + "0.SelfAttention.v.weight", "layers.{l}.attn.v.weight"),
    Row(_ENCODER + "0.SelfAttention.o.weight", "layers.{l}.attn.o.weight"),
    Row(_ENCODER + "1.layer_norm.weight", "layers.{l}.mlp_norm.weight"),
    Row(_ENCODER + "1.DenseReluDense.wi_0.weight", "layers.{l}.mlp.gate.weight", when="gated"),
    Row(_ENCODER + "1.DenseReluDense.wi_1.weight", "layers.{l}.mlp.up.weight", when="gated"),
    Row(_ENCODER + "1.DenseReluDense.wi.weight", "layers.{l}.mlp.up.weight", when="not gated"),
    Row(_ENCODER + "1.DenseReluDense.wo.weight", "layers.{l}.mlp.down.weight"),
    Row("encoder.final_layer_norm.weight", "norm.weight"),
    Row(
        "decoder.block.0.layer.0." + _BIAS,
        "decoder.relative_bias.weight",
        when="not relative_per_layer",
    ),
    Row(_DECODER + "0." + _BIAS, "decoder.{d}.relative_bias.weight", when="relative_per_layer"),
    Row(_DECODER + "0.layer_norm.weight", "decoder.{d}.attn_norm.weight"),
    Row(_DECODER + "0.SelfAttention.q.weight", "decoder.{d}.attn.q.weight"),
    Row(_DECODER + "0.SelfAttention.k.weight", "decoder.{d}.attn.k.weight"),
    Row(_DECODER + "0.SelfAttention.v.weight", "decoder.{d}.attn.v.weight"),
    Row(_DECODER + "0.SelfAttention.o.weight", "decoder.{d}.attn.o.weight"),
    Row(_DECODER + "1.layer_norm.weight", "decoder.{d}.cross_norm.weight"),
    Row(_DECODER + "1.EncDecAttention.q.weight", "decoder.{d}.cross.q.weight"),
    Row(_DECODER + "1.EncDecAttention.k.weight", "decoder.{d}.cross.k.weight"),
    Row(_DECODER + "1.EncDecAttention.v.weight", "decoder.{d}.cross.v.weight"),
    Row(_DECODER + "1.EncDecAttention.o.weight", "decoder.{d}.cross.o.weight"),
    Row(_DECODER + "2.layer_norm.weight", "decoder.{d}.mlp_norm.weight"),
    Row(_DECODER + "2.DenseReluDense.wi_0.weight", "decoder.{d}.mlp.gate.weight", when="gated"),
    Row(_DECODER + "2.DenseReluDense.wi_1.weight", "decoder.{d}.mlp.up.weight", when="gated"),
    Row(_DECODER + "2.DenseReluDense.wi.weight", "decoder.{d}.mlp.up.weight", when="not gated"),
    Row(_DECODER + "2.DenseReluDense.wo.weight", "decoder.{d}.mlp.down.weight"),
    Row("decoder.final_layer_norm.weight", "decoder.norm.weight"),
    Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
    Dropped(
        "lm_head.weight",
        "a copy of the tied embedding",
        when="tied_embeddings",
        copy_of="embed.weight",
    ),
    Dropped("encoder.embed_tokens.weight", "a copy of the embedding", copy_of="embed.weight"),
    Dropped("decoder.embed_tokens.weight", "a copy of the embedding", copy_of="embed.weight"),
    Dropped(
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        "never used: attention to the encoder has no positions",
    ),
)

MEGATRON_T5: Table = (
    Row(
        "encoder_relative_pos_emb.relative_attention_bias.weight",
        "relative_bias.weight",
        when="not relative_per_layer",
    ),
    Row(
        "decoder_relative_pos_emb.relative_attention_bias.weight",
        "decoder.relative_bias.weight",
        when="not relative_per_layer",
    ),
    Row(_L + _OWN_BIAS, "layers.{l}.relative_bias.weight", when="relative_per_layer"),
    Row(_D + _OWN_BIAS, "decoder.{d}.relative_bias.weight", when="relative_per_layer"),
    Row(
        _L + "self_attention.linear_qkv.layer_norm_weight",
        "layers.{l}.attn_norm.weight",
        also=(_L + "input_layernorm.weight",),
    ),
    Row(
        _L + "self_attention.linear_qkv.weight",
        Qkv("layers.{l}.attn.q.weight", "layers.{l}.attn.k.weight", "layers.{l}.attn.v.weight"),
    ),
    Row(_L + "self_attention.linear_proj.weight", "layers.{l}.attn.o.weight"),
    Row(
        _L + "mlp.linear_fc1.layer_norm_weight",
        "layers.{l}.mlp_norm.weight",
        also=(_L + "pre_mlp_layernorm.weight",),
    ),
    Row(
        _L + "mlp.linear_fc1.weight",
        Cat("layers.{l}.mlp.gate.weight", "layers.{l}.mlp.up.weight"),
        when="gated",
    ),
    Row(_L + "mlp.linear_fc1.weight", "layers.{l}.mlp.up.weight", when="not gated"),
    Row(_L + "mlp.linear_fc2.weight", "layers.{l}.mlp.down.weight"),
    Row("encoder.final_layernorm.weight", "norm.weight"),
    Row(
        _D + "self_attention.linear_qkv.layer_norm_weight",
        "decoder.{d}.attn_norm.weight",
        also=(_D + "input_layernorm.weight",),
    ),
    Row(
        _D + "self_attention.linear_qkv.weight",
        Qkv(
            "decoder.{d}.attn.q.weight",
            "decoder.{d}.attn.k.weight",
            "decoder.{d}.attn.v.weight",
        ),
    ),
    Row(_D + "self_attention.linear_proj.weight", "decoder.{d}.attn.o.weight"),
    Row(_D + "pre_cross_attn_layernorm.weight", "decoder.{d}.cross_norm.weight"),
    Row(_D + "cross_attention.linear_q.weight", "decoder.{d}.cross.q.weight"),
    Row(
        _D + "cross_attention.linear_kv.weight",
        Grouped("decoder.{d}.cross.k.weight", "decoder.{d}.cross.v.weight", by="num_kv_heads"),
    ),
    Row(_D + "cross_attention.linear_proj.weight", "decoder.{d}.cross.o.weight"),
    Row(
        _D + "mlp.linear_fc1.layer_norm_weight",
        "decoder.{d}.mlp_norm.weight",
        also=(_D + "pre_mlp_layernorm.weight",),
    ),
    Row(
        _D + "mlp.linear_fc1.weight",
        Cat("decoder.{d}.mlp.gate.weight", "decoder.{d}.mlp.up.weight"),
        when="gated",
    ),
    Row(_D + "mlp.linear_fc1.weight", "decoder.{d}.mlp.up.weight", when="not gated"),
    Row(_D + "mlp.linear_fc2.weight", "decoder.{d}.mlp.down.weight"),
    Row("decoder.final_layernorm.weight", "decoder.norm.weight"),
    Row("output_layer.bias", Padded("head.bias")),
    Dropped("lm_head.output_layer.weight", "the output layer's other name"),
    Dropped("lm_head.output_layer.bias", "its bias's other name", copy_of="head.bias"),
)

T5_LIMITS: tuple[tuple[Expression, str], ...] = (
    (
        True,
        "Megatron's T5 divides attention scores by the root of a head's size, unless its "
        "softmax_scale is 1, and does not scale the states that logits are made of",
    ),
    (
        True,
        "Megatron's T5 stores its output layer under two names, with a bias where embeddings "
        "are tied: --dist-ckpt-strictness log_all loads a checkpoint without them",
    ),
)


_ACT, _IS_GATED = "dense_act_fn", "is_gated_act"


@dataclass(frozen=True, slots=True)
class FeedForward(Setting):
    """A stored key that names the activation of the MLP, after `gated-` where it is gated.

    `gated-gelu` is the approximation by tanh, as transformers reads it. What it makes of the key,
    and saves beside it, comes first: those two are kept verbatim in `extra`.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (_ACT, _IS_GATED)

    key: str
    default: str

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Both fields."""
        value = stored.get(self.key)
        first, dash, second = str(self.default if value is None else value).partition("-")
        kind = second if dash else first
        if kind not in ("relu", "gelu", "gelu_new", "silu") or (dash and first != "gated"):
            raise MappingError(
                f"the configuration says {self.key}={value!r}, "
                "but the family knows relu, gelu, gelu_new and silu, each also after 'gated-'",
                error_id="unsupported-model",
            )
        into["gated"] = bool(stored.get(_IS_GATED, dash))
        kind = "gelu_new" if dash and kind == "gelu" else kind
        if (kind := stored.get(_ACT, kind)) not in ACTIVATIONS:
            raise unsupported(_ACT, kind, "and its formula is not known")
        into["activation"] = kind
        return (self.key,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Both fields in one."""
        kind = config.mlp.activation
        if config.mlp.gated:
            kind = "gated-" + ("gelu" if kind == "gelu_new" else kind)
        into[self.key] = kind
        same = {_ACT: config.mlp.activation, _IS_GATED: config.mlp.gated}
        into |= {k: v for k, v in same.items() if config.extra.get(k, v) != v}


def t5_keys(feed_forward: str, **defaults: int) -> tuple[Setting, ...]:
    """The settings of models of T5's kind.

    `feed_forward` is the default of `feed_forward_proj`, and `defaults` are those of the sizes,
    by their keys; those without one are required.
    """

    def key(name: str, field: str) -> Key:
        return Key(name, field, defaults.get(name, REQUIRED))

    return (
        key("num_layers", "num_layers"),
        Key("num_decoder_layers", "num_decoder_layers", Default("num_layers")),
        key("d_model", "hidden_size"),
        key("d_ff", "ffn_hidden_size"),
        key("num_heads", "num_heads"),
        Derived("num_kv_heads", "num_heads"),
        key("d_kv", "head_dim"),
        key("vocab_size", "vocab_size"),
        Assumed("max_positions", "512"),
        Key("relative_attention_num_buckets", "relative_num_buckets", 32),
        Key("relative_attention_max_distance", "relative_max_distance", 128),
        Key("layer_norm_epsilon", "norm_eps", 1e-6),
        # Kept as it is: transformers 5 always writes `true`, whatever it has (`head_unties`).
        Noted("tie_word_embeddings", "tied_embeddings", True),
        FeedForward("feed_forward_proj", feed_forward),
    )


MT5_SIZES: dict[str, int] = {
    "num_layers": 8,
    "d_model": 512,
    "d_ff": 1024,
    "num_heads": 6,
    "d_kv": 64,
    "vocab_size": 250112,
}
"""Sizes that transformers' MT5Config and UMT5Config have by default."""
