"""OpenELM: fused projections, and layers whose heads and MLPs grow with their number."""

from megtool.convert import (
    Cat,
    Derived,
    Dropped,
    Family,
    Key,
    Only,
    Rope,
    Row,
    ScaledLayers,
)

_STORED, _OURS = "transformer.layers.{l}.", "layers.{l}."

FAMILY = Family(
    name="openelm",
    architectures=("OpenELMForCausalLM",),
    model_types=("openelm",),
    traits={"norm": "rmsnorm", "gated": True, "activation": "silu"},
    config=(
        Key("num_transformer_layers", "num_layers"),
        Key("model_dim", "hidden_size"),
        ScaledLayers(),
        Key("head_dim", "head_dim", 128),
        Key("vocab_size", "vocab_size"),
        Key("max_context_length", "max_positions", 2048),
        Derived("norm_eps", "0.000001"),
        Key("share_input_output_layers", "tied_embeddings", False),
        Key("normalize_qk_projections", "qk_norm", False),
        Only("ffn_with_glu", True),
        Only("activation_fn_name", "swish"),
        Only("normalization_layer_name", "rms_norm"),
        Rope(10000.0, key="rope_freq_constant"),
    ),
    hf=(
        Row("transformer.token_embeddings.weight", "embed.weight"),
        Row(_STORED + "attn_norm.weight", _OURS + "attn_norm.weight"),
        Row(
            _STORED + "attn.qkv_proj.weight",
            Cat(_OURS + "attn.q.weight", _OURS + "attn.k.weight", _OURS + "attn.v.weight"),
        ),
        Row(_STORED + "attn.q_norm.weight", _OURS + "attn.q_norm.weight"),
        Row(_STORED + "attn.k_norm.weight", _OURS + "attn.k_norm.weight"),
        Row(_STORED + "attn.out_proj.weight", _OURS + "attn.o.weight"),
        Row(_STORED + "ffn_norm.weight", _OURS + "mlp_norm.weight"),
        Row(
            _STORED + "ffn.proj_1.weight",
            Cat(_OURS + "mlp.gate.weight", _OURS + "mlp.up.weight"),
        ),
        Row(_STORED + "ffn.proj_2.weight", _OURS + "mlp.down.weight"),
        Row("transformer.norm.weight", "norm.weight"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
    ),
    limits=((True, "Megatron has as many query heads in every layer"),),
)
