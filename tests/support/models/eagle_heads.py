"""Models with an EAGLE-3 head as ModelOpt builds, runs and exports them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megtool.train.features.eagle_head import norm_states_once

SIZES = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def modelopt_eagle(model: Path, eagle_config: dict[str, Any]) -> Any:
    """ModelOpt's model: that of a folder as Transformers loads it, with a head (not trained) that
    norms states once."""
    import modelopt.torch.speculative as mtsp
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = mtsp.convert(base, [("eagle", eagle_config | {"eagle_offline": False})])
    out.eagle_module.rotary_emb = LlamaRotaryEmbedding(config=out.eagle_config)
    norm_states_once(out.eagle_module)
    return out


def save_head(model: Any, folder: Path) -> Path:
    """Export the head of ModelOpt's model."""
    model.get_exporter().export(folder)
    return folder
