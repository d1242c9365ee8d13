"""Generate, family by family: caches of windows, latents and experts, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megtool.console import silent
from megtool.inference.generation.batching import GenerateRequest
from megtool.inference.generation.generate import Decoding, generate
from megtool.inference.runtime import load_forward, on_ranks
from megtool.options.groups import RuntimeOptions
from megtool.source.open import open_decoder
from tests.support.emulated.graph_rules import check_graphs
from tests.support.models.moe_cases import V4
from tests.support.models.tiny_model import fill_tables

COMMON = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": 120, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
HEADS = ("head_dim", "num_key_value_heads")
WAYS = ((2, False, 99), (9, False, 99), (9, True, 99), (2, True, 99), (2, False, 4))
"""How many at once, whether as graphs, and how many tokens of prompts in a pass."""

FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2Config": COMMON | {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "GPT2Config": GPT2,
    "Qwen3Config": COMMON,
    "MixtralConfig": COMMON | {"num_local_experts": 4},
    "GptOssConfig": COMMON
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "Gemma3TextConfig": COMMON
    | {"num_hidden_layers": 6, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "GPTNeoXConfig": {k: v for k, v in COMMON.items() if k not in HEADS},
    "Llama4TextConfig": COMMON
    | {"num_hidden_layers": 4, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    | {"attention_chunk_size": 8, "floor_scale": 4, "attn_scale": 0.5, "intermediate_size_mlp": 40},
    "DeepseekV2Config": {k: v for k, v in COMMON.items() if k != "head_dim"}
    | LATENT
    | {"q_lora_rank": None, "n_group": None, "topk_group": None},
    "DeepseekV3Config": {k: v for k, v in COMMON.items() if k != "head_dim"} | LATENT,
    "DeepseekV4Config": COMMON
    | V4
    | {"num_hidden_layers": 4, "num_nextn_predict_layers": 0, "num_experts_per_tok": 2}
    | {"index_n_heads": 8},  # few scores are equal
    "Lfm2MoeConfig": COMMON
    | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


class Silent:
    """Tokens without a text."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers_without_a_cache(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, name)(**FAMILIES[name])
    peer = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    fill_tables(peer)
    for weight in peer.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    peer.save_pretrained(tmp_path)
    prompts = [torch.randint(2, 120, (size,)).tolist() for size in (3, 9, 17)]
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                tokens.append(int(peer(torch.tensor([tokens])).logits[0, -1].argmax()))
        expected.append(tuple(tokens[len(prompt) :]))
        if name == "DeepseekV4Config":  # with its own cache
            whole = peer.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
            assert tuple(whole[0, len(prompt) :].tolist()) == expected[-1]
    requests = [
        GenerateRequest(number=n, prompt=tuple(p), max_new_tokens=12) for n, p in enumerate(prompts)
    ]
    manner = RuntimeOptions(device="cpu", dtype="float32")
    runnable = open_decoder(tmp_path)
    with on_ranks(manner) as groups:
        forward = load_forward(runnable, manner, groups, silent)
        for slots, graphed, chunk in WAYS:
            options = Decoding(num_slots=slots, graphed=graphed, prefill_tokens=chunk)
            with check_graphs():
                found = list(generate(forward, requests, options, new_detokenizer=Silent))
            assert [one.ids for one in found] == expected, (slots, graphed, chunk)
