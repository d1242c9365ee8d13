"""Falcon: attention fused by groups of heads, beside an MLP without a gate; rotary or refused."""

from megtool.convert import (
    Activation,
    Default,
    Derived,
    Dropped,
    Family,
    Grouped,
    GroupedHeads,
    Key,
    Refused,
    Rope,
    Row,
    with_bias,
)

_STORED, _OURS = "transformer.h.{l}.", "layers.{l}."
_ATTN = _OURS + "attn."
_TWO = "parallel_residual and not shared_norm"

FAMILY = Family(
    name="falcon",
    architectures=("FalconForCausalLM",),
    model_types=("falcon",),
    traits={"norm": "layernorm", "gated": False},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("ffn_hidden_size", "ffn_hidden_size", Default("4 * hidden_size")),
        Key("num_attention_heads", "num_heads"),
        GroupedHeads(),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("bias", "qkv_bias", False),
        Key("bias", "attn_out_bias", False),
        Key("bias", "mlp_bias", False),
        Refused(
            "alibi", True, "transformers adds slopes of scores once or twice, by its implementation"
        ),
        Activation("activation", "gelu"),
        Rope(10000.0),
    ),
    hf=(
        Row("transformer.word_embeddings.weight", "embed.weight"),
        Row(
            _STORED + "self_attention.query_key_value.weight",
            Grouped(_ATTN + "q.weight", _ATTN + "k.weight", _ATTN + "v.weight", by="num_kv_heads"),
        ),
        Row(
            _STORED + "self_attention.query_key_value.bias",
            Grouped(_ATTN + "q.bias", _ATTN + "k.bias", _ATTN + "v.bias", by="num_kv_heads"),
        ),
        *with_bias(_STORED + "self_attention.dense", _ATTN + "o"),
        Row(_STORED + "ln_attn.weight", _OURS + "attn_norm.weight", when=_TWO),
        Row(_STORED + "ln_attn.bias", _OURS + "attn_norm.bias", when=_TWO),
        Row(_STORED + "ln_mlp.weight", _OURS + "mlp_norm.weight", when=_TWO),
        Row(_STORED + "ln_mlp.bias", _OURS + "mlp_norm.bias", when=_TWO),
        *with_bias(_STORED + "input_layernorm", _OURS + "attn_norm"),
        *with_bias(_STORED + "post_attention_layernorm", _OURS + "mlp_norm"),
        *with_bias(_STORED + "mlp.dense_h_to_4h", _OURS + "mlp.up"),
        *with_bias(_STORED + "mlp.dense_4h_to_h", _OURS + "mlp.down"),
        *with_bias("transformer.ln_f", "norm"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
    ),
    limits=(("shared_norm", "Megatron has no norm that feeds attention and MLP at once"),),
)
