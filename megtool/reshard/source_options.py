"""Selection: which part of which checkpoints is read, and as what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megtool.checkpoint.formats.save_folder import is_save_folder
from megtool.convert.dialects import is_optimizer_state
from megtool.errors import UsageError
from megtool.reshard.average import Average, check_same, parse_shares
from megtool.reshard.layer_subset import select_layers
from megtool.reshard.open_source import CheckpointSource, Model, open_model, selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the user says of the checkpoints to read.

    `select` and `exclude` are globs on stored names, `layers` a list of layers. `optimizer` false
    leaves optimizer state out, `optimizer_only` everything else. `prove_all` compares every master
    weight with its weight. `for_format` is the format to be written. The mean of
    the source and `average` has no optimizer state; `weights` lists the shares, the source's first.
    """

    iteration: str | None = None
    family: str | None = None
    like: Path | None = None
    select: Sequence[str] = ()
    exclude: Sequence[str] = ()
    optimizer: bool = True
    optimizer_only: bool = False
    layers: str | None = None
    prove_all: bool = False
    for_format: str | None = None
    average: Sequence[Path] = ()
    weights: str | None = None

    def open(self, path: Path) -> CheckpointSource:
        """Open the source.

        Raises:
            MegtoolError: see `open_model` and `select_layers`.
        """
        if self.optimizer_only and (self.average or not self.optimizer):
            why = "optimizer state is not averaged" if self.average else "nothing is left to write"
            other = "--average" if self.average else "--optimizer none"
            raise UsageError(f"--optimizer-only with {other}: {why}", hint="leave one of them out")
        if self.weights is not None and not self.average:
            raise UsageError("--weights without --average", hint="--average OTHER names others")
        return self._open(path, self.iteration, self._keep(), None)

    def open_others(self, first: CheckpointSource) -> Average | None:
        """Open the checkpoints to average with the source, None where there are none.

        Globs are about the source's names: of the others what the source has is taken. An
        iteration is that of save folders.

        Raises:
            UsageError: weights that are not one for each.
            MappingError: a checkpoint of another model.
        """
        if not self.average:
            return None
        shares = parse_shares(self.weights, len(self.average) + 1)
        others = []
        for path in self.average:
            iteration = self.iteration if is_save_folder(path) else None
            others.append(self._open(path, iteration, None, first.model))
        check_same(first, others, partial=self._keep() is not None)
        return Average(others=tuple(others), shares=shares)

    def _open(
        self,
        path: Path,
        iteration: str | None,
        keep: Callable[[str], bool] | None,
        model: Model | None,
    ) -> CheckpointSource:
        opened = open_model(
            path,
            iteration=iteration,
            family_name=self.family,
            like=self.like,
            keep=keep,
            model=model if self.layers is None else None,
            optimizer=self.optimizer and not self.average,
            prove_all=self.prove_all,
            for_format=self.for_format,
        )
        return opened if self.layers is None else select_layers(opened, self.layers)

    def _keep(self) -> Callable[[str], bool] | None:
        """Which stored tensors of the source are wanted, None for all."""
        keep = selector(self.select, self.exclude)
        if not self.optimizer_only:
            return keep
        return lambda name: is_optimizer_state(name) and (keep is None or keep(name))
