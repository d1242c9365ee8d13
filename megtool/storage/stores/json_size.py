"""The memory that a JSON text takes when it is parsed, estimated before."""

from __future__ import annotations

MAX_PARSED_BYTES = 384 << 20
"""The most memory that the value of a JSON text may take; the largest vocabularies need half."""

_COSTS = ((b"{", 240), (b"[", 72), (b",", 16), (b'"', 30))
"""Bytes that CPython 3.11 allocates for each object, list, member and end of a text, rounded up."""


def estimate_parsed_bytes(data: bytes) -> int:
    """Estimate the memory of the value of a JSON text in bytes, without that of its characters."""
    return sum(data.count(mark) * cost for mark, cost in _COSTS)
