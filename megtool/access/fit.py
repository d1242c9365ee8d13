"""Whether the tensors that a program asks for fit a checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import FormatError, MappingError, UsageError, listed

if TYPE_CHECKING:
    import torch

FILLED_IN_PART = "the tensors are filled in part: load them again, or do not use them"
"""What an error says once reading has begun."""


def refuse_misfits(
    subject: str,
    *,
    missing: Sequence[str],
    misshapen: Mapping[str, str],
    mistyped: Mapping[str, str] = MappingProxyType({}),
    file: str | Path | None = None,
    lacks: str | None = None,
    hint: str = "nothing was loaded; is it the same model?",
) -> None:
    """Refuse tensors that do not fit, all of them at once; nothing happens if all do.

    Args:
        subject: What does not fit, for example "the model's 12 tensors".
        missing: Names that the checkpoint does not have.
        misshapen: What differs, by the names of tensors with other shapes.
        mistyped: Why they cannot hold what is stored, by the names of others.
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
    if mistyped:
        texts = listed([*mistyped.values()], 20)
        faults.append(f"{len(mistyped)} cannot hold what is there: {texts}")
    if faults:
        raise MappingError(
            f"{subject} do not fit the checkpoint; {'; '.join(faults)}",
            file=file,
            tensor=[*missing, *misshapen, *mistyped][0],
            hint=hint,
            error_id="missing-tensors",
        )


def find_obstacle(value: Any, stored: DType) -> str | None:
    """Why a value of a state dict cannot hold the elements of a stored tensor; None if it can.

    Floating numbers are cast to floating numbers, and everything else is kept as it is.
    """
    kind = str(getattr(value, "dtype", ""))
    if not kind.startswith("torch."):
        return f"is no tensor of torch but a {type(value).__name__}"
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    if local.is_quantized or not is_known(kind):
        return f"is {kind.removeprefix('torch.')}, and here {stored}"
    if "strided" not in str(local.layout):
        return f"is {str(local.layout).removeprefix('torch.')}, and only dense tensors are filled"
    strides = () if local.is_meta else local.stride()
    if any(n > 1 and not step for n, step in zip(local.shape, strides, strict=False)):
        return "has elements that share memory (it is expanded: clone it)"
    known = named_dtype(kind)
    if known != stored and not (known.is_float and stored.is_float):
        return f"is {known}, and here {stored} (only floating numbers are cast)"
    return None


def is_known(kind: str) -> bool:
    """Whether an element type is one that checkpoints have."""
    try:
        named_dtype(kind)
    except FormatError:
        return False
    return True


def describe_obstacles(pairs: Mapping[str, tuple[Any, DType]]) -> dict[str, str]:
    """The sentences on values that cannot hold what is stored, by their names."""
    reasons = {name: find_obstacle(*pair) for name, pair in pairs.items()}
    return {name: f"{name} {reason}" for name, reason in reasons.items() if reason is not None}


def require_memory(on_meta: Sequence[str]) -> None:
    """Refuse tensors on the meta device, which nothing can be read into.

    Raises:
        UsageError: there are some.
    """
    if on_meta:
        raise UsageError(
            f"{len(on_meta)} tensors have no memory, such as {on_meta[0]!r}",
            hint='model.to_empty(device="cpu") gives them some',
        )
