"""Nemotron-H, Nemotron Nano 2 and 3: Mamba-2, attention, MLPs and experts, one in every layer."""

from megtool.convert import (
    Default,
    Dropped,
    Family,
    Key,
    KindKey,
    LayerKinds,
    MtpKind,
    OneOf,
    Only,
    Row,
    ScoreNorm,
    StepLimit,
    UpTo,
    hf_mamba,
    in_inner_mtp,
    in_mtp,
)

_KINDS = (
    ("linear_attention", "M"),
    ("full_attention", "*"),
    ("mlp", "-"),
    ("moe", "E"),
    ("mamba", "M"),
    ("attention", "*"),
)
_STORED, _OURS = "backbone.layers.{l}.", "layers.{l}."
_MIXER, _MLP = _STORED + "mixer.", _OURS + "mlp."
_ATTN, _DENSE, _MOE = "l in attn_layers", "l in dense_layers", "l in moe_layers"

_MIXING = (
    Row(_STORED + "norm.weight", _OURS + "attn_norm.weight", when="l in mixer_layers"),
    *hf_mamba(_MIXER),
    Row(_MIXER + "q_proj.weight", _OURS + "attn.q.weight", when=_ATTN),
    Row(_MIXER + "k_proj.weight", _OURS + "attn.k.weight", when=_ATTN),
    Row(_MIXER + "v_proj.weight", _OURS + "attn.v.weight", when=_ATTN),
    Row(_MIXER + "o_proj.weight", _OURS + "attn.o.weight", when=_ATTN),
)
_FEEDING = (
    Row(
        _STORED + "norm.weight",
        _OURS + "mlp_norm.weight",
        when="l in dense_layers or l in moe_layers",
    ),
    Row(_MIXER + "up_proj.weight", _MLP + "up.weight", when=_DENSE),
    Row(_MIXER + "up_proj.bias", _MLP + "up.bias", when=_DENSE),
    Row(_MIXER + "down_proj.weight", _MLP + "down.weight", when=_DENSE),
    Row(_MIXER + "down_proj.bias", _MLP + "down.bias", when=_DENSE),
    Row(_MIXER + "gate.weight", _MLP + "router.weight", when=_MOE),
    Row(_MIXER + "gate.e_score_correction_bias", _MLP + "router.expert_bias", when=_MOE),
    Row(_MIXER + "fc1_latent_proj.weight", _MLP + "latent_in.weight", when=_MOE),
    Row(_MIXER + "fc2_latent_proj.weight", _MLP + "latent_out.weight", when=_MOE),
    Row(_MIXER + "experts.{e}.up_proj.weight", _MLP + "experts.{e}.up.weight", when=_MOE),
    Row(_MIXER + "experts.{e}.down_proj.weight", _MLP + "experts.{e}.down.weight", when=_MOE),
    Row(_MIXER + "shared_experts.up_proj.weight", _MLP + "shared.up.weight", when=_MOE),
    Row(_MIXER + "shared_experts.down_proj.weight", _MLP + "shared.down.weight", when=_MOE),
)
# Branches of layers of multi-token prediction are layers of their own, all counted in one row.
_EACH = "mtp.layers.{m*num_mtp_branches+k}."
_FIRST, _LAST = "mtp.layers.{m*num_mtp_branches}.", "mtp.layers.{(m+1)*num_mtp_branches-1}."

_STEP = "would limit steps from below in some implementations of transformers, not in others"

FAMILY = Family(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    model_types=("nemotron_h",),
    traits={
        "norm": "rmsnorm",
        "gated": False,
        "position_embedding": "none",
        "router_score": "sigmoid",
        "router_expert_bias": True,
        "router_fp32": True,
        "router_group_best": 2,
    },
    ignores={
        "n_shared_experts": "their width says it",
        "expand": "heads and their size say it",
    },
    config=(
        LayerKinds("layers_block_type", _KINDS, counts=True, pattern_key="hybrid_override_pattern"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=8),
        Key("head_dim", "head_dim", 128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 4096),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Only("attention_bias", False),
        Only("sliding_window", None),
        Key("mlp_bias", "mlp_bias", False),
        OneOf("mlp_hidden_act", "activation", ("relu2",)),
        KindKey("mamba_num_heads", "mamba_num_heads", "M", 128),
        KindKey("mamba_head_dim", "mamba_head_dim", "M", 64),
        KindKey("ssm_state_size", "mamba_state_dim", "M", 128),
        KindKey("n_groups", "mamba_num_groups", "M", 8),
        KindKey("conv_kernel", "mamba_conv_kernel", "M", 4),
        StepLimit(),
        UpTo("time_step_min", "0.001", _STEP),
        Only("use_conv_bias", True),
        Only("use_bias", False),
        Only("mamba_proj_bias", False),
        Only("mamba_hidden_act", "silu"),
        KindKey("n_routed_experts", "num_experts", "E", 8),
        KindKey("num_experts_per_tok", "num_experts_per_token", "E", 2),
        KindKey("moe_intermediate_size", "moe_ffn_hidden_size", "E", 7688),
        KindKey("moe_shared_expert_intermediate_size", "shared_ffn_hidden_size", "E", 7688),
        KindKey("moe_latent_size", "moe_latent_size", "E"),
        KindKey("n_group", "router_num_groups", "E", 1),
        KindKey("topk_group", "router_topk_groups", "E", 1),
        Key("routed_scaling_factor", "router_scaling", 1.0),
        ScoreNorm(),
        Key("num_nextn_predict_layers", "num_mtp_layers", 0),
        MtpKind("mtp_layers_block_type", _KINDS, "mtp_hybrid_override_pattern", "*E"),
    ),
    hf=(
        Row("backbone.embeddings.weight", "embed.weight"),
        *_MIXING,
        *_FEEDING,
        Row("backbone.norm_f.weight", "norm.weight"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
        Row(_FIRST + "enorm.weight", "mtp.{m}.embed_norm.weight"),
        Row(_FIRST + "hnorm.weight", "mtp.{m}.hidden_norm.weight"),
        Row(_FIRST + "eh_proj.weight", "mtp.{m}.proj.weight"),
        *in_mtp(_MIXING, (_STORED, _FIRST)),
        *in_mtp(_FEEDING, (_STORED, _LAST)),
        *in_inner_mtp((*_MIXING, *_FEEDING), (_STORED, _EACH)),
        Row(_LAST + "final_layernorm.weight", "mtp.{m}.norm.weight"),
    ),
    limits=(("mamba_step_limit", "Megatron does not limit the steps (dt) of Mamba-2"),),
)
