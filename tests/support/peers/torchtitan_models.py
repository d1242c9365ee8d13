"""Tiny models of torchtitan, with the Hugging Face models that they stand for."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.models.moe_cases import DEEPSEEK

HEADS, KV, HIDDEN, INNER, WORDS = 4, 2, 64, 96, 128
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    k: v for k, v in DEEPSEEK.items() if k not in ("n_group", "topk_group", "num_key_value_heads")
}
TOKENS = torch.arange(48).reshape(2, 24) % WORDS


def noisy(model: Any) -> None:
    """Norms and biases, too, are random."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape) * 0.1)


def embeddings(tied: bool = False, hidden: int = HIDDEN) -> dict[str, Any]:
    """The parts of a configuration that all models have."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common.param_init import skip_param_init

    start = {"weight": torch.nn.init.zeros_}
    skipped = {"weight": skip_param_init}
    return {
        "dim": hidden,
        "vocab_size": WORDS,
        "enable_weight_tying": tied,
        "tok_embeddings": Embedding.Config(
            num_embeddings=WORDS, embedding_dim=hidden, param_init=skipped if tied else start
        ),
        "norm": RMSNorm.Config(normalized_shape=hidden, param_init=start, eps=1e-6),
        "lm_head": Linear.Config(in_features=hidden, out_features=WORDS, param_init=start),
    }


def plain_attention(config: Any) -> Any:
    """The configuration with attention without masks of documents, which runs on the CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def build_llama(*, fuse: bool, hidden: int = HIDDEN, inner: int = INNER) -> tuple[Any, Any]:
    """The configuration of a llama3 of torchtitan, and its adapter."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE

    rope = ComplexRoPE.Config(dim=hidden // HEADS, max_seq_len=64, theta=10000.0)
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=hidden,
        n_heads=HEADS,
        n_kv_heads=KV,
        hidden_dim=inner,
        rope=rope,
        fuse_qkv=fuse,
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = 1e-6
    config = llama3.Llama3Model.Config(layers=layers, **embeddings(hidden=hidden))
    return plain_attention(config), llama3.Llama3StateDictAdapter(config, None)


def build_qwen3(*, tied: bool) -> tuple[Any, Any]:
    """The configuration of a qwen3 of torchtitan, and its adapter."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE

    layers = qwen3._build_qwen3_layers(
        n_layers=2,
        dim=HIDDEN,
        n_heads=HEADS,
        n_kv_heads=KV,
        head_dim=16,
        hidden_dim=INNER,
        attn_backend="flex",
        rope=CosSinRoPE.Config(dim=16, max_seq_len=64, theta=10000.0),
    )
    config = qwen3.Qwen3Model.Config(layers=layers, **embeddings(tied))
    return plain_attention(config), qwen3.Qwen3StateDictAdapter(config, None)


def build_qwen3_moe() -> tuple[Any, Any]:
    """The configuration of a qwen3 of torchtitan with experts, and its adapter."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE

    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=HIDDEN,
        n_heads=HEADS,
        n_kv_heads=KV,
        head_dim=16,
        moe_hidden_dim=32,
        num_experts=4,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=16, max_seq_len=64, theta=10000.0),
    )
    config = qwen3.Qwen3Model.Config(layers=layers, **embeddings())
    return plain_attention(config), qwen3.Qwen3StateDictAdapter(config, None)


def build_deepseek() -> tuple[Any, Any]:
    """The configuration of a deepseek_v3 of torchtitan, and its adapter."""
    from torchtitan.models import deepseek_v3
    from torchtitan.models.common import ComplexRoPE

    layers = deepseek_v3._build_dsv3_layers(
        n_layers=2,
        n_dense_layers=1,
        dim=HIDDEN,
        n_heads=HEADS,
        q_lora_rank=LATENT["q_lora_rank"],
        kv_lora_rank=LATENT["kv_lora_rank"],
        qk_nope_head_dim=LATENT["qk_nope_head_dim"],
        qk_rope_head_dim=LATENT["qk_rope_head_dim"],
        v_head_dim=LATENT["v_head_dim"],
        mscale=1.0,
        dense_hidden_dim=LATENT["intermediate_size"],
        moe_hidden_dim=LATENT["moe_intermediate_size"],
        num_experts=LATENT["n_routed_experts"],
        num_shared_experts=LATENT["n_shared_experts"],
        router_top_k=2,
        router_score_func="sigmoid",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=LATENT["qk_rope_head_dim"], max_seq_len=64),
    )
    config = deepseek_v3.DeepSeekV3Model.Config(layers=layers, mtp_layers=[], **embeddings())
    return plain_attention(config), deepseek_v3.DeepSeekV3StateDictAdapter(config, None)


def build_gpt_oss() -> tuple[Any, Any]:
    """The configuration of a gpt_oss of torchtitan, and its adapter."""
    from torchtitan.models import gpt_oss
    from torchtitan.models.common import CosSinRoPE

    layers = gpt_oss._build_gptoss_layers(
        dim=HIDDEN,
        n_layers=2,
        hidden_dim=32,
        num_experts=4,
        top_k=2,
        load_balance_coeff=1e-3,
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=64, max_seq_len=64, theta=150000.0),
    )
    config = gpt_oss.GptOssModel.Config(layers=layers, **embeddings())
    return plain_attention(config), GptOssAdapter(gpt_oss.GptOssStateDictAdapter(config, None))


class GptOssAdapter:
    """torchtitan's adapter with the names that its model has in 0.3.0, and the adapter has not."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        inner = "layers.{}.moe.routed_experts.inner_experts."
        stored = "model.layers.{}.mlp.experts."
        self.names = {
            f"{stored}gate_up_proj": f"{inner}mlp1_weight_EGD",
            f"{stored}gate_up_proj_bias": f"{inner}mlp1_bias_EG",
            f"{stored}down_proj": f"{inner}mlp2_weight_EDF",
            f"{stored}down_proj_bias": f"{inner}mlp2_bias_ED",
        }
        adapter.from_hf_map.update(self.names)

    def from_hf(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Plain matrices are stored turned, unlike the packed ones that the adapter expects."""
        return dict(self.adapter.from_hf(turned(state)))

    def to_hf(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The way back."""
        back = turned(self.adapter.to_hf(state))
        return {n: t for n, t in back.items() if not n.endswith("_blocks")}


def turned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with the matrices of experts transposed."""
    return {
        n: t.transpose(1, 2).contiguous() if n.endswith(("gate_up_proj", "down_proj")) else t
        for n, t in state.items()
    }


CASES = {
    "llama": ("llama", {}, lambda: build_llama(fuse=False)),
    "wide llama": (
        "llama",
        {"hidden_size": 512, "intermediate_size": 512},
        lambda: build_llama(fuse=False, hidden=512, inner=512),
    ),
    "llama fused": ("llama", {}, lambda: build_llama(fuse=True)),
    "qwen3": ("qwen3", {"head_dim": 16}, lambda: build_qwen3(tied=False)),
    "qwen3 tied": (
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True},
        lambda: build_qwen3(tied=True),
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 16}, build_qwen3_moe),
    "deepseek_v3": ("deepseek_v3", LATENT | {"num_experts_per_tok": 2}, build_deepseek),
    "gpt_oss": (
        "gpt_oss",
        {
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
            **{"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        },
        build_gpt_oss,
    ),
}
