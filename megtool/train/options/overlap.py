"""Options that let communication of a model's ranks overlap with their computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megtool.options.effects import excludes, requires
from megtool.options.field import OptionCondition, Options, option

if TYPE_CHECKING:
    from megtool.model.stacks.decoder import Decoder

OVERLAP = "Overlap"

_HAS_SHARED_EXPERTS = OptionCondition(
    holds=lambda options, facts: facts.has_shared_experts,
    reason="{has} no effect: the model has no shared experts",
    hint="leave {it} out",
    on_facts=True,
)


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(Options):
    """What overlaps inside a model's passes, with Megatron's names. Results stay the same."""

    tp_comm_overlap: bool = option(
        OVERLAP,
        "With --sequence-parallel, multiply the rows of other ranks in forward passes as they "
        "arrive.",
        False,
        needs=(
            requires("sequence_parallel"),
            *excludes({"fp8_recipe": "an FP8 product has one scale for all rows"}),
        ),
    )
    moe_shared_expert_overlap: bool = option(
        OVERLAP,
        "With --ep, compute shared experts while tokens are on their way to other ranks' experts, "
        "and back.",
        False,
        needs=(requires("ep"), _HAS_SHARED_EXPERTS),
    )
    overlap_p2p_communication: bool | None = option(
        OVERLAP,
        "With --pp, receive ahead and send behind while a stage computes; default: with --vpp "
        "only.",
        needs=(requires("pp"),),
    )


def let_overlap(stages: Sequence[Decoder], settings: OverlapOptions) -> None:
    """Set on modules what options ask for."""
    from megtool.model.layers.linear import ColumnLinear
    from megtool.model.moe.experts import MoeMlp

    for module in (m for stage in stages for m in stage.modules()):
        if isinstance(module, ColumnLinear):
            module.overlaps_gather = settings.tp_comm_overlap
        elif isinstance(module, MoeMlp):
            module.overlaps_shared_experts = settings.moe_shared_expert_overlap
