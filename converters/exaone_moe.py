"""K-EXAONE: DeepSeek's experts, no rotary embedding in layers without a window, one MTP layer."""

from megtool.convert import (
    HF_ATTENTION,
    HF_EXPERTS,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    HF_QK_NORMS,
    HF_SHARED_EXPERTS,
    Activation,
    Assumed,
    Default,
    Family,
    Key,
    MoeLayers,
    Multiple,
    Nullable,
    OneOf,
    Only,
    Refused,
    Rope,
    RopeInWindows,
    Row,
    Window,
    hf_outer_mtp,
)

_LAYERS = (*HF_NORMS, *HF_ATTENTION, *HF_QK_NORMS, *HF_GATED_MLP)

FAMILY = Family(
    name="exaone_moe",
    architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    model_types=("exaone_moe",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "qk_norm": True,
        "router_score": "sigmoid",
        "router_expert_bias": True,
        "router_fp32": True,
        "router_group_best": 2,
    },
    # The layer of multi-token prediction has an MLP, not experts, and attends to all tokens without
    # rotary embedding, like other layers without a window.
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 32),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("num_experts", "num_experts", 64),
        Key("num_experts_per_tok", "num_experts_per_token", 8),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", 1024),
        Multiple(
            "num_shared_experts", "shared_ffn_hidden_size", unit="moe_ffn_hidden_size", absent=1
        ),
        MoeLayers(first="first_k_dense_replace", types="mlp_layer_types", num_dense=1),
        Nullable("n_group", "router_num_groups"),
        Nullable("topk_group", "router_topk_groups"),
        Key("routed_scaling_factor", "router_scaling", 2.5),
        Only("norm_topk_prob", True),
        OneOf("num_nextn_predict_layers", "num_mtp_layers", (0, 1)),
        Assumed("mtp_kind", "'*-' if num_mtp_layers else ''"),
        Refused("mtp_layer_types", ["sliding_attention"], "its layer attends to all tokens"),
        Only("swiglu_limits", None),
        Activation(),
        Rope(10000.0),
        Window(default=4096, every=4, every_key="sliding_window_pattern"),
        RopeInWindows(without_key=True),
    ),
    hf=(
        *HF_MODEL,
        *_LAYERS,
        *HF_EXPERTS,
        Row(
            "model.layers.{l}.mlp.e_score_correction_bias",
            "layers.{l}.mlp.router.expert_bias",
            also=("model.layers.{l}.mlp.gate.e_score_correction_bias",),
        ),
        *HF_SHARED_EXPERTS,
        *hf_outer_mtp(_LAYERS),
    ),
)
