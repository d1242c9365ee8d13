"""Two descriptions of one model compared: a checkpoint's own args, and a config.json beside it.

The args are those of the run that made the weights, so that they are followed where both say
something. What args cannot say at all comes from the config.json, and what tensors show, such as
sizes and biases, from the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megtool.convert.megatron.args import args_from_config, read_plain_args
from megtool.convert.megatron.settings import plain_args
from megtool.errors import MappingError
from megtool.spec.model_config import CONFIG_FIELDS, ModelConfig

FOLLOWED = (
    *("norm_eps", "zero_centered_norm", "qk_l2_norm", "qk_l2_norm_unrotated"),
    *("softmax_scale", "attn_zero_sinks", "window_size", "window_skip_freq"),
    *("activation", "activation_limit", "glu_offset"),
    *("position_embedding", "rotary_percent", "rope_interleaved", "rope_base", "rope_scaling"),
    *("no_rope_layers", "embedding_scale", "logit_scale"),
    *("num_experts_per_token", "router_score", "router_pre_softmax", "router_scaling"),
    *("router_num_groups", "router_topk_groups", "router_scales_input", "index_topk"),
)
"""Fields that no tensor shows, and that args say."""

# Names of one thing: where the args have one of them, it is not completed with another.
_SAME = (
    ("norm_epsilon", "layernorm_epsilon"),
    ("apply_layernorm_1p", "layernorm_zero_centered_gamma"),
    ("position_embedding_type", "add_position_embedding", "use_rotary_position_embeddings"),
    ("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor"),
    (
        *("swiglu", "squared_relu", "quick_geglu", "openai_gelu", "gated_linear_unit"),
        *("activation_func", "bias_gelu_fusion", "bias_activation_fusion"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A field that args and config.json have different values for."""

    field: str
    in_args: Any
    in_config: Any

    def __str__(self) -> str:
        """Return what both say."""
        name = CONFIG_FIELDS[self.field].megatron or self.field
        return f"{name} ({self.field}) is {self.in_args!r:.60}, not {self.in_config!r:.60}"


def reconcile(
    config: ModelConfig, args: Mapping[str, Any]
) -> tuple[ModelConfig, list[Contradiction]]:
    """Return the configuration of a config.json with what the args say otherwise, and what that is.

    Both are compared as args, so that a setting which has none is no contradiction.
    """
    expected = args_from_config(config)
    completed = {**expected, **{k: v for k, v in args.items() if v is not None or k in expected}}
    for names in _SAME:
        if any(args.get(name) is not None for name in names):
            for name in names:
                if name not in args:
                    completed.pop(name, None)
    try:
        in_args, in_config = (read_plain_args(plain_args(x)) for x in (completed, expected))
    except MappingError:  # the args belong to another class of model, which its tensors tell
        return config, []
    contradictions = [
        Contradiction(field=name, in_args=a, in_config=b)
        for name in FOLLOWED
        if (a := in_args.get(name)) != (b := in_config.get(name))
    ]
    if not contradictions or in_args.num_layers != in_config.num_layers:
        return config, []
    return config.with_fields(**{c.field: c.in_args for c in contradictions}), contradictions
