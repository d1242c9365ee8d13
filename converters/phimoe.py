"""Phi-3.5-MoE: Mixtral's experts chosen one after the other, layer norms, biases at both ends."""

from megtool.convert import (
    HF_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    Assumed,
    Default,
    Family,
    Key,
    Noted,
    OneOf,
    Only,
    Padded,
    Rope,
    Row,
    Weight,
    Window,
    stacked_experts,
)

FAMILY = Family(
    name="phimoe",
    architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    model_types=("phimoe",),
    traits={
        "norm": "layernorm",
        "gated": True,
        "activation": "silu",
        "router_score": "sparsemixer",
    },
    vocabulary={"head.bias": Weight(("vocab_size",), flag="head_bias")},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "moe_ffn_hidden_size"),
        Assumed("ffn_hidden_size", "moe_ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("lm_head_bias", "head_bias", False),
        Key("num_local_experts", "num_experts", 16),
        OneOf("num_experts_per_tok", "num_experts_per_token", (2,)),
        Noted("router_jitter_noise", "router_jitter", 0.01),
        Only("hidden_act", "silu"),
        Rope(1000000.0),
        Window(),
    ),
    hf=(
        *HF_MODEL,
        Row("lm_head.bias", "head.bias"),
        *HF_NORMS,
        *HF_ATTENTION,
        Row(
            "model.layers.{l}.block_sparse_moe.gate.weight",
            "layers.{l}.mlp.router.weight",
            also=("model.layers.{l}.mlp.router.weight",),
        ),
        *(
            Row(
                f"model.layers.{{l}}.block_sparse_moe.experts.{{e}}.{stored}.weight",
                f"layers.{{l}}.mlp.experts.{{e}}.{name}.weight",
            )
            for stored, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
        ),
        *stacked_experts("model.layers.{l}.mlp.experts."),
    ),
    megatron=(Row("output_layer.bias", Padded("head.bias")),),
    limits=(
        (True, "Megatron has no SparseMixer: it chooses experts and their shares otherwise"),
        ("head_bias", "Megatron's output layer has no bias"),
    ),
)
