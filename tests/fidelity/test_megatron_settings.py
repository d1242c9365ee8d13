"""Settings of Megatron one at a time: where megatron-core's logits move, ours follow, or we refuse.

The peer is the installed megatron-core on a CPU, built from args by Megatron-LM's rules
(`tests/support/peers/settings_world.py`). Nothing may change the function in silence.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard
from megtool.errors import MappingError
from megtool.inference.forward import Forward
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.source.open import open_decoder
from tests.support.paths import PEERS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

LARGEST_DIFFERENCE = 1e-4
"""Of our logits and the peer's, as a part of its largest one."""

_GATED = {"swiglu": False, "gated_linear_unit": True}
_YARN: dict[str, Any] = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 8.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": None,
    "yarn_mscale_all_dim": None,
    "yarn_correction_range_round_to_int": True,
}
_ROPE = {"position_embedding_type": "rope"}
_SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}
_SIGMOID = {"moe_router_score_function": "sigmoid"}

FAST: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {},
        {"rotary_seq_len_interpolation_factor": 4.0},
        {"window_size": [15, 0], "window_attn_skip_freq": 2},
        {"softmax_scale": 0.1},
        {"softmax_type": "off-by-one"},
        {"layernorm_zero_centered_gamma": True},
        {**_GATED, "bias_gelu_fusion": True},
        {"qk_l2_norm": True, "no_rope_freq": 3},
        {**_YARN, "rotary_percent": 0.5, "yarn_mscale": 0.5, "yarn_mscale_all_dim": 0.0},
    ],
    "biased": [{"bias_gelu_fusion": True}],
    "moe": [
        _SINKHORN,
        _SINKHORN | {"moe_router_topk": 1},
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    ],
    "mla": [{"rotary_percent": 0.5}, {"rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0}],
    "mla_yarn": [{}, {"mscale": 0.7}],
    "hybrid": [
        {},
        {"layernorm_epsilon": 1e-2},
        _ROPE | {"rotary_seq_len_interpolation_factor": 4.0},
        {"qk_l2_norm": True},
    ],
}
"""Settings that are carried, by the base that they perturb."""

MORE: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {"rotary_percent": 0.5},
        {"rotary_base": 500000},
        {"rotary_interleaved": True},
        {"use_rope_scaling": True, "rotary_base": 500000, "rope_scaling_factor": 32.0},
        {"window_size": [15, 0]},
        {"window_size": [15, 0], "window_attn_skip_freq": [0, 1, 1]},
        {"softmax_type": "learnable"},
        {"layernorm_epsilon": 1e-2},
        {"swiglu": False},
        {"swiglu": False, "openai_gelu": True},
        _GATED,
        {"swiglu": False, "quick_geglu": True},
        {"swiglu": False, "squared_relu": True},
        {**_GATED, "squared_relu": True},
        {**_GATED, "activation_func": "relu"},
        {"swiglu": False, "activation_func": "silu"},
        {"activation_func_clamp_value": 0.5},
        {"glu_linear_offset": 1.0},
        {"qk_layernorm": True},
        {"qk_l2_norm": True},
        {"no_rope_freq": 3},
        {"no_rope_freq": [0, 1, 1]},
        {"attention_output_gate": True},
        {"add_bias_linear": True, "add_qkv_bias": True},
        {"add_qkv_bias": True},
        {"position_embedding_type": "none"},
        {"position_embedding_type": "none", "qk_l2_norm": True},
        {"position_embedding_type": "learned_absolute"},
        {"untie_embeddings_and_output_weights": False},
        {"group_query_attention": False},
        {"kv_channels": 16},
        _YARN,
        {"apply_residual_connection_post_layernorm": True},
        {"apply_query_key_layer_scaling": True},
        {"moe_expert_capacity_factor": 0.5},
    ],
    "biased": [
        {},
        {"openai_gelu": True},
        {"gated_linear_unit": True, "bias_gelu_fusion": True},
        {"squared_relu": True},
        {"position_embedding_type": "rope"},
        {"activation_func": "fast_gelu"},
        {"quick_geglu": True},
        {"activation_func": "quick_gelu"},
        {"softmax_scale": 0.1},
    ],
    "moe": [
        {},
        {"moe_router_topk": 3},
        {"moe_router_pre_softmax": True},
        {"moe_router_pre_softmax": True, "moe_router_topk": 1},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
        {"moe_router_topk_scaling_factor": 2.5},
        _SIGMOID,
        _SIGMOID | {"moe_router_enable_expert_bias": True},
        _SIGMOID | {"moe_apply_probs_on_input": True, "moe_router_topk": 1},
        _SIGMOID | {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
        {"moe_shared_expert_intermediate_size": 48},
        {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
        {"moe_expert_capacity_factor": -1.0},
        _SINKHORN | {"moe_router_topk_scaling_factor": 2.5, "moe_router_pre_softmax": True},
        {"moe_router_load_balancing_type": "none"},
        {"moe_layer_freq": [0, 1, 1]},
        {"activation_func_clamp_value": 0.5},
        _GATED,
        {
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
        },
        {"swiglu": False, "squared_relu": True},
        {"softmax_type": "off-by-one"},
        {"add_bias_linear": True, "add_qkv_bias": True},
    ],
    "mla": [
        {},
        {"position_embedding_type": "none"},
        {"softmax_scale": 0.1},
        {"softmax_type": "off-by-one"},
        {"rotary_base": 500000},
        {"use_rope_scaling": True},
        {"rotary_seq_len_interpolation_factor": 4.0},
        {"no_rope_freq": 3},
        {"qk_layernorm": False},
        {"q_lora_rank": None},
        {"window_size": [15, 0]},
    ],
    "mla_yarn": [
        {"rotary_scaling_factor": 40.0},
        {"rotary_scaling_factor": 1.0},
        {"mscale_all_dim": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "beta_fast": 4.0, "beta_slow": 2.0},
        {"original_max_position_embeddings": 16},
        {"rotary_percent": 0.5},
        {"max_position_embeddings": 48, "seq_length": 48},
    ],
    "hybrid": [
        {"mamba_num_heads": None},
        {"mamba_num_groups": 1},
        {"mamba_state_dim": 8},
        {"mamba_head_dim": 4},
        {"hybrid_override_pattern": None, "hybrid_attention_ratio": 0.3, "hybrid_mlp_ratio": 0.3},
        _ROPE,
        _ROPE | {"rotary_percent": 0.5},
        _ROPE | {"rotary_base": 500},
        _ROPE | {"use_rope_scaling": True},
        _ROPE | {"no_rope_freq": [0, 1, 0, 0, 0, 0, 0]},
        {"position_embedding_type": "learned_absolute"},
        {"position_embedding_type": "mrope"},
        _YARN,
        {"rotary_interleaved": True},
        {"window_size": [15, 0]},
        {"window_size": [15, 0], "window_attn_skip_freq": 2},
        {"window_size": [15, 0], "window_attn_skip_freq": [0, 1, 0, 0, 0, 0, 0]},
        {"softmax_scale": 0.1},
        {"softmax_type": "off-by-one"},
        {"softmax_type": "learnable"},
        {"attention_output_gate": True},
        {"apply_residual_connection_post_layernorm": True},
        {"layernorm_zero_centered_gamma": True},
        {"layernorm_zero_centered_gamma": True, "layernorm_epsilon": 1e-2},
        {"normalization": "LayerNorm"},
        {"swiglu": False},
        {"swiglu": False, "squared_relu": True},
        _GATED,
        {"activation_func_clamp_value": 0.5},
        {"glu_linear_offset": 1.0},
        {"add_bias_linear": True},
        {"add_qkv_bias": True},
        {"untie_embeddings_and_output_weights": False},
        {"group_query_attention": False},
        {"kv_channels": 16},
        {"moe_router_topk": 3},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
        _SIGMOID | {"moe_router_enable_expert_bias": True},
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
        {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
        {"moe_layer_freq": 2},
        {"use_mamba_mem_eff_path": True},
    ],
}
"""More of them."""

REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("dense", "window_size", {"window_size": [15, -1]}),
    ("dense", "window_size", {"window_size": [15, 3]}),
    ("moe", "moe_expert_capacity_factor", {"moe_expert_capacity_factor": 0.5}),
    (
        "moe",
        "moe_expert_capacity_factor",
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    ),
    (
        "moe",
        "moe_expert_capacity_factor",
        {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True},
    ),
    ("moe", "moe_input_jitter_eps", {"moe_input_jitter_eps": 0.3}),
    ("moe", "moe_router_force_load_balancing", {"moe_router_force_load_balancing": True}),
    ("mla", "position_embedding_type", {"position_embedding_type": "learned_absolute"}),
    ("hybrid", "rotary_interleaved", _ROPE | {"rotary_interleaved": True}),
    ("hybrid", "moe_expert_capacity_factor", {"moe_expert_capacity_factor": 0.5}),
]
"""Settings that move the peer's logits and are refused, by the base and the name refused."""


FAMILIES = {
    "dense": "llama",
    "moe": "mixtral",
    "mla": "deepseek_v3",
    "mla_yarn": "deepseek_v3",
}
"""The family that a base is written as."""


@dataclass(frozen=True, slots=True)
class World:
    """What the peer saved and computed."""

    folder: Path
    logits: dict[str, Any]

    def check(self, base: str, args: dict[str, Any]) -> None:
        """Compare our logits with the peer's."""
        name = name_of(base, args)
        theirs = self.logits[name]
        assert isinstance(theirs, torch.Tensor), theirs
        with torch.no_grad():
            ours = logits(self.folder / name)[..., : theirs.shape[-1]]
        difference = (ours - theirs).abs().max() / theirs.abs().max()
        assert difference < LARGEST_DIFFERENCE, f"{name}: {difference:.2g}"


def name_of(base: str, args: dict[str, Any]) -> str:
    """The folder of a case."""
    return "-".join((base, *(f"{k}={v}".replace(" ", "") for k, v in args.items())))


def make_world(folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> World:
    """Let the peer build, run and save models."""
    by_name = {name_of(b, a): {"name": name_of(b, a), "base": b, "args": a} for b, a in cases}
    listed = list(by_name.values())
    (folder / "cases.json").write_text(json.dumps(listed))
    script = [sys.executable, str(PEERS / "settings_world.py"), str(folder)]
    done = subprocess.run(
        [*script, str(folder / "cases.json")],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return World(folder, torch.load(folder / "logits.pt"))


def tokens() -> torch.Tensor:
    """The tokens that the peer's logits are of."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 64, (2, 48), generator=generator)


def logits(folder: Path) -> torch.Tensor:
    """Our own decoder's logits of the peer's tokens."""
    forward = Forward(load(open_decoder(folder)))
    states = forward.hidden(Batch(tokens_BS=tokens()))
    assert states is not None
    return forward.logits(states).view(*tokens().shape, -1).float()


def pairs(table: dict[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(base, args) for base, all_args in table.items() for args in all_args]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("fast"), pairs(FAST))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    refused = [(base, args) for base, _, args in REFUSED]
    bases = [(base, {}) for base in MORE]
    cases = [*pairs(MORE), *pairs(FAST), *refused, *bases]
    return make_world(tmp_path_factory.mktemp("whole"), cases)


@pytest.mark.parametrize(("base", "args"), pairs(FAST), ids=lambda x: str(x))
def test_our_forward_pass_follows(fast: World, base: str, args: dict[str, Any]) -> None:
    fast.check(base, args)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "args"), pairs(MORE), ids=lambda x: str(x))
def test_our_forward_pass_follows_all(whole: World, base: str, args: dict[str, Any]) -> None:
    whole.check(base, args)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "name", "args"), REFUSED, ids=lambda x: str(x))
def test_what_cannot_be_described_is_refused(
    whole: World, base: str, name: str, args: dict[str, Any]
) -> None:
    theirs, plain = whole.logits[name_of(base, args)], whole.logits[name_of(base, {})]
    assert (theirs - plain).abs().max() > 1e-3
    with pytest.raises(MappingError, match=name) as e:
        open_decoder(whole.folder / name_of(base, args))
    assert e.value.id == "unsupported-setting"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "args"),
    [pair for pair in (*pairs(FAST), *pairs(MORE)) if pair[0] in FAMILIES],
    ids=lambda x: str(x),
)
def test_what_is_written_computes_the_same_or_is_refused(
    whole: World, base: str, args: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    name, folder = name_of(base, args), tmp_path / "hf"
    try:
        reshard(whole.folder / name, folder, to="hf", family=FAMILIES[base], fsync=False)
    except MappingError as e:
        assert args, f"a plain model is refused: {e}"
        return
    theirs = whole.logits[name]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        written = model(tokens()).logits.float()
    difference = (written - theirs).abs().max() / theirs.abs().max()
    assert difference < LARGEST_DIFFERENCE, f"{name}: {difference:.2g}"
