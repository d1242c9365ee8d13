"""The layout of a save: stored tensors, their shards, and the content of this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megtool.convert.megatron.names import MAIN
from megtool.convert.megatron.sharding import shard
from megtool.dtypes import dtype
from megtool.errors import MappingError, UsageError
from megtool.megatron_state.param_groups import DP_RESHARDABLE, FULLY_RESHARDABLE
from megtool.tensors.sharded import GlobalTensor, Shards, widest
from megtool.train.checkpointing.save_template import BucketLayout, SaveTemplate
from megtool.train.checkpointing.shard_ownership import (
    LayoutOwnership,
    RankOwnership,
    ShardCells,
    StateRange,
    WriteAssignment,
    assign_writers,
    local_name,
    split_into_boxes,
)

FLOAT32 = dtype("float32")
WEIGHT = ""
"""The state name of weights."""

_STORED_NAMES = {MAIN: "param"}


@dataclass(frozen=True, slots=True)
class ShardPart(StateRange):
    """A range of a state of this rank's tensor `name`, at `offset` of a shard."""

    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLayout:
    """What is stored, and by which rank; `parts` has the content of each of this rank's shards.

    Elements of a shard that no part covers are padding, and zero.
    """

    tensors: tuple[GlobalTensor, ...]
    shards: Shards
    parts: dict[int, tuple[ShardPart, ...]]
    buckets: BucketLayout | None = None


_Row = tuple[int, list[int], list[int], int, tuple[ShardPart, ...]]


def plan_save_layout(
    template: SaveTemplate, reports: Sequence[RankOwnership], rank: int, optimizer_format: str
) -> SaveLayout:
    """Plan a save; `reports` are those of all ranks, of which this one is `rank`.

    Weights are sharded and assigned to ranks as `reshard` does, unless ranks report ranges of them.
    State, and weights with ranges, are sharded further where one rank's part ends: every rank
    writes what it owns.

    Raises:
        MappingError: ranks and checkpoint do not have the same tensors.
        UsageError: with `dp_reshardable` some parameters lack state that others have.
    """
    parallel, config = template.parallel, template.config
    kinds = {n: kind for report in reports for n, kind in report.dtypes.items()}
    ownership = LayoutOwnership(template.tensors, config, parallel)
    shards = shard(template.tensors, parallel, config=config)
    cells = ShardCells(template.tensors, shards)
    weights = _with_stored_dtypes(template.tensors, reports, ownership, cells, kinds)
    has_shards = any(run.state == WEIGHT for report in reports for run in report.ranges)
    rows = (
        _shard_rows(_only(reports, is_weight=True), ownership, cells)
        if has_shards
        else _weight_rows(weights, shards, _weight_parts(reports[rank], ownership, cells), rank)
    )
    reports = _only(reports, is_weight=False)
    buckets: BucketLayout | None = None
    tensors = list(weights)
    if optimizer_format == DP_RESHARDABLE and any(r.ranges for r in reports):
        buckets = _plan_buckets(template, reports)
        rows += _bucket_rows(
            buckets,
            assign_writers(reports, ownership, every_place=True),
            reports,
            ownership,
            len(tensors),
        )
        tensors += buckets.tensors
    else:
        rows += _state_rows(tensors, assign_writers(reports, ownership), cells)
    for t in template.whole:
        part = ShardPart(WEIGHT, t.name, 0, t.numel, 0)
        lo, hi = [0] * len(t.shape), list(t.shape)
        rows.append((len(tensors), lo, hi, 0, (part,) if rank == 0 else ()))
        tensors.append(t)
    rows.sort(key=lambda row: row[0])
    ndim = max(widest(tensors), 1)
    return SaveLayout(
        tensors=tuple(tensors),
        shards=Shards.build([row[:4] for row in rows], ndim),
        parts={
            i: tuple(replace(p, name=local_name(p.name, reports[rank].dtypes)) for p in row[4])
            for i, row in enumerate(rows)
            if row[3] == rank
        },
        buckets=buckets,
    )


def _with_stored_dtypes(
    tensors: Sequence[GlobalTensor],
    reports: Sequence[RankOwnership],
    ownership: LayoutOwnership,
    cells: ShardCells,
    kinds: dict[str, str],
) -> list[GlobalTensor]:
    """The stored weights with the dtypes that ranks have them in."""
    out = list(tensors)
    for seat in {report.coordinates for report in reports}:
        for parameter in ownership.parameters_of(seat):
            number, _ = cells.find_tensor(parameter.parameter.key)
            name = local_name(parameter.name, kinds)
            if name not in kinds:
                raise MappingError(
                    "no rank has this weight of the checkpoint", tensor=parameter.name
                )
            out[number] = replace(out[number], dtype=dtype(kinds[name]))
    return out


def _weight_parts(
    report: RankOwnership, ownership: LayoutOwnership, cells: ShardCells
) -> dict[int, ShardPart]:
    """The content of each shard that this rank has a copy of."""
    out: dict[int, ShardPart] = {}
    for parameter in ownership.parameters_of(report.coordinates):
        name = local_name(parameter.name, report.dtypes)
        for (lo, hi), begin, row in cells.find_cells(parameter.parameter):
            size = 1
            for a, b in zip(lo, hi, strict=True):
                size *= b - a
            start = parameter.offset + begin
            out.setdefault(row, ShardPart(WEIGHT, name, start, start + size, 0))
    return out


def _only(reports: Sequence[RankOwnership], *, is_weight: bool) -> list[RankOwnership]:
    """The reports with the ranges of weights alone, or of everything else."""
    return [
        replace(r, ranges=tuple(run for run in r.ranges if (run.state == WEIGHT) is is_weight))
        for r in reports
    ]


def _weight_rows(
    weights: Sequence[GlobalTensor], shards: Shards, owned: Mapping[int, ShardPart], rank: int
) -> list[_Row]:
    """Rows of weights that ranks have whole parts of; `owned` are those of this rank."""
    rows: list[_Row] = []
    owners = shards.owner.tolist()
    boxes = zip(shards.boxes.lo.tolist(), shards.boxes.hi.tolist(), strict=True)
    for row, (number, (lo, hi)) in enumerate(zip(shards.tensor.tolist(), boxes, strict=True)):
        ndim, parts = len(weights[number].shape), tuple[ShardPart, ...]()
        if owners[row] == rank:
            if row not in owned:
                raise MappingError(
                    "the rank that should write a part of it does not have that part",
                    tensor=weights[number].name,
                )
            parts = (owned[row],)
        rows.append((number, lo[:ndim], hi[:ndim], owners[row], parts))
    return rows


def _shard_rows(
    reports: Sequence[RankOwnership], ownership: LayoutOwnership, cells: ShardCells
) -> list[_Row]:
    """Rows of weights of which ranks have ranges of elements."""
    rows: list[_Row] = []
    for a in assign_writers(reports, ownership):
        number, lead = cells.find_tensor(a.owned.parameter.key)
        rows += _rows_of(a, cells, number, list(lead))
    return rows


def _rows_of(a: WriteAssignment, cells: ShardCells, number: int, front: list[int]) -> list[_Row]:
    """The boxes of a range of elements, as rows of a tensor with leading indices `front`."""
    rows: list[_Row] = []
    after = [x + 1 for x in front]
    for lo, hi, offset in split_into_boxes(cells.find_cells(a.owned.parameter), a.start, a.stop):
        size = 1
        for x, y in zip(lo, hi, strict=True):
            size *= y - x
        start = a.owned.offset + offset
        part = ShardPart(a.state, a.owned.name, start, start + size, 0)
        rows.append((number, front + lo, after + hi, a.rank, (part,)))
    return rows


def _state_rows(
    tensors: list[GlobalTensor], assigned: Sequence[WriteAssignment], cells: ShardCells
) -> list[_Row]:
    """Rows of state under the names of its weights; its tensors are appended to `tensors`."""
    sizes: dict[tuple[str, int], int] = {}
    for a in assigned:
        number, _ = cells.find_tensor(a.owned.parameter.key)
        sizes[a.state, number] = sizes.get((a.state, number), 0) + a.stop - a.start
    # A tensor of all layers needs them all: if some are frozen, each layer has its own tensor.
    is_complete = all(size == cells.tensors[number].numel for (_, number), size in sizes.items())
    numbers: dict[tuple[str, str], int] = {}
    order = {MAIN: 0, "exp_avg": 1, "exp_avg_sq": 2}
    if is_complete:
        for state, number in sorted(sizes, key=lambda s: (order.get(s[0], 3), s)):
            t = cells.tensors[number]
            numbers[state, t.name] = len(tensors)
            tensors.append(_state_tensor(state, t.name, t.shape))
    rows: list[_Row] = []
    for a in assigned:
        p = a.owned.parameter
        number, lead = cells.find_tensor(p.key)
        name = cells.tensors[number].name if is_complete else cells.prefix + p.key
        if (a.state, name) not in numbers:
            numbers[a.state, name] = len(tensors)
            tensors.append(_state_tensor(a.state, name, p.shape))
        rows += _rows_of(a, cells, numbers[a.state, name], list(lead) if is_complete else [])
    return rows


def _state_tensor(state: str, name: str, shape: tuple[int, ...]) -> GlobalTensor:
    stored_name = _STORED_NAMES.get(state, state)
    return GlobalTensor(name=f"optimizer.state.{stored_name}.{name}", shape=shape, dtype=FLOAT32)


def _plan_buckets(template: SaveTemplate, reports: Sequence[RankOwnership]) -> BucketLayout:
    states = {run.state for report in reports for run in report.ranges}
    if template.plan_buckets is None:
        raise MappingError(f"{DP_RESHARDABLE} needs the run's bucket sizes")
    order = sorted(states, key=lambda s: (s != MAIN, s))
    return template.plan_buckets({_STORED_NAMES.get(s, s): FLOAT32 for s in order})


def _bucket_rows(
    buckets: BucketLayout,
    assigned: Sequence[WriteAssignment],
    reports: Sequence[RankOwnership],
    ownership: LayoutOwnership,
    first: int,
) -> list[_Row]:
    """Rows of state in buckets: one for every range of a bucket that a rank owns."""
    by_parameter: dict[tuple[object, ...], list[WriteAssignment]] = {}
    for a in assigned:
        key = a.owned.parameter.key, a.owned.parameter.boxes, a.owned.place
        by_parameter.setdefault((_STORED_NAMES.get(a.state, a.state), *key), []).append(a)
    by_tensor: dict[int, list[tuple[int, int, WriteAssignment]]] = {}
    for slot in buckets.slots:
        p, seat = slot.parameter, reports[slot.rank].coordinates
        place = (seat.stage, seat.ep, seat.etp) if p.is_expert else (seat.stage, 0, seat.tp)
        for state, number in slot.tensors.items():
            start = slot.start
            for part in ownership.in_parts(p):
                assignments = by_parameter.get((state, part.key, part.boxes, place))
                if assignments is None:
                    raise UsageError(
                        f"{DP_RESHARDABLE} stores the same states of every parameter, and this one "
                        f"has no {state!r}: it is frozen, or updated by another rule",
                        tensor=p.key,
                        hint=f"--dist-ckpt-optim-format {FULLY_RESHARDABLE} saves the existing "
                        "state",
                    )
                by_tensor.setdefault(number, []).extend(
                    (start + a.start, start + a.stop, a) for a in assignments
                )
                start += part.numel
    rows: list[_Row] = []
    for number, runs in sorted(by_tensor.items()):
        runs.sort(key=lambda run: run[0])
        groups: list[list[tuple[int, int, WriteAssignment]]] = []
        for run in runs:
            if groups and groups[-1][-1][2].rank == run[2].rank:
                groups[-1].append(run)
            else:
                groups.append([run])
        size = buckets.tensors[number].numel
        begins = [0, *(group[0][0] for group in groups[1:]), size]
        for group, lo, hi in zip(groups, begins, begins[1:], strict=False):
            parts = tuple(
                ShardPart(a.state, a.owned.name, a.offset, a.offset + stop - start, start - lo)
                for start, stop, a in group
            )
            rows.append((first + number, [lo], [hi], group[0][2].rank, parts))
    return rows
