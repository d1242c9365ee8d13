"""The model in NeMo's and Megatron-Bridge's YAML, as Megatron-LM's args.

NeMo 1 has `model_config.yaml` next to `model_weights/`, which names settings itself. NeMo 2 writes
`context/model.yaml` next to `weights/`, Megatron-Bridge `run_config.yaml` into every iteration;
none keeps args. These two describe a dataclass by `_target_` and its fields. It is read as plain
data: nothing that a target names is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.convert.megatron.hybrid_pattern import OLD_PATTERN, PATTERN
from megtool.convert.megatron.names import EMBEDDING, split_state
from megtool.errors import FormatError, MappingError
from megtool.formats.auxiliary_files import NEMO_1_CONFIG
from megtool.formats.plain_yaml import read_yaml
from megtool.tensors.catalogue import Catalogue

NEMO_FILE, BRIDGE_FILE = "context/model.yaml", "run_config.yaml"

_RENAMED = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "rope_scaling": "use_rope_scaling",
}
_ACTIVATIONS = {
    "silu": "swiglu",
    "squared_relu": "squared_relu",
    "relu2": "squared_relu",
    "openai_gelu": "openai_gelu",
    "fast_gelu": "openai_gelu",
    "gelu_pytorch_tanh": "openai_gelu",
    "quick_gelu": "quick_geglu",
}
# What NeMo's and Bridge's dataclasses take where Megatron's args would take something else.
_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "transformer_engine",
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
}
_HYBRID_DEFAULTS = {"position_embedding_type": "none", "normalization": "RMSNorm"}
_HYBRID_KEYS = (PATTERN, OLD_PATTERN)


def read_foreign_args(catalogue: Catalogue) -> dict[str, Any] | None:
    """The args of the model in the checkpoint's YAML, as plain values; None without YAML.

    Raises:
        FormatError: the file is invalid, or describes no model.
        MissingPackageError: reading it needs PyYAML.
    """
    if (path := catalogue.auxiliary_files.get(NEMO_1_CONFIG)) is not None:
        value = read_yaml(path)
        if not isinstance(value, dict) or "num_attention_heads" not in value:
            raise FormatError("it describes no model", file=path)
        return args_from_nemo_1(value) | _vocabulary_args(catalogue)
    for name, key in ((BRIDGE_FILE, "model"), (NEMO_FILE, "config")):
        path = catalogue.auxiliary_files.get(name)
        if path is None:
            continue
        value = read_yaml(path)
        section = value.get(key) if isinstance(value, dict) else None
        if not isinstance(section, dict) or not all(isinstance(k, str) for k in section):
            raise FormatError(f"it has no section {key!r} that describes a model", file=path)
        return args_from_section(section) | _vocabulary_args(catalogue)
    return None


_NEMO_1_RENAMED = {
    "encoder_seq_length": "seq_length",
    "layernorm_epsilon": "norm_epsilon",
    "rotary_percentage": "rotary_percent",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "num_moe_experts": "num_experts",
}
_NEMO_1_NORMS = {
    "layernorm": "LayerNorm",
    "layernorm1p": "LayerNorm",
    "low_precision_layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
}
_NEMO_1_ACTIVATIONS = {
    "swiglu": {"swiglu": True},
    "fast-swiglu": {"swiglu": True},
    "squared-relu": {"squared_relu": True},
    "gelu": {},
    "openai-gelu": {"openai_gelu": True},
}


def args_from_nemo_1(config: Mapping[str, Any]) -> dict[str, Any]:
    """The args of a model from NeMo 1's `model_config.yaml`.

    Source: `megatron_gpt_config.yaml` and `MegatronGPTModel` of NeMo 1.23.

    Raises:
        MappingError: an activation or a norm that has no arg of Megatron's.
    """
    out = dict(_DEFAULTS)
    for name, value in config.items():
        if isinstance(value, bool | int | float | str | list) and isinstance(name, str):
            out[_NEMO_1_RENAMED.get(name, name)] = value
    norm = str(config.get("normalization", "layernorm1p")).lower()
    activation = str(config.get("activation", "gelu")).lower()
    if norm not in _NEMO_1_NORMS or activation not in _NEMO_1_ACTIVATIONS:
        setting = f"normalization {norm!r}" if norm not in _NEMO_1_NORMS else repr(activation)
        raise MappingError(
            f"{NEMO_1_CONFIG} says {setting}, which is not known",
            hint="--like HF_FOLDER gives the configuration instead",
            error_id="unsupported-model",
        )
    heads, groups = config.get("num_attention_heads"), config.get("num_query_groups")
    return {
        **{k: v for k, v in out.items() if k not in ("activation", "precision")},
        **_NEMO_1_ACTIVATIONS[activation],
        "normalization": _NEMO_1_NORMS[norm],
        "apply_layernorm_1p": norm == "layernorm1p",
        "group_query_attention": groups is not None and groups != heads,
        "untie_embeddings_and_output_weights": not config.get(
            "share_embeddings_and_output_weights", True
        ),
    }


def args_from_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """The args of a model from a dataclass's fields, with those of an inner `transformer`."""
    inner = section.get("transformer")
    fields = {**(inner if isinstance(inner, dict) else {}), **section}
    is_hybrid = _target_name(section).startswith("Hybrid") or any(map(fields.get, _HYBRID_KEYS))
    out = _DEFAULTS | (_HYBRID_DEFAULTS if is_hybrid else {})
    for name, value in fields.items():
        if isinstance(value, bool | int | float | str | list | tuple):
            out[_RENAMED.get(name, name)] = value
    if function := _target_name(fields.get("activation_func")):
        out["activation_func"] = function
    out.setdefault("bias_activation_fusion", False)
    out["use_mcore_models"] = True
    heads, groups = fields.get("num_attention_heads"), fields.get("num_query_groups")
    out["group_query_attention"] = groups is not None and groups != heads
    is_gated = fields.get("gated_linear_unit") is True
    activation = _ACTIVATIONS.get(_target_name(fields.get("activation_func")), "")
    # SwiGLU and quick GeGLU are gated; without a gate Megatron's args know neither.
    if activation in ("openai_gelu", "squared_relu") or (activation and is_gated):
        out[activation] = True
    out["untie_embeddings_and_output_weights"] = not fields.get(
        "share_embeddings_and_output_weights", not is_hybrid
    )
    if "seq_length" in out:
        out.setdefault("max_position_embeddings", out["seq_length"])
    if (
        isinstance(factor := fields.get("scale_factor"), int | float)
        and "old_context_len" in fields
    ):
        out |= {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}  # NeMo's Llama 3.1
    if _target_name(section).startswith(("MLA", "DeepSeek")) or isinstance(
        fields.get("kv_lora_rank"), int
    ):
        out["multi_latent_attention"] = True
    for name in ("params_dtype", "pipeline_dtype"):
        out.pop(name, None)
    return out


def _target_name(value: Any) -> str:
    """The last part of what a field names: a function, a class, or text."""
    name = value.get("_target_") if isinstance(value, dict) else value
    return str(name).rpartition(".")[2] if isinstance(name, str) else ""


def _vocabulary_args(catalogue: Catalogue) -> dict[str, Any]:
    """The padded vocabulary size, which neither file has."""
    for t in catalogue.tensors:
        state, _, key = split_state(t.name)
        if not state and key == EMBEDDING and t.shape:
            return {"padded_vocab_size": t.shape[0]}
    return {}
