"""Tiny models with recurrent mixers, transformers' own, and ours with their weights."""

from __future__ import annotations

from typing import Any

import torch

from megtool.model.stacks.decoder import Decoder
from megtool.spec.model_config import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "max_position_embeddings": 128,
    "use_cache": False,
}


def nemotron_h() -> Any:
    """A Nemotron-H model whose weights all are random, and none is large or small."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(0)
    model = NemotronHForCausalLM(NemotronHConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.3)
            elif name.endswith("A_log"):
                p.uniform_(-1.0, 1.0)
            else:
                p.normal_(std=0.3).add_(float(name.endswith("norm.weight") or ".D" in name))
    return model


def config_of(model: Any) -> ModelConfig:
    """The configuration of a Nemotron-H model, without a converter."""
    c = model.config
    symbols = {"linear_attention": "M", "mlp": "-", "full_attention": "*"}
    return ModelConfig.from_fields(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        ffn_hidden_size=c.intermediate_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        norm_eps=c.layer_norm_epsilon,
        gated=False,
        activation="relu2",
        position_embedding="none",
        layer_kinds=tuple(symbols[kind] for kind in c.layers_block_type),
        mamba_num_heads=c.mamba_num_heads,
        mamba_head_dim=c.mamba_head_dim,
        mamba_state_dim=c.ssm_state_size,
        mamba_num_groups=c.n_groups,
        mamba_conv_kernel=c.conv_kernel,
    )


def ours(model: Any) -> Decoder:
    """A decoder with the weights of a Nemotron-H model, by Megatron's names."""
    config = config_of(model)
    decoder = Decoder(config, device="cpu", vocab_multiple=1)
    state = {n.removeprefix("model."): t for n, t in model.state_dict().items()}
    weights = {
        "embedding.word_embeddings.weight": state["embeddings.weight"],
        "output_layer.weight": state["lm_head.weight"],
        "decoder.final_norm.weight": state["norm_f.weight"],
    }
    for number, kinds in enumerate(config.layer_kinds or ()):
        theirs, layer = f"layers.{number}.", f"decoder.layers.{number}."
        norm, mixer = state[theirs + "norm.weight"], theirs + "mixer."
        if kinds == "M":
            weights[layer + "mixer.in_proj.layer_norm_weight"] = norm
            own = {n: t for n, t in state.items() if n.startswith(mixer)}
            weights |= {layer + n.removeprefix(theirs): t for n, t in own.items()}
        elif kinds == "-":
            weights[layer + "mlp.linear_fc1.layer_norm_weight"] = norm
            weights[layer + "mlp.linear_fc1.weight"] = state[mixer + "up_proj.weight"]
            weights[layer + "mlp.linear_fc2.weight"] = state[mixer + "down_proj.weight"]
        else:
            query, key, value = (
                state[f"{mixer}{n}_proj.weight"].unflatten(0, (config.attention.num_kv_heads, -1))
                for n in "qkv"
            )
            attention = layer + "self_attention.linear_"
            weights[attention + "qkv.layer_norm_weight"] = norm
            weights[attention + "qkv.weight"] = torch.cat((query, key, value), 1).flatten(0, 1)
            weights[attention + "proj.weight"] = state[mixer + "o_proj.weight"]
    decoder.load_state_dict(weights)
    return decoder
