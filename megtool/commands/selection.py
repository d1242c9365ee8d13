"""Selection: which part of which checkpoints is read, and as what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megtool.checkpoint.formats.save_folder import is_save_folder
from megtool.commands.average import Average, check_same, parse_shares
from megtool.commands.layers import select_layers
from megtool.commands.opened import Model, Opened, open_model, selector
from megtool.convert.dialects import is_optimizer_state
from megtool.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the user says of the checkpoints to read.

    `select` and `exclude` are globs on stored names, `layers` a list of layers. `optimizer` false
    leaves optimizer state out, `optimizer_only` everything else. `prove_all` compares every master
    weight with its weight. `for_format` is the format to be written.
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

    def open(self, path: Path) -> Opened:
        """Open the source.

        Raises:
            MegtoolError: see `open_model` and `select_layers`.
        """
        if self.optimizer_only and not self.optimizer:
            raise UsageError(
                "--optimizer-only with --optimizer none leaves nothing",
                hint="leave one of the two out",
            )
        return self._open(path, self.iteration, self._keep(), None)

    def open_others(
        self, first: Opened, paths: Sequence[Path], weights: str | None
    ) -> Average | None:
        """Open the checkpoints to average with the source, None where there are none.

        Globs are about the source's names: of the others what the source has is taken. An
        iteration is that of save folders.

        Raises:
            UsageError: weights that are not one for each, or without others.
            MappingError: a checkpoint of another model.
        """
        if not paths:
            if weights is not None:
                raise UsageError("--weights without --average", hint="--average OTHER names others")
            return None
        if self.optimizer_only:
            raise UsageError("optimizer state is not averaged", hint="leave --optimizer-only out")
        shares = parse_shares(weights, len(paths) + 1)
        others = []
        for path in paths:
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
    ) -> Opened:
        opened = open_model(
            path,
            iteration=iteration,
            family_name=self.family,
            like=self.like,
            keep=keep,
            model=model if self.layers is None else None,
            optimizer=self.optimizer,
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
