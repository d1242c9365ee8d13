"""Adapters that PEFT writes for tiny models, and the models that it merges them into."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from megtool.adapters.read import read_adapter
from megtool.model.batch import Batch
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.train.model.build import load_for_training
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.weight_update import WeightUpdate

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ATTENTION}),
    "all-linear": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {"target_modules": ["q_proj", "up_proj"], "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"k_proj": 2, r"model\.layers\.1\.self_attn\.q_proj": 8},
            "alpha_pattern": {r"layers\.0\.self_attn\.v_proj": 3, "o_proj": 5},
        },
    ),
    "one layer": ("llama", {"target_modules": ATTENTION, "layers_to_transform": [1]}),
    "head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "interleaved": ("gpt_neox", {"target_modules": ["query_key_value", "dense_h_to_4h"]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
}
"""Families, and the settings of an adapter of each."""

TOKENS = torch.randint(1, 100, (2, 12), generator=torch.Generator().manual_seed(1))


def load_model(folder: Path) -> Any:
    """The model of a Hugging Face folder, by transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_adapter(base: Path, folder: Path, **settings: Any) -> Any:
    """PEFT's model of a base and a random adapter, which is saved to `folder`."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings})
    model = peft.get_peft_model(load_model(base), config).eval()
    with torch.no_grad():
        for n, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if "lora_" in name:
                torch.manual_seed(n)
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


def read_updates(base: Path, folder: str | Path) -> dict[str, WeightUpdate]:
    """What the adapter in a folder adds to a model."""
    source = open_source(base)
    assert source.model is not None
    return read_adapter(folder).updates(source.config, source.model.family)


def logits(model: Any) -> Tensor:
    """What a model of transformers computes of `TOKENS`."""
    with torch.no_grad():
        out: Tensor = model(TOKENS).logits
    return out


def read_canonical(folder: Path) -> dict[str, Tensor]:
    """All canonical tensors of a checkpoint of float32, flat."""
    source = open_source(folder)
    with CheckpointReader(source.catalogue, Files()) as reader:
        return {
            name: torch.from_numpy(
                reader.open_canonical(source.placement_of(name)).read().copy()
            ).view(source.view.canonical[name].shape)
            for name in source.view.canonical
        }


def add_updates(
    weights: Mapping[str, Tensor], updates: Mapping[str, WeightUpdate]
) -> dict[str, Tensor]:
    """Canonical weights with what an adapter adds to them, in float64."""
    out = {name: tensor.double() for name, tensor in weights.items()}
    for name, update in updates.items():
        up, down = (factor[:, :].double() for factor in (update.up, update.down))
        out[name] = out[name] + update.scale * (up @ down)
    return out


def decoder_logits(base: Path, updates: Mapping[str, WeightUpdate], tokens_BS: Tensor) -> Tensor:
    """What our decoder computes with the weights of a checkpoint and what is added to them."""
    (decoder,) = load_for_training(open_source(base), None, dtype="float32", threads=1)
    modules = {name.removesuffix(".weight"): update for name, update in updates.items()}
    views = WeightViews(decoder, modules)
    for module, update in modules.items():
        up, down = (factor[:, :].double() for factor in (update.up, update.down))
        delta = update.scale * (up @ down)
        views.write(module, (views.read(module).double() + delta).float())
    decoder.eval()
    with torch.inference_mode():
        return decoder(Batch(tokens_BS=tokens_BS)).clone()
