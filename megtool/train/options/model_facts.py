"""What a run knows of the model that it trains, and the conditions that options have on it."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.options.field import OptionCondition
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the headers of a checkpoint say of its model."""

    has_encoder: bool
    has_labels: bool
    has_mtp_layers: bool
    has_shared_experts: bool
    has_fixed_expert_bias: bool

    @classmethod
    def from_config(cls, config: ModelConfig) -> ModelFacts:
        """Return the facts of a model."""
        return cls(
            has_encoder=bool(config.num_decoder_layers),
            has_labels=bool(config.head.num_labels),
            has_mtp_layers=bool(config.mtp.num_mtp_layers),
            has_shared_experts=bool(config.moe.shared_ffn_hidden_size),
            has_fixed_expert_bias=bool(layer_sets.moe_layers(config))
            and not config.router.router_expert_bias,
        )


IS_DECODER = OptionCondition(
    holds=lambda options, facts: not facts.has_encoder,
    reason="{is} for decoders, and the model has an encoder as well",
    hint="leave {it} out",
    on_facts=True,
    is_conflict=True,
)
HAS_TOKENS = OptionCondition(
    holds=lambda options, facts: not facts.has_labels,
    reason="{is} for models of tokens, and this one scores labels",
    hint="leave {it} out",
    on_facts=True,
    is_conflict=True,
)
