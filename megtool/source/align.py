"""Open checkpoints for a comparison: tensors of the same meaning get the same names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megtool.convert.dialects import read_side
from megtool.errors import MappingError
from megtool.formats.save_folder import is_save_folder
from megtool.options.groups import SourceOptions
from megtool.source.checkpoint import CheckpointSource, ModelIdentity
from megtool.source.open import TensorFilter, open_source

_PARTIAL = TensorFilter(select=lambda name: True)
"""All tensors, and the model need not be complete."""


def open_for_digests(path: Path, options: SourceOptions) -> CheckpointSource:
    """Open a checkpoint under the names that its digests use, if it has digests.

    Raises:
        MappingError: its digests have canonical names, and the tensors do not fit the model.
    """
    source = _open(path, options)
    sidecar = source.sidecar
    if sidecar and sidecar.names == "canonical" and not source.is_canonical and source.reason:
        raise source.reason
    return source


def open_aligned(
    a: Path, b: Path, options: SourceOptions
) -> tuple[CheckpointSource, CheckpointSource]:
    """Open two checkpoints under canonical names, or both under stored names.

    Where one does not say which model it is, the other's model is tried.

    Raises:
        MappingError: the two have no tensor name in common.
    """
    options_a, options_b = _options_of_one(options, a, b), _options_of_one(options, b, a)
    x, y = _open(a, options_a), _open(b, options_b)
    if x.model is None and y.model is not None:
        x = _open(a, options_a, y.model)
    elif y.model is None and x.model is not None:
        y = _open(b, options_b, x.model)
    if x.is_canonical != y.is_canonical:
        reason = y.reason if x.is_canonical else x.reason
        _use_stored_names(x)
        _use_stored_names(y)
    else:
        reason = x.reason or y.reason
    if x.view.canonical and y.view.canonical and not x.view.canonical.keys() & y.view.canonical:
        if reason is not None:
            raise reason
        raise MappingError(
            f"{x.path} and {y.path} have no tensor name in common, "
            f"for example {next(iter(x.view.canonical))!r} and {next(iter(y.view.canonical))!r}",
            hint="--family NAME and --like HF_FOLDER say which model they are",
        )
    return x, y


def _options_of_one(options: SourceOptions, path: Path, other_path: Path) -> SourceOptions:
    """The options for one of two checkpoints: `iteration` is for the save folder among them."""
    if options.iteration is None or is_save_folder(path) or not is_save_folder(other_path):
        return options
    return replace(options, iteration=None)


def _open(
    path: Path, options: SourceOptions, fallback: ModelIdentity | None = None
) -> CheckpointSource:
    """Open a checkpoint, which may lack tensors. One that does not fit its own model keeps the
    stored names, and `reason` says why."""
    return open_source(
        path,
        options,
        tensors=_PARTIAL,
        fallback=fallback,
        lenient=not (options.family or options.like),
        may_lack=True,
    )


def _use_stored_names(source: CheckpointSource) -> None:
    """Make every stored tensor its own canonical one, padding included."""
    source.view = read_side(source.catalogue.tensors, dialect="identity")
