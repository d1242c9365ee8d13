"""Megatron's args namespace as a model's configuration, both ways."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megtool.convert.config.blocks import block_limits
from megtool.convert.config.hybrid import gpt_form
from megtool.convert.config.indexer import has_steps
from megtool.convert.families.family import Family
from megtool.convert.language.canonical import VOCABULARY
from megtool.convert.language.expression import evaluate
from megtool.convert.megatron.activation_args import (
    activation_args,
    activation_fields,
    lost_activation,
)
from megtool.convert.megatron.hybrid_pattern import pattern_of
from megtool.convert.megatron.mixer_args import mixer_args, mixer_fields
from megtool.convert.megatron.names import padded_multiple
from megtool.convert.megatron.parallel_args import layout_args
from megtool.convert.megatron.rotary_args import (
    is_yarn,
    lost_scaling,
    position_kind,
    rotary_args,
    rotary_fields,
    yarn_args,
)
from megtool.convert.megatron.settings import find_unsupported, plain_args, refusal
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.spec.meaning import compare_functions
from megtool.spec.model_config import CONFIG_FIELDS, ModelConfig

_SHOWN_BY_TENSORS = frozenset(w.flag for w in VOCABULARY.values() if w.flag is not None)
_NORMS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
# With a pattern, pipeline chunks and further layers are part of it.
_CUT_BY_PATTERN: dict[str, Any] = {
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
}


def config_from_args(args: Mapping[str, Any], *, dropped: Collection[str] = ()) -> ModelConfig:
    """Return the configuration that a checkpoint's args (`vars(namespace)`) hold.

    A HybridModel whose layers pair up (attention and an MLP) is described as the GPT model it is.

    `vocab_size` is the true size where args know it, otherwise the padded one counts as true. Args
    that are `dropped` are read as if they were not there.

    Raises:
        MappingError: a field is missing, or Megatron's model is one megtool cannot describe; with
            the id `unsupported-setting`, an arg changes the model and is not supported.
    """
    plain = plain_args(args, dropped)
    if unsupported := find_unsupported(plain):
        raise refusal(unsupported)
    return read_plain_args(plain)


def read_plain_args(args: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration in args of plain values, whatever they have besides.

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
        **activation_fields(args),
        qkv_bias=linear_bias or bool(get("add_qkv_bias", False)),
        attn_out_bias=linear_bias,
        mlp_bias=linear_bias,
        qk_norm=bool(get("qk_layernorm", False)),
        attn_output_gate=bool(get("attention_output_gate", False)),
        position_embedding=position_kind(args),
        alibi_bias_max=get("alibi_bias_max", 8.0),
        num_token_types=int(get("num_tokentypes", 0)),
        **_window(args),
        num_experts=experts,
        num_experts_per_token=int(get("moe_router_topk", 0)) if experts else 0,
        moe_ffn_hidden_size=expert_ffn,
        shared_ffn_hidden_size=int(get("moe_shared_expert_intermediate_size", 0)),
        moe_layer_freq=tuple(freq) if isinstance(freq, list | tuple) else int(freq),
    )
    fields |= _scales(args) | rotary_fields(args)
    fields |= moe_fields(args) | mixer_fields(args)
    return gpt_form(ModelConfig.from_fields(**fields | _norm_fields(args, fields)))


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
    experts = config.moe.num_experts or None
    model: dict[str, Any] = {
        "num_layers": config.num_layers,
        "encoder_num_layers": config.num_layers,
        **_encoder_decoder_args(config),
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.mlp.ffn_hidden_size,
        "num_attention_heads": config.attention.num_heads,
        "group_query_attention": is_gqa,
        "num_query_groups": config.attention.num_kv_heads,
        "kv_channels": config.attention.head_dim,
        "vocab_size": config.embedding.vocab_size,
        "seq_length": positions.max_positions,
        "max_position_embeddings": positions.max_positions,
        **rotary_args(config),
        "add_bias_linear": config.mlp.mlp_bias,
        "add_qkv_bias": config.attention.qkv_bias and not config.mlp.mlp_bias,
        **activation_args(config),
        **_scale_args(config),
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
    if config.positions.rope_local_base not in (None, config.positions.rope_base):
        out.append("Megatron has one rotary base, not another for layers with a window")
    if config.attention.attn_out_bias != config.mlp.mlp_bias:
        out.append(
            f"attn_out_bias={config.attention.attn_out_bias} with mlp_bias={config.mlp.mlp_bias}: "
            "Megatron has both biases or neither"
        )
    if config.mlp.mlp_bias and not config.attention.qkv_bias:
        out.append("mlp_bias without qkv_bias: Megatron has both")
    out += [x for x in (lost_activation(config), lost_scaling(config)) if x is not None]
    out += _lost_fields(config, family)
    return out + block_limits(config)


def _lost_fields(config: ModelConfig, family: Family | None) -> list[str]:
    """Return what is read as another value where args are all that is left, a sentence each."""
    try:
        read = read_plain_args(plain_args(args_from_config(config)))
        if family is not None:
            read, _ = family.completed(read)
    except MappingError:  # without its tensors such a model is not described by args
        return []
    return [
        f"{name} is {value!r:.60}, which Megatron has no arg for: its own checkpoints mean "
        f"{computed!r:.60}"
        for name, (value, computed) in compare_functions(config, read).items()
        if CONFIG_FIELDS[name].megatron is None and name not in _SHOWN_BY_TENSORS
    ]


def _is_gqa(args: Mapping[str, Any]) -> bool:
    return bool(args.get("group_query_attention"))


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


def _sides(config: ModelConfig) -> tuple[int, int]:
    """How many tokens before and behind its own one attends to, within a window."""
    side = config.window.window_size - 1
    return side, side if config.bidirectional else 0


def _scales(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors of scores, embeddings and logits, muP's included.

    Latent attention has a factor of its own. Source of muP's: megatron-core 0.19.2,
    `TransformerConfig.__post_init__`.
    """

    def get(name: str, default: float | None) -> Any:
        return default if args.get(name) is None else float(args[name])

    hidden, heads = int(args["hidden_size"]), int(args["num_attention_heads"])
    size = int(args.get("kv_channels") or hidden // heads)
    scale, out = get("softmax_scale", None), dict[str, Any]()
    if args.get("use_mup"):
        width = hidden / get("mup_base_hidden_size", float(hidden))
        output = get("mup_output_mult", 1.0)
        out["embedding_scale"] = get("mup_embedding_mult", 1.0)
        out["logit_scale"] = 1 / width if output == 1 else output
        if scale is None:
            base = get("mup_base_head_dim", 1.0)
            scale = math.sqrt(base) / size ** get("mup_attn_scale_power", 1.0)
    if scale is not None and not math.isclose(scale, size**-0.5):
        out["softmax_scale"] = scale
    return out if not args.get("multi_latent_attention") else out | {"softmax_scale": None}


def _scale_args(config: ModelConfig) -> dict[str, Any]:
    """Return the args that `_scales` reads. Releases before 0.19 have none for embeddings and
    logits."""
    scale, size = config.attention.softmax_scale, config.attention.head_dim
    is_latent = bool(config.latent.kv_lora_rank)
    out: dict[str, Any] = {"softmax_scale": None if is_latent else scale}
    ends = (config.embedding.embedding_scale, config.head.logit_scale)
    if ends == (1.0, 1.0):
        return out
    if scale is None and not is_latent:
        out["softmax_scale"] = size**-0.5
    out |= {"use_mup": True, "mup_base_hidden_size": config.hidden_size}
    return out | {"mup_embedding_mult": ends[0], "mup_output_mult": ends[1]}


def _norm_fields(args: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether queries and keys are normalized without weights, and those that do not turn,
    too, as Megatron does; attention of hybrid models has no such norm."""
    without = fields.get("no_rope_layers")
    stands = fields.get("position_embedding") != "rope" or bool(without and any(without))
    has_norm = bool(args.get("qk_l2_norm")) and pattern_of(args) is None
    return {"qk_l2_norm": has_norm, "qk_l2_norm_unrotated": has_norm and stands}


def _softmax_type(config: ModelConfig) -> str:
    if config.attention.attn_zero_sinks:
        return "off-by-one"
    return "learnable" if config.attention.attn_sinks else "vanilla"


def _router_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return how experts are chosen in evaluation.

    With `sinkhorn` these are the best by a softmax over all, or by a sigmoid where a token gets but
    one; groups, scaling and biases play no part then.
    """

    def get(name: str, default: Any) -> Any:
        value = args.get(name)
        return default if value is None else value

    kind = args.get("moe_router_load_balancing_type")
    if kind == "sinkhorn" or kind in (["sinkhorn"], ("sinkhorn",)):
        is_one = int(get("moe_router_topk", 0)) == 1
        return {"router_score": "sigmoid" if is_one else "softmax", "router_pre_softmax": True}
    return {
        "router_score": str(get("moe_router_score_function", "softmax")),
        "router_pre_softmax": bool(get("moe_router_pre_softmax", False)),
        "router_scaling": float(get("moe_router_topk_scaling_factor", 1.0)),
        "router_num_groups": int(get("moe_router_num_groups", 0)),
        "router_topk_groups": int(get("moe_router_group_topk", 0)),
        "router_expert_bias": bool(get("moe_router_enable_expert_bias", False)),
    }


def moe_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from args; those missing in args are omitted."""

    def get(name: str, default: Any) -> Any:
        value = args.get(name)
        return default if value is None else value

    mtp = int(get("mtp_num_layers", 0))
    out: dict[str, Any] = {
        **(_router_fields(args) if int(get("num_experts", 0)) else {}),
        "shared_expert_gate": bool(get("moe_shared_expert_gate", False)),
        "attn_sinks": get("softmax_type", "vanilla") == "learnable",
        "attn_zero_sinks": get("softmax_type", "vanilla") == "off-by-one",
        "activation_limit": float(get("activation_func_clamp_value", 0.0)),
        "glu_offset": float(get("glu_linear_offset", 0.0)),
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
    return out


def moe_args(config: ModelConfig) -> dict[str, Any]:
    """Args from the fields of ModelConfig that `moe_fields` reads."""
    scaling = config.router.router_scaling
    out: dict[str, Any] = {
        "moe_router_score_function": config.router.router_score,
        "moe_router_pre_softmax": config.router.router_pre_softmax,
        "moe_router_topk_scaling_factor": scaling if scaling != 1 else None,
        "moe_router_num_groups": config.router.router_num_groups or None,
        "moe_router_group_topk": config.router.router_topk_groups or None,
        "moe_router_enable_expert_bias": config.router.router_expert_bias,
        "moe_shared_expert_gate": config.moe.shared_expert_gate,
        "softmax_type": _softmax_type(config),
        "glu_linear_offset": config.mlp.glu_offset,
        "activation_func_clamp_value": config.mlp.activation_limit or None,
        "qk_l2_norm": config.norms.qk_l2_norm,
        "moe_apply_probs_on_input": config.router.router_scales_input,
        "moe_router_dtype": "fp32" if config.router.router_fp32 else None,
        "mtp_num_layers": config.mtp.num_mtp_layers or None,
        "multi_latent_attention": bool(config.latent.kv_lora_rank),
    }
    if config.latent.kv_lora_rank:
        out |= {
            "q_lora_rank": config.latent.q_lora_rank or None,
            "kv_lora_rank": config.latent.kv_lora_rank,
            "qk_head_dim": config.latent.qk_nope_head_dim,
            "qk_pos_emb_head_dim": config.latent.qk_rope_head_dim,
            "v_head_dim": config.attention.v_head_dim,
            "rope_type": "yarn" if is_yarn(config) else "rope",
        }
    return out | yarn_args(config)
