"""Megatron's args namespace as a model's configuration, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.convert.config.blocks import block_limits
from megtool.convert.config.hybrid import gpt_form
from megtool.convert.config.indexer import has_steps
from megtool.convert.config.keys import num_layers
from megtool.convert.families.family import Family
from megtool.convert.language.expression import evaluate
from megtool.convert.megatron.mixer_args import mixer_args, mixer_fields
from megtool.convert.megatron.names import padded_multiple
from megtool.convert.megatron.parallel_args import layout_args
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

_NORMS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
_POSITIONS = {
    "learned": "learned_absolute",
    "rope": "rope",
    "relative": "relative",
    "alibi": "alibi",  # as Megatron-DeepSpeed has it
    "none": "none",
}
# With a pattern, pipeline chunks and further layers are part of it.
_CUT_BY_PATTERN: dict[str, Any] = {
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
}
_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def config_from_args(args: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a checkpoint's args (`vars(namespace)`) hold.

    A HybridModel whose layers pair up (attention and an MLP) is described as the GPT model it is.

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
    expert_ffn = int(get("moe_ffn_hidden_size", ffn)) if experts else 0
    if experts and expert_ffn < 1:
        raise MappingError(f"moe_ffn_hidden_size is {expert_ffn}, with num_experts {experts}")
    fields: dict[str, Any] = dict(
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
        zero_centered_norm=bool(
            get("apply_layernorm_1p", False) or get("layernorm_zero_centered_gamma", False)
        ),
        gated=any(bool(get(x, False)) for x in ("swiglu", "quick_geglu", "gated_linear_unit")),
        activation=_activation(args),
        qkv_bias=linear_bias or bool(get("add_qkv_bias", False)),
        attn_out_bias=linear_bias,
        mlp_bias=linear_bias,
        qk_norm=bool(get("qk_layernorm", False)),
        attn_output_gate=bool(get("attention_output_gate", False)),
        position_embedding=_positions(args),
        alibi_bias_max=get("alibi_bias_max", 8.0),
        rotary_percent=float(get("rotary_percent", 1.0)),
        rope_base=float(get("rotary_base", 10000)),
        rope_scaling=_scaling(args),
        no_rope_layers=_no_rope(args),
        num_token_types=int(get("num_tokentypes", 0)),
        **_window(args),
        num_experts=experts,
        num_experts_per_token=int(get("moe_router_topk", 0)) if experts else 0,
        moe_ffn_hidden_size=expert_ffn,
        shared_ffn_hidden_size=int(get("moe_shared_expert_intermediate_size", 0)),
        moe_layer_freq=tuple(freq) if isinstance(freq, list | tuple) else int(freq),
    )
    return gpt_form(ModelConfig.from_fields(**fields | moe_fields(args) | mixer_fields(args)))


def args_from_config(
    config: ModelConfig,
    parallel: ParallelConfig | None = None,
    *,
    dtype: str = "bfloat16",
    divisible_by: int = 128,
    base_args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Args complete enough for Megatron's `--use-checkpoint-args`, as plain values.

    `dtype` is the model's (`params_dtype` is left to the caller as a name, since only torch can
    hold it as an object). `base_args` are args the checkpoint already had: they are kept, and what
    depends on the layout is updated.
    """
    positions = config.positions
    sizes = parallel or ParallelConfig()
    pad = padded_multiple(sizes.tp, divisible_by)
    is_gqa = config.attention.num_kv_heads != config.attention.num_heads
    llama3 = _is_llama3(config)
    experts = config.moe.num_experts or None
    model: dict[str, Any] = {
        "num_layers": config.num_layers,
        "encoder_num_layers": config.num_layers,
        **_encoder_decoder_args(config),
        **_alibi_args(config),
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.mlp.ffn_hidden_size,
        "num_attention_heads": config.attention.num_heads,
        "group_query_attention": is_gqa,
        "num_query_groups": config.attention.num_kv_heads,
        "kv_channels": config.attention.head_dim,
        "vocab_size": config.embedding.vocab_size,
        "seq_length": positions.max_positions,
        "max_position_embeddings": positions.max_positions,
        "position_embedding_type": _POSITIONS[positions.position_embedding],
        "add_position_embedding": positions.position_embedding == "learned",
        "use_rotary_position_embeddings": positions.position_embedding == "rope",
        "rotary_base": _whole(positions.rope_base),
        "rotary_percent": positions.rotary_percent,
        "rotary_interleaved": positions.rope_interleaved,
        "use_rope_scaling": llama3,
        "rope_scaling_factor": (positions.rope_scaling or {}).get("factor", 8.0) if llama3 else 8.0,
        "add_bias_linear": config.mlp.mlp_bias,
        "add_qkv_bias": config.attention.qkv_bias and not config.mlp.mlp_bias,
        "swiglu": config.mlp.gated and config.mlp.activation == "silu",
        "gated_linear_unit": config.mlp.gated,
        "squared_relu": config.mlp.activation == "relu2" and not config.mlp.gated,
        "openai_gelu": config.mlp.activation in _TANH_GELUS and not config.mlp.gated,
        "untie_embeddings_and_output_weights": not config.embedding.tied_embeddings,
        "normalization": next(k for k, v in _NORMS.items() if v == config.norms.norm),
        "norm_epsilon": config.norms.norm_eps,
        "layernorm_epsilon": config.norms.norm_eps,
        "apply_layernorm_1p": config.norms.zero_centered_norm,
        "layernorm_zero_centered_gamma": config.norms.zero_centered_norm,
        "apply_query_key_layer_scaling": False,
        "qk_layernorm": config.norms.qk_norm,
        "attention_output_gate": config.attention.attn_output_gate,
        "window_size": _sides(config) if config.window.window_size else None,
        "window_attn_skip_freq": list(config.window.window_skip_freq)
        if isinstance(config.window.window_skip_freq, tuple)
        else config.window.window_skip_freq,
        "no_rope_freq": list(positions.no_rope_layers) if positions.no_rope_layers else None,
        "num_tokentypes": config.embedding.num_token_types,
        "bert_binary_head": "ForPreTraining" in str(config.extra.get("architectures")),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": experts,
        "moe_ffn_hidden_size": config.moe.moe_ffn_hidden_size or None,
        "moe_router_topk": config.moe.num_experts_per_token if experts else 2,
        "moe_layer_freq": list(config.moe.moe_layer_freq)
        if isinstance(config.moe.moe_layer_freq, tuple)
        else config.moe.moe_layer_freq,
        "moe_shared_expert_intermediate_size": config.moe.shared_ffn_hidden_size or None,
        "moe_grouped_gemm": bool(experts),
        **moe_args(config),
    }
    layout: dict[str, Any] = {
        "padded_vocab_size": -(-config.embedding.vocab_size // pad) * pad,
        "make_vocab_size_divisible_by": divisible_by,
        **layout_args(sizes, config.num_layers),
    }
    mixers = mixer_args(config, sizes, base_args or {})
    if is_hybrid := "hybrid_layer_pattern" in mixers:
        layout |= _CUT_BY_PATTERN
    args: dict[str, Any] = {
        "params_dtype": dtype,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "ckpt_format": "torch_dist",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    if (
        not base_args
    ):  # whose layers a checkpoint of Megatron's is made of, only its own args can say
        args["transformer_impl"] = "transformer_engine"
    known = dict(base_args or {})
    if is_hybrid or known.get("num_layers") != config.num_layers:  # of another class of model
        counted = ("num_layers", "encoder_num_layers", "moe_layer_freq", "mtp_num_layers")
        known |= {k: model[k] for k in counted if k in known}
    return {**model, **args, **known, **mixers, **layout}


def megatron_limits(config: ModelConfig, family: Family | None = None) -> list[str]:
    """The features of this model that Megatron cannot run, one sentence each; its tensors still
    convert.

    Megatron has one switch for the biases of all linear layers, and one for the fused attention
    rows alone; its rotary scaling is Llama 3's; its MLP comes after attention; and of gated
    activations its args know SiLU alone. The rest a family says of itself.
    """
    out = [
        message
        for condition, message in (family.limits if family else ())
        if evaluate(condition, config)
    ]
    if config.positions.position_embedding == "alibi":
        out.append("Megatron-core has no slopes of attention scores (ALiBi)")
    if layer_sets.parallel_layers(config):
        out.append("Megatron-core has no layer with several mixers side by side")
    if not has_steps(config):
        out.append("Megatron gives an indexer to every n-th layer, and this model to others")
    if config.residual.parallel_residual:
        out.append("attention and MLP in parallel: Megatron runs the MLP after attention")
    if config.mlp.gated and config.mlp.activation in ("gelu", *_TANH_GELUS):
        out.append(f"a gated MLP with {config.mlp.activation!r} has to be set by hand in Megatron")
    if config.positions.rope_local_base not in (None, config.positions.rope_base):
        out.append("Megatron has one rotary base, not another for layers with a window")
    if config.attention.attn_out_bias != config.mlp.mlp_bias:
        out.append(
            f"attn_out_bias={config.attention.attn_out_bias} with mlp_bias={config.mlp.mlp_bias}: "
            "Megatron has both biases or neither"
        )
    if config.mlp.mlp_bias and not config.attention.qkv_bias:
        out.append("mlp_bias without qkv_bias: Megatron has both")
    if config.positions.rope_scaling is not None and not _is_llama3(config) and not is_yarn(config):
        kind = config.positions.rope_scaling.get("rope_type")
        out.append(f"rotary scaling of type {kind!r} has to be set by hand in Megatron")
    return out + block_limits(config)


def _is_gqa(args: Mapping[str, Any]) -> bool:
    return bool(args.get("group_query_attention"))


def _is_llama3(config: ModelConfig) -> bool:
    return (
        config.positions.rope_scaling is not None
        and config.positions.rope_scaling.get("rope_type") == "llama3"
    )


def _activation(args: Mapping[str, Any]) -> str:
    if args.get("swiglu"):
        return "silu"
    if args.get("quick_geglu"):
        return "quick_gelu"
    if args.get("squared_relu"):
        return "relu2"
    return "gelu_pytorch_tanh" if args.get("openai_gelu") else "gelu"


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


def _positions(args: Mapping[str, Any]) -> str:
    """Absent in args older than the choice, which had a flag for learned positions."""
    declared = args.get("position_embedding_type")
    if declared is None:
        is_learned = args.get("add_position_embedding") and not args.get(
            "use_rotary_position_embeddings"
        )
        return "learned" if is_learned else "rope"
    if declared in ("yarn", "mrope"):
        return "rope"
    return next(
        (ours for ours, megatron_name in _POSITIONS.items() if megatron_name == declared),
        str(declared),
    )


def _window(args: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron counts the tokens to the left of the one that attends."""
    left = (args.get("window_size") or (-1, 0))[0]
    if left < 0:
        return {}
    freq = args.get("window_attn_skip_freq")
    return {
        "window_size": left + 1,
        "window_skip_freq": tuple(freq) if isinstance(freq, list | tuple) else freq,
    }


def _encoder_decoder_args(config: ModelConfig) -> dict[str, Any]:
    """Args of T5's that no other model has."""
    if not config.num_decoder_layers:
        return {}
    return {
        "decoder_num_layers": config.num_decoder_layers,
        "relative_attention_num_buckets": config.positions.relative_num_buckets,
        "relative_attention_max_distance": config.positions.relative_max_distance,
    }


def _alibi_args(config: ModelConfig) -> dict[str, Any]:
    """An arg of our own, which Megatron has none for."""
    is_alibi = config.positions.position_embedding == "alibi"
    return {"alibi_bias_max": config.positions.alibi_bias_max} if is_alibi else {}


def _sides(config: ModelConfig) -> tuple[int, int]:
    """How many tokens before and behind its own one attends to, within a window."""
    side = config.window.window_size - 1
    return side, side if config.bidirectional else 0


def _no_rope(args: Mapping[str, Any]) -> tuple[int, ...] | None:
    """One flag per layer; n means that every n-th layer has no rotary embedding."""
    freq = args.get("no_rope_freq")
    if not freq:
        return None
    if isinstance(freq, int):
        return tuple(int((i + 1) % freq == 0) for i in range(num_layers(args)))
    return tuple(int(f) for f in freq)


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value


# Keys of a rotary scaling of type `yarn`, as Megatron's args call them with latent attention and
# without, and what Megatron takes where nothing is said.
_YARN = (
    ("factor", "rotary_scaling_factor", 1.0),
    ("original_max_position_embeddings", "original_max_position_embeddings", 4096),
    ("beta_fast", "beta_fast", 32.0),
    ("beta_slow", "beta_slow", 1.0),
    ("mscale", "mscale", 1.0),
    ("mscale_all_dim", "mscale_all_dim", 0.0),
)
_ROUND = ("truncate", "yarn_correction_range_round_to_int")


def moe_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from args; those missing in args are omitted."""

    def get(name: str, default: Any) -> Any:
        value = args.get(name)
        return default if value is None else value

    mtp = int(get("mtp_num_layers", 0))
    out: dict[str, Any] = {
        "router_score": str(get("moe_router_score_function", "softmax")),
        "router_pre_softmax": bool(get("moe_router_pre_softmax", False)),
        "router_scaling": float(get("moe_router_topk_scaling_factor", 1.0)),
        "router_num_groups": int(get("moe_router_num_groups", 0)),
        "router_topk_groups": int(get("moe_router_group_topk", 0)),
        "router_expert_bias": bool(get("moe_router_enable_expert_bias", False)),
        "shared_expert_gate": bool(get("moe_shared_expert_gate", False)),
        "attn_sinks": get("softmax_type", "vanilla") == "learnable",
        "rope_interleaved": bool(get("rotary_interleaved", False)),
        "activation_limit": float(get("activation_func_clamp_value", 0.0)),
        "glu_offset": float(get("glu_linear_offset", 0.0)),
        "qk_l2_norm": bool(get("qk_l2_norm", False)),
        "router_scales_input": bool(get("moe_apply_probs_on_input", False)),
        "router_fp32": get("moe_router_dtype", None) is not None,
        "num_mtp_layers": min(mtp, 1) if get("mtp_use_repeated_layer", False) else mtp,
    }
    if get("multi_latent_attention", False):
        rope, nope = int(get("qk_pos_emb_head_dim", 64)), int(get("qk_head_dim", 128))
        out |= {
            "q_lora_rank": int(get("q_lora_rank", 0)),
            "kv_lora_rank": int(get("kv_lora_rank", 32)),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": int(get("v_head_dim", 128)),
            "head_dim": nope + rope,
            "num_kv_heads": int(args["num_attention_heads"]),
        }
        if get("rope_type", "yarn") == "yarn" and get("rotary_scaling_factor", 1.0) != 1:
            out["rope_scaling"] = _yarn(args, "")
    elif get("position_embedding_type", "") == "yarn":
        out["rope_scaling"] = _yarn(args, "yarn_")
    return out


def _yarn(args: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    values = {ours: args.get(prefix + megatron_name) for ours, megatron_name, _ in _YARN}
    values[_ROUND[0]] = args.get(_ROUND[1])
    return {"rope_type": "yarn"} | {k: v for k, v in values.items() if v is not None}


def moe_args(config: ModelConfig) -> dict[str, Any]:
    """Args from the fields of ModelConfig that `moe_fields` reads."""
    scaling = config.router.router_scaling
    is_quick = config.mlp.gated and config.mlp.activation == "quick_gelu"
    out: dict[str, Any] = {
        "moe_router_score_function": config.router.router_score,
        "moe_router_pre_softmax": config.router.router_pre_softmax,
        "moe_router_topk_scaling_factor": scaling if scaling != 1 else None,
        "moe_router_num_groups": config.router.router_num_groups or None,
        "moe_router_group_topk": config.router.router_topk_groups or None,
        "moe_router_enable_expert_bias": config.router.router_expert_bias,
        "moe_shared_expert_gate": config.moe.shared_expert_gate,
        "softmax_type": "learnable" if config.attention.attn_sinks else "vanilla",
        "quick_geglu": is_quick,
        "glu_linear_offset": config.mlp.glu_offset,
        "activation_func_clamp_value": config.mlp.activation_limit or None,
        "qk_l2_norm": config.norms.qk_l2_norm,
        "moe_apply_probs_on_input": config.router.router_scales_input,
        "moe_router_dtype": "fp32" if config.router.router_fp32 else None,
        "mtp_num_layers": config.mtp.num_mtp_layers or None,
        "multi_latent_attention": bool(config.latent.kv_lora_rank),
    }
    yarn = config.positions.rope_scaling if is_yarn(config) else None
    if config.latent.kv_lora_rank:
        out |= {
            "q_lora_rank": config.latent.q_lora_rank or None,
            "kv_lora_rank": config.latent.kv_lora_rank,
            "qk_head_dim": config.latent.qk_nope_head_dim,
            "qk_pos_emb_head_dim": config.latent.qk_rope_head_dim,
            "v_head_dim": config.attention.v_head_dim,
            "rope_type": "yarn" if yarn else "rope",
        }
    if yarn:
        prefix = "" if config.latent.kv_lora_rank else "yarn_"
        out |= {
            prefix + megatron_name: yarn.get(ours, default)
            for ours, megatron_name, default in _YARN
        }
        if not config.latent.kv_lora_rank:
            absent = {f"yarn_{k}": None for k in ("mscale", "mscale_all_dim") if k not in yarn}
            out |= absent | {
                "position_embedding_type": "yarn",
                _ROUND[1]: yarn.get(_ROUND[0], True),
            }
    return out


def is_yarn(config: ModelConfig) -> bool:
    """Whether the rotary scaling is YaRN's, which Megatron's args can express."""
    positions = config.positions
    return positions.rope_scaling is not None and positions.rope_scaling.get("rope_type") == "yarn"
