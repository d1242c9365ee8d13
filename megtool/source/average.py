"""The mean of several checkpoints of one model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megtool.console import format_bytes
from megtool.convert.dialects import is_optimizer_state
from megtool.errors import MappingError, UsageError
from megtool.plan.copies import DroppedItem, PlanSource
from megtool.source.checkpoint import CheckpointSource
from megtool.source.foreign_tensors import is_extra_state_tensor
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """The checkpoints that are averaged with the source, and the shares of all, which sum to 1.

    Float tensors are averaged; everything else, extra states included, is the source's.
    """

    others: tuple[CheckpointSource, ...]
    shares: tuple[float, ...]


def parse_shares(text: str | None, count: int) -> tuple[float, ...]:
    """The shares of `count` checkpoints: equal ones, or in the proportions that `text` lists.

    Raises:
        UsageError: not one positive number for each checkpoint.
    """
    if text is None:
        return (1 / count,) * count
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as e:
        raise UsageError(
            f"--average-weights is {text!r}, which is no list of numbers",
            hint="numbers, such as 0.5,0.3,0.2",
        ) from e
    total = math.fsum(weights)
    if not all(w > 0 and math.isfinite(w) for w in weights) or not math.isfinite(total):
        raise UsageError(
            f"--average-weights is {text!r}", hint="every weight has to be a positive number"
        )
    if len(weights) != count:
        raise UsageError(
            f"there are {len(weights)} weights for {count} checkpoints",
            hint="one for the source, then one for each --average, in their order",
        )
    return tuple(w / total for w in weights)


def check_same_model(
    first: CheckpointSource, others: Sequence[CheckpointSource], *, is_partial: bool
) -> None:
    """Check that every checkpoint has the tensors of the first, in their shapes.

    With `is_partial` only some tensors of the first are selected, and the others may have more.

    Raises:
        MappingError: the first difference.
    """
    for source in others:
        if source.is_canonical != first.is_canonical:
            unknown = first if source.is_canonical else source
            raise unknown.reason or MappingError(
                "the model is not known, so its tensors have no names in common with the others'",
                file=unknown.path,
                hint="--family NAME and --like HF_FOLDER supply it",
            )
        tensors = source.view.canonical
        for name, tensor in first.view.canonical.items():
            if name not in tensors:
                raise _difference(f"it lacks {name!r}, which {first.path} has", source, name)
            if tensors[name].shape != tensor.shape:
                raise _difference(
                    f"{name!r} has shape {list(tensors[name].shape)}, and {list(tensor.shape)} "
                    f"in {first.path}",
                    source,
                    name,
                )
        extra = next((n for n in tensors if n not in first.view.canonical), None)
        if extra is not None and not is_partial:
            raise _difference(f"it has {extra!r}, which {first.path} lacks", source, extra)


def _difference(message: str, source: CheckpointSource, name: str) -> MappingError:
    return MappingError(
        message,
        file=source.path,
        tensor=name,
        hint="only checkpoints of one model can be averaged; --select averages shared tensors",
    )


def averaged_sources(
    first: CheckpointSource, sources: Sequence[CheckpointSource]
) -> list[PlanSource]:
    """The float tensors of each other checkpoint, as sources of the plan."""
    out = []
    names = {n for n, t in first.view.canonical.items() if _has_mean(t)} - first.repeats.keys()
    for source in sources:
        placements = {n: p for n, p in source.view.placements.items() if n in names}
        stored = {p.stored for p in placements.values()}
        catalogue = source.catalogue.select(stored.__contains__)
        out.append(PlanSource(catalogue=catalogue, placements=placements))
    return out


def _has_mean(tensor: GlobalTensor) -> bool:
    is_number = not (is_optimizer_state(tensor.name) or is_extra_state_tensor(tensor.name))
    return tensor.dtype.is_float and is_number


def dropped_optimizers(sources: Sequence[CheckpointSource], model: str) -> list[DroppedItem]:
    """The optimizer state of checkpoints, which the `model` made of their weights does not have."""
    return [
        DroppedItem(
            name=f"optimizer state of {source.path}",
            reason=f"{model} has no optimizer state "
            f"({format_bytes(source.optimizer_bytes)}; --optimizer-format none leaves it out)",
            num_bytes=source.optimizer_bytes,
        )
        for source in sources
        if source.optimizer_bytes
    ]
