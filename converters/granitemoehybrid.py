"""Granite 4: Mamba-2 or attention in every layer, then an MLP, beside experts in some models."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GRANITE_EXPERTS,
    HF_MODEL,
    HF_NORMS,
    Assumed,
    Cat,
    Default,
    Family,
    Implied,
    Key,
    KindKey,
    LayerKinds,
    MambaHeads,
    Noted,
    Only,
    Rope,
    Row,
    StepLimit,
    granite_shared_expert,
    granite_single_experts,
    hf_mamba,
    in_branches,
)

_STORED, _MLP = "model.layers.{l}.", "layers.{l}.mlp."
_DENSE = "l in dense_layers"

_FEEDING = (
    Row(
        _STORED + "shared_mlp.input_linear.weight",
        Cat(_MLP + "gate.weight", _MLP + "up.weight"),
        when=_DENSE,
    ),
    Row(_STORED + "shared_mlp.output_linear.weight", _MLP + "down.weight", when=_DENSE),
    *granite_shared_expert("l in moe_layers"),
    *HF_GRANITE_EXPERTS,
    *granite_single_experts("gate_proj", "up_proj", "down_proj"),
)

FAMILY = Family(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    traits={"norm": "rmsnorm", "gated": True, "activation": "silu"},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
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
        LayerKinds(
            "layer_types",
            (
                ("mamba", "M"),
                ("attention", "*"),
                ("linear_attention", "M"),
                ("full_attention", "*"),
            ),
            feeds=True,
        ),
        # What all tokens pass through is the MLP of a layer without experts.
        KindKey("num_experts_per_tok", "num_experts_per_token", "E", 2),
        KindKey("intermediate_size", "moe_ffn_hidden_size", "E", 11008),
        KindKey("shared_intermediate_size", "shared_ffn_hidden_size", "E", 1024),
        KindKey("shared_intermediate_size", "ffn_hidden_size", "-", 1024),
        Assumed("ffn_hidden_size", "ffn_hidden_size or moe_ffn_hidden_size"),
        MambaHeads(),
        KindKey("mamba_d_state", "mamba_state_dim", "M", 256),
        KindKey("mamba_n_groups", "mamba_num_groups", "M", 1),
        Key("mamba_d_conv", "mamba_conv_kernel", 4),
        StepLimit(),
        Only("mamba_conv_bias", True),
        Only("mamba_proj_bias", False),
        Only("hidden_act", "silu"),
        Noted(
            "position_embedding_type", "position_embedding", "none", "x if x == 'rope' else 'none'"
        ),
        Implied(
            "position_embedding_type",
            "position_embedding if position_embedding == 'rope' else 'nope'",
        ),
        Rope(10000.0),
        Noted("embedding_multiplier", "embedding_scale", 1.0),
        Noted("residual_multiplier", "residual_scale", 1.0),
        Noted("attention_multiplier", "softmax_scale", 1.0, "x + 0.0"),
        Noted("logits_scaling", "logit_scale", 1.0, "1 / x"),
    ),
    hf=(
        *HF_MODEL,
        *in_branches(HF_NORMS, HF_ATTENTION, hf_mamba(_STORED + "mamba."), _FEEDING),
    ),
    limits=(
        (True, "Megatron has no multipliers of embeddings, attention, residuals, logits"),
        ("mamba_step_limit", "Megatron does not limit the steps (dt) of Mamba-2"),
    ),
)
