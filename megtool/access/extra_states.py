"""Extra states of modules, such as Transformer Engine's FP8 scales, in state dicts that are loaded.

`<module>._extra_state` is whatever the module's `get_extra_state` gives: Transformer Engine 2.x a
tensor of bytes, 1.x a BytesIO; without FP8 it is empty. The bytes are a pickle, which
`set_extra_state` executes. Hugging Face folders have no extra states, and Megatron's are objects of
its own modules: what a checkpoint lacks is no fault of it, and the module's own state stays.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megtool.errors import FormatError, listed
from megtool.pickles.rules import verbatim_problems
from megtool.source.foreign_tensors import find_foreign_tensors
from megtool.tensors.catalogue import Catalogue

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"(.*\.)?_extra_state\d*")


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is the extra state of a module, by its name."""
    return _NAME.fullmatch(name) is not None


def is_empty(value: Any) -> bool:
    """Whether a module's extra state holds nothing, as those of modules without FP8."""
    if isinstance(value, io.BytesIO):
        return not value.getbuffer().nbytes
    num_elements = getattr(value, "numel", None)
    return value is None or (num_elements is not None and not num_elements())


def warn_kept(names: Sequence[str], location: str | Path) -> None:
    """Warn that modules keep extra states that hold something."""
    if names:
        _LOG.warning(
            "no extra state of %d modules is loaded from %s, and theirs stay as they are: %s",
            len(names),
            location,
            listed(names, 3),
        )


def kept_states(state: Mapping[str, Any], loaded: Collection[str]) -> list[str]:
    """The extra states of a state dict that hold something, and are not among those loaded."""
    others = (n for n in state if is_extra_state(n) and n not in loaded)
    return [n for n in others if not is_empty(state[n])]


def refuse_foreign_states(catalogue: Catalogue, names: Collection[str]) -> None:
    """Refuse stored extra states that would run code once a module unpickles them.

    Raises:
        FormatError: there is one among `names`.
    """
    for name, file, problems in find_foreign_tensors(catalogue, names):
        raise _hostile(name, file, problems)


def refuse_foreign_stream(name: str, value: Any, file: str | Path) -> None:
    """Refuse the extra state of a module that is a stream, in the same way.

    Raises:
        FormatError: it would run code.
    """
    data = value.getvalue() if isinstance(value, io.BytesIO) else b""
    if is_extra_state(name) and (problems := verbatim_problems(data)):
        raise _hostile(name, file, problems)


def _hostile(name: str, file: str | Path, problems: Sequence[str]) -> FormatError:
    return FormatError(
        f"not loaded, because the module that gets it would run code: {problems[0]}",
        file=file,
        tensor=name,
        hint="load a state dict without this entry, or another checkpoint",
        error_id="hostile-pickle",
    )
