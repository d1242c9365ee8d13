"""Match: checkpoints opened so that their tensors meet under the same names, as far as they do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megtool.checkpoint.formats.save_folder import is_save_folder
from megtool.convert.dialects import read_side
from megtool.errors import MappingError
from megtool.reshard.open_source import CheckpointSource, Model, open_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user says of the checkpoints to open."""

    family: str | None = None
    like: Path | None = None
    iteration: str | None = None

    def of(self, path: Path, other: Path) -> Choice:
        """The choice for one of two: an iteration is not asked of what is no save folder, if the
        other is one."""
        if self.iteration is None or is_save_folder(path) or not is_save_folder(other):
            return self
        return replace(self, iteration=None)

    def open(self, path: Path, model: Model | None = None) -> CheckpointSource:
        """Open a checkpoint, which may lack tensors. One that does not fit its own model keeps the
        stored names, and `reason` says why."""
        return open_model(
            path,
            iteration=self.iteration,
            family_name=self.family,
            like=self.like,
            keep=lambda name: True,
            model=model,
            lenient=not (self.family or self.like),
        )


def open_one(path: Path, choice: Choice) -> CheckpointSource:
    """Open a checkpoint under the names that its digests have, if it has any.

    Raises:
        MappingError: its digests have canonical names, and the tensors do not fit the model.
    """
    opened = choice.open(path)
    sidecar = opened.sidecar
    if sidecar and sidecar.names == "canonical" and not opened.is_canonical and opened.reason:
        raise opened.reason
    return opened


def open_both(a: Path, b: Path, choice: Choice) -> tuple[CheckpointSource, CheckpointSource]:
    """Open two checkpoints under canonical names, or both under stored names.

    Where one knows no model, the other's is tried.

    Raises:
        MappingError: no tensor of one has the name of a tensor of the other.
    """
    of_a, of_b = choice.of(a, b), choice.of(b, a)
    x, y = of_a.open(a), of_b.open(b)
    if x.model is None and y.model is not None:
        x = of_a.open(a, y.model)
    elif y.model is None and x.model is not None:
        y = of_b.open(b, x.model)
    if x.is_canonical != y.is_canonical:
        reason = y.reason if x.is_canonical else x.reason
        _keep_names(x)
        _keep_names(y)
    else:
        reason = x.reason or y.reason
    if x.side.canonical and y.side.canonical and not x.side.canonical.keys() & y.side.canonical:
        if reason is not None:
            raise reason
        raise MappingError(
            f"no tensor of {x.path} has the name of one of {y.path}, "
            f"for example {next(iter(x.side.canonical))!r} and {next(iter(y.side.canonical))!r}",
            hint="--family NAME and --like HF_FOLDER say what model they are",
        )
    return x, y


def _keep_names(opened: CheckpointSource) -> None:
    """Every stored tensor is its own canonical one, padding and all."""
    opened.side = read_side(opened.catalogue.tensors, dialect="identity")
