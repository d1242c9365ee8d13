"""Families computed by real megatron-core: after conversion, the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import reshard
from tests.support.models.tiny_model import class_of
from tests.support.models.unequal_layers import BLOCKS
from tests.support.peers.forked_worlds import run_forked

transformers = pytest.importorskip("transformers")
pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
GQA, UNTIED, EAGER = (
    {"num_key_value_heads": 2},
    {"tie_word_embeddings": False},
    {"attn_implementation": "eager"},
)
GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 101,
    "n_positions": 64,
}

# Those that megatron-core's plain PyTorch layers can compute.
MODELS = [
    ("LlamaForCausalLM", "Llama", SIZES | GQA | UNTIED),
    ("Qwen2ForCausalLM", "Qwen2", SIZES | GQA | UNTIED),
    ("Qwen3ForCausalLM", "Qwen3", SIZES | GQA | {"head_dim": 16, "tie_word_embeddings": True}),
    ("Phi3ForCausalLM", "Phi3", SIZES | GQA),
    ("GPT2LMHeadModel", "GPT2", GPT2),
    (
        "GPTNeoXForCausalLM",
        "GPTNeoX",
        SIZES | {"use_parallel_residual": False, "tie_word_embeddings": False},
    ),
    ("Starcoder2ForCausalLM", "Starcoder2", SIZES | GQA),
    ("DeciLMForCausalLM", "DeciLM", SIZES | UNTIED | {"block_configs": BLOCKS[::3]}),
    ("DeciLMForCausalLM", "DeciLM", SIZES | {"num_hidden_layers": 4, "block_configs": BLOCKS}),
    ("MegatronBertForMaskedLM", "MegatronBert", SIZES),
    ("MegatronBertForPreTraining", "MegatronBert", SIZES),
]


@pytest.mark.parametrize(("model", "config", "keys"), MODELS, ids=[m for m, _, _ in MODELS])
def test_megatron_core_computes_the_same(
    model: str, config: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    ours = class_of(model)(class_of(f"{config}Config")(**keys))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(0.1, 0.4)
    ours.eval().save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, fsync=False)
    tokens = np.arange(24).reshape(2, 12) * 7 % 101
    np.save(tmp_path / "tokens.npy", tokens)
    files = [str(tmp_path / n) for n in ("meg/release", "tokens.npy", "logits.npy")]
    run_forked("family_world.py", *files)
    with torch.no_grad():
        out = ours(torch.from_numpy(tokens))
    want = (out.prediction_logits if "prediction_logits" in out else out.logits).numpy()
    got = np.load(tmp_path / "logits.npy")[..., :101]
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * np.abs(want).max())
