"""Mixtral: Mistral's layers with a mixture of experts in each."""

from megtool.convert import (
    GGUF_EXPERTS,
    HF_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Assumed,
    Cat,
    Default,
    Dropped,
    Family,
    Key,
    Permuted,
    Rope,
    Row,
    Stacked,
    Window,
)

FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    gguf_architectures=("llama with experts",),
    traits={"norm": "rmsnorm", "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "moe_ffn_hidden_size"),
        Assumed("ffn_hidden_size", "moe_ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=8),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("num_local_experts", "num_experts", 8),
        Key("num_experts_per_tok", "num_experts_per_token", 2),
        Activation(),
        Rope(1000000.0),
        Window(by_layer=False),
    ),
    # Experts one by one, or fused as transformers 5 holds them in memory.
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        Row(
            "model.layers.{l}.block_sparse_moe.gate.weight",
            "layers.{l}.mlp.router.weight",
            also=("model.layers.{l}.mlp.gate.weight",),
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight",
            "layers.{l}.mlp.experts.{e}.gate.weight",
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight",
            "layers.{l}.mlp.experts.{e}.down.weight",
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.experts.{e}.w3.weight",
            "layers.{l}.mlp.experts.{e}.up.weight",
        ),
        Row(
            "model.layers.{l}.mlp.experts.gate_up_proj",
            Stacked(
                Cat(
                    "layers.{l}.mlp.experts.{e}.gate.weight",
                    "layers.{l}.mlp.experts.{e}.up.weight",
                ),
                "e",
            ),
        ),
        Row(
            "model.layers.{l}.mlp.experts.down_proj",
            Stacked("layers.{l}.mlp.experts.{e}.down.weight", "e"),
        ),
    ),
    # As `llama` files: rotary pairs side by side (see converters/llama.py).
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
        Row("blk.{l}.attn_output.weight", "layers.{l}.attn.o.weight"),
        Row("blk.{l}.ffn_norm.weight", "layers.{l}.mlp_norm.weight"),
        *GGUF_EXPERTS,
        Row("output_norm.weight", "norm.weight"),
        Row("output.weight", "head.weight", when="not tied_embeddings"),
        Dropped("rope_freqs.weight", "rotary factors: rope_scaling in config.json says them"),
    ),
)
