"""Qwen3-Next: gated delta nets in three of four layers, gated attention, experts beside one."""

from megtool.convert import (
    HF_DELTA_NET,
    HF_EXPERTS,
    HF_GATED_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    HF_QK_NORMS,
    HF_SHARED_EXPERT,
    Assumed,
    Default,
    EitherKey,
    Family,
    Grouped,
    Inverted,
    Key,
    LayerKinds,
    MoeLayers,
    Only,
    Rope,
    Row,
    hf_outer_mtp,
)

_DELTA = "layers.{l}.delta."

_LAYERS = (
    *HF_NORMS,
    *HF_GATED_ATTENTION,
    *HF_QK_NORMS,
    *HF_GATED_MLP,
    *HF_EXPERTS,
    *HF_SHARED_EXPERT,
)

_INPUTS = (
    Row(
        "model.layers.{l}.linear_attn.in_proj_qkvz.weight",
        Grouped(
            _DELTA + "q.weight",
            _DELTA + "k.weight",
            _DELTA + "v.weight",
            _DELTA + "z.weight",
            by="linear_num_key_heads",
        ),
        when="l in delta_layers",
    ),
    Row(
        "model.layers.{l}.linear_attn.in_proj_ba.weight",
        Grouped(_DELTA + "b.weight", _DELTA + "a.weight", by="linear_num_key_heads"),
        when="l in delta_layers",
    ),
)

FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    traits={
        "norm": "rmsnorm",
        "zero_centered_norm": True,
        "gated": True,
        "activation": "silu",
        "qk_norm": True,
        "attn_output_gate": True,
        "shared_expert_gate": True,
    },
    # The layer of multi-token prediction is in published files, and no key says so.
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=2),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads"), absent=256),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 32768),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Only("attention_bias", False),
        EitherKey(("num_experts", "num_local_experts"), "num_experts"),
        Key("num_experts_per_tok", "num_experts_per_token", 10),
        Key("moe_intermediate_size", "moe_ffn_hidden_size"),
        Key("shared_expert_intermediate_size", "shared_ffn_hidden_size"),
        MoeLayers(step="decoder_sparse_step", dense="mlp_only_layers"),
        LayerKinds(
            "layer_types",
            (("linear_attention", "G"), ("full_attention", "*")),
            feeds=True,
            every_key="full_attention_interval",
            every=4,
        ),
        Key("linear_num_key_heads", "linear_num_key_heads", 16),
        Key("linear_num_value_heads", "linear_num_value_heads", 32),
        Key("linear_key_head_dim", "linear_key_head_dim", 128),
        Key("linear_value_head_dim", "linear_value_head_dim", 128),
        Key("linear_conv_kernel_dim", "linear_conv_kernel", 4),
        Inverted("norm_topk_prob", "router_pre_softmax", True),
        Only("hidden_act", "silu"),
        Assumed("num_mtp_layers", "1"),
        Rope(10000.0, percent_key="partial_rotary_factor", percent=0.25),
    ),
    hf=(*HF_MODEL, *_LAYERS, *_INPUTS, *HF_DELTA_NET, *hf_outer_mtp(_LAYERS)),
)
