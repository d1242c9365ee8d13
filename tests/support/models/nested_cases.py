"""Models with a text model and a vision tower: tiny random ones as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import moe_cases, tiny_text
from tests.support.models.dense_cases import GEMMA4
from tests.support.models.tiny_model import SIZES

transformers = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "rope_parameters": MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class NestedCase:
    """A class of transformers, and the keys of its tiny configuration.

    `older` replaces how names begin as transformers saves them by what other releases save.
    """

    family: str
    model: str
    text: dict[str, Any]
    vision: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    older: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.family

    def build(self, folder: Path, *, dtype: str = "bfloat16", **text: Any) -> Any:
        """A random model, saved by transformers; `text` are further keys of the text model."""
        sizes = {k: v for k, v in (SIZES | self.text | text).items() if v != "absent"}
        outer = {k: sizes.pop(k) for k in ("tie_word_embeddings",) if k in text}
        keys = {"text_config": sizes, "vision_config": self.vision, **self.keys, **outer}
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.model}Config")(**deepcopy(keys))
        model = getattr(transformers, f"{self.model}ForConditionalGeneration")(config)
        model.to(getattr(torch, dtype))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("linear_attn.norm.weight"):  # Megatron stores it less 1
                    parameter.copy_(torch.rand(parameter.shape) / 4 + 0.75)
                elif parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)
                else:
                    parameter.copy_(torch.rand(parameter.shape))
        model.save_pretrained(folder)
        if self.family == "kimi_k25":  # of some names, transformers 5.23 saves others
            _rename(folder, "language_model.model.blocks.", "language_model.model.layers.")
            _rename(folder, "model.mm_projector.", "mm_projector.")
        if self.family == "qwen3_vl_moe":  # nor does it turn experts that it has not read turned
            file = folder / "model.safetensors"
            held = {
                n: t.transpose(1, 2).contiguous() if ".mlp.experts." in n else t
                for n, t in load_file(file).items()
            }
            save_file(held, file, metadata={"format": "pt"})
        return model.eval()


def _rename(folder: Path, old: str, new: str) -> None:
    file = folder / "model.safetensors"
    held = {n.replace(old, new): t for n, t in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})


LLAVA_OLDER = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
CASES = [
    NestedCase(
        "gemma3_multimodal",
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"mm_tokens_per_image": 4},
        LLAVA_OLDER,
    ),
    NestedCase(
        "mistral3",
        "Mistral3",
        {"model_type": "mistral", "head_dim": 8},
        VISION | {"model_type": "pixtral", "head_dim": 8},
        {"tie_word_embeddings": False},
        LLAVA_OLDER,
    ),
    NestedCase(
        "llama4_multimodal",
        "Llama4",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
        VISION
        | {
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
    ),
    NestedCase(
        "kimi_k25",
        "Kimi_K25",
        moe_cases.DEEPSEEK
        | {"model_type": "deepseek_v3", "num_experts_per_tok": 2, "num_hidden_layers": 2},
        {
            "patch_size": 4,
            "pos_emb_height": 2,
            "pos_emb_width": 2,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
        },
        {"tie_word_embeddings": False, "projection_hidden_size": 32},
    ),
    NestedCase(
        "qwen2_5_vl",
        "Qwen2_5_VL",
        {"rope_parameters": MROPE},
        QWEN_VISION,
        {},
        (("model.", "model.language_model."), ("visual.", "model.visual.")),
    ),
    NestedCase(
        "qwen3_vl",
        "Qwen3VL",
        {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    NestedCase(
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}}
        | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
        | {"tie_word_embeddings": False},
        QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    NestedCase("qwen3_5", "Qwen3_5", DELTA, QWEN_VISION | {"num_position_embeddings": 16}),
    NestedCase(
        "qwen3_5_moe",
        "Qwen3_5Moe",
        DELTA
        | {"intermediate_size": "absent", "moe_intermediate_size": 24, "num_experts": 4}
        | {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 16},
        QWEN_VISION | {"num_position_embeddings": 16},
    ),
    NestedCase(
        "gemma4_multimodal",
        "Gemma4",
        GEMMA4 | {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0},
        VISION | {"num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 16},
        {"audio_config": None},
    ),
    NestedCase(
        "gemma4_unified",
        "Gemma4Unified",
        {k: v for k, v in GEMMA4.items() if k != "hidden_size_per_layer_input"}
        | {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0},
        {"mm_embed_dim": 32, "patch_size": 2, "pooling_kernel_size": 2, "mm_posemb_size": 8},
        {"audio_config": {"audio_embed_dim": 16}},
    ),
]


def rename(folder: Path, names: tuple[tuple[str, str], ...]) -> None:
    """Rename the tensors of a folder whose names begin so, as another release saves them."""
    file = folder / "model.safetensors"

    def renamed(name: str) -> str:
        for old, new in names:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    save_file({renamed(n): t for n, t in load_file(file).items()}, file, {"format": "pt"})


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> Mapping[str, Any]:
    """Change a folder's config.json in place."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    return config


_WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "head_dim": 64,
    "vocab_size": tiny_text.VOCABULARY,
    "max_position_embeddings": 128,
    "eos_token_id": tiny_text.END,
}
_WIDE_EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
_WIDE_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama4_multimodal": {"intermediate_size_mlp": 128},
    "kimi_k25": _WIDE_EXPERTS
    | {"num_key_value_heads": 2, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 64}
    | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "head_dim": 32},
    "gemma4_multimodal": {"global_head_dim": 64},
    "gemma4_unified": {"global_head_dim": 64},
    "qwen3_vl_moe": _WIDE_EXPERTS,
    "qwen3_5": {"linear_value_head_dim": 8},
    "qwen3_5_moe": _WIDE_EXPERTS | {"linear_value_head_dim": 8},
}


def save_quantizable(case: NestedCase, folder: Path) -> Path:
    """A model whose matrices have columns for the groups of every format, with a tokenizer."""
    case.build(folder, **_WIDE | _WIDE_OF_FAMILY.get(case.family, {}))
    tiny_text.save_tokenizer(folder)
    return folder
