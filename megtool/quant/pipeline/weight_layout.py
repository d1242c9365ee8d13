"""Where the rows of each weight are in a stored tensor, and which weights cannot be quantized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megtool.errors import MappingError
from megtool.quant.packed_tensors.transposed import TURNED
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import BLOCKS
from megtool.reshard.source import CheckpointSource
from megtool.reshard.target import make_target
from megtool.reshard.writers.target_spec import Target, TargetOptions
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

EXPERTS_RECIPE = "mxfp4_experts"
"""The shipped recipe for what is stored in blocks."""


def make_quantized_target(
    source: CheckpointSource, decisions: Sequence[Decision], request: TargetOptions
) -> Target:
    """The Hugging Face folder to be written, experts where loaders look for their codes.

    Where no expert becomes codes, they lie as the family has them unquantized.
    """
    coded = any(_algo(d) and "expert" in d.module.roles for d in decisions)
    model = source.model
    if coded and model is not None and model.family is not None:
        source = replace(source, model=replace(model, family=model.family.for_codes))
    return make_target(source, request)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Rows of a weight in a stored matrix, the `matrix`-th of a stack: `run` of them from row
    `first`, the next `run` from `period` rows further on, and so on; all at once where the two are
    equal. `is_turned`: its rows are columns there.
    """

    matrix: int
    first: int
    run: int
    period: int
    is_turned: bool = False

    @property
    def is_interleaved(self) -> bool:
        """Whether rows of other weights alternate with its rows."""
        return self.run != self.period


def row_layout(to: Placement, tensor: GlobalTensor) -> RowLayout | None:
    """The row layout of a weight; None if its rows are not contiguous and in order."""
    down, across = len(tensor.shape) - 2, len(tensor.shape) - 1
    return _row_layout_along(to, tensor, down, across) or _row_layout_along(
        to, tensor, across, down
    )


def _row_layout_along(
    to: Placement, tensor: GlobalTensor, down: int, across: int
) -> RowLayout | None:
    """The same, with rows along the dimension `down`."""
    view = [v for v in zip(to.shape, to.dims, to.mults, strict=True) if v[0] > 1]
    width = 1
    while view and view[-1][1] == across and view[-1][2] == width:
        width *= view.pop()[0]
    if width != tensor.shape[across] or to.base[across] or any(d != down for _, d, _ in view):
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
        first=to.base[down],
        run=run,
        period=period or run,
        is_turned=across < down,
    )


def check_places(decisions: Sequence[Decision], target: Target) -> None:
    """Refuse weights whose stored layout no loader supports for their format.

    Raises:
        MappingError: with all of them, and whether any of the family's could be quantized.
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
        MappingError: something else is quantized besides, or an expert is not.
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
            message = f"{d.module.name} is kept, and other experts are to be MXFP4"
        elif d.module.name not in inside and has:
            message = f"{d.module.name} is to be {d.label}, and experts are to be MXFP4"
        else:
            continue
        raise MappingError(
            f"{message}: this family has a form of its own for these, in which all experts are "
            "MXFP4 and nothing else is quantized",
            hint=f"--recipe {EXPERTS_RECIPE} writes it",
        )


def placement_error(
    wrong: Sequence[tuple[Decision, GlobalTensor, str]], *, is_all: bool
) -> MappingError:
    """All weights that cannot be stored as codes, by the names they have in every layer."""
    alike: dict[str, list[str]] = defaultdict(list)
    for d, _, reason in wrong:
        name = ".".join("*" if p.isdecimal() else p for p in d.module.name.split("."))
        if name not in alike[reason]:
            alike[reason].append(name)
    first, tensor, _ = wrong[0]
    label = first.format.label if first.format else ""
    message = "; ".join(f"{', '.join(names)} {reason}" for reason, names in alike.items())
    globs = ", ".join(name for names in alike.values() for name in names)
    hint = f"keep them by a rule before the others: - {{match: {{glob: [{globs}]}}, format: keep}}"
    if tensor.name.endswith(BLOCKS):
        hint = f"take --recipe {EXPERTS_RECIPE}, or {hint}"
    if "transposed" in next(iter(alike)):
        hint = "--recipe fp8 (a scale a tensor) can be stored so"
    elif is_all:
        hint = "no weight of this family can be written so: nothing is left to quantize"
    return MappingError(
        f"{len(wrong):,} weights are to be quantized ({first.module.name} to {label}), and a "
        f"Hugging Face folder of this family stores them so that no engine loads codes: {message}",
        tensor=tensor.name,
        hint=hint,
    )


def describe_misplacement(d: Decision, to: Placement, tensor: GlobalTensor) -> str:
    """Why a weight's layout does not suit loaders of its format; empty if it does."""
    in_blocks = tensor.name.endswith(BLOCKS)
    if len(tensor.shape) != (3 if in_blocks else 2):
        return "stacked with others"
    if in_blocks and _algo(d) != "MXFP4":
        return "stacked with others, for which loaders know MXFP4 alone"
    if not in_blocks and not tensor.name.endswith(".weight"):
        return f"as {tensor.name!r}, for which loaders have no scales"
    rows = row_layout(to, tensor)
    if rows is None:
        return "interleaved with others"
    if rows.is_turned and (_algo(d) not in TURNED or rows.is_interleaved):
        return f"transposed, for which loaders know {', '.join(TURNED)} alone"
    return ""
