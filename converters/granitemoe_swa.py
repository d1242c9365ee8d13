"""Granite with experts, windows, attention sinks, and a rotary base for each layer."""

from megtool.convert import (
    HF_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    Assumed,
    Cat,
    Default,
    Family,
    Key,
    LayerRopeBases,
    Noted,
    Only,
    Rope,
    Row,
    Stacked,
    Window,
)

_STORED, _MLP = "model.layers.{l}.", "layers.{l}.mlp."
_EXPERT, _SHARED = _MLP + "experts.{e}.", _MLP + "shared."

FAMILY = Family(
    name="granitemoe_swa",
    architectures=("GraniteMoeSWAForCausalLM",),
    model_types=("granitemoe_swa",),
    traits={"norm": "rmsnorm", "gated": True, "activation": "silu", "attn_sinks": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "moe_ffn_hidden_size"),
        Assumed("ffn_hidden_size", "moe_ffn_hidden_size"),
        Key("shared_intermediate_size", "shared_ffn_hidden_size", 0),
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
        Window(default=128, every=4, full_first=True),
        LayerRopeBases(),
        Noted("embedding_multiplier", "embedding_scale", 1.0),
        Noted("residual_multiplier", "residual_scale", 1.0),
        Noted("attention_multiplier", "softmax_scale", 1.0, "x + 0.0"),
        Noted("logits_scaling", "logit_scale", 1.0, "1 / x"),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        Row(_STORED + "self_attn.sinks", "layers.{l}.attn.sinks"),
        Row(
            _STORED + "shared_mlp.input_linear.weight",
            Cat(_SHARED + "gate.weight", _SHARED + "up.weight"),
            when="shared_ffn_hidden_size",
        ),
        Row(
            _STORED + "shared_mlp.output_linear.weight",
            _SHARED + "down.weight",
            when="shared_ffn_hidden_size",
        ),
        Row(
            _STORED + "block_sparse_moe.router.weight",
            _MLP + "router.weight",
            also=(_STORED + "block_sparse_moe.router.layer.weight",),
        ),
        Row(
            _STORED + "block_sparse_moe.experts.gate_up_proj",
            Stacked(Cat(_EXPERT + "gate.weight", _EXPERT + "up.weight"), "e"),
            also=(_STORED + "block_sparse_moe.input_linear.weight",),
            plain=True,
        ),
        Row(
            _STORED + "block_sparse_moe.experts.down_proj",
            Stacked(_EXPERT + "down.weight", "e"),
            also=(_STORED + "block_sparse_moe.output_linear.weight",),
            plain=True,
        ),
        # vLLM looks for codes of experts one by one.
        Row(
            _STORED + "block_sparse_moe.experts.{e}.w1.weight",
            _EXPERT + "gate.weight",
        ),
        Row(
            _STORED + "block_sparse_moe.experts.{e}.w3.weight",
            _EXPERT + "up.weight",
        ),
        Row(
            _STORED + "block_sparse_moe.experts.{e}.w2.weight",
            _EXPERT + "down.weight",
        ),
    ),
    limits=((True, "Megatron has no multipliers of embeddings, attention, residuals, logits"),),
)
