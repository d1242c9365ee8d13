"""Which part of which checkpoints a reshard reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megtool.convert.dialects import is_optimizer_state
from megtool.errors import UsageError
from megtool.formats.save_folder import is_save_folder
from megtool.options.groups import SourceOptions
from megtool.reshard.writers.target_spec import TargetOptions
from megtool.run_state.optimizer import NONE
from megtool.source.average import Average, check_same_model, parse_shares
from megtool.source.checkpoint import CheckpointSource, ModelIdentity
from megtool.source.merge import AdapterMerge, open_merges
from megtool.source.open import NameFilter, TensorFilter, name_filter, open_source
from megtool.source.subset.layers import without_excluded_mtp
from megtool.source.subset.widths import PRUNE_NOTHING, PruningOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions(SourceOptions):
    """The checkpoints that a reshard reads, and which of their tensors.

    `select` and `exclude` are globs on stored names, and `pruning` says which parts of the model.
    `optimizer_only` reads nothing but optimizer state. `average` lists checkpoints that are
    averaged with the source, without optimizer state; `weights` are the shares of the mean, the
    source's first. `adapters` are merged into the weights, whose optimizer state then is read only
    if the target asks for it, to be refused.
    """

    select: Sequence[str] = ()
    exclude: Sequence[str] = ()
    optimizer_only: bool = False
    pruning: PruningOptions = PRUNE_NOTHING
    average: Sequence[Path] = ()
    weights: str | None = None
    adapters: Sequence[Path] = ()

    def open(self, path: Path, target: TargetOptions) -> CheckpointSource:
        """Open the source of a reshard to `target`.

        Raises:
            UsageError: options that exclude each other.
            MegtoolError: see `open_source` and `PruningOptions.apply`.
        """
        if self.optimizer_only and (self.average or target.optimizer == NONE):
            why = "optimizer state is not averaged" if self.average else "nothing is left to write"
            option = "--average" if self.average else "--optimizer-format none"
            raise UsageError(
                f"--optimizer-only excludes {option}: {why}", hint="leave one of them out"
            )
        if self.weights is not None and not self.average:
            raise UsageError(
                "--average-weights has no effect without --average",
                hint="--average PATH names the other checkpoints",
                error_id="option-without-effect",
            )
        options = SourceOptions(iteration=self.iteration, family=self.family, like=self.like)
        return self._open(path, options, target, select=self._tensor_filter())

    def open_average(self, first: CheckpointSource, target: TargetOptions) -> Average | None:
        """Open the checkpoints that are averaged with the source, None where there are none.

        Globs apply to the source's names: of the others, the same tensors are read. `iteration`
        applies to those that are save folders.

        Raises:
            UsageError: not one weight for each checkpoint.
            MappingError: a checkpoint of another model.
        """
        if not self.average:
            return None
        shares = parse_shares(self.weights, len(self.average) + 1)
        sources = []
        for path in self.average:
            iteration = self.iteration if is_save_folder(path) else None
            options = SourceOptions(iteration=iteration, family=self.family, like=self.like)
            sources.append(self._open(path, options, target, fallback=first.model))
        check_same_model(first, sources, is_partial=self._tensor_filter() is not None)
        return Average(others=tuple(sources), shares=shares)

    def open_merges(self, source: CheckpointSource) -> list[AdapterMerge]:
        """Open the adapters that are merged into the source's weights.

        Raises:
            FormatError: there is no adapter, or a damaged one.
            MappingError: an adapter does not fit the model.
            UsageError: an adapter is given twice.
        """
        return open_merges(self.adapters, source)

    def _open(
        self,
        path: Path,
        options: SourceOptions,
        target: TargetOptions,
        *,
        select: NameFilter | None = None,
        fallback: ModelIdentity | None = None,
    ) -> CheckpointSource:
        has_optimizer = target.optimizer != NONE and not self.average
        if self.adapters and target.optimizer is None:
            has_optimizer = False
        source = open_source(
            path,
            options,
            tensors=TensorFilter(select=select),
            fallback=None if self.pruning.is_given else fallback,
            optimizer=has_optimizer,
            prove_all=target.prove_all,
            for_format=target.to or "dcp",
        )
        if select is not None:
            source = without_excluded_mtp(source)
        return self.pruning.apply(source)

    def _tensor_filter(self) -> NameFilter | None:
        """Which stored tensors of the source are read, None for all."""
        globs = name_filter(self.select, self.exclude)
        if not self.optimizer_only:
            return globs
        return lambda name: is_optimizer_state(name) and (globs is None or globs(name))
