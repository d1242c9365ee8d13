"""The files Megatron-Bridge expects beside the data: run_config.yaml and train_state.pt."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from typing import Any

from megtool.convert.megatron.args import args_from_config
from megtool.convert.megatron.hybrid_pattern import PATTERN, parse_pattern, pattern_text
from megtool.convert.megatron.parallel_args import layout_args
from megtool.megatron_state.nemo_config import BRIDGE_FILE
from megtool.options.layout import ParallelConfig
from megtool.pickles.reader import Inert, PersistentRef, inert_global
from megtool.pickles.zip_writer import encode_object
from megtool.spec.model_config import ModelConfig

_PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
_LATENT_PROVIDER = "megatron.bridge.models.mla_provider.MLAModelProvider"
_HYBRID_PROVIDER = "megatron.bridge.models.hybrid.hybrid_provider.HybridModelProvider"
_ACTIVATIONS = {
    "silu": "torch.nn.functional.silu",
    "gelu": "torch.nn.functional.gelu",
    "relu2": "megatron.core.activations.squared_relu",
    "quick_gelu": "megatron.core.activations.quick_gelu",
}
_TANH_GELU = "megatron.core.activations.fast_gelu"

# Args whose names and meanings are those of the provider's fields.
_SHARED_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "attention_output_gate",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rope_scaling_factor",
    "gated_linear_unit",
    "make_vocab_size_divisible_by",
    "vocab_size",
    "seq_length",
    "window_size",
    "window_attn_skip_freq",
    "attention_dropout",
    "hidden_dropout",
    "softmax_type",
    "bf16",
    "fp16",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "moe_grouped_gemm",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
    "mtp_num_layers",
    "moe_latent_size",
    PATTERN,
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_state_dim",
    "mamba_num_groups",
    "experimental_attention_variant",
    "linear_attention_freq",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "kda_two_stage_gates",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_EXPERT_FIELDS = ("moe_router_topk", "moe_layer_freq", "moe_grouped_gemm")
_MLA_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def make_bridge_files(
    config: ModelConfig,
    parallel: ParallelConfig,
    *,
    dtype: str = "bfloat16",
    divisible_by: int = 128,
    iteration: int | None = None,
    has_optimizer: bool = False,
    existing: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """run_config.yaml and train_state.pt by their names; those in `existing` are kept.

    `divisible_by` is what the vocabulary is padded to, times TP, and `iteration` the step.
    """
    out = {
        BRIDGE_FILE: make_run_config(config, parallel, dtype, divisible_by, has_optimizer),
        "train_state.pt": make_train_state(iteration or 0),
    }
    return out | {name: data for name, data in (existing or {}).items() if name in out}


def edit_layout(data: bytes, parallel: ParallelConfig) -> bytes:
    """Set the sizes of parallel axes in the model's section of a run_config.yaml.

    Where they change, random state is not carried, and `save_rng` says so. Everything else stays
    byte for byte.
    """
    sizes = layout_args(parallel)
    text = data.decode("utf-8", "surrogateescape")
    model = _section("model").search(text)
    if model is None:
        return data
    changed = False

    def put(match: re.Match[str]) -> str:
        nonlocal changed
        new = f"{match[1]}{_scalar(sizes[match[2]])}"
        changed = changed or new != match[0]
        return new

    inner = _SIZE.sub(put, model[0])
    if changed:
        inner = _CUT_PATTERN.sub(lambda m: m[1] + _scalar(_recut(m[2], parallel)), inner)
    text = text[: model.start()] + inner + text[model.end() :]
    if changed and (section := _section("checkpoint").search(text)):
        new_section = re.sub(r"(?m)^(\s+save_rng: *)true *$", r"\1false", section[0])
        text = text[: section.start()] + new_section + text[section.end() :]
    return text.encode("utf-8", "surrogateescape")


def edit_model(data: bytes, changed: Mapping[str, Any]) -> bytes:
    """Set the fields in `changed` in the model's section of a run_config.yaml.

    A field has one line, or a list below it; a missing field is not added.
    """
    text = data.decode("utf-8", "surrogateescape")
    model = _section("model").search(text)
    if model is None:
        return data
    inner = model[0]
    for name, value in changed.items():
        field = rf"(?m)^( +{re.escape(name)}:)[^\n]*(?:\n +- [^\n]*)*$"
        spelled = _scalar(value).replace("\\", r"\\")
        inner = re.sub(field, rf"\g<1> {spelled}", inner)
    text = text[: model.start()] + inner + text[model.end() :]
    return text.encode("utf-8", "surrogateescape")


def _section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?m)^{name}:[^\n]*\n(?:(?:[ #][^\n]*)?\n)*")


_SIZE = re.compile(
    r"(?m)^(\s+((?:tensor_model|pipeline_model|virtual_pipeline_model|context|expert_model|"
    r"expert_tensor)_parallel_size): *)[^\n#]*"
)


_CUT_PATTERN = re.compile(rf"(?m)^( +{PATTERN}: *)['\"]?([^'\"\n]*\|[^'\"\n]*)['\"]?$")


def _recut(text: str, parallel: ParallelConfig) -> str:
    """A layer pattern with the chunks of a layout."""
    pattern = parse_pattern(text)
    return pattern_text(pattern.symbols, pattern.mtp, pattern.depths, parallel)


def make_run_config(
    config: ModelConfig,
    parallel: ParallelConfig,
    dtype: str = "bfloat16",
    divisible_by: int = 128,
    has_optimizer: bool = False,
) -> bytes:
    """A run_config.yaml from which Megatron-Bridge builds the model and loads the checkpoint.

    It has the two sections that loading reads; source: Megatron-Bridge of August 2026,
    `training/checkpointing.py` and `training/model_load_save.py`.
    """
    args = args_from_config(config, parallel, dtype=dtype, divisible_by=divisible_by)
    names = [n for n in _SHARED_FIELDS if config.moe.num_experts or n not in _EXPERT_FIELDS]
    model: dict[str, Any] = {
        "_target_": _provider(config, args),
        **{name: args[name] for name in names if args.get(name) is not None},
        "num_moe_experts": config.moe.num_experts or None,
        "activation_func": _target_entry(_ACTIVATIONS.get(config.mlp.activation, _TANH_GELU)),
        "share_embeddings_and_output_weights": config.embedding.tied_embeddings,
        "should_pad_vocab": True,
        "rope_scaling": bool(args.get("use_rope_scaling")),
        "params_dtype": _target_entry(f"torch.{dtype}"),
        "pipeline_dtype": _target_entry(f"torch.{dtype}"),
    }
    if config.latent.kv_lora_rank:
        model |= {name: args[name] for name in _MLA_FIELDS if args.get(name) is not None}
        model["multi_latent_attention"] = True
    checkpoint = {
        "save_optim": has_optimizer,
        "save_rng": False,
        "fully_parallel_save": True,
        "ckpt_format": "torch_dist",
    }
    lines: list[str] = []
    for section, fields in (("checkpoint", checkpoint), ("model", model)):
        lines.append(f"{section}:")
        lines += [f"  {name}: {_scalar(value)}" for name, value in sorted(fields.items())]
    return ("\n".join(lines) + "\n").encode()


def _provider(config: ModelConfig, args: Mapping[str, Any]) -> str:
    """The dataclass of Megatron-Bridge that builds the model."""
    if args.get(PATTERN):
        return _HYBRID_PROVIDER
    return _LATENT_PROVIDER if config.latent.kv_lora_rank else _PROVIDER


def make_train_state(step: int) -> bytes:
    """A train_state.pt at which training begins with this step; the samples seen are not known."""
    counts = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    tree: dict[str, Any] = {}
    for name in counts:
        value = step if name == "step" else 0
        tree[name] = _tensor("LongStorage", len(tree), struct.pack("<q", value))
    tree["floating_point_operations_so_far"] = _tensor(
        "DoubleStorage", len(tree), struct.pack("<d", 0.0)
    )
    for name in ("do_train", "do_valid", "do_test"):
        tree[name] = _tensor("BoolStorage", len(tree), b"\0")
    return encode_object(tree)


def _tensor(storage: str, number: int, data: bytes) -> Inert:
    """A 0-d tensor."""
    node = PersistentRef(("storage", inert_global("torch", storage), str(number), "cpu", 1))
    node.data = data
    hooks = inert_global("collections", "OrderedDict")()
    return inert_global("torch._utils", "_rebuild_tensor_v2")(node, 0, (), (), False, hooks)


def _target_entry(target: str) -> dict[str, Any]:
    """A function or dtype as such a file names it."""
    return {"_call_": False, "_target_": target}


def _scalar(value: Any) -> str:
    """A value as YAML reads it back: JSON, with a point in every float."""
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_scalar, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_scalar(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)
