"""Gemma 4, text: norms of values, and other heads in layers without a window.

31B is dense, 26B-A4B has experts beside an MLP, and E2B and E4B have embeddings per layer and
layers that share keys and values.
"""

from megtool.convert import (
    HF_EXPERTS_BESIDE_MLP,
    HF_GATED_MLP,
    HF_MODEL,
    HF_POST_NORMS,
    HF_SHARED_KV_ATTENTION,
    MEGATRON_EXPERT_POST_NORMS,
    POST_NORM_WEIGHTS,
    Activation,
    Assumed,
    Family,
    GlobalHeads,
    Implied,
    Key,
    LayerInputs,
    Noted,
    Padded,
    Refused,
    Rope,
    Row,
    SharedKeys,
    Unless,
    Weight,
    Window,
)

FAMILY = Family(
    name="gemma4",
    architectures=("Gemma4ForCausalLM",),
    model_types=("gemma4_text",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "qk_norm": True,
        "value_norm": True,
        "layer_scalar": True,
        "post_norms": True,
        "softmax_scale": 1.0,
    },
    vocabulary={
        **POST_NORM_WEIGHTS,
        "layers.{l}.scalar": Weight((1,)),
        "layers.{l}.mlp.shared.norm.weight": Weight(("hidden_size",), "l in moe_layers"),
        "layers.{l}.mlp.shared.post_norm.weight": Weight(("hidden_size",), "l in moe_layers"),
        "layers.{l}.mlp.post_norm.weight": Weight(("hidden_size",), "l in moe_layers"),
        "layers.{l}.mlp.router.scale": Weight(("hidden_size",), "l in moe_layers"),
        "layers.{l}.mlp.router.expert_scale": Weight(("num_experts",), "l in moe_layers"),
        "layer_embed.weight": Weight(
            ("vocab_size", "num_layers * layer_input_size"), "layer_input_size"
        ),
        "layer_proj.weight": Weight(
            ("num_layers * layer_input_size", "hidden_size"), "layer_input_size"
        ),
        "layer_norm.weight": Weight(("layer_input_size",), "layer_input_size"),
        "layers.{l}.input_gate.weight": Weight(
            ("layer_input_size", "hidden_size"), "layer_input_size"
        ),
        "layers.{l}.input_proj.weight": Weight(
            ("hidden_size", "layer_input_size"), "layer_input_size"
        ),
        "layers.{l}.input_norm.weight": Weight(("hidden_size",), "layer_input_size"),
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Window(default=512, every=6, full_last=True),
        GlobalHeads(),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Activation("hidden_activation", "gelu_pytorch_tanh"),
        # E2B and E4B have the first two, and 26B-A4B experts, beside which its MLP is a shared one.
        SharedKeys(),
        LayerInputs(),
        Unless("num_experts", "num_experts", "enable_moe_block", False),
        Unless("top_k_experts", "num_experts_per_token", "enable_moe_block", False),
        Unless("moe_intermediate_size", "moe_ffn_hidden_size", "enable_moe_block", False),
        Assumed("shared_ffn_hidden_size", "ffn_hidden_size if num_experts else 0"),
        Assumed("expert_norms", "num_experts > 0"),
        Assumed("router_norm", "num_experts > 0"),
        Implied("enable_moe_block", "num_experts > 0", verbatim=False),
        Refused("use_bidirectional_attention", "all", "it is an encoder"),
        Rope(
            1000000.0,
            by_kind=True,
            old=False,
            scaling={"rope_type": "proportional", "partial_rotary_factor": 0.25},
        ),
        Assumed("embedding_scale", "hidden_size ** 0.5"),
        Noted("final_logit_softcapping", "logit_softcap", 0.0, "x + 0.0"),
    ),
    hf=(
        *HF_MODEL,
        Row("model.layers.{l}.input_layernorm.weight", "layers.{l}.attn_norm.weight"),
        *HF_EXPERTS_BESIDE_MLP,
        Row(
            "model.layers.{l}.pre_feedforward_layernorm.weight",
            "layers.{l}.mlp_norm.weight",
            when="l not in moe_layers",
        ),
        *HF_POST_NORMS,
        *HF_SHARED_KV_ATTENTION,
        *HF_GATED_MLP,
        Row("model.layers.{l}.layer_scalar", "layers.{l}.scalar"),
        Row("model.embed_tokens_per_layer.weight", "layer_embed.weight"),
        Row("model.per_layer_model_projection.weight", "layer_proj.weight"),
        Row("model.per_layer_projection_norm.weight", "layer_norm.weight"),
        Row("model.layers.{l}.per_layer_input_gate.weight", "layers.{l}.input_gate.weight"),
        Row("model.layers.{l}.per_layer_projection.weight", "layers.{l}.input_proj.weight"),
        Row("model.layers.{l}.post_per_layer_input_norm.weight", "layers.{l}.input_norm.weight"),
    ),
    megatron=(
        *MEGATRON_EXPERT_POST_NORMS,
        Row("decoder.layers.{l}.layer_scalar", "layers.{l}.scalar"),
        Row(
            "decoder.layers.{l}.mlp.shared_experts.linear_fc1.layer_norm_weight",
            "layers.{l}.mlp.shared.norm.weight",
        ),
        Row(
            "decoder.layers.{l}.mlp.shared_experts.linear_fc2.post_layernorm.weight",
            "layers.{l}.mlp.shared.post_norm.weight",
        ),
        Row("decoder.layers.{l}.mlp.post_moe_layernorm.weight", "layers.{l}.mlp.post_norm.weight"),
        Row("decoder.layers.{l}.mlp.router.scale", "layers.{l}.mlp.router.scale"),
        Row("decoder.layers.{l}.mlp.router.per_expert_scale", "layers.{l}.mlp.router.expert_scale"),
        Row("embedding.layer_embeddings.weight", Padded("layer_embed.weight")),
        Row("embedding.layer_proj.weight", "layer_proj.weight"),
        Row("embedding.layer_norm.weight", "layer_norm.weight"),
        Row("decoder.layers.{l}.input_gate.weight", "layers.{l}.input_gate.weight"),
        Row("decoder.layers.{l}.input_proj.weight", "layers.{l}.input_proj.weight"),
        Row("decoder.layers.{l}.input_post_layernorm.weight", "layers.{l}.input_norm.weight"),
    ),
    limits=(
        (
            True,
            "Megatron has neither norms of values and after attention and MLP, nor embeddings "
            "times sqrt(hidden_size), nor a scalar by layer (Megatron-Bridge has)",
        ),
        (
            "layer_sizes",
            "Megatron has heads of one size in all layers, and none of another size in layers "
            "without a window (Megatron-Bridge has)",
        ),
        (
            "num_experts",
            "Megatron has no MLP beside experts with norms of its own, nor a router that reads the "
            "residual; Megatron-Bridge, whose names these are, has one with both norms and scales "
            "multiplied into it, and does not load what is kept apart here",
        ),
        (
            "layer_input_size or shared_kv_layers",
            "Megatron and Megatron-Bridge have neither embeddings per layer nor layers that share "
            "keys and values: the names of these tensors are megtool's own",
        ),
        (
            "tied_values",
            "rows of values are left out where they are those of keys: Megatron-Bridge, which has "
            "a copy of them, does not load such layers",
        ),
    ),
)
