"""Where a Hugging Face folder says how it is quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUANT_FILE = "hf_quant_config.json"
"""Where ModelOpt describes the quantization, in addition to (or instead of) config.json."""

QUANT_KEYS = ("quantization_config", "compression_config", "quantization")
"""The keys of config.json that describe the quantization; the last is MLX's."""

METHOD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which AutoGPTQ and AutoAWQ described the quantization before config.json had it."""

TRANSFORMS_KEY = "transform_config"
"""The key of a quantization config that describes rotations, in the form of compressed-tensors.

A folder that is not quantized has it in config.json itself: engines stop at a quantization config
without a format.
"""


def quantization_config(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization config of a folder, with a `quant_method`; None if there is none."""
    config = metadata.get("config")
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")
    for candidate in (config, text if isinstance(text, dict) else {}):
        for key in QUANT_KEYS:
            section = candidate.get(key)
            if isinstance(section, dict):
                return with_method(section)
    modelopt_config = metadata.get("hf_quant_config")
    if isinstance(modelopt_config, dict) and isinstance(modelopt_config.get("quantization"), dict):
        return {"quant_method": "modelopt", **modelopt_config["quantization"]}
    described = metadata.get("method_config")
    return described if isinstance(described, dict) else None


def with_method(section: dict[str, Any]) -> dict[str, Any]:
    """Return the section with a `quant_method`: MLX's has none, and says group size and bits."""
    is_mlx = "quant_method" not in section and {"group_size", "bits"} <= section.keys()
    return {"quant_method": "mlx", **section} if is_mlx else section


def without_quantization(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of the same folder if it were not quantized. Rotations stay."""
    out = {k: v for k, v in metadata.items() if k not in ("hf_quant_config", "method_config")}
    transforms = transform_config(metadata)
    config = out.get("config")
    if isinstance(config, dict):
        out["config"] = _without_keys(config)
        if isinstance(text := config.get("text_config"), dict):
            out["config"]["text_config"] = _without_keys(text)
        if transforms is not None:
            out["config"][TRANSFORMS_KEY] = transforms
    return out


def _without_keys(section: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in section.items() if k not in QUANT_KEYS}


def transform_config(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a folder says that its weights are rotated; None if it does not."""
    for section in (quantization_config(metadata), metadata.get("config")):
        transforms = section.get(TRANSFORMS_KEY) if isinstance(section, dict) else None
        if transforms and isinstance(transforms, dict):
            return transforms
    return None


_OFFLINE_LOCATIONS = ("weight_input", "weight_output")
"""Where a rotation is in the weights already (compressed-tensors, `TransformLocation`)."""


def online_transforms(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The rotations of a quantization config that an engine has to compute, as `group: location`.

    What is not understood counts as one.
    """
    transforms = config.get(TRANSFORMS_KEY)
    if not transforms:
        return ()
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    if not isinstance(groups, dict):
        return ("transform_config: no config_groups",)
    out: list[str] = []
    for name, scheme in groups.items():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        for args in applied if isinstance(applied, list) else [None]:
            location = args.get("location") if isinstance(args, dict) else None
            if location not in _OFFLINE_LOCATIONS:
                out.append(f"{name}: {location}")
    return tuple(dict.fromkeys(out))
