"""Mixtures of experts computed by real megatron-core: after conversion, transformers' logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megtool import reshard
from megtool.model.batch import Batch
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.source.open import open_source
from megtool.train.model.build import load_for_training
from tests.support.models.moe_cases import (
    DEEPSEEK,
    EIGHT,
    QWEN,
    SPARSE,
    YARN,
    Case,
    case_config,
    with_mtp,
)
from tests.support.models.mtp_reference import save_tunable
from tests.support.peers.forked_worlds import run_forked
from tests.support.peers.release import install_release

transformers = pytest.importorskip("transformers")
pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

SHARED = {"shared_expert_intermediate_size": 48}
LIMITED = {
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 1.5,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
}
MODELS: list[Case] = [
    ("mixtral", "Mixtral", EIGHT),
    ("qwen2_moe", "Qwen2Moe", QWEN | SHARED | {"mlp_only_layers": [1]}),
    ("qwen3_moe", "Qwen3Moe", QWEN | {"head_dim": 16, "norm_topk_prob": True}),
    ("deepseek_v2", "DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    ("deepseek_v2", "DeepseekV2", DEEPSEEK | LIMITED | {"rope_parameters": YARN}),
    ("deepseek_v3", "DeepseekV3", DEEPSEEK),
    ("gpt_oss", "GptOss", EIGHT | {"head_dim": 8, "sliding_window": 4}),
]


SHARED_INDEX = {"indexer_types": ["full", "shared", "shared", "full"], "n_group": 1}
SPARSE_MODELS: list[Case] = [
    ("deepseek_v32", "DeepseekV32", SPARSE),
    ("deepseek_v32", "DeepseekV32", SPARSE | {"rope_parameters": YARN}),
    ("glm_moe_dsa", "GlmMoeDsa", SPARSE | SHARED_INDEX),
]


@pytest.mark.parametrize("case", MODELS, ids=lambda c: c[0])
def test_megatron_core_computes_the_same(case: Case, tmp_path: Path) -> None:
    assert_same_logits(case, tmp_path)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release that has sparse attention, apart from the one that is installed."""
    folder = tmp_path_factory.mktemp("core")
    return install_release("megatron-core==0.19.2", folder, "--ignore-requires-python")


@pytest.mark.parametrize("case", SPARSE_MODELS, ids=lambda c: c[0])
def test_attention_to_what_an_indexer_chooses_is_megatrons(
    case: Case, core: Path, tmp_path: Path
) -> None:
    """By the release's own layers, without its fused kernels: fewer tokens than a row has."""
    assert_same_logits(case, tmp_path, core)


def assert_same_logits(case: Case, tmp_path: Path, core: Path | None = None) -> None:
    """What transformers made is converted; Megatron's logits are its own."""
    torch.manual_seed(0)
    ours = getattr(transformers, f"{case[1]}ForCausalLM")(case_config(case))
    with torch.no_grad():
        for tensor in ours.state_dict().values():
            tensor.normal_(0.1, 0.4)
    ours.eval().save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, ep=2, fsync=False)
    tokens = np.arange(24).reshape(2, 12) * 7 % 101
    np.save(tmp_path / "tokens.npy", tokens)
    compute(tmp_path, core)
    with torch.no_grad():
        want = ours(torch.from_numpy(tokens)).logits.numpy()
    got = np.load(tmp_path / "logits.npy")[..., :101]
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * np.abs(want).max())


def compute(folder: Path, core: Path | None = None) -> None:
    files = [str(folder / n) for n in ("meg/release", "tokens.npy", "logits.npy")]
    run_forked("moe_world.py", *files, core=core)


def test_megatron_core_loads_layers_of_multi_token_prediction(tmp_path: Path) -> None:
    before = with_mtp(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, ep=2, fsync=False)
    np.save(tmp_path / "tokens.npy", np.arange(12).reshape(1, 12))
    compute(tmp_path)
    held = np.load(tmp_path / "logits.npy.mtp.npz")

    def theirs(name: str) -> np.ndarray:
        kind, shape, raw = before[name]
        bits = {"BF16": torch.bfloat16, "F32": torch.float32}[kind]
        found: np.ndarray = torch.frombuffer(bytearray(raw), dtype=bits).view(shape).float().numpy()
        return found

    for m in range(2):
        ours, at = f"mtp.layers.{m}.", f"model.layers.{4 + m}."
        inner = f"{ours}transformer_layer."
        pairs = {
            f"{ours}enorm.weight": ["enorm.weight"],
            f"{ours}eh_proj.weight": ["eh_proj.weight"],
            f"{ours}final_layernorm.weight": ["shared_head.norm.weight"],
            f"{inner}input_layernorm.weight": ["input_layernorm.weight"],
            f"{inner}self_attention.kv_layernorm.weight": ["self_attn.kv_a_layernorm.weight"],
            f"{inner}mlp.router.expert_bias": ["mlp.gate.e_score_correction_bias"],
            f"{inner}mlp.experts.local_experts.3.linear_fc1.weight": [
                f"mlp.experts.3.{x}_proj.weight" for x in ("gate", "up")
            ],
        }
        for name, parts in pairs.items():
            want = np.concatenate([theirs(at + p) for p in parts])
            assert (held[name] == want).all(), name


def test_megatron_core_has_the_losses_of_multi_token_prediction(tmp_path: Path) -> None:
    """Each depth's loss, and the gradients of the whole model; no row of the vocabulary is padding,
    which megatron-core counts in."""
    save_tunable(tmp_path / "hf", vocab_size=128)
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    tokens = torch.arange(24).view(2, 12) * 7 % 101
    np.save(tmp_path / "tokens.npy", tokens.numpy())
    compute(tmp_path)
    theirs = np.load(tmp_path / "logits.npy.loss.npz")
    (decoder,) = load_for_training(open_source(tmp_path / "meg"), dtype="float32", threads=1)
    counted = torch.arange(24).view(2, 12) % 5 != 3
    labels = tokens.roll(-1, 1).masked_fill(~counted, -100)
    schedule = PipelineSchedule(decoder, num_microbatches=1)
    total, count = schedule.step(Batch(tokens_BS=tokens), labels)
    assert float(total / count) == pytest.approx(float(theirs["loss"]), abs=1e-5)
    assert decoder.mtp is not None
    further = [float(loss / num) for loss, num in decoder.mtp.sums]
    assert further == pytest.approx(theirs["further"].tolist(), abs=1e-5)
    compared = 0
    for name, parameter in decoder.named_parameters():
        for ours in (name, name.replace(".linear_kv_up_proj.layer_norm_", ".kv_layernorm.")):
            if f"grad {ours}" in theirs and parameter.grad is not None:
                grad = theirs[f"grad {ours}"]
                np.testing.assert_allclose(
                    parameter.grad.numpy() / int(count), grad, atol=1e-5, rtol=1e-3, err_msg=name
                )
                compared += 1
    assert compared > 40
