"""Conversion: the words families and dialects are written in, and what reads them."""

from megtool.convert.canonical import Entry
from megtool.convert.families import Family
from megtool.convert.mapping import (
    Cat,
    Dropped,
    Grouped,
    Interleaved,
    Padded,
    Permuted,
    Qkv,
    Row,
    Same,
    Stacked,
    Transposed,
)
from megtool.convert.settings import Default, Key, Only, Rope

__all__ = [
    "Cat",
    "Default",
    "Dropped",
    "Entry",
    "Family",
    "Grouped",
    "Interleaved",
    "Key",
    "Only",
    "Padded",
    "Permuted",
    "Qkv",
    "Rope",
    "Row",
    "Same",
    "Stacked",
    "Transposed",
]
