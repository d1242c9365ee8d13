"""Whether the tensors that a program asks for fit a checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megtool.errors import MappingError, listed


def refuse_misfits(
    subject: str,
    *,
    missing: Sequence[str],
    misshapen: Mapping[str, str],
    file: str | Path | None = None,
    lacks: str | None = None,
    hint: str = "nothing was loaded; is it the same model?",
) -> None:
    """Refuse tensors that do not fit, all of them at once; nothing happens if all do.

    Args:
        subject: What does not fit, for example "the model's 12 tensors".
        missing: Names that the checkpoint does not have.
        misshapen: What differs, by the names of tensors with other shapes.
        file: The checkpoint.
        lacks: Another beginning of the sentence on missing ones.
        hint: What to do.

    Raises:
        MappingError: there are some.
    """
    faults = []
    if missing:
        lacks = lacks or f"the checkpoint lacks {len(missing)} of them"
        faults.append(f"{lacks}: {listed(missing, 20)}")
    if misshapen:
        faults.append(f"{len(misshapen)} have other shapes: {listed([*misshapen.values()], 20)}")
    if faults:
        raise MappingError(
            f"{subject} do not fit the checkpoint; {'; '.join(faults)}",
            file=file,
            tensor=[*missing, *misshapen][0],
            hint=hint,
            error_id="missing-tensors",
        )
