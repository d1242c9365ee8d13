"""Tiny models of every family by transformers' own classes, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_NUMBERS = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
RENAMED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("gpt2", "gptj", "codegen", "gpt_bigcode"), GPT2_NAMES),
    "bloom": _NUMBERS | {"max_position_embeddings": "seq_length", "intermediate_size": ""},
    "gpt_neo": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "mpt": {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "intermediate_size": "",
    },
    "opt": {"intermediate_size": "ffn_dim"},
}
"""What families call sizes; nothing where they have no word."""
WITHOUT_GROUPS = {
    *("bert", "bert_post_norm", "gpt2", "gpt_neox", "modernbert", "mt5", "roberta", "t5", "umt5"),
    *("falcon", "gptj", "persimmon", "bloom", "codegen", "gpt_bigcode", "gpt_neo", "mpt", "opt"),
}
"""Families whose attention has as many heads of keys and values as of queries."""

CLASSES: dict[str, tuple[str, str]] = {
    "cohere": ("CohereForCausalLM", "CohereConfig"),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config"),
    "bamba": ("BambaForCausalLM", "BambaConfig"),
    "afmoe": ("AfmoeForCausalLM", "AfmoeConfig"),
    "apertus": ("ApertusForCausalLM", "ApertusConfig"),
    "arcee": ("ArceeForCausalLM", "ArceeConfig"),
    "bert": ("MegatronBertForMaskedLM", "MegatronBertConfig"),
    "bert_post_norm": ("BertForMaskedLM", "BertConfig"),
    "bloom": ("BloomForCausalLM", "BloomConfig"),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig"),
    "cwm": ("CwmForCausalLM", "CwmConfig"),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config"),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config"),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config"),
    "dots1": ("Dots1ForCausalLM", "Dots1Config"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "Ernie4_5Config"),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig"),
    "exaone_moe": ("ExaoneMoeForCausalLM", "ExaoneMoeConfig"),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config"),
    "falcon": ("FalconForCausalLM", "FalconConfig"),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config"),
    "flex_olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig"),
    "gemma": ("GemmaForCausalLM", "GemmaConfig"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig"),
    "glm": ("GlmForCausalLM", "GlmConfig"),
    "glm4": ("Glm4ForCausalLM", "Glm4Config"),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig"),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig"),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig"),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig"),
    "gptj": ("GPTJForCausalLM", "GPTJConfig"),
    "granite": ("GraniteForCausalLM", "GraniteConfig"),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig"),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config"),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig"),
    "granite_swa": ("GraniteSWAForCausalLM", "GraniteSWAConfig"),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig"),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig"),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig"),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig"),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig"),
    "helium": ("HeliumForCausalLM", "HeliumConfig"),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config"),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config"),
    "hyperclovax": ("HyperCLOVAXForCausalLM", "HyperCLOVAXConfig"),
    "hy_v3": ("HYV3ForCausalLM", "HYV3Config"),
    "jais2": ("Jais2ForCausalLM", "Jais2Config"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig"),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config"),
    "ministral": ("MinistralForCausalLM", "MinistralConfig"),
    "ministral3": ("Ministral3ForCausalLM", "Ministral3Config"),
    "mistral": ("MistralForCausalLM", "MistralConfig"),
    "mistral4": ("Mistral4ForCausalLM", "Mistral4Config"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig"),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig"),
    "mpt": ("MptForCausalLM", "MptConfig"),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config"),
    "nanochat": ("NanoChatForCausalLM", "NanoChatConfig"),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig"),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig"),
    "nemotron_nas": ("DeciLMForCausalLM", "DeciLMConfig"),
    "olmo": ("OlmoForCausalLM", "OlmoConfig"),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config"),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config"),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig"),
    "openelm": ("OpenELMForCausalLM", "OpenELMConfig"),
    "opt": ("OPTForCausalLM", "OPTConfig"),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig"),
    "phi": ("PhiForCausalLM", "PhiConfig"),
    "phi3": ("Phi3ForCausalLM", "Phi3Config"),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig"),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig"),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig"),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config"),
    "solar_open": ("SolarOpenForCausalLM", "SolarOpenConfig"),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig"),
    "t5": ("T5ForConditionalGeneration", "T5Config"),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config"),
    "vaultgemma": ("VaultGemmaForCausalLM", "VaultGemmaConfig"),
    "youtu": ("YoutuForCausalLM", "YoutuConfig"),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config"),
}
"""transformers' model and configuration class of each family."""

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASED = {"attention_bias": True}

Fill = Callable[[Any], None]


def fill_tables(model: Any) -> None:
    """Draw the experts of each token where a table says them: different ones."""
    import torch

    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            noise = torch.rand(table.shape[0], model.config.n_routed_experts)
            table.copy_(noise.argsort(1)[:, : table.shape[1]])


def sizes_of(family: str, sizes: Mapping[str, Any] = SIZES) -> dict[str, Any]:
    """Sizes under the names that the family's configuration has for them."""
    named = {
        k: v for k, v in sizes.items() if family not in WITHOUT_GROUPS or k != "num_key_value_heads"
    }
    names = RENAMED.get(family, {})
    return {name: v for k, v in named.items() if (name := names.get(k, k))}


def class_of(name: str) -> Any:
    """transformers' class of this name, or ours of a model that it has no class for."""
    import transformers

    from tests.support.models import openelm_model, unequal_layers

    for module in (unequal_layers, openelm_model):
        if hasattr(module, name):
            return getattr(module, name)
    return getattr(transformers, name)


def tiny_config(family: str, *, sizes: Mapping[str, Any] = SIZES, **keys: Any) -> Any:
    """A transformers configuration; `keys` replace or add to the sizes, and are passed as given."""
    return class_of(CLASSES[family][1])(**(sizes_of(family, sizes) | keys))


def tiny_model(
    family: str,
    folder: Path | None = None,
    *,
    sizes: Mapping[str, Any] = SIZES,
    seed: int = 0,
    dtype: str = "float32",
    fill: Fill | None = None,
    model_class: str = "",
    **keys: Any,
) -> Any:
    """A random model of transformers' own class, saved to `folder` if there is one.

    Args:
        family: A key of `CLASSES`.
        folder: Where to save it as a Hugging Face folder, in one file.
        sizes: Sizes under Llama's names, whatever the family calls them.
        seed: Of the weights as transformers initializes them, and of what `fill` draws after.
        dtype: Of the weights; `fill` writes into weights of this dtype.
        fill: Replaces or changes the weights, so that norms and biases are random too.
        model_class: Another class of the family than the one for causal language modeling.
        keys: Other keys of the configuration.
    """
    import torch

    config = tiny_config(family, sizes=sizes, **keys)
    torch.manual_seed(seed)
    model = class_of(model_class or CLASSES[family][0])(config)
    model.to(getattr(torch, dtype))
    if fill is not None:
        with torch.no_grad():
            fill(model)
    if folder is not None:
        model.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Case:
    """A model class of a family, and keys of its tiny configuration in addition to the sizes."""

    model_type: str
    keys: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    model_class: str = ""

    def __str__(self) -> str:
        plain = (f"{k}={v}" for k, v in self.keys.items() if not isinstance(v, list | dict))
        return f"{self.model_type}({self.name or ','.join(plain)})"

    @property
    def family(self) -> str:
        """The converter of the family."""
        return "llama" if self.model_type == "mistral" else self.model_type

    @property
    def model(self) -> str:
        """The name of transformers' class."""
        return self.model_class or CLASSES[self.model_type][0]

    def config(self) -> Any:
        """The transformers configuration."""
        return tiny_config(self.model_type, **self.keys)

    def build(self, folder: Path | None = None, **options: Any) -> Any:
        """The model; `options` are those of `tiny_model`."""
        return tiny_model(
            self.model_type, folder, model_class=self.model_class, **options, **self.keys
        )
