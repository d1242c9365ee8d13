"""gpt-oss: biases everywhere, attention sinks, gate and up columns of experts interleaved."""

from megtool.convert import (
    HF_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    TORCHTITAN_ATTENTION,
    TORCHTITAN_BIASED_EXPERTS,
    TORCHTITAN_MODEL,
    TORCHTITAN_NORMS,
    Assumed,
    Default,
    Family,
    Interleaved,
    Key,
    Noted,
    Only,
    Rope,
    Row,
    Stacked,
    Transposed,
    Window,
)

_STORED, _OURS = "model.layers.{l}.", "layers.{l}."
_EXPERTS, _EXPERT = "model.layers.{l}.mlp.experts.", "layers.{l}.mlp.experts.{e}."

FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "activation": "quick_gelu",
        "attn_sinks": True,
        "mlp_bias": True,
        "router_bias": True,
        "glu_offset": 1.0,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "moe_ffn_hidden_size"),
        Assumed("ffn_hidden_size", "moe_ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=8),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads"), absent=64),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", True),
        Key("attention_bias", "attn_out_bias", True),
        Key("num_local_experts", "num_experts"),
        Key("num_experts_per_tok", "num_experts_per_token", 4),
        Only("hidden_act", "silu"),
        Noted("swiglu_limit", "activation_limit", 7.0),
        Only("swiglu_alpha", 1.702),
        Rope(
            150000.0,
            scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        Window(default=128, every=2),
    ),
    # A row of the packed form (`_blocks`, four bits an element) is a column of the plain one.
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        Row(_STORED + "self_attn.sinks", _OURS + "attn.sinks"),
        Row(_STORED + "mlp.router.weight", _OURS + "mlp.router.weight"),
        Row(_STORED + "mlp.router.bias", _OURS + "mlp.router.bias"),
        Row(
            _EXPERTS + "gate_up_proj",
            Stacked(Transposed(Interleaved(_EXPERT + "gate.weight", _EXPERT + "up.weight")), "e"),
            plain=True,
        ),
        Row(
            _EXPERTS + "gate_up_proj_bias",
            Stacked(Interleaved(_EXPERT + "gate.bias", _EXPERT + "up.bias"), "e"),
        ),
        Row(_EXPERTS + "down_proj", Stacked(Transposed(_EXPERT + "down.weight"), "e"), plain=True),
        Row(_EXPERTS + "down_proj_bias", Stacked(_EXPERT + "down.bias", "e")),
        Row(
            _EXPERTS + "gate_up_proj_blocks",
            Stacked(Interleaved(_EXPERT + "gate.weight", _EXPERT + "up.weight"), "e"),
        ),
        Row(_EXPERTS + "down_proj_blocks", Stacked(_EXPERT + "down.weight", "e")),
    ),
    torchtitan=(
        *TORCHTITAN_MODEL,
        *TORCHTITAN_NORMS,
        *TORCHTITAN_ATTENTION,
        *TORCHTITAN_BIASED_EXPERTS,
    ),
)
