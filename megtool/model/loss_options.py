"""Options of losses beside that on the data: experts' load, and tokens further ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megtool.options.effects import requires, unused_with
from megtool.options.field import OptionCondition, Options, option

BalanceKind = Literal["aux_loss", "seq_aux_loss", "none"]
"""Experts are to be evenly busy over a microbatch, or in each of its rows; or nobody asks."""

EXPERTS, MTP = "Mixture of experts", "Multi-token prediction"

_HAS_EXPERT_BIAS = OptionCondition(
    holds=lambda options, facts: not facts.has_fixed_expert_bias,
    reason="{has} no effect on a model without an expert bias",
    hint="--moe-aux-loss-coeff X",
    on_facts=True,
)
_TRAINS_MODEL = OptionCondition(
    holds=lambda options, facts: (
        not options.mtp_loss_scaling_factor or (options.lora_rank is None and options.eagle is None)
    ),
    reason="{has} no effect with --lora-rank and --eagle, which train nothing else",
    hint="leave {it} out",
)
_HAS_MTP_LAYERS = OptionCondition(
    holds=lambda options, facts: facts.has_mtp_layers or not options.mtp_loss_scaling_factor,
    reason="{has} no effect for a model without layers of multi-token prediction",
    hint="leave {it} out",
    on_facts=True,
)


@dataclass(frozen=True, kw_only=True)
class LossOptions(Options):
    """Losses of routers and of layers of multi-token prediction, with Megatron's names.

    0 is no loss. Layers of multi-token prediction whose loss weighs nothing are not trained.
    """

    moe_aux_loss_coeff: float = option(
        EXPERTS,
        "Coefficient of the load balancing loss.",
        0.0,
        metavar="X",
        minimum=0,
        needs=unused_with({"moe_router_load_balancing_type=none": "which has no such loss"}),
    )
    moe_router_load_balancing_type: BalanceKind | None = option(
        EXPERTS,
        "Balance over a micro batch, or within each of its rows; default: aux_loss.",
        needs=(
            requires(
                ("moe_aux_loss_coeff", "moe_losses_from_checkpoint"),
                values=("aux_loss", "seq_aux_loss"),
            ),
        ),
    )
    moe_z_loss_coeff: float = option(
        EXPERTS,
        "Coefficient of the z-loss, which keeps router logits small.",
        0.0,
        metavar="X",
        minimum=0,
    )
    moe_router_bias_update_rate: float = option(
        EXPERTS,
        "Update rate of the routers' expert bias, towards experts with less load.",
        0.0,
        metavar="X",
        minimum=0,
        needs=(*unused_with({"lora_rank": "which trains adapters only"}), _HAS_EXPERT_BIAS),
    )
    moe_losses_from_checkpoint: bool = option(
        EXPERTS, "Take coefficients that are not given from the checkpoint.", False
    )
    mtp_loss_scaling_factor: float = option(
        MTP,
        "Weight of the loss of multi-token prediction layers; 0 leaves them as they are.",
        0.1,
        metavar="X",
        minimum=0,
        needs=(_TRAINS_MODEL, _HAS_MTP_LAYERS),
    )

    @property
    def has_router_losses(self) -> bool:
        """There is a loss of routers to be added."""
        aux = self.moe_aux_loss_coeff and self.moe_router_load_balancing_type != "none"
        return bool(aux or self.moe_z_loss_coeff)
