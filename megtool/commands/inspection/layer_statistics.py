"""Bytes by module, and statistics by layer: a role's tensors over the layers, and outliers."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megtool.convert.megatron.names import split_state
from megtool.digests.statistics import TensorStatistics
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.sharded import GlobalTensor

_LAYER = re.compile(r"(?:^|[./])(?:layers?|h|blocks?|blk)[./](\d+)[./]")
_STACKED = re.compile(r"(^|\.)layers\.(?!\d+\.)")
_ROW = re.compile(r"(.*)\[(\d+)\]$")
_EXPERT = re.compile(r"(experts?\.)\d+(?=\.)")
_LEAVES = ("weight", "bias")
_MAX_EXPERTS = 16

MIN_LAYERS = 4
"""A role in fewer layers has no outliers."""

FAR = 8.0
"""An outlier's logarithm is this many deviations (of the median kind) from its role's median."""

MIN_RATIO = 4.0
"""And it is that many times the role's median, or a part of it as small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStatistics:
    """The tensors of one role in one layer. `state` is that of an optimizer, empty for weights;
    experts of a layer count as one."""

    role: str
    state: str
    layer: int
    mean: float | None
    std: float | None
    largest: float | None
    zeros: float
    nan: int
    inf: int

    def to_json(self) -> dict[str, Any]:
        """The statistics as plain data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsOutlier:
    """A role in a layer that is unlike the same role in other layers, and how."""

    name: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """The outlier as plain data."""
        return {"name": self.name, "text": self.text}


def module_bytes(source: CheckpointSource) -> dict[str, int]:
    """Bytes of every module by its path: names of the family where it is known, else as stored.

    Optimizer state is in a branch of its own. Experts are one module where there are many.
    """
    tensors = source.view.canonical if source.is_canonical else source.catalogue.index
    experts = len({m[0] for n in tensors if (m := re.search(r"experts\.(\d+)\.", n))})
    out: dict[str, int] = defaultdict(int)
    for name in tensors:
        t = source.view.canonical[name] if source.is_canonical else source.catalogue[name]
        state, key = _split(name, source.is_canonical)
        if experts > _MAX_EXPERTS:
            key = _EXPERT.sub(r"\1", key).replace("..", ".")
        parts = key.split(".")
        if len(parts) > 1 and parts[-1] in _LEAVES:
            parts.pop()
        root = ("optimizer", state) if state else ("model",)
        out[".".join((*root, *parts))] += t.num_bytes
    return dict(out)


def _split(name: str, is_canonical: bool) -> tuple[str, str]:
    if is_canonical:
        state, colon, key = name.rpartition(":")
        return (state, key) if colon else ("", name)
    state, _, key = split_state(name)
    return state, key


def find_stacked_layers(tensors: Sequence[GlobalTensor]) -> set[str]:
    """Tensors whose rows are layers: Megatron's, of all layers in one."""
    return {
        t.name
        for t in tensors
        if t.packing is None
        and len(t.shape) > 1
        and t.numel
        and t.dtype.is_float
        and _STACKED.search(split_state(t.name)[2])
    }


def layer_statistics(
    statistics: Mapping[str, TensorStatistics], stacked: Collection[str]
) -> tuple[LayerStatistics, ...]:
    """Statistics of each role in each layer, in order of first appearance."""
    groups: dict[tuple[str, str, int], TensorStatistics] = {}
    for name, own in statistics.items():
        row = _ROW.match(name)
        state, _, key = split_state(row[1] if row else name)
        if row and row[1] in stacked:
            role, layer = _STACKED.sub(r"\1", key), int(row[2])
        elif name not in stacked and (match := _LAYER.search(key)):
            role, layer = key[: match.start()] + "." + key[match.end() :], int(match[1])
            role = role.lstrip(".")
        else:
            continue
        role = _EXPERT.sub(r"\1", role).replace("..", ".")
        groups.setdefault((state, role, layer), TensorStatistics()).merge(own)
    return tuple(
        LayerStatistics(
            role=role,
            state=state,
            layer=layer,
            mean=total.mean,
            std=total.std,
            largest=total.largest,
            zeros=total.zeros / max(total.count, 1),
            nan=total.nan,
            inf=total.inf,
        )
        for (state, role, layer), total in _by_layer(groups)
    )


def _by_layer(
    groups: Mapping[tuple[str, str, int], TensorStatistics],
) -> Iterator[tuple[tuple[str, str, int], TensorStatistics]]:
    """Roles in order of first appearance, the layers of each in their order."""
    first: dict[tuple[str, str], int] = {}
    for state, role, _ in groups:
        first.setdefault((state, role), len(first))
    yield from sorted(groups.items(), key=lambda item: (first[item[0][:2]], item[0][2]))


def find_outliers(layers: Sequence[LayerStatistics]) -> tuple[StatisticsOutlier, ...]:
    """Roles in layers with NaN, Inf, nothing but zeros, or a spread or largest magnitude that is
    far from those of the same role in other layers."""
    groups: dict[tuple[str, str], list[LayerStatistics]] = defaultdict(list)
    for layer in layers:
        groups[layer.state, layer.role].append(layer)
    return tuple(o for members in groups.values() for o in _outliers_of(members))


def _outliers_of(members: Sequence[LayerStatistics]) -> Iterator[StatisticsOutlier]:
    texts: dict[int, list[str]] = defaultdict(list)
    for member in members:
        if member.nan or member.inf:
            texts[member.layer].append(f"{member.nan:,} NaN, {member.inf:,} Inf")
    is_dead = [member.largest == 0 for member in members]
    if any(is_dead) and not all(is_dead):
        for member, dead in zip(members, is_dead, strict=True):
            if dead:
                texts[member.layer].append("all zeros, other layers are not")
    for field, label in (("std", "spread"), ("largest", "largest magnitude")):
        values = {m.layer: v for m in members if (v := getattr(m, field)) and math.isfinite(v)}
        if len(values) < MIN_LAYERS:
            continue
        logs = {layer: math.log(v) for layer, v in values.items()}
        middle = median(logs.values())
        deviation = median(abs(v - middle) for v in logs.values())
        for layer, v in logs.items():
            distance = abs(v - middle)
            if distance > max(FAR * deviation, math.log(MIN_RATIO)):
                ratio = math.exp(v - middle)
                shown = f"{ratio:.1f} times" if ratio > 1 else f"1/{1 / ratio:.1f} of"
                text = f"{label} {values[layer]:.4g} is {shown} the median of all layers"
                texts[layer].append(text)
    for member in members:
        if member.layer in texts:
            state = f"{member.state}: " if member.state else ""
            name = f"{state}{member.role}, layer {member.layer}"
            yield StatisticsOutlier(name=name, text="; ".join(texts[member.layer]))
