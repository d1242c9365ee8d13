"""StarCoder2: layer norms, a plain GELU MLP, and biases in all layers or none."""

from megtool.convert import (
    HF_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Default,
    Family,
    Key,
    Rope,
    Row,
    Window,
)

FAMILY = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    traits={"norm": "layernorm", "gated": False},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 2),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 4096),
        Key("norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("use_bias", "qkv_bias", True),
        Key("use_bias", "attn_out_bias", True),
        Key("use_bias", "mlp_bias", True),
        Activation("hidden_act", "gelu_pytorch_tanh"),
        Rope(10000.0),
        Window(by_layer=False),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        Row("model.layers.{l}.mlp.c_fc.weight", "layers.{l}.mlp.up.weight"),
        Row("model.layers.{l}.mlp.c_fc.bias", "layers.{l}.mlp.up.bias"),
        Row("model.layers.{l}.mlp.c_proj.weight", "layers.{l}.mlp.down.weight"),
        Row("model.layers.{l}.mlp.c_proj.bias", "layers.{l}.mlp.down.bias"),
    ),
)
