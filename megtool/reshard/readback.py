"""Open a staged checkpoint, before its commit, and find in it all that was planned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megtool.errors import DigestError, FormatError, MegtoolError, StorageError
from megtool.formats import open_checkpoint
from megtool.plan.copies import Op, ReshardPlan
from megtool.reshard.staged_headers import READBACK_HINT, refuse_foreign_states
from megtool.reshard.writers.target_spec import Target
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import TensorFilter, open_source
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor as it was read back: where it is, in which of the opened catalogues."""

    catalogue: int
    placement: Placement


def check_readable(source: CheckpointSource, target: Target, plan: ReshardPlan, tree: Path) -> None:
    """Open what was written to `tree` by its headers, and find everything that was planned.

    Names, shapes and dtypes of tensors and names of objects are compared. The only data read are
    extra states, which a cast or a mean may have made anew.

    Raises:
        FormatError: it cannot be read back, something is missing or is another, or an extra state
            is a hostile pickle.
    """
    planned = plan.target.catalogue
    hint = "nothing was put in place; another format (--to) may hold it"
    try:
        raw = open_checkpoint(tree)
        stored = {(t.name, t.shape, t.dtype) for t in raw.tensors}
        if any((t.name, t.shape, t.dtype) not in stored for t in planned.tensors):
            # Rank files and buckets are read as parts: compare the tensors made of them.
            find_written(source, target, plan, *open_tree(tree, source))
    except StorageError:  # says nothing of what was written
        raise
    except MegtoolError as e:
        raise FormatError(
            f"what was written as {target.format!r} cannot be read back: {e.message}",
            tensor=e.tensor,
            hint=hint,
        ) from e
    refuse_foreign_states(raw)
    if missing := next((n for n in planned.objects if n not in raw.objects), None):
        raise FormatError(
            f"the object {missing!r} that was written as {target.format!r} is missing when it is "
            "read back",
            hint=hint,
        )


def open_tree(tree: Path, source: CheckpointSource) -> tuple[CheckpointSource, Catalogue]:
    """The staged checkpoint as a source, and its tensors as they are stored."""
    try:
        written = open_source(
            tree,
            tensors=TensorFilter(select=lambda name: True),
            fallback=source.model,
            lenient=True,
        )
        return written, open_checkpoint(tree)
    except StorageError:
        raise
    except MegtoolError as e:
        raise DigestError(
            f"what was written cannot be read back: {e.message}",
            file=e.file,
            tensor=e.tensor,
            hint=READBACK_HINT,
        ) from e


def find_written(
    source: CheckpointSource,
    target: Target,
    plan: ReshardPlan,
    written: CheckpointSource,
    raw: Catalogue,
) -> dict[str, WrittenTensor]:
    """Where every tensor of the plan is in the checkpoint that was opened again.

    A tensor is found by its canonical name, if source and target have such names, else by the name
    that the plan stores it under. Copies that a format reads as one tensor are its replicas.
    """
    out: dict[str, WrittenTensor] = {}
    has_same_names = source.is_canonical and written.is_canonical
    for entry in plan.entries:
        name, stored = entry.canonical, entry.target.stored
        if entry.op is Op.FILL or not entry.writes:
            continue
        place = written.view.placements.get(name) if has_same_names else None
        if place is not None:
            location = WrittenTensor(0, place)
        elif stored in written.catalogue:
            location = WrittenTensor(0, entry.target)
        elif stored in raw:
            location = WrittenTensor(1, entry.target)
        elif name in target.copies:
            continue
        else:
            raise DigestError(
                f"{name!r} was written as {stored!r}, and is missing when it is read back",
                tensor=stored,
                hint=READBACK_HINT,
            )
        tensor = (written.catalogue, raw)[location.catalogue][location.placement.stored]
        expected = plan.target_tensor(entry).dtype
        if tensor.dtype != expected or numel(location.placement.shape) != numel(entry.shape):
            raise DigestError(
                f"{name!r} was written as {list(entry.shape)} {expected}, and is read back as "
                f"{list(location.placement.shape)} {tensor.dtype}",
                tensor=stored,
                hint=READBACK_HINT,
            )
        out[name] = location
    return out
