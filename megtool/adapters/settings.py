"""Numbers in the settings that other programs save with an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megtool.errors import FormatError
from megtool.formats.header_reader import short_repr

_MOST = 2.0**64


def read_factor(
    section: Mapping[str, Any], key: str, default: float, path: Path, *, may_be_zero: bool = False
) -> float:
    """A number above 0 and at most 2^64; `default` where there is none.

    Raises:
        FormatError: it is something else.
    """
    value: Any = default if section.get(key) is None else section[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MOST or not (value or may_be_zero):
        raise FormatError(f"{key!r} is {short_repr(value)}, no number above 0", file=path)
    return float(value) if isinstance(value, float) else int(value)


def read_count(section: Mapping[str, Any], key: str, default: int, path: Path) -> int:
    """A whole number of 1 or more; `default` where there is none.

    Raises:
        FormatError: it is something else.
    """
    value = read_factor(section, key, default, path)
    if value != int(value):
        raise FormatError(f"{key!r} is {value!r}, no whole number", file=path)
    return int(value)
