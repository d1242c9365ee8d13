"""Granite 3 with experts: Granite's multipliers, and experts fused in two tensors."""

from megtool.convert import (
    HF_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    Assumed,
    Cat,
    Default,
    Family,
    Key,
    Noted,
    Only,
    Rope,
    Row,
    Stacked,
)

FAMILY = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    model_types=("granitemoe",),
    traits={"norm": "rmsnorm", "gated": True, "activation": "silu"},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "moe_ffn_hidden_size"),
        Assumed("ffn_hidden_size", "moe_ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("num_local_experts", "num_experts", 8),
        Key("num_experts_per_tok", "num_experts_per_token", 2),
        Only("hidden_act", "silu"),
        Rope(10000.0),
        Noted("embedding_multiplier", "embedding_scale", 1.0),
        Noted("residual_multiplier", "residual_scale", 1.0),
        Noted("attention_multiplier", "softmax_scale", 1.0, "x + 0.0"),
        Noted("logits_scaling", "logit_scale", 1.0, "1 / x"),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        Row(
            "model.layers.{l}.block_sparse_moe.router.layer.weight",
            "layers.{l}.mlp.router.weight",
            also=("model.layers.{l}.block_sparse_moe.router.weight",),
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.input_linear.weight",
            Stacked(
                Cat(
                    "layers.{l}.mlp.experts.{e}.gate.weight", "layers.{l}.mlp.experts.{e}.up.weight"
                ),
                "e",
            ),
            also=("model.layers.{l}.block_sparse_moe.experts.gate_up_proj",),
            plain=True,
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.output_linear.weight",
            Stacked("layers.{l}.mlp.experts.{e}.down.weight", "e"),
            also=("model.layers.{l}.block_sparse_moe.experts.down_proj",),
            plain=True,
        ),
        # vLLM looks for codes of experts one by one.
        Row(
            "model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight",
            "layers.{l}.mlp.experts.{e}.gate.weight",
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.experts.{e}.w3.weight",
            "layers.{l}.mlp.experts.{e}.up.weight",
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight",
            "layers.{l}.mlp.experts.{e}.down.weight",
        ),
    ),
    limits=((True, "Megatron has no multipliers of embeddings, attention, residuals, logits"),),
)
