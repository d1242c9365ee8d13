"""Parse sizes such as `5GB` and `128MiB`."""

from __future__ import annotations

import re

from megtool.errors import UsageError

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def parse_size(text: str, option: str) -> int:
    """Bytes of a size such as `5GB`, `500MB` or `128MiB`.

    Raises:
        UsageError: not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    unit = match[2] if match else "?"
    unit = {"K": "KB", "M": "MB", "G": "GB", "T": "TB", "B": ""}.get(unit, unit)
    unit = unit if unit in _UNITS else f"{unit}B"
    if match is None or unit not in _UNITS or int(float(match[1]) * _UNITS[unit]) <= 0:
        raise UsageError(
            f"{option} is {text!r}, which is no size", hint="a size such as 5GB or 128MiB"
        )
    return int(float(match[1]) * _UNITS[unit])
