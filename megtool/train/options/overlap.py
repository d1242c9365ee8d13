"""Options that let communication of a model's ranks overlap with their computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megtool.errors import UsageError
from megtool.options.field import Options, option

if TYPE_CHECKING:
    from megtool.model.stacks.decoder import Decoder
    from megtool.spec.model_config import ModelConfig

OVERLAP = "Overlap"


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(Options):
    """What overlaps inside a model's passes, with Megatron's names. Results stay the same."""

    tp_comm_overlap: bool = option(
        OVERLAP,
        "With --sequence-parallel, multiply the rows of other ranks in forward passes as they "
        "arrive.",
        False,
    )
    moe_shared_expert_overlap: bool = option(
        OVERLAP,
        "With --ep, compute shared experts while tokens are on their way to other ranks' experts, "
        "and back.",
        False,
    )
    overlap_p2p_communication: bool | None = option(
        OVERLAP,
        "With --pp, receive ahead and send behind while a stage computes; default: with --vpp "
        "only.",
    )


def check_overlap(s: Any) -> None:
    """Check the options of a `TrainConfig` that let communication overlap.

    Raises:
        UsageError: one has no effect, or excludes another option.
    """
    needs = (
        ("--tp-comm-overlap", s.tp_comm_overlap, s.sequence_parallel, "--sequence-parallel"),
        ("--moe-shared-expert-overlap", s.moe_shared_expert_overlap, s.ep > 1, "--ep"),
        (
            "--overlap-p2p-communication",
            s.overlap_p2p_communication is not None,
            s.pp > 1,
            "--pp",
        ),
    )
    for name, is_given, has_effect, needed in needs:
        if is_given and not has_effect:
            raise UsageError(
                f"{name} has no effect without {needed}", error_id="option-without-effect"
            )
    if s.tp_comm_overlap and s.fp8_recipe is not None:
        raise UsageError(
            "--tp-comm-overlap and --fp8-recipe exclude each other: an FP8 product has one scale "
            "for all rows",
            hint="leave out one of them",
        )


def check_overlap_of_model(s: Any, config: ModelConfig) -> None:
    """Check that a model has what is to overlap.

    Raises:
        UsageError: it has no shared experts.
    """
    if s.moe_shared_expert_overlap and not config.shared_ffn_hidden_size:
        raise UsageError(
            "--moe-shared-expert-overlap has no effect: the model has no shared experts",
            error_id="option-without-effect",
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
