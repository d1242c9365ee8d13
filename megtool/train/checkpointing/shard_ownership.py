"""Ownership of a save's elements: which ranks have them, and which rank writes them.

A rank's parameter consists of boxes of a stored tensor, in order; each box is one or several
*cells*, the shards of Megatron. A range of a parameter's elements is thus a range of cells, and at
most a few boxes of each. If several ranks have the same elements (replicas, norms on all tensor
ranks, both copies of a tied embedding), one rank at the first place that has them writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from megtool.convert.families.nested import MEGATRON_PREFIX
from megtool.convert.megatron.rank_parameters import Box, Parameter, RankPlace, rank_parameters
from megtool.convert.megatron.sections import part_names, split_part
from megtool.convert.rank_tensors import RankCoordinates
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from megtool.spec.model_config import ModelConfig
from megtool.tensors.box import from_flat
from megtool.tensors.sharded import GlobalTensor, Shards

_LAYER = re.compile(r"(decoder|encoder|mtp)\.layers\.(\d+)\.(.+)")
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")
_SINGLE_EXPERT = re.compile(r"(.+\.experts\.experts)\.(\d+)\.(.+)")
_OWN_NORM = (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """A parameter of a rank: the elements from `offset` of its local tensor `name`.

    `place` is its pipeline stage, expert rank and tensor rank, without replicas.
    """

    parameter: Parameter
    name: str
    offset: int
    place: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class StateRange:
    """Elements `start` to `stop` of one state of a rank's flattened parameter `name`."""

    state: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOwnership:
    """What a rank owns: its coordinates, its tensors' dtypes, and the ranges of its state."""

    coordinates: RankCoordinates
    dtypes: Mapping[str, str]
    ranges: tuple[StateRange, ...]


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    """Elements `start` to `stop` of a parameter (from `owned.offset`), which `rank` writes.

    `offset` is the first of them in the rank's own flattened tensor.
    """

    state: str
    owned: OwnedParameter
    rank: int
    start: int
    stop: int
    offset: int


@dataclass(slots=True)
class ShardCells:
    """The shards of stored weights, by parameter.

    Stored names of a text model begin with `prefix` if a larger model nests it; those of its
    parameters do not.
    """

    tensors: Sequence[GlobalTensor]
    shards: Shards
    number: dict[str, int] = field(init=False)
    prefix: str = field(init=False)
    _by_layer: dict[tuple[int, int], list[tuple[Box, int]]] = field(init=False)

    def __post_init__(self) -> None:
        is_nested = any(t.name.startswith(MEGATRON_PREFIX) for t in self.tensors)
        self.prefix = MEGATRON_PREFIX if is_nested else ""
        self.number = {t.name.removeprefix(self.prefix): i for i, t in enumerate(self.tensors)}
        self._by_layer = {}
        lo, hi = self.shards.boxes.lo.tolist(), self.shards.boxes.hi.tolist()
        for row, number in enumerate(self.shards.tensor.tolist()):
            t = self.tensors[number]
            ndim, lead = len(t.shape), int(_is_stacked(t.name.removeprefix(self.prefix)))
            box = tuple(lo[row][lead:ndim]), tuple(hi[row][lead:ndim])
            layer = lo[row][0] if lead else 0
            self._by_layer.setdefault((number, layer), []).append((box, row))

    def find_tensor(self, key: str) -> tuple[int, tuple[int, ...]]:
        """The stored tensor of a per-layer key, and its leading indices.

        Raises:
            MappingError: there is none.
        """
        if key in self.number:
            return self.number[key], ()
        match = _LAYER.fullmatch(key)
        stacked = f"{match[1]}.layers.{match[3]}" if match else ""
        if match is None or stacked not in self.number:
            raise MappingError("the run has a parameter that its checkpoint lacks", tensor=key)
        return self.number[stacked], (int(match[2]),)

    def find_cells(self, p: Parameter) -> list[tuple[Box, int, int]]:
        """A parameter's cells in the order of its elements: box, first element, row of shards."""
        number, lead = self.find_tensor(p.key)
        candidates = self._by_layer.get((number, lead[0] if lead else 0), [])
        out: list[tuple[Box, int, int]] = []
        begin = 0
        for lo, hi in p.boxes:
            shape = [b - a for a, b in zip(lo, hi, strict=True)]
            for (cell_lo, cell_hi), row in candidates:
                inside = all(
                    a <= c and d <= b for a, b, c, d in zip(lo, hi, cell_lo, cell_hi, strict=True)
                )
                if inside:
                    offset = 0
                    for size, a, c in zip(shape, lo, cell_lo, strict=True):
                        offset = offset * size + c - a
                    out.append(((cell_lo, cell_hi), begin + offset, row))
            begin += prod(shape)
        return sorted(out, key=lambda cell: cell[1])


def split_into_boxes(
    cells: Iterable[tuple[Box, int, int]], start: int, stop: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """A parameter's elements `start` to `stop` as boxes of its tensor, with their first
    elements."""
    for (lo, hi), begin, _ in cells:
        shape = [b - a for a, b in zip(lo, hi, strict=True)]
        a, b = max(start - begin, 0), min(stop - begin, prod(shape))
        if a >= b:
            continue
        boxes, offset = from_flat(shape, a, b), begin + a
        volumes = boxes.volume().tolist()
        for box_lo, box_hi, volume in zip(
            boxes.lo.tolist(), boxes.hi.tolist(), volumes, strict=True
        ):
            yield (
                [x + y for x, y in zip(lo, box_lo, strict=True)],
                [x + y for x, y in zip(lo, box_hi, strict=True)],
                offset,
            )
            offset += volume


class LayoutOwnership:
    """The parameters of a model's stored weights on the ranks of a layout."""

    def __init__(
        self, tensors: Sequence[GlobalTensor], config: ModelConfig, parallel: ParallelConfig
    ) -> None:
        self._ranks = rank_parameters(tensors, config, parallel)
        self._parts = {  # parameters of a nested text model have names of their own
            t.name.removeprefix(MEGATRON_PREFIX): t.shape[0] for t in tensors if split_part(t.name)
        }
        self._num_chunks = parallel.vpp
        self._by_coordinates: dict[RankCoordinates, list[OwnedParameter]] = {}

    def parameters_of(self, coordinates: RankCoordinates) -> list[OwnedParameter]:
        """The parameters of a rank under the names of its modules, with each expert separate."""
        if coordinates not in self._by_coordinates:
            self._by_coordinates[coordinates] = list(self._find(coordinates))
        return self._by_coordinates[coordinates]

    def _find(self, coordinates: RankCoordinates) -> Iterator[OwnedParameter]:
        ends: dict[str, int] = {}
        for chunk in range(self._num_chunks):
            dense = RankPlace(coordinates.stage, chunk, 0, coordinates.tp)
            experts = RankPlace(coordinates.stage, chunk, coordinates.ep, coordinates.etp)
            for place, is_expert in ((dense, False), (experts, True)):
                owned = [
                    p
                    for p in self._ranks.get(place, ())
                    if p.is_expert == is_expert and not p.is_unused
                ]
                for p in sorted(owned, key=lambda p: _split_single(p.key)[1]):
                    name, _ = _split_single(p.key)
                    offset = ends.get(name, 0)
                    ends[name] = offset + p.numel
                    for part in self.in_parts(p):
                        coordinates_of = (place.stage, place.ep, place.tp)
                        yield OwnedParameter(part, name, offset, coordinates_of)
                        offset += part.numel

    def in_parts(self, p: Parameter) -> Iterator[Parameter]:
        """A parameter as the stored tensors that it consists of."""
        names = part_names(p.key, self._parts)
        if not names:
            yield p
            return
        first = 0
        for name in names:
            rows = self._parts[name]
            boxes = tuple(
                ((max(lo[0], first) - first, *lo[1:]), (min(hi[0], first + rows) - first, *hi[1:]))
                for lo, hi in p.boxes
                if lo[0] < first + rows and first < hi[0]
            )
            yield replace(p, key=name, shape=(rows, *p.shape[1:]), boxes=boxes)
            first += rows


def _split_single(key: str) -> tuple[str, tuple[int, bool]]:
    """The parameter that is stored as `key`, or partly so, and the order of its parts: experts one
    by one, each with its rows of gate before those of up."""
    half, expert = _HALF.fullmatch(key), _SINGLE_EXPERT.fullmatch(key)
    name = half[1] if half else key
    if expert is None:
        return name, (0, half is not None and half[2] == "v")
    match = _SINGLE_EXPERT.fullmatch(name)
    name = f"{match[1]}.{match[3]}" if match else name
    return name, (int(expert[2]), half is not None and half[2] == "v")


def local_name(key: str, local_names: Mapping[str, object]) -> str:
    """The name in a rank's modules of the parameter that is stored as `key`.

    megatron-core's local layers have another name for the norm before experts.
    """
    return key if key in local_names else key.replace(*_OWN_NORM)


def assign_writers(
    reports: Sequence[RankOwnership], ownership: LayoutOwnership, *, every_place: bool = False
) -> list[WriteAssignment]:
    """Assign every element of every parameter's state to one rank that writes it.

    Of the ranks that own an element, the one with the least assigned elements writes it: among
    those at the first place that has the parameter, or with `every_place` at each of them.

    Raises:
        MappingError: no rank has some elements of a parameter's state.
    """
    load = [0] * len(reports)
    out: list[WriteAssignment] = []
    for (state, key), candidates in _by_parameter(reports, ownership).items():
        places = sorted({owned.place for owned, *_ in candidates})
        for place in places if every_place else places[:1]:
            at_place = [f for f in candidates if f[0].place == place]
            start, size = 0, at_place[0][0].parameter.numel
            while start < size:
                writers = [
                    (load[rank], rank, b, owned) for owned, rank, a, b in at_place if a <= start < b
                ]
                if not writers:
                    raise MappingError(
                        f"no rank has the elements from {start} on of its state {state!r}",
                        tensor=key[0],
                    )
                _, rank, stop, owned = min(writers, key=lambda h: h[:2])
                out.append(WriteAssignment(state, owned, rank, start, stop, owned.offset + start))
                load[rank] += stop - start
                start = stop
    return out


_Key = tuple[str, tuple[Box, ...]]


def _by_parameter(
    reports: Sequence[RankOwnership], ownership: LayoutOwnership
) -> dict[tuple[str, _Key], list[tuple[OwnedParameter, int, int, int]]]:
    """Ranges of parameters' elements, by state and parameter: owner, rank, start and stop."""
    out: dict[tuple[str, _Key], list[tuple[OwnedParameter, int, int, int]]] = {}
    for rank, report in enumerate(reports):
        by_name: dict[str, list[OwnedParameter]] = {}
        for owned in ownership.parameters_of(report.coordinates):
            by_name.setdefault(local_name(owned.name, report.dtypes), []).append(owned)
        for run in report.ranges:
            for owned in by_name.get(run.name, ()):
                end = owned.offset + owned.parameter.numel
                a, b = max(run.start, owned.offset), min(run.stop, end)
                if a < b:
                    key = owned.parameter.key, owned.parameter.boxes
                    piece = owned, rank, a - owned.offset, b - owned.offset
                    out.setdefault((run.state, key), []).append(piece)
    return out


def _is_stacked(name: str) -> bool:
    return re.match(r"(decoder|encoder)\.layers\.(?!\d)", name) is not None
