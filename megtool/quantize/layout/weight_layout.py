"""The rows of each weight in its stored tensor, and weights that cannot be stored quantized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.errors import MappingError
from megtool.options.target import TargetOptions
from megtool.quant.packed_tensors.pack import TRANSPOSABLE_ALGOS
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import BLOCKS
from megtool.reshard.target import make_target
from megtool.reshard.writers.target_spec import Target
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

EXPERTS_RECIPE = "mxfp4_experts"
"""The shipped recipe for experts stored in blocks."""


def make_quantized_target(
    source: CheckpointSource, decisions: Sequence[Decision], request: TargetOptions
) -> Target:
    """Plan the Hugging Face folder, with experts in the layout in which loaders read their codes.

    If no expert is quantized, experts keep the layout of the family.
    """
    has_quantized_experts = any(_algo(d) and "expert" in d.module.roles for d in decisions)
    model = source.model
    if has_quantized_experts and model is not None and model.family is not None:
        source = replace(source, model=replace(model, family=model.family.for_codes))
    return make_target(source, request)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Rows of a weight in a stored matrix, the `matrix`-th of a stack.

    `run` rows start at row `first`, the next `run` at `first + period`, and so on; they are
    contiguous if the two are equal. `is_transposed`: its rows are columns there.
    """

    matrix: int
    first: int
    run: int
    period: int
    is_transposed: bool = False

    @property
    def is_interleaved(self) -> bool:
        """Whether rows of other weights alternate with its rows."""
        return self.run != self.period

    def indices(self, num_rows: int) -> NDArray[np.int64]:
        """The rows in the stored matrix of `num_rows` rows of the weight."""
        row = np.arange(num_rows)
        return self.first + row // self.run * self.period + row % self.run


def row_layout(to: Placement, tensor: GlobalTensor) -> RowLayout | None:
    """The row layout of a weight; None if its rows are not contiguous and in order."""
    row_dim, column_dim = len(tensor.shape) - 2, len(tensor.shape) - 1
    return _row_layout_along(to, tensor, row_dim, column_dim) or _row_layout_along(
        to, tensor, column_dim, row_dim
    )


def _row_layout_along(
    to: Placement, tensor: GlobalTensor, row_dim: int, column_dim: int
) -> RowLayout | None:
    """The row layout with rows along the dimension `row_dim`."""
    view = [v for v in zip(to.shape, to.dims, to.mults, strict=True) if v[0] > 1]
    width = 1
    while view and view[-1][1] == column_dim and view[-1][2] == width:
        width *= view.pop()[0]
    if (
        width != tensor.shape[column_dim]
        or to.base[column_dim]
        or any(d != row_dim for _, d, _ in view)
    ):
        return None
    run, period, count = 1, 0, 1
    for n, _, mult in reversed(view):
        if not period and mult == run:
            run *= n
        elif not period:
            period, count = mult, n
        elif mult == period * count:
            count *= n
        else:
            return None
    return RowLayout(
        matrix=to.base[0] if len(to.base) > 2 else 0,
        first=to.base[row_dim],
        run=run,
        period=period or run,
        is_transposed=column_dim < row_dim,
    )


def check_places(decisions: Sequence[Decision], target: Target) -> None:
    """Refuse weights whose stored layout no loader supports for their format.

    Raises:
        MappingError: lists all of them, and says whether the family can be quantized at all.
    """
    tensors = {t.name: t for t in target.side.tensors}
    quantized = [d for d in decisions if _algo(d)]
    wrong = []
    for d in quantized:
        to = target.side.placements[f"{d.module.name}.weight"]
        if reason := describe_misplacement(d, to, tensors[to.stored]):
            wrong.append((d, tensors[to.stored], reason))
    if wrong:
        raise placement_error(wrong, is_all=len(wrong) == len(quantized))


def _algo(d: Decision) -> str:
    return d.format.algo if d.format is not None else ""


def check_blocks(decisions: Sequence[Decision], target: Target) -> None:
    """Check that MXFP4 blocks cover all experts, as their layout requires.

    Raises:
        MappingError: another module is quantized, or an expert is not.
    """
    places = target.side.placements
    inside = {
        name
        for d in decisions
        if (p := places.get(f"{(name := d.module.name)}.weight")) and p.stored.endswith(BLOCKS)
    }
    if not any(_algo(d) == "MXFP4" for d in decisions if d.module.name in inside):
        return
    for d in decisions:
        has = d.format is not None
        if d.module.name in inside and not has:
            message = f"{d.module.name} is not quantized, but other experts are MXFP4"
        elif d.module.name not in inside and has:
            message = f"{d.module.name} is {d.label}, but only experts can be quantized"
        else:
            continue
        raise MappingError(
            f"{message}: in the MXFP4 format of this family all experts are MXFP4 and nothing "
            "else is quantized",
            hint=f"--recipe {EXPERTS_RECIPE} writes it",
        )


def placement_error(
    wrong: Sequence[tuple[Decision, GlobalTensor, str]], *, is_all: bool
) -> MappingError:
    """The error for all weights that cannot be stored as codes, by their names without layer
    numbers."""
    names_by_reason: dict[str, list[str]] = defaultdict(list)
    for d, _, reason in wrong:
        name = ".".join("*" if p.isdecimal() else p for p in d.module.name.split("."))
        if name not in names_by_reason[reason]:
            names_by_reason[reason].append(name)
    first, tensor, _ = wrong[0]
    label = first.format.label if first.format else ""
    message = "; ".join(f"{', '.join(names)} {reason}" for reason, names in names_by_reason.items())
    globs = ", ".join(name for names in names_by_reason.values() for name in names)
    hint = f"exclude them with a first rule: - {{match: {{glob: [{globs}]}}, format: keep}}"
    if tensor.name.endswith(BLOCKS):
        hint = f"use --recipe {EXPERTS_RECIPE}, or {hint}"
    if "transposed" in next(iter(names_by_reason)):
        hint = "use --recipe fp8, which has one scale per tensor"
    elif is_all:
        hint = "no weight of this family can be quantized with this recipe"
    return MappingError(
        f"a Hugging Face folder of this family stores {len(wrong):,} weights ({first.module.name}: "
        f"{label}) in a layout in which no engine loads codes: {message}",
        tensor=tensor.name,
        hint=hint,
    )


def describe_misplacement(d: Decision, to: Placement, tensor: GlobalTensor) -> str:
    """Why loaders of a weight's format do not support its layout; empty if they do."""
    in_blocks = tensor.name.endswith(BLOCKS)
    if len(tensor.shape) != (3 if in_blocks else 2):
        return "stacked with others"
    if in_blocks and _algo(d) != "MXFP4":
        return "stacked with others, for which loaders only support MXFP4"
    if not in_blocks and not tensor.name.endswith(".weight"):
        return f"as {tensor.name!r}, for which loaders have no scales"
    rows = row_layout(to, tensor)
    if rows is None:
        return "interleaved with others"
    if rows.is_transposed and (_algo(d) not in TRANSPOSABLE_ALGOS or rows.is_interleaved):
        return f"transposed, for which loaders only support {', '.join(TRANSPOSABLE_ALGOS)}"
    return ""
