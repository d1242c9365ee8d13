"""MPT: slopes of scores for positions (ALiBi), no biases, and layer norms of a weight alone."""

from megtool.convert import (
    Cat,
    Derived,
    Dropped,
    Family,
    Key,
    MptAttention,
    Only,
    Row,
)

_STORED, _OURS = "transformer.blocks.{l}.", "layers.{l}."
_ATTN = _OURS + "attn."

FAMILY = Family(
    name="mpt",
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    model_types=("mpt",),
    traits={
        "norm": "layernorm",
        "norm_bias": False,
        "position_embedding": "alibi",
        "gated": False,
        "activation": "gelu",
    },
    ignores={
        "norm_type": "the class has layer norms without bias",
        "learned_pos_emb": "the class has slopes alone",
    },
    config=(
        Key("n_layers", "num_layers"),
        Key("d_model", "hidden_size"),
        Only("expansion_ratio", 4),
        Derived("ffn_hidden_size", "4 * hidden_size"),
        Key("n_heads", "num_heads"),
        Derived("num_kv_heads", "num_heads"),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("max_seq_len", "max_positions", 2048),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Only("no_bias", True),
        Only("logit_scale", None),
        MptAttention(),
    ),
    hf=(
        Row("transformer.wte.weight", "embed.weight"),
        Row(_STORED + "norm_1.weight", _OURS + "attn_norm.weight"),
        Row(
            _STORED + "attn.Wqkv.weight",
            Cat(_ATTN + "q.weight", _ATTN + "k.weight", _ATTN + "v.weight"),
        ),
        Row(_STORED + "attn.out_proj.weight", _ATTN + "o.weight"),
        Row(_STORED + "norm_2.weight", _OURS + "mlp_norm.weight"),
        Row(_STORED + "ffn.up_proj.weight", _OURS + "mlp.up.weight"),
        Row(_STORED + "ffn.down_proj.weight", _OURS + "mlp.down.weight"),
        Row("transformer.norm_f.weight", "norm.weight"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
    ),
    limits=((True, "Megatron's layer norms have a bias"),),
)
