"""Tensors of several parts, each cut for itself: their rows, and the names of whole and parts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from megtool.convert.language.expression import evaluate
from megtool.convert.megatron.mixers import SECTIONS
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor

_PART_NAMES = frozenset(name for parts in SECTIONS.values() for name, _ in parts)
_PART = re.compile(
    rf"(.*\.(?:{'|'.join(map(re.escape, SECTIONS))}))\.({'|'.join(sorted(_PART_NAMES))})"
)
_WHOLE = re.compile(rf"(?:.*\.)?({'|'.join(map(re.escape, SECTIONS))})")
_IN_MEMORY = re.compile(r"\b((?:mamba_)?mixer)\.conv1d_(weight|bias)$")


def split_part(name: str) -> tuple[str, str] | None:
    """The name of the whole tensor and that of the part; None for the name of no part."""
    match = _PART.fullmatch(name)
    return None if match is None else (match[1], match[2])


def has_parts(name: str) -> bool:
    """Whether a tensor of this name, in memory or on disk, has several parts."""
    return _WHOLE.fullmatch(on_disk(name)) is not None


def on_disk(name: str) -> str:
    """The name in a checkpoint of a convolution that megatron-core 0.19 renamed in memory."""
    return _IN_MEMORY.sub(r"\1.conv1d.\2", name)


def section_rows(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The rows of each part of a tensor, in order; none for a tensor without parts."""
    match = _WHOLE.fullmatch(on_disk(name))
    rows = () if match is None else (int(evaluate(n, config)) for _, n in SECTIONS[match[1]])
    return tuple(n for n in rows if n)


def part_names(name: str, stored: Collection[str]) -> tuple[str, ...]:
    """The names of the parts of a tensor that has some, in the order of their rows.

    None where `stored`, names of a checkpoint, lacks one of them.
    """
    match = _WHOLE.fullmatch(on_disk(name))
    if match is None:
        return ()
    names = [(f"{on_disk(name)}.{n}", rows) for n, rows in SECTIONS[match[1]]]
    every, needed = tuple(n for n, _ in names), tuple(n for n, r in names if "kda" not in r)
    has_rest = any(n in stored for n in every if n not in needed)
    parts = every if has_rest else needed
    return parts if all(n in stored for n in parts) else ()


def joined(tensors: Iterable[GlobalTensor]) -> list[GlobalTensor]:
    """The tensors with parts put together, at the place of the first part of each."""
    out: dict[str, GlobalTensor] = {}
    parts: dict[str, list[GlobalTensor]] = {}
    for t in tensors:
        split = split_part(t.name)
        if split is None:
            out[t.name] = t
            continue
        parts.setdefault(split[0], []).append(t)
        out.setdefault(split[0], t)
    for whole, some in parts.items():
        rows = sum(t.shape[0] for t in some)
        out[whole] = GlobalTensor(name=whole, shape=(rows, *some[0].shape[1:]), dtype=some[0].dtype)
    return list(out.values())
