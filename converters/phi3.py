"""Phi-3 and Phi-4 (mini, 14B): Llama with fused projections, rotating a part of each head."""

from megtool.convert import (
    HF_MODEL,
    HF_NORMS,
    Activation,
    Cat,
    Default,
    Dropped,
    Family,
    Key,
    Only,
    Rope,
    Row,
    Window,
)

FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    gguf_architectures=("phi3",),
    traits={"norm": "rmsnorm", "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 4096),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Only("attention_bias", False),
        Activation(),
        Rope(10000.0, percent_key="partial_rotary_factor", kinds=("longrope", "su"), length=4096),
        Window(by_layer=False),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        Row(
            "model.layers.{l}.self_attn.qkv_proj.weight",
            Cat("layers.{l}.attn.q.weight", "layers.{l}.attn.k.weight", "layers.{l}.attn.v.weight"),
        ),
        Row("model.layers.{l}.self_attn.o_proj.weight", "layers.{l}.attn.o.weight"),
        Row(
            "model.layers.{l}.mlp.gate_up_proj.weight",
            Cat("layers.{l}.mlp.gate.weight", "layers.{l}.mlp.up.weight"),
        ),
        Row("model.layers.{l}.mlp.down_proj.weight", "layers.{l}.mlp.down.weight"),
    ),
    gguf=(
        Row("token_embd.weight", "embed.weight"),
        Row("blk.{l}.attn_norm.weight", "layers.{l}.attn_norm.weight"),
        Row(
            "blk.{l}.attn_qkv.weight",
            Cat("layers.{l}.attn.q.weight", "layers.{l}.attn.k.weight", "layers.{l}.attn.v.weight"),
        ),
        Row("blk.{l}.attn_output.weight", "layers.{l}.attn.o.weight"),
        Row("blk.{l}.ffn_norm.weight", "layers.{l}.mlp_norm.weight"),
        Row("blk.{l}.ffn_up.weight", Cat("layers.{l}.mlp.gate.weight", "layers.{l}.mlp.up.weight")),
        Row("blk.{l}.ffn_down.weight", "layers.{l}.mlp.down.weight"),
        Row("output_norm.weight", "norm.weight"),
        Row("output.weight", "head.weight", when="not tied_embeddings"),
        Dropped("rope_factors_*.weight", "rotary factors: rope_scaling in config.json says them"),
    ),
)
