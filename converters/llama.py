"""Llama 2 and 3, Mistral, SmolLM, and whatever else has exactly their layout."""

from megtool.convert import (
    TORCHTITAN_MLP,
    TORCHTITAN_MODEL,
    TORCHTITAN_NORMS,
    TORCHTITAN_PAIRED_ATTENTION,
    Activation,
    Default,
    Dropped,
    Family,
    Key,
    Permuted,
    Rope,
    Row,
    Window,
)

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    model_types=("llama", "mistral"),
    gguf_architectures=("llama",),
    traits={"norm": "rmsnorm", "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent={"mistral": 8}),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048, absent={"mistral": 131072}),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Activation(),
        Rope(10000.0),
        Window(
            default={"mistral": 4096},
            types=("mistral",),
            architectures=("MistralForCausalLM",),
            by_layer=False,
        ),
    ),
    hf=(
        Row("model.embed_tokens.weight", "embed.weight"),
        Row("model.layers.{l}.input_layernorm.weight", "layers.{l}.attn_norm.weight"),
        Row("model.layers.{l}.self_attn.q_proj.weight", "layers.{l}.attn.q.weight"),
        Row("model.layers.{l}.self_attn.k_proj.weight", "layers.{l}.attn.k.weight"),
        Row("model.layers.{l}.self_attn.v_proj.weight", "layers.{l}.attn.v.weight"),
        Row("model.layers.{l}.self_attn.o_proj.weight", "layers.{l}.attn.o.weight"),
        Row("model.layers.{l}.self_attn.q_proj.bias", "layers.{l}.attn.q.bias"),
        Row("model.layers.{l}.self_attn.k_proj.bias", "layers.{l}.attn.k.bias"),
        Row("model.layers.{l}.self_attn.v_proj.bias", "layers.{l}.attn.v.bias"),
        Row("model.layers.{l}.self_attn.o_proj.bias", "layers.{l}.attn.o.bias"),
        Row("model.layers.{l}.post_attention_layernorm.weight", "layers.{l}.mlp_norm.weight"),
        Row("model.layers.{l}.mlp.gate_proj.weight", "layers.{l}.mlp.gate.weight"),
        Row("model.layers.{l}.mlp.up_proj.weight", "layers.{l}.mlp.up.weight"),
        Row("model.layers.{l}.mlp.down_proj.weight", "layers.{l}.mlp.down.weight"),
        Row("model.layers.{l}.mlp.gate_proj.bias", "layers.{l}.mlp.gate.bias"),
        Row("model.layers.{l}.mlp.up_proj.bias", "layers.{l}.mlp.up.bias"),
        Row("model.layers.{l}.mlp.down_proj.bias", "layers.{l}.mlp.down.bias"),
        Row("model.norm.weight", "norm.weight"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
        Dropped("*.rotary_emb.inv_freq", "computed from the configuration"),
    ),
    # GGUF stores rotary pairs side by side: rows (half, 2) of every head where we have (2, half).
    gguf=(
        Row("token_embd.weight", "embed.weight"),
        Row("blk.{l}.attn_norm.weight", "layers.{l}.attn_norm.weight"),
        Row(
            "blk.{l}.attn_q.weight",
            Permuted(
                "layers.{l}.attn.q.weight", ("num_heads", 2, "head_dim // 2"), order=(0, 2, 1)
            ),
        ),
        Row(
            "blk.{l}.attn_k.weight",
            Permuted(
                "layers.{l}.attn.k.weight", ("num_kv_heads", 2, "head_dim // 2"), order=(0, 2, 1)
            ),
        ),
        Row("blk.{l}.attn_v.weight", "layers.{l}.attn.v.weight"),
        Row(
            "blk.{l}.attn_q.bias",
            Permuted("layers.{l}.attn.q.bias", ("num_heads", 2, "head_dim // 2"), order=(0, 2, 1)),
        ),
        Row(
            "blk.{l}.attn_k.bias",
            Permuted(
                "layers.{l}.attn.k.bias", ("num_kv_heads", 2, "head_dim // 2"), order=(0, 2, 1)
            ),
        ),
        Row("blk.{l}.attn_v.bias", "layers.{l}.attn.v.bias"),
        Row("blk.{l}.attn_output.bias", "layers.{l}.attn.o.bias"),
        Row("blk.{l}.attn_output.weight", "layers.{l}.attn.o.weight"),
        Row("blk.{l}.ffn_norm.weight", "layers.{l}.mlp_norm.weight"),
        Row("blk.{l}.ffn_gate.weight", "layers.{l}.mlp.gate.weight"),
        Row("blk.{l}.ffn_up.weight", "layers.{l}.mlp.up.weight"),
        Row("blk.{l}.ffn_down.weight", "layers.{l}.mlp.down.weight"),
        Row("blk.{l}.ffn_gate.bias", "layers.{l}.mlp.gate.bias"),
        Row("blk.{l}.ffn_up.bias", "layers.{l}.mlp.up.bias"),
        Row("blk.{l}.ffn_down.bias", "layers.{l}.mlp.down.bias"),
        Row("output_norm.weight", "norm.weight"),
        Row("output.weight", "head.weight", when="not tied_embeddings"),
        Dropped("rope_freqs.weight", "rotary factors: rope_scaling in config.json says them"),
    ),
    torchtitan=(
        *TORCHTITAN_MODEL,
        *TORCHTITAN_NORMS,
        *TORCHTITAN_PAIRED_ATTENTION,
        *TORCHTITAN_MLP,
    ),
)
