"""Which part of which checkpoints is read, and what is left out of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megtool.options.effects import is_set, requires
from megtool.options.field import OptionCondition, Options, group, option
from megtool.options.groups import INPUT, AdaptedSource

PRUNING = "Pruning"
PRUNED_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size"),
    *("num_attention_heads", "num_query_groups", "num_experts"),
)
"""The options that say how small a pruned model is."""

PARTS_AND_MEANS = ("select", "exclude", "optimizer_only", "layers", "average")
"""The options that make another model than the source's."""

_NEEDS_SCORES = requires(
    "pruning_scores", "--pruning-scores FILE says what matters least; `evaluate` writes it"
)
_HAS_SIZE = OptionCondition(
    holds=lambda options, facts: any(getattr(options, n) is not None for n in PRUNED_SIZES),
    reason="{has} no effect without a smaller size",
    hint="--ffn-hidden-size N, for example",
)
_IS_WHOLE_MODEL = OptionCondition(
    holds=lambda options, facts: (
        not any(is_set(options, name) for name in (*PARTS_AND_MEANS, *PRUNED_SIZES))
    ),
    reason="{is} merged into a whole model, not into a part of one or a mean",
    hint="merge first, and then reshard what was written with the other options",
)


@dataclass(frozen=True, kw_only=True)
class Pruning(Options):
    """What is left out of a model: layers that are named, or by scores what matters least."""

    layers: str | None = option(
        INPUT, "Only these transformer layers, renumbered: 0-15, or 0-3,8.", metavar="LIST"
    )
    pruning_scores: Path | None = option(
        PRUNING,
        "Scores of the model's parts, which `evaluate --pruning-scores` wrote; those with the "
        "lowest are left out.",
        metavar="FILE",
        needs=(_HAS_SIZE,),
    )
    num_layers: int | None = option(
        PRUNING, "Layers that stay.", metavar="N", minimum=1, needs=(_NEEDS_SCORES,)
    )
    hidden_size: int | None = option(
        PRUNING,
        "Channels of hidden states that stay, the same in all layers.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_SCORES,),
    )
    ffn_hidden_size: int | None = option(
        PRUNING,
        "Neurons of each MLP that stay; each layer has its own.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_SCORES,),
    )
    num_attention_heads: int | None = option(
        PRUNING,
        "Query heads of each layer that stay, as many in each group.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_SCORES,),
    )
    num_query_groups: int | None = option(
        PRUNING,
        "Groups of each layer (heads of keys and values, with their query heads) that stay.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_SCORES,),
    )
    num_experts: int | None = option(
        PRUNING, "Experts of each layer that stay.", metavar="N", minimum=1, needs=(_NEEDS_SCORES,)
    )

    @property
    def has_sizes(self) -> bool:
        """Any size is to change."""
        return any(getattr(self, name) is not None for name in PRUNED_SIZES)

    @property
    def is_given(self) -> bool:
        """Something is left out."""
        return self.has_sizes or self.layers is not None


@dataclass(frozen=True, kw_only=True)
class SourceSelection(Options):
    """The checkpoints that a reshard reads, and which of their tensors.

    `select` and `exclude` are globs on stored names, which apply to the source's. Checkpoints that
    are averaged with it are read without optimizer state.
    """

    extra_needs: ClassVar = {_IS_WHOLE_MODEL: ("adapter",)}

    select: tuple[str, ...] = option(
        INPUT, "Only tensors of these names; repeatable.", (), metavar="GLOB"
    )
    exclude: tuple[str, ...] = option(
        INPUT, "No tensors of these names; repeatable.", (), metavar="GLOB"
    )
    optimizer_only: bool = option(INPUT, "Optimizer state without the weights.", False)
    pruning: Pruning = group(Pruning)
    average: tuple[Path, ...] = option(
        INPUT, "Write the mean of SRC's weights and these; repeatable.", (), metavar="OTHER"
    )
    average_weights: str | None = option(
        INPUT,
        "Weights of the mean, SRC's first: 0.5,0.3,0.2; default: equal ones.",
        metavar="LIST",
        needs=(requires("average", "--average OTHER names other checkpoints"),),
    )
    reading: AdaptedSource = group(AdaptedSource)
