"""Layout: the stored tensors of a save, their shards, and what of this rank is in its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megtool.checkpoint.param_groups import BY_DP, FULLY
from megtool.convert.megatron import MAIN
from megtool.convert.sharding import shard
from megtool.dtypes import dtype
from megtool.errors import MappingError, UsageError
from megtool.tensors.sharded import GlobalTensor, Shards, widest
from megtool.train.checkpointing.save_template import Flat, Template
from megtool.train.checkpointing.shard_ownership import (
    Assigned,
    Cells,
    Holders,
    Report,
    assign,
    boxes_of,
    local_name,
)

FLOAT32 = dtype("float32")
WEIGHT = ""
"""What a weight is called among the states."""

_SPELLED = {MAIN: "param"}


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `start` to `stop` of a state of this rank's tensor `name`, at `at` of a shard."""

    state: str
    name: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is stored, and by whom; `parts` says of this rank's shards what fills them.

    Elements of a shard that no part covers are padding, and zero.
    """

    tensors: tuple[GlobalTensor, ...]
    shards: Shards
    parts: dict[int, tuple[Part, ...]]
    flat: Flat | None = None


_Row = tuple[int, list[int], list[int], int, tuple[Part, ...]]


def lay_out_run(
    template: Template, reports: Sequence[Report], rank: int, optimizer_format: str
) -> Layout:
    """Lay out a save; `reports` are those of all ranks, of which this one is `rank`.

    Weights are cut and spread over ranks as `reshard` does. State is cut as its weights are, and
    again where one rank's part of it ends: every rank writes what it has.

    Raises:
        MappingError: ranks and checkpoint do not have the same tensors.
        UsageError: `dp_reshardable`, and some parameters lack state that others have.
    """
    parallel, config = template.parallel, template.config
    kinds = {n: kind for report in reports for n, kind in report.dtypes.items()}
    holders = Holders(template.tensors, config, parallel)
    shards = shard(template.tensors, parallel, config=config)
    cells = Cells(template.tensors, shards)
    weights = _typed(template.tensors, reports, holders, cells, kinds)
    owned = _weight_parts(reports[rank], holders, cells)
    rows: list[_Row] = []
    owners = shards.owner.tolist()
    boxes = zip(shards.boxes.lo.tolist(), shards.boxes.hi.tolist(), strict=True)
    for row, (which, (lo, hi)) in enumerate(zip(shards.tensor.tolist(), boxes, strict=True)):
        ndim, parts = len(weights[which].shape), tuple[Part, ...]()
        if owners[row] == rank:
            if row not in owned:
                raise MappingError(
                    "the rank that is to write a part of it does not hold that",
                    tensor=weights[which].name,
                )
            parts = (owned[row],)
        rows.append((which, lo[:ndim], hi[:ndim], owners[row], parts))
    flat: Flat | None = None
    tensors = list(weights)
    if optimizer_format == BY_DP and any(r.runs for r in reports):
        flat = _flat(template, reports)
        rows += _flat_rows(flat, assign(reports, holders, every_place=True), reports, len(tensors))
        tensors += flat.tensors
    else:
        rows += _state_rows(tensors, assign(reports, holders), cells)
    rows.sort(key=lambda row: row[0])
    ndim = max(widest(tensors), 1)
    return Layout(
        tensors=tuple(tensors),
        shards=Shards.build([row[:4] for row in rows], ndim),
        parts={
            i: tuple(replace(p, name=local_name(p.name, reports[rank].dtypes)) for p in row[4])
            for i, row in enumerate(rows)
            if row[3] == rank
        },
        flat=flat,
    )


def _typed(
    tensors: Sequence[GlobalTensor],
    reports: Sequence[Report],
    holders: Holders,
    cells: Cells,
    kinds: dict[str, str],
) -> list[GlobalTensor]:
    """The stored weights in the types that the ranks hold them in."""
    out = list(tensors)
    for seat in {report.seat for report in reports}:
        for held in holders.of(seat):
            number, _ = cells.stored(held.parameter.key)
            name = local_name(held.name, kinds)
            if name not in kinds:
                raise MappingError("no rank holds this weight of the checkpoint", tensor=held.name)
            out[number] = replace(out[number], dtype=dtype(kinds[name]))
    return out


def _weight_parts(report: Report, holders: Holders, cells: Cells) -> dict[int, Part]:
    """What fills each shard of which this rank holds a copy."""
    out: dict[int, Part] = {}
    for held in holders.of(report.seat):
        name = local_name(held.name, report.dtypes)
        for (lo, hi), begin, row in cells.of(held.parameter):
            size = 1
            for a, b in zip(lo, hi, strict=True):
                size *= b - a
            start = held.offset + begin
            out.setdefault(row, Part(WEIGHT, name, start, start + size, 0))
    return out


def _state_rows(
    tensors: list[GlobalTensor], assigned: Sequence[Assigned], cells: Cells
) -> list[_Row]:
    """State under the names of its weights; its tensors are appended to `tensors`."""
    sizes: dict[tuple[str, int], int] = {}
    for a in assigned:
        number, _ = cells.stored(a.held.parameter.key)
        sizes[a.state, number] = sizes.get((a.state, number), 0) + a.stop - a.start
    # A key of all layers needs them all: where some are frozen, each layer has a key of its own.
    whole = all(size == cells.tensors[number].numel for (_, number), size in sizes.items())
    numbers: dict[tuple[str, str], int] = {}
    order = {MAIN: 0, "exp_avg": 1, "exp_avg_sq": 2}
    if whole:
        for state, number in sorted(sizes, key=lambda s: (order.get(s[0], 3), s)):
            t = cells.tensors[number]
            numbers[state, t.name] = len(tensors)
            tensors.append(_state_tensor(state, t.name, t.shape))
    rows: list[_Row] = []
    for a in assigned:
        p = a.held.parameter
        number, lead = cells.stored(p.key)
        name = cells.tensors[number].name if whole else p.key
        if (a.state, name) not in numbers:
            numbers[a.state, name] = len(tensors)
            tensors.append(_state_tensor(a.state, name, p.shape))
        front = list(lead) if whole else []
        after = [x + 1 for x in front]
        for lo, hi, at in boxes_of(cells.of(p), a.start, a.stop):
            size = 1
            for x, y in zip(lo, hi, strict=True):
                size *= y - x
            start = a.held.offset + at
            part = Part(a.state, a.held.name, start, start + size, 0)
            rows.append((numbers[a.state, name], front + lo, after + hi, a.rank, (part,)))
    return rows


def _state_tensor(state: str, name: str, shape: tuple[int, ...]) -> GlobalTensor:
    spelled = _SPELLED.get(state, state)
    return GlobalTensor(name=f"optimizer.state.{spelled}.{name}", shape=shape, dtype=FLOAT32)


def _flat(template: Template, reports: Sequence[Report]) -> Flat:
    states = {run.state for report in reports for run in report.runs}
    if template.flat is None:
        raise MappingError(f"{BY_DP} needs to know how the run cuts its buckets")
    order = sorted(states, key=lambda s: (s != MAIN, s))
    return template.flat({_SPELLED.get(s, s): FLOAT32 for s in order})


def _flat_rows(
    flat: Flat, assigned: Sequence[Assigned], reports: Sequence[Report], first: int
) -> list[_Row]:
    """State in buckets: a row for every run of a bucket that one rank holds."""
    known: dict[tuple[object, ...], list[Assigned]] = {}
    for a in assigned:
        key = a.held.parameter.key, a.held.parameter.boxes, a.held.place
        known.setdefault((_SPELLED.get(a.state, a.state), *key), []).append(a)
    found: dict[int, list[tuple[int, int, Assigned]]] = {}
    for slot in flat.slots:
        p, seat = slot.parameter, reports[slot.rank].seat
        place = (seat.stage, seat.ep, seat.etp) if p.is_expert else (seat.stage, 0, seat.tp)
        for state, number in slot.tensors.items():
            there = known.get((state, p.key, p.boxes, place))
            if there is None:
                raise UsageError(
                    f"{BY_DP} state is of every parameter alike, and this one has no {state!r}: "
                    "it is frozen, or updated in another way than others are",
                    tensor=p.key,
                    hint=f"--dist-ckpt-optim-format {FULLY} saves what there is",
                )
            found.setdefault(number, []).extend(
                (slot.start + a.start, slot.start + a.stop, a) for a in there
            )
    rows: list[_Row] = []
    for number, runs in sorted(found.items()):
        runs.sort(key=lambda run: run[0])
        groups: list[list[tuple[int, int, Assigned]]] = []
        for run in runs:
            if groups and groups[-1][-1][2].rank == run[2].rank:
                groups[-1].append(run)
            else:
                groups.append([run])
        size = flat.tensors[number].numel
        begins = [0, *(group[0][0] for group in groups[1:]), size]
        for group, lo, hi in zip(groups, begins, begins[1:], strict=False):
            parts = tuple(
                Part(a.state, a.held.name, a.at, a.at + stop - start, start - lo)
                for start, stop, a in group
            )
            rows.append((first + number, [lo], [hi], group[0][2].rank, parts))
    return rows
