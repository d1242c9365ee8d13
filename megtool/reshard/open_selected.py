"""Open the checkpoints that a reshard reads: the selected part of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megtool.convert.dialects import is_optimizer_state
from megtool.errors import UsageError
from megtool.formats.save_folder import is_save_folder
from megtool.options.selection import SourceSelection
from megtool.options.target import TargetOptions
from megtool.run_state.optimizer import NONE
from megtool.source.average import Average, check_same_model, parse_shares
from megtool.source.checkpoint import CheckpointSource, ModelIdentity
from megtool.source.merge import AdapterMerge, open_merges
from megtool.source.open import NameFilter, TensorFilter, name_filter, open_source
from megtool.source.subset.layers import without_excluded_mtp
from megtool.source.subset.widths import prune_as_asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardSources:
    """A source, the checkpoints that are averaged with it, and the adapters that are added."""

    source: CheckpointSource
    average: Average | None = None
    merges: Sequence[AdapterMerge] = ()

    @property
    def checkpoints(self) -> list[CheckpointSource]:
        """The source, and the checkpoints that are averaged with it."""
        return [self.source, *self.others]

    @property
    def others(self) -> Sequence[CheckpointSource]:
        """The checkpoints that are averaged with the source."""
        return self.average.others if self.average else ()

    @property
    def paths(self) -> list[Path]:
        """Files and folders, which the destination must neither contain nor be inside."""
        out = [path for checkpoint in self.checkpoints for path in checkpoint.paths]
        return out + [merge.path for merge in self.merges if merge.path is not None]


def open_sources(
    path: Path,
    selection: SourceSelection,
    target: TargetOptions,
    check_source: Callable[[CheckpointSource], object] | None = None,
) -> ReshardSources:
    """Open what a reshard to `target` reads; `check_source` is called with the source first.

    Raises:
        MegtoolError: see `open_selected`, `open_average` and `open_merges`.
    """
    source = open_selected(path, selection, target)
    if check_source is not None:
        check_source(source)
    return ReshardSources(
        source=source,
        average=open_average(source, selection, target),
        merges=open_merges(selection.reading.adapter, source),
    )


def open_selected(
    path: Path, selection: SourceSelection, target: TargetOptions
) -> CheckpointSource:
    """Open the source of a reshard to `target`.

    With adapters, optimizer state is read only if the target asks for it, to be refused.

    Raises:
        UsageError: options that exclude each other.
        MegtoolError: see `open_source` and `prune_as_asked`.
    """
    if selection.optimizer_only and (selection.average or target.optimizer_format == NONE):
        why = "optimizer state is not averaged" if selection.average else "nothing is left to write"
        option = "--average" if selection.average else "--optimizer-format none"
        raise UsageError(f"--optimizer-only excludes {option}: {why}", hint="leave one of them out")
    return _open(path, selection, target, select=_tensor_filter(selection))


def open_average(
    first: CheckpointSource, selection: SourceSelection, target: TargetOptions
) -> Average | None:
    """Open the checkpoints that are averaged with the source, None where there are none.

    Globs apply to the source's names: of the others, the same tensors are read. `iteration`
    applies to those that are save folders.

    Raises:
        UsageError: not one weight for each checkpoint.
        MappingError: a checkpoint of another model.
    """
    if not selection.average:
        return None
    shares = parse_shares(selection.average_weights, len(selection.average) + 1)
    sources = []
    for path in selection.average:
        reading = selection.reading
        if not is_save_folder(path):
            reading = replace(reading, iteration=None)
        other = replace(selection, reading=reading)
        sources.append(_open(path, other, target, fallback=first.model))
    check_same_model(first, sources, is_partial=_tensor_filter(selection) is not None)
    return Average(others=tuple(sources), shares=shares)


def _open(
    path: Path,
    selection: SourceSelection,
    target: TargetOptions,
    *,
    select: NameFilter | None = None,
    fallback: ModelIdentity | None = None,
) -> CheckpointSource:
    has_optimizer = target.optimizer_format != NONE and not selection.average
    if selection.reading.adapter and target.optimizer_format is None:
        has_optimizer = False
    source = open_source(
        path,
        replace(selection.reading, adapter=()),
        tensors=TensorFilter(select=select),
        fallback=None if selection.pruning.is_given else fallback,
        optimizer=has_optimizer,
        verify_master_weights=target.verify_master_weights,
        for_format=target.to or "dcp",
        as_class=target.to in ("hf", "safetensors"),
    )
    if select is not None:
        source = without_excluded_mtp(source)
    return prune_as_asked(source, selection.pruning)


def _tensor_filter(selection: SourceSelection) -> NameFilter | None:
    """Which stored tensors of the source are read, None for all."""
    globs = name_filter(selection.select, selection.exclude)
    if not selection.optimizer_only:
        return globs
    return lambda name: is_optimizer_state(name) and (globs is None or globs(name))
