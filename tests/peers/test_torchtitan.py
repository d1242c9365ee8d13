"""torchtitan's own models, and its adapters, against our names of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import megtool
from megtool import reshard
from tests.support.folders import stored_tensors
from tests.support.models.moe_cases import DEEPSEEK
from tests.support.models.tiny_model import tiny_model

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.peers

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


def embeddings(tied: bool = False) -> dict[str, Any]:
    """The parts of a configuration that all models have."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common.param_init import skip_param_init

    start = {"weight": torch.nn.init.zeros_}
    skipped = {"weight": skip_param_init}
    return {
        "dim": HIDDEN,
        "vocab_size": WORDS,
        "enable_weight_tying": tied,
        "tok_embeddings": Embedding.Config(
            num_embeddings=WORDS, embedding_dim=HIDDEN, param_init=skipped if tied else start
        ),
        "norm": RMSNorm.Config(normalized_shape=HIDDEN, param_init=start, eps=1e-6),
        "lm_head": Linear.Config(in_features=HIDDEN, out_features=WORDS, param_init=start),
    }


def build_llama(*, fuse: bool) -> tuple[Any, Any]:
    """A model of torchtitan's llama3 and its adapter."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE

    rope = ComplexRoPE.Config(dim=HIDDEN // HEADS, max_seq_len=64, theta=10000.0)
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=HIDDEN,
        n_heads=HEADS,
        n_kv_heads=KV,
        hidden_dim=INNER,
        rope=rope,
        fuse_qkv=fuse,
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = 1e-6
    config = llama3.Llama3Model.Config(layers=layers, **embeddings())
    return config.build(), llama3.Llama3StateDictAdapter(config, None)


def build_qwen3(*, tied: bool) -> tuple[Any, Any]:
    """A model of torchtitan's qwen3 and its adapter."""
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
    return config.build(), qwen3.Qwen3StateDictAdapter(config, None)


def build_qwen3_moe() -> tuple[Any, Any]:
    """A model of torchtitan's qwen3 with experts, and its adapter."""
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
    return config.build(), qwen3.Qwen3StateDictAdapter(config, None)


def build_deepseek() -> tuple[Any, Any]:
    """A model of torchtitan's deepseek_v3 and its adapter."""
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
    return config.build(), deepseek_v3.DeepSeekV3StateDictAdapter(config, None)


def build_gpt_oss() -> tuple[Any, Any]:
    """A model of torchtitan's gpt_oss and its adapter."""
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
    return config.build(), GptOssAdapter(gpt_oss.GptOssStateDictAdapter(config, None))


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


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, Any]:
    """A Hugging Face folder, torchtitan's empty model of it and its adapter."""
    family, keys, build = CASES[request.param]
    tiny_model(family, tmp_path / "hf", sizes=SIZES, fill=noisy, **keys)
    return tmp_path / "hf", *build()


def read_by_adapter(folder: Path, adapter: Any) -> dict[str, torch.Tensor]:
    """torchtitan's own conversion."""
    state: dict[str, torch.Tensor] = adapter.from_hf(load_file(folder / "model.safetensors"))
    return state


def loss_of(model: Any) -> float:
    """The loss of next tokens."""
    with torch.no_grad():
        logits = model(TOKENS)
        return float(
            torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten()
            )
        )


def use_plain_attention(model: Any) -> None:
    """Attention without masks of documents, which runs on the CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in model.layers.values():
        layer.attention.inner_attention = ScaledDotProductAttention.Config().build()


def assert_state(model: Any, expected: dict[str, torch.Tensor]) -> None:
    """Every tensor of the model is as torchtitan's adapter has it."""
    state = model.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    assert {n for n in state if n not in expected} <= {n for n in state if "expert_bias_E" in n}


@pytest.mark.parametrize("how", ["load_state_dict", "dcp"])
def test_a_model_is_filled_as_by_its_adapter(case: tuple[Path, Any, Any], how: str) -> None:
    folder, model, adapter = case
    expected = read_by_adapter(folder, adapter)
    other = {n: t for n, t in model.state_dict().items() if n not in expected}
    out = folder.parent / "out"
    reshard(folder, out, to="torch_dist", tp=2, fsync=False)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(-1)
    if how == "dcp":
        state = {n: t for n, t in model.state_dict().items() if n not in other}
        dcp.load(state, storage_reader=megtool.dcp.Reader(out), planner=megtool.dcp.Planner())
        model.load_state_dict(state, strict=False)
    else:
        report = megtool.load_state_dict(model, out, strict=not other)
        assert report.naming == "torchtitan"
        assert report.missing == tuple(other)
    assert_state(model, expected)
    use_plain_attention(model)
    if type(model).__name__ == "GptOssModel":  # its experts compute in bfloat16 alone
        model.to(torch.bfloat16)
    ours = loss_of(model)
    model.load_state_dict(expected, strict=False)
    assert ours == loss_of(model)


def test_a_saved_model_becomes_a_hugging_face_folder(case: tuple[Path, Any, Any]) -> None:
    folder, model, adapter = case
    model.load_state_dict(read_by_adapter(folder, adapter), strict=False)
    saved = folder.parent / "saved"
    state = model.state_dict()
    dcp.save(state, checkpoint_id=saved)
    reshard(saved, folder.parent / "out", to="hf", like=folder, fsync=False)
    back = adapter.to_hf(state)
    written = load_file(folder.parent / "out" / "model.safetensors")
    assert set(written) == set(back)
    for name, tensor in written.items():
        assert torch.equal(tensor, back[name]), name
    assert stored_tensors(folder.parent / "out") == stored_tensors(folder)
