"""The choice of experts against transformers' routers and megatron-core's function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import MappingError
from megtool.model.moe.router import Router, choose
from megtool.spec.model_config import ModelConfig

SIZES: dict[str, Any] = dict(
    num_layers=1,
    hidden_size=16,
    ffn_hidden_size=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=10,
    num_experts=8,
    num_experts_per_token=2,
    moe_ffn_hidden_size=8,
)


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_fields(**SIZES | changes)


def router(settings: ModelConfig, *, seed: int = 0) -> Router:
    made = Router(settings, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return made


def dense(experts_TK: torch.Tensor, probs_TK: torch.Tensor, num: int) -> torch.Tensor:
    """Shares of all experts, which no order of the chosen changes."""
    assert experts_TK.dtype == torch.int64
    out = torch.zeros(experts_TK.shape[0], num)
    return out.scatter_(1, experts_TK, probs_TK.float())


ROUTERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", "MixtralTopKRouter", {}, {"num_local_experts": 8}),
    "qwen2_moe": (
        "qwen2_moe",
        "Qwen2MoeTopKRouter",
        {"router_pre_softmax": True},
        {"num_experts": 8, "norm_topk_prob": False},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        {},
        {"num_experts": 8, "norm_topk_prob": True},
    ),
    "gpt_oss": ("gpt_oss", "GptOssTopKRouter", {"router_bias": True}, {"num_local_experts": 8}),
    "deepseek_v2": (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {
            "router_pre_softmax": True,
            "router_fp32": True,
            "router_num_groups": 4,
            "router_topk_groups": 2,
            "router_group_best": 1,
            "router_scaling": 1.5,
            "num_experts_per_token": 3,
        },
        {
            "n_routed_experts": 8,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        {
            "router_score": "sigmoid",
            "router_expert_bias": True,
            "router_fp32": True,
            "router_num_groups": 2,
            "router_topk_groups": 1,
            "router_group_best": 2,
            "router_scaling": 2.5,
            "num_experts_per_token": 3,
        },
        {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_shares_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    package, kind, ours, theirs = ROUTERS[name]
    made = router(config(**ours)).to(dtype)
    module = getattr(transformers.models, package)
    modeling = getattr(module, f"modeling_{package}")
    k = made.config.moe.num_experts_per_token
    prefix = kind.removesuffix("TopKRouter").removesuffix("TopkRouter")
    settings = getattr(transformers, f"{prefix}Config")(
        hidden_size=16, num_experts_per_tok=k, num_attention_heads=2, **theirs
    )
    other = getattr(modeling, kind)(settings).to(dtype)
    with torch.no_grad():
        other.weight.copy_(made.weight)
        if made.bias is not None:
            other.bias.copy_(made.bias)
        if made.expert_bias is not None:
            made.expert_bias.data = made.expert_bias.float()
            other.e_score_correction_bias = made.expert_bias.clone()
        x = torch.randn(200, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        experts, probs = made(x)
        _, want_probs, want_experts = other(x)
    assert probs.dtype == torch.float32
    got, want = dense(experts, probs, 8), dense(want_experts, want_probs, 8)
    # gpt-oss rounds shares to the model's type, we do not.
    torch.testing.assert_close(got, want, atol=1e-6 if dtype == torch.float32 else 4e-3, rtol=0)
    if dtype == torch.float32 or made.config.router.router_fp32:
        assert torch.equal(got > 0, want > 0)


def test_llama4_chooses_by_logits_and_normalises_nothing() -> None:
    """Logits so large that all their sigmoids are 1 are told apart as transformers does."""
    made = config(router_score="sigmoid", router_scales_input=True)
    logits = torch.tensor([[30.0, 1.0, 40.0, 50.0, -3.0, 2.0, 35.0, 0.0]])
    experts, probs = choose(logits, made)
    assert experts.tolist() == [[3, 2]]
    assert probs.tolist() == [[1.0, 1.0]]
    experts, probs = choose(torch.arange(8.0)[None] - 4, made)
    assert probs[0].tolist() == pytest.approx(torch.tensor([3.0, 2.0]).sigmoid().tolist())


@pytest.mark.peers
@settings(max_examples=60)
@given(data=st.data())
def test_shares_are_those_of_megatron(data: st.DataObject) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    group_size, groups = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    best = data.draw(st.integers(1, groups))
    k = best * data.draw(st.integers(1, group_size))
    num = group_size * groups
    score = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    pre = data.draw(st.booleans())
    scaling = data.draw(st.sampled_from([1.0, 2.5]))
    is_grouped = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(20, num, generator=generator)
    bias = torch.randn(num, generator=generator) if data.draw(st.booleans()) else None
    bias = bias if score == "sigmoid" else None
    made = config(
        num_experts=num,
        num_experts_per_token=k,
        router_score=score,
        router_pre_softmax=pre,
        router_scaling=scaling,
        router_num_groups=groups if is_grouped else 0,
        router_topk_groups=best if is_grouped else 0,
    )
    experts, probs = choose(logits, made, bias)
    want, chosen = moe_utils.topk_routing_with_score_function(
        logits,
        k,
        use_pre_softmax=pre,
        num_groups=groups if is_grouped else None,
        group_topk=best if is_grouped else None,
        scaling_factor=scaling,
        score_function=score,
        expert_bias=bias,
    )
    torch.testing.assert_close(dense(experts, probs, num), want)
    assert torch.equal(dense(experts, torch.ones_like(probs), num).bool(), chosen)


def test_expert_bias_chooses_and_does_not_count() -> None:
    made = config(router_score="sigmoid", router_expert_bias=True)
    logits = torch.zeros(1, 8)
    experts, probs = choose(logits, made, torch.tensor([0.0, 5, 0, 0, 0, 0, 9, 0]))
    assert experts.tolist() == [[6, 1]]
    assert probs.tolist() == [[0.5, 0.5]]


def test_gradients_reach_the_router_and_not_its_expert_bias() -> None:
    made = router(config(router_score="sigmoid", router_expert_bias=True, router_bias=True))
    x = torch.randn(5, 16, requires_grad=True)
    _, probs = made(x)
    (probs * torch.rand(5, 2)).sum().backward()
    assert made.weight.grad is not None
    assert made.bias is not None
    assert made.bias.grad is not None
    assert x.grad is not None
    assert made.expert_bias is not None
    assert made.expert_bias.grad is None
    assert not made.expert_bias.requires_grad


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"router_score": "sparsemax"}, "router_score is 'sparsemax'"),
        ({"num_experts_per_token": 9}, "num_experts_per_token is 9"),
        ({"router_num_groups": 3, "router_topk_groups": 1}, "1 of 3 groups"),
        (
            {"router_num_groups": 8, "router_topk_groups": 1},
            "2 of 8 experts cannot be chosen from 1 of 8 groups",
        ),
    ],
)
def test_impossible_choices_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MappingError, match=said):
        Router(config(**changes))
