"""Average: other checkpoints of one model beside the source, and the share of each in the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megtool.checkpoint.plan import Dropped, Source
from megtool.console import format_bytes
from megtool.convert.dialects import is_optimizer_state
from megtool.errors import MappingError, UsageError
from megtool.reshard.open_source import CheckpointSource
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """Opened checkpoints that are averaged with the source, and the shares of all, which sum to 1.

    Tensors of floats are averaged; what else there is, and all beside the tensors, is the source's.
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
        given = [float(part) for part in text.split(",")]
    except ValueError as e:
        raise UsageError(f"weights {text!r}", hint="numbers, such as 0.5,0.3,0.2") from e
    total = math.fsum(given)
    if not all(w > 0 and math.isfinite(w) for w in given) or not math.isfinite(total):
        raise UsageError(f"weights {text!r}", hint="every weight is a positive number")
    if len(given) != count:
        raise UsageError(
            f"{len(given)} weights for {count} checkpoints",
            hint="one for the source, then one for each --average, in their order",
        )
    return tuple(w / total for w in given)


def check_same(
    first: CheckpointSource, others: Sequence[CheckpointSource], *, partial: bool
) -> None:
    """Every checkpoint holds the tensors of the first, in their shapes.

    With `partial` only some tensors of the first are asked for, and others may hold more.

    Raises:
        MappingError: the first difference.
    """
    for other in others:
        if other.is_canonical != first.is_canonical:
            unknown = first if other.is_canonical else other
            raise unknown.reason or MappingError(
                "the model is not known, so that its tensors have no names in common with others",
                file=unknown.path,
                hint="--family NAME and --like HF_FOLDER supply it",
            )
        held = other.side.canonical
        for name, tensor in first.side.canonical.items():
            if name not in held:
                raise _differ(f"it lacks {name!r}, which {first.path} holds", other, name)
            if held[name].shape != tensor.shape:
                raise _differ(
                    f"{name!r} has shape {list(held[name].shape)}, and {list(tensor.shape)} "
                    f"in {first.path}",
                    other,
                    name,
                )
        extra = next((n for n in held if n not in first.side.canonical), None)
        if extra is not None and not partial:
            raise _differ(f"it holds {extra!r}, which {first.path} lacks", other, extra)


def _differ(what: str, other: CheckpointSource, name: str) -> MappingError:
    return MappingError(
        what,
        file=other.path,
        tensor=name,
        hint="only checkpoints of one model can be averaged; --select averages what they share",
    )


def sources_of(first: CheckpointSource, others: Sequence[CheckpointSource]) -> list[Source]:
    """What each other checkpoint gives to a mean: its tensors of floats, and nothing else."""
    out = []
    for other in others:
        wanted = {n for n, t in first.side.canonical.items() if _has_mean(t)}
        wanted -= first.repeats.keys()
        placements = {n: p for n, p in other.side.placements.items() if n in wanted}
        stored = {p.stored for p in placements.values()}
        catalogue = other.catalogue.select(stored.__contains__)
        out.append(Source(catalogue=catalogue, placements=placements))
    return out


def _has_mean(tensor: GlobalTensor) -> bool:
    return tensor.dtype.is_float and not is_optimizer_state(tensor.name)


def dropped_optimizers(opened: Sequence[CheckpointSource]) -> list[Dropped]:
    """The optimizer state of checkpoints, which a mean does not have."""
    return [
        Dropped(
            name=f"optimizer state of {one.path}",
            reason=f"no run has had the mean of several checkpoints "
            f"({format_bytes(one.optimizer_bytes)}; --optimizer none says that it may go)",
            num_bytes=one.optimizer_bytes,
        )
        for one in opened
        if one.optimizer_bytes
    ]
