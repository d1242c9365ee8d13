"""Where a Hugging Face folder says how it is quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUANT_FILE = "hf_quant_config.json"
"""Where ModelOpt describes the quantization, in addition to (or instead of) config.json."""

QUANT_KEYS = ("quantization_config", "compression_config")
"""The keys of config.json that describe the quantization."""


def quantization_config(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization config of a folder, with a `quant_method`; None if there is none."""
    config = metadata.get("config")
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")
    for candidate in (config, text if isinstance(text, dict) else {}):
        for key in QUANT_KEYS:
            section = candidate.get(key)
            if isinstance(section, dict):
                return section
    modelopt_config = metadata.get("hf_quant_config")
    if isinstance(modelopt_config, dict) and isinstance(modelopt_config.get("quantization"), dict):
        return {"quant_method": "modelopt", **modelopt_config["quantization"]}
    return None
