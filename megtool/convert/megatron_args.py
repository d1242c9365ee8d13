"""Megatron's args namespace as a model's configuration, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.config import ModelConfig, ParallelConfig
from megtool.convert.megatron import padded_multiple
from megtool.errors import MappingError

_NORMS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}


def config_from_args(args: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a checkpoint's args (`vars(namespace)`) hold.

    `vocab_size` is the true size where args know it, otherwise the padded one counts as true.

    Raises:
        MappingError: a field is missing, or Megatron's model is one megtool cannot describe.
    """

    def get(name: str, default: Any = None) -> Any:
        value = args.get(name)
        return default if value is None else value

    def need(name: str) -> Any:
        if args.get(name) is None:
            raise MappingError(
                f"the checkpoint's args lack {name!r}", hint="give --like a folder with config.json"
            )
        return args[name]

    normalization = get("normalization", "LayerNorm")
    if normalization not in _NORMS:
        raise MappingError(f"normalization is {normalization!r}", hint="RMSNorm or LayerNorm")
    heads, hidden = int(need("num_attention_heads")), int(need("hidden_size"))
    linear_bias, experts = bool(get("add_bias_linear", True)), int(get("num_experts", 0))
    ffn, freq = int(get("ffn_hidden_size", 4 * hidden)), get("moe_layer_freq", 1)
    return ModelConfig(
        num_layers=int(need("num_layers")),
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_heads=heads,
        num_kv_heads=int(get("num_query_groups", heads)) if _is_gqa(args) else heads,
        head_dim=int(get("kv_channels", hidden // heads)),
        vocab_size=int(get("vocab_size", 0)) or int(need("padded_vocab_size")),
        max_positions=int(get("max_position_embeddings", get("seq_length", 2048))),
        tied_embeddings=not get("untie_embeddings_and_output_weights", False),
        norm=_NORMS[normalization],
        norm_eps=float(get("norm_epsilon", get("layernorm_epsilon", 1e-5))),
        gated=bool(get("swiglu", False)),
        activation=_activation(args),
        qkv_bias=linear_bias or bool(get("add_qkv_bias", False)),
        attn_out_bias=linear_bias,
        mlp_bias=linear_bias,
        qk_norm=bool(get("qk_layernorm", False)),
        attn_output_gate=bool(get("attention_output_gate", False)),
        rope_base=float(get("rotary_base", 10000)),
        rope_scaling=_scaling(args),
        num_experts=experts,
        num_experts_per_token=int(get("moe_router_topk", 0)) if experts else 0,
        moe_ffn_hidden_size=int(get("moe_ffn_hidden_size", ffn)) if experts else 0,
        shared_ffn_hidden_size=int(get("moe_shared_expert_intermediate_size", 0)),
        moe_layer_freq=tuple(freq) if isinstance(freq, list | tuple) else int(freq),
    )


def args_from_config(
    config: ModelConfig,
    parallel: ParallelConfig | None = None,
    *,
    dtype: str = "bfloat16",
    divisible_by: int = 128,
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Args complete enough for Megatron's `--use-checkpoint-args`, as plain values.

    `dtype` is the model's (`params_dtype` is left to the caller as a name, since only torch can
    hold it as an object). `known` are args the checkpoint already had: they are kept, and what
    depends on the layout is updated.
    """
    sizes = parallel or ParallelConfig()
    pad = padded_multiple(sizes.tp, divisible_by)
    is_gqa = config.num_kv_heads != config.num_heads
    llama3 = _is_llama3(config)
    experts = config.num_experts or None
    model: dict[str, Any] = {
        "num_layers": config.num_layers,
        "encoder_num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_heads,
        "group_query_attention": is_gqa,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "vocab_size": config.vocab_size,
        "seq_length": config.max_positions,
        "max_position_embeddings": config.max_positions,
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "rotary_base": _whole(config.rope_base),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": llama3,
        "rope_scaling_factor": (config.rope_scaling or {}).get("factor", 8.0) if llama3 else 8.0,
        "add_bias_linear": config.mlp_bias,
        "add_qkv_bias": config.qkv_bias and not config.mlp_bias,
        "swiglu": config.gated and config.activation == "silu",
        "squared_relu": config.activation == "relu2",
        "untie_embeddings_and_output_weights": not config.tied_embeddings,
        "normalization": next(k for k, v in _NORMS.items() if v == config.norm),
        "norm_epsilon": config.norm_eps,
        "layernorm_epsilon": config.norm_eps,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "qk_layernorm": config.qk_norm,
        "attention_output_gate": config.attn_output_gate,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": experts,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size or None,
        "moe_router_topk": config.num_experts_per_token if experts else 2,
        "moe_layer_freq": list(config.moe_layer_freq)
        if isinstance(config.moe_layer_freq, tuple)
        else config.moe_layer_freq,
        "moe_shared_expert_intermediate_size": config.shared_ffn_hidden_size or None,
        "moe_grouped_gemm": bool(experts),
    }
    layout: dict[str, Any] = {
        "padded_vocab_size": -(-config.vocab_size // pad) * pad,
        "make_vocab_size_divisible_by": divisible_by,
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": (
            config.num_layers // (sizes.pp * sizes.vpp) if sizes.vpp > 1 else None
        ),
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
        "context_parallel_size": sizes.cp,
        "data_parallel_size": sizes.dp,
        "world_size": sizes.world_size,
    }
    rest: dict[str, Any] = {
        "params_dtype": dtype,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "ckpt_format": "torch_dist",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    return {**model, **rest, **(known or {}), **layout}


def megatron_limits(config: ModelConfig) -> list[str]:
    """What Megatron cannot run of this model: one sentence each; its tensors convert all the same.

    Megatron has one switch for the biases of all linear layers, and one for the fused attention
    rows alone; and its rotary scaling is Llama 3's.
    """
    out = []
    if config.attn_out_bias != config.mlp_bias:
        out.append(
            f"attn_out_bias={config.attn_out_bias} with mlp_bias={config.mlp_bias}: "
            "Megatron has both biases or neither"
        )
    if config.mlp_bias and not config.qkv_bias:
        out.append("mlp_bias without qkv_bias: Megatron has both")
    if config.rope_scaling is not None and not _is_llama3(config):
        kind = config.rope_scaling.get("rope_type")
        out.append(f"rotary scaling of type {kind!r} has to be set by hand in Megatron")
    return out


def _is_gqa(args: Mapping[str, Any]) -> bool:
    return bool(args.get("group_query_attention"))


def _is_llama3(config: ModelConfig) -> bool:
    return config.rope_scaling is not None and config.rope_scaling.get("rope_type") == "llama3"


def _activation(args: Mapping[str, Any]) -> str:
    if args.get("swiglu"):
        return "silu"
    return "relu2" if args.get("squared_relu") else "gelu"


def _scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Megatron fixes Llama 3's other numbers in code (frequency factors 1 and 4, context 8192)."""
    if not args.get("use_rope_scaling"):
        return None
    return {
        "rope_type": "llama3",
        "factor": float(args.get("rope_scaling_factor") or 8.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value
