"""Holdings: who holds which elements of which state, and which rank writes each of them.

A rank's parameter is boxes of a stored tensor, one after the other; each box is one or several
*cells*, the shards that Megatron cuts. A run of a parameter's elements is thus a run of cells, and
at most a few boxes of each. Where several ranks hold the same elements (replicas, norms on all
tensor ranks, both copies of a tied embedding) one of the first place that holds them writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from megtool.config import ModelConfig, ParallelConfig
from megtool.convert.rank_parameters import Box, Parameter, RankPlace, rank_parameters
from megtool.convert.rank_tensors import RankCoordinates
from megtool.errors import MappingError
from megtool.tensors.box import from_flat
from megtool.tensors.sharded import GlobalTensor, Shards

_LAYER = re.compile(r"(decoder|encoder|mtp)\.layers\.(\d+)\.(.+)")
_OWN_NORM = (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter of a rank: elements `offset` on of what the rank calls `name`.

    `place` is the pipeline stage, expert rank and tensor rank that hold it, without replicas.
    """

    parameter: Parameter
    name: str
    offset: int
    place: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `start` to `stop` of one state of a rank's flattened parameter `name`."""

    state: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank tells all others: where it sits, its tensors' types, and the runs it holds."""

    seat: RankCoordinates
    dtypes: Mapping[str, str]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """Elements `start` to `stop` of a parameter (of `held.offset` on): written by `rank`.

    `at` is the element of the rank's own flattened tensor at which they begin.
    """

    state: str
    held: Held
    rank: int
    start: int
    stop: int
    at: int


@dataclass(slots=True)
class Cells:
    """The shards of the stored weights, by the parameter whose elements they are."""

    tensors: Sequence[GlobalTensor]
    shards: Shards
    number: dict[str, int] = field(init=False)
    _by_layer: dict[tuple[int, int], list[tuple[Box, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.number = {t.name: i for i, t in enumerate(self.tensors)}
        self._by_layer = {}
        lo, hi = self.shards.boxes.lo.tolist(), self.shards.boxes.hi.tolist()
        for row, which in enumerate(self.shards.tensor.tolist()):
            t = self.tensors[which]
            ndim, lead = len(t.shape), int(_is_stacked(t.name))
            box = tuple(lo[row][lead:ndim]), tuple(hi[row][lead:ndim])
            layer = lo[row][0] if lead else 0
            self._by_layer.setdefault((which, layer), []).append((box, row))

    def stored(self, key: str) -> tuple[int, tuple[int, ...]]:
        """The stored tensor of a per-layer key, and the indices in front of the key's own.

        Raises:
            MappingError: there is none.
        """
        if key in self.number:
            return self.number[key], ()
        match = _LAYER.fullmatch(key)
        stacked = f"{match[1]}.layers.{match[3]}" if match else ""
        if match is None or stacked not in self.number:
            raise MappingError(
                "the run has a parameter that its checkpoint has no place for", tensor=key
            )
        return self.number[stacked], (int(match[2]),)

    def of(self, p: Parameter) -> list[tuple[Box, int, int]]:
        """A parameter's cells in the order of its elements: box, first element, row of shards."""
        number, lead = self.stored(p.key)
        there = self._by_layer.get((number, lead[0] if lead else 0), [])
        out: list[tuple[Box, int, int]] = []
        begin = 0
        for lo, hi in p.boxes:
            shape = [b - a for a, b in zip(lo, hi, strict=True)]
            for (cell_lo, cell_hi), row in there:
                inside = all(
                    a <= c and d <= b for a, b, c, d in zip(lo, hi, cell_lo, cell_hi, strict=True)
                )
                if inside:
                    at = 0
                    for size, a, c in zip(shape, lo, cell_lo, strict=True):
                        at = at * size + c - a
                    out.append(((cell_lo, cell_hi), begin + at, row))
            begin += prod(shape)
        return sorted(out, key=lambda cell: cell[1])


def boxes_of(
    cells: Iterable[tuple[Box, int, int]], start: int, stop: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """A parameter's elements `start` to `stop` as boxes of its tensor, with the first of each."""
    for (lo, hi), begin, _ in cells:
        shape = [b - a for a, b in zip(lo, hi, strict=True)]
        a, b = max(start - begin, 0), min(stop - begin, prod(shape))
        if a >= b:
            continue
        found, at = from_flat(shape, a, b), begin + a
        volumes = found.volume().tolist()
        for box_lo, box_hi, volume in zip(
            found.lo.tolist(), found.hi.tolist(), volumes, strict=True
        ):
            yield (
                [x + y for x, y in zip(lo, box_lo, strict=True)],
                [x + y for x, y in zip(lo, box_hi, strict=True)],
                at,
            )
            at += volume


class Holders:
    """What every seat of a layout holds, of a model's stored weights."""

    def __init__(
        self, tensors: Sequence[GlobalTensor], config: ModelConfig, parallel: ParallelConfig
    ) -> None:
        self._ranks = rank_parameters(tensors, config, parallel)
        self._num_chunks = parallel.vpp
        self._known: dict[RankCoordinates, list[Held]] = {}

    def of(self, seat: RankCoordinates) -> list[Held]:
        """The parameters of a seat, experts one by one, under the names of its modules."""
        if seat not in self._known:
            self._known[seat] = list(self._find(seat))
        return self._known[seat]

    def _find(self, seat: RankCoordinates) -> Iterator[Held]:
        ends: dict[str, int] = {}
        for chunk in range(self._num_chunks):
            dense = RankPlace(seat.stage, chunk, 0, seat.tp)
            experts = RankPlace(seat.stage, chunk, seat.ep, seat.etp)
            for place, is_expert in ((dense, False), (experts, True)):
                for p in self._ranks.get(place, ()):
                    if p.is_expert == is_expert:
                        at = ends.get(p.key, 0)
                        ends[p.key] = at + p.numel
                        yield Held(p, p.key, at, (place.stage, place.ep, place.tp))


def local_name(key: str, known: Mapping[str, object]) -> str:
    """What a rank's modules call the parameter that is stored as `key`.

    megatron-core's own layers name the norm before experts otherwise.
    """
    return key if key in known else key.replace(*_OWN_NORM)


def assign(
    reports: Sequence[Report], holders: Holders, *, every_place: bool = False
) -> list[Assigned]:
    """Which rank writes which elements of which parameter's state, each element once.

    The least loaded of the ranks that hold an element writes it: of those of the first place that
    holds the parameter, or with `every_place` once for each of them.

    Raises:
        MappingError: some elements of a parameter's state are on no rank.
    """
    load = [0] * len(reports)
    out: list[Assigned] = []
    for (state, key), found in _by_parameter(reports, holders).items():
        places = sorted({held.place for held, *_ in found})
        for place in places if every_place else places[:1]:
            mine = [f for f in found if f[0].place == place]
            at, size = 0, mine[0][0].parameter.numel
            while at < size:
                here = [(load[rank], rank, b, held) for held, rank, a, b in mine if a <= at < b]
                if not here:
                    raise MappingError(
                        f"elements from {at} on of its state {state!r} are on no rank",
                        tensor=key[0],
                    )
                _, rank, stop, held = min(here, key=lambda h: h[:2])
                out.append(Assigned(state, held, rank, at, stop, held.offset + at))
                load[rank] += stop - at
                at = stop
    return out


_Key = tuple[str, tuple[Box, ...]]


def _by_parameter(
    reports: Sequence[Report], holders: Holders
) -> dict[tuple[str, _Key], list[tuple[Held, int, int, int]]]:
    """Runs of parameters' own elements, by state and parameter: holder, rank, start and stop."""
    out: dict[tuple[str, _Key], list[tuple[Held, int, int, int]]] = {}
    for rank, report in enumerate(reports):
        by_name: dict[str, list[Held]] = {}
        for held in holders.of(report.seat):
            by_name.setdefault(local_name(held.name, report.dtypes), []).append(held)
        for run in report.runs:
            for held in by_name.get(run.name, ()):
                end = held.offset + held.parameter.numel
                a, b = max(run.start, held.offset), min(run.stop, end)
                if a < b:
                    key = held.parameter.key, held.parameter.boxes
                    piece = held, rank, a - held.offset, b - held.offset
                    out.setdefault((run.state, key), []).append(piece)
    return out


def _is_stacked(name: str) -> bool:
    return re.match(r"(decoder|encoder)\.layers\.(?!\d)", name) is not None
