"""Hunyuan with experts (A13B): experts in every layer beside a shared one of the same size."""

from megtool.convert import (
    HF_ATTENTION,
    HF_EXPERTS,
    HF_HUNYUAN_QK_NORMS,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Alike,
    Assumed,
    Default,
    Derived,
    Family,
    Key,
    Only,
    Rope,
    Row,
)

FAMILY = Family(
    name="hunyuan_v1_moe",
    architectures=("HunYuanMoEV1ForCausalLM",),
    model_types=("hunyuan_v1_moe",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "qk_norm": True,
        "qk_norm_rotated": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "moe_ffn_hidden_size"),
        Assumed("ffn_hidden_size", "moe_ffn_hidden_size"),
        Derived("shared_ffn_hidden_size", "moe_ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Only("use_qk_norm", True),
        Only("use_cla", False),
        Alike("num_experts", "num_experts", 1),
        Alike("moe_topk", "num_experts_per_token", 1),
        Activation(),
        Rope(10000.0),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        *HF_HUNYUAN_QK_NORMS,
        Row("model.layers.{l}.mlp.gate.wg.weight", "layers.{l}.mlp.router.weight"),
        *HF_EXPERTS,
        Row(
            "model.layers.{l}.mlp.shared_mlp.gate_proj.weight", "layers.{l}.mlp.shared.gate.weight"
        ),
        Row("model.layers.{l}.mlp.shared_mlp.up_proj.weight", "layers.{l}.mlp.shared.up.weight"),
        Row(
            "model.layers.{l}.mlp.shared_mlp.down_proj.weight", "layers.{l}.mlp.shared.down.weight"
        ),
    ),
    limits=((True, "Megatron normalizes queries and keys before their rotation, not after it"),),
)
