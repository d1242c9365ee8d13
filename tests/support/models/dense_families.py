"""Dense families at sizes of a test: their configurations, and what transformers calls them.

A family is its file in converters/, its model class, and its configuration class without `Config`.
"""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GPT2_SIZES: dict[str, Any] = {
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 101,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASED = {"attention_bias": True}
LLAMA = ("llama", "LlamaForCausalLM", "Llama")
MISTRAL = ("llama", "MistralForCausalLM", "Mistral")
QWEN2, QWEN3 = ("qwen2", "Qwen2ForCausalLM", "Qwen2"), ("qwen3", "Qwen3ForCausalLM", "Qwen3")
GEMMA = ("gemma", "GemmaForCausalLM", "Gemma")
GEMMA2 = ("gemma2", "Gemma2ForCausalLM", "Gemma2")
GEMMA3 = ("gemma3", "Gemma3ForCausalLM", "Gemma3Text")
PHI3, GPT2 = ("phi3", "Phi3ForCausalLM", "Phi3"), ("gpt2", "GPT2LMHeadModel", "GPT2")
NEOX = ("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoX")
GRANITE = ("granite", "GraniteForCausalLM", "Granite")
SMOLLM3 = ("smollm3", "SmolLM3ForCausalLM", "SmolLM3")
STARCODER2 = ("starcoder2", "Starcoder2ForCausalLM", "Starcoder2")
NEMOTRON = ("nemotron", "NemotronForCausalLM", "Nemotron")
