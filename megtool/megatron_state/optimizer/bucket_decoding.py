"""Decode flat optimizer buffers as state of the model's tensors.

Nothing on disk says where a parameter is in a bucket: that follows from the order in which
parameters are registered, and there are several orders. So every known order is tried, the likely
one first, until one fills all buckets exactly and every master weight, rounded, equals the model's
weight (see `master_weight_check`). Then each other order has to be wrong about one of the
parameters that it places elsewhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megtool.convert.megatron.names import MAIN, split_state
from megtool.convert.megatron.rank_parameters import Parameter
from megtool.errors import FormatError, MappingError
from megtool.megatron_state.optimizer.box_runs import BoxRunCollector, split_into_boxes
from megtool.megatron_state.optimizer.master_weight_check import MasterWeightMismatch, find_mismatch
from megtool.megatron_state.saved_objects import saved_args
from megtool.tensors import buckets
from megtool.tensors.buckets import Slot
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.registration_order import ORDERS, Order, likely_orders, registered
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.rechunk import rechunk


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's state: its unpadded size in elements, and the stored tensor of every state.

    It starts at element `offset` of these tensors.
    """

    size: int
    states: Mapping[str, str]
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """One flat buffer and its parameters, in the order of the rank's file or the model.

    `buckets` are its buckets in order. If `is_coalesced`, they are stored one after the other in a
    single one, split by one of the `bucket_sizes` (None: not split).
    """

    members: Sequence[Parameter]
    buckets: Sequence[Bucket]
    is_coalesced: bool = False
    bucket_sizes: Sequence[int | None] = (None,)

    def place_parameters(self, ordered: Sequence[Parameter]) -> list[PlacedParameter] | None:
        """The place of each parameter; None if in this order they do not fill the buffer."""
        numels = [p.numel for p in ordered]
        if not self.is_coalesced:
            sizes = [b.size for b in self.buckets]
            slots = buckets.fit(numels, sizes) or buckets.fit(numels, sizes, alignment=1)
            if slots is None:
                return None
            placed_buckets = [self.buckets[s.bucket] for s in slots]
            return [
                PlacedParameter(p, b, s)
                for p, b, s in zip(ordered, placed_buckets, slots, strict=True)
            ]
        (coalesced,) = self.buckets
        slots = buckets.split_coalesced(
            numels, [p.is_shared for p in ordered], coalesced.size, self.bucket_sizes
        )
        if slots is None:
            return None
        return [PlacedParameter(p, coalesced, s) for p, s in zip(ordered, slots, strict=True)]


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """A parameter, its bucket, and its slot there."""

    parameter: Parameter
    bucket: Bucket
    slot: Slot


def decode_buckets(
    catalogue: Catalogue,
    buffers: Sequence[FlatBuffer],
    is_flat: Callable[[str], bool],
    *,
    verify_master_weights: bool = False,
) -> Catalogue:
    """The catalogue with flat buffers as `optimizer.state.STATE.KEY`, one tensor per layer.

    `catalogue` holds the model's weights, stacked or per layer, and the buffers, which are those
    tensors that `is_flat` names. `verify_master_weights` compares all elements of master weights,
    instead of some. `metadata["registration_order"]` of the result is the order
    that fits (None: one that only the rank's file has).

    Raises:
        FormatError: buckets are incomplete; no known order fills the buffers; in every one that
            does, master weights are not the model's weights (names the first parameter that is
            not), or they are in two that differ.
    """
    _check_buckets(catalogue, buffers)
    first_mismatch: MasterWeightMismatch | None = None
    tried: set[object] = set()
    orders = _candidate_orders(catalogue)
    for k, order in enumerate(orders):
        placed = _place_all(buffers, order)
        if placed is None or (key := _position_key(placed)) in tried:
            continue
        tried.add(key)
        candidate = _to_model_space(catalogue, placed, is_flat)
        mismatch = find_mismatch(candidate, catalogue, verify_master_weights=verify_master_weights)
        if mismatch is None and order is not None:  # the order of the file itself needs no proof
            mismatch = _check_unique(catalogue, buffers, placed, orders[k + 1 :], is_flat)
        if mismatch is None:
            candidate.metadata["registration_order"] = order or _match_order(buffers)
            return candidate
        first_mismatch = first_mismatch or mismatch
    if first_mismatch is not None:
        raise first_mismatch.to_error(catalogue.root)
    raise FormatError(
        "the optimizer's buckets do not fit this model's parameters in any known order: "
        f"{_first_misfit(buffers)}",
        file=catalogue.root,
        hint=f"the optimizer belongs to another model or layout; {_LEAVE_OUT}",
    )


def _position_key(placed: Sequence[PlacedParameter]) -> tuple[object, ...]:
    """The positions of parameters, as a value to compare."""
    return tuple(
        sorted(
            (
                next(iter(x.bucket.states.values())),
                x.bucket.offset + x.slot.start,
                x.parameter.key,
                x.parameter.expert,
            )
            for x in placed
        )
    )


def _check_unique(
    catalogue: Catalogue,
    buffers: Sequence[FlatBuffer],
    placed: Sequence[PlacedParameter],
    other_orders: Sequence[Order | None],
    is_flat: Callable[[str], bool],
) -> MasterWeightMismatch | None:
    """Prove wrong every other order that says something else than `placed`, or find `placed` wrong.

    An order that holds as well, to the last element of all that it puts elsewhere, leaves `placed`
    to be compared as thoroughly.

    Raises:
        FormatError: both hold.
    """
    positions = {_position_key([x]): x for x in placed}
    tried: set[object] = set()
    for order in other_orders:
        other_placed = _place_all(buffers, order)
        if other_placed is None or (key := _position_key(other_placed)) in tried:
            continue
        tried.add(key)
        rival = {_position_key([x]): x for x in other_placed}
        elsewhere = [x for place, x in rival.items() if place not in positions]
        sample = elsewhere[:: max(len(elsewhere) // _SAMPLE_SIZE, 1)]
        if not elsewhere or any(
            _find_mismatch(catalogue, some, is_flat, every_element)
            for some, every_element in ((sample, False), (elsewhere, False), (elsewhere, True))
        ):
            continue
        unmatched = [x for place, x in positions.items() if place not in rival]
        if mismatch := _find_mismatch(catalogue, unmatched, is_flat, True):
            return mismatch
        raise FormatError(
            f"the optimizer's state fits the model in two orders ({order} is one), which place "
            "parameters differently",
            file=catalogue.root,
            tensor=elsewhere[0].parameter.key,
            hint=f"parameters of equal values cannot be told apart: {_LEAVE_OUT}",
        )
    return None


_SAMPLE_SIZE = 16


def _find_mismatch(
    catalogue: Catalogue,
    placed: Sequence[PlacedParameter],
    is_flat: Callable[[str], bool],
    verify_master_weights: bool,
) -> MasterWeightMismatch | None:
    return find_mismatch(
        _to_model_space(catalogue, placed, is_flat),
        catalogue,
        verify_master_weights=verify_master_weights,
    )


def _check_buckets(catalogue: Catalogue, buffers: Sequence[FlatBuffer]) -> None:
    """Check that all buckets have the same states, of one size each, with master weights.

    Raises:
        FormatError: one does not; the error names its tensor.
    """
    all_states = {s for h in buffers for b in h.buckets for s in b.states}
    for bucket in (b for h in buffers for b in h.buckets):
        tensor_name = next(iter(bucket.states.values()))
        if lacking := sorted(all_states - bucket.states.keys()):
            raise FormatError(
                f"its bucket has no {lacking[0]!r}, which other buckets have",
                file=catalogue.root,
                tensor=tensor_name,
                hint=f"the optimizer state is incomplete; {_LEAVE_OUT}",
            )
        for state, name in bucket.states.items():
            tensor = catalogue[name]
            if not bucket.offset and tensor.shape != (bucket.size,):
                raise FormatError(
                    f"states of one bucket differ in size: {list(tensor.shape)} here, "
                    f"{bucket.size} elements in {tensor_name!r}",
                    file=catalogue.root,
                    tensor=name,
                    hint=f"the optimizer state is damaged; {_LEAVE_OUT}",
                )
            if _is_main(state) and not tensor.dtype.is_float:
                raise FormatError(
                    f"master weights are {tensor.dtype.name} remainders of the weights, as a "
                    "precision-aware optimizer may keep them",
                    file=catalogue.root,
                    tensor=name,
                    hint="save it with master weights of fp32 (--main-params-dtype fp32, without "
                    f"store_param_remainders); {_LEAVE_OUT}",
                )
        if not any(map(_is_main, bucket.states)):
            raise FormatError(
                f"its bucket has no master weights, only {', '.join(sorted(bucket.states))}",
                file=catalogue.root,
                tensor=tensor_name,
                hint=f"the places of parameters cannot be found without; {_LEAVE_OUT}",
            )


_LEAVE_OUT = "--optimizer-format none leaves the optimizer out"


def _is_main(state: str) -> bool:
    return split_state(f"optimizer.state.{state}.x")[0] == MAIN


def _first_misfit(buffers: Sequence[FlatBuffer]) -> str:
    """The first buffer that no order fills, with the sizes of it and of its parameters."""
    for holder in buffers:
        if all(
            holder.place_parameters([holder.members[i] for i in o]) is None
            for o in _known_orders(holder)
        ):
            num_expected = sum(p.numel for p in holder.members)
            num_stored = sum(b.size for b in holder.buckets)
            sizes = ", ".join(str(b.size) for b in holder.buckets[:8])
            more = ", ..." if len(holder.buckets) > 8 else ""
            first = next(iter(holder.buckets[0].states.values())) if holder.buckets else "a rank"
            return (
                f"{num_stored} elements (buckets of {sizes}{more}) in the buffer of {first!r}, and "
                f"{num_expected} in its {len(holder.members)} parameters"
            )
    return "no order fills all buffers at once"


def _known_orders(buffer: FlatBuffer) -> list[list[int]]:
    keys = [(p.module_key, p.expert) for p in buffer.members]
    try:
        return [list(range(len(keys))), *(registered(keys, order) for order in ORDERS)]
    except MappingError:
        return [list(range(len(keys)))]


def _candidate_orders(catalogue: Catalogue) -> list[Order | None]:
    """Orders to try: that of the rank's file if there is one, then those likely by the args."""
    args = saved_args(catalogue)
    file_order: list[Order | None] = [None] if catalogue.format == "megatron" else []
    return file_order + list(
        likely_orders(args.get("transformer_impl"), args.get("moe_grouped_gemm"))
    )


def _match_order(buffers: Sequence[FlatBuffer]) -> Order | None:
    """The known order in which files list their parameters, None for another order.

    The name of the first norm shows whether layers are Megatron's local ones.
    """
    keys = [p.module_key for holder in buffers for p in holder.members]
    is_local = any(".input_layernorm." in k for k in keys)
    for order in likely_orders("local" if is_local else None, None):
        try:
            if all(_is_in_order(order, holder.members) for holder in buffers):
                return order
        except MappingError:
            return None
    return None


def _is_in_order(order: Order, members: Sequence[Parameter]) -> bool:
    positions = registered([(p.module_key, p.expert) for p in members], order)
    return positions == list(range(len(members)))


def _place_all(buffers: Sequence[FlatBuffer], order: Order | None) -> list[PlacedParameter] | None:
    """The place of every parameter of the model; None if an order does not fill a buffer."""
    out: list[PlacedParameter] = []
    for holder in buffers:
        ordered = list(holder.members)
        if order is not None:
            try:
                positions = registered([(p.module_key, p.expert) for p in ordered], order)
            except MappingError:
                if holder.is_coalesced:  # the order of the file is tried instead
                    return None
                raise
            ordered = [ordered[i] for i in positions]
        placed = holder.place_parameters(ordered)
        if placed is None:
            return None
        out += [x for x in placed if not x.parameter.is_unused]
    return out


def _to_model_space(
    catalogue: Catalogue, placed: Sequence[PlacedParameter], is_flat: Callable[[str], bool]
) -> Catalogue:
    """The catalogue with every parameter's state in model space."""
    collected = BoxRunCollector()
    chunks = _ChunkIndex(catalogue)
    copies: dict[object, list[PlacedParameter]] = {}
    for item in placed:
        copies.setdefault((item.parameter.key, item.parameter.boxes), []).append(item)
    for items in copies.values():
        for state in items[0].bucket.states:
            ranges = [
                (x.bucket.states[state], x.bucket.offset + x.slot.start, x.slot.numel)
                for x in items
                if state in x.bucket.states
            ]
            # All copies get the same cuts, wherever ranges of ranks end, so they can be compared.
            cuts = sorted({c for r in ranges for c in chunks.cuts(*r)})
            p = items[0].parameter
            for name, first, _ in ranges:
                kind = catalogue[name].dtype
                tensor = GlobalTensor(
                    name=f"optimizer.state.{state}.{p.key}", shape=p.shape, dtype=kind
                )
                for a, b in pairwise(cuts):
                    shard, start = chunks.locate(name, first + a)
                    for box, position in split_into_boxes(p, a, b):
                        collected.add(tensor, box, shard, start + position)
    return rechunk(catalogue, lambda n: not is_flat(n), collected.regrouping())


class _ChunkIndex:
    """The chunks of 1-d stored tensors, by their first elements."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._cache: dict[str, tuple[list[int], list[int]]] = {}

    def _starts_and_rows(self, name: str) -> tuple[list[int], list[int]]:
        """Starts of a tensor's chunks, ascending, and their rows."""
        if name not in self._cache:
            rows = self._catalogue.shards.of(self._catalogue.index[name])
            boxes = self._catalogue.shards.boxes
            pairs = sorted(
                (int(boxes.lo[r, 0]), r)
                for r in range(rows.start, rows.stop)
                if boxes.hi[r, 0] > boxes.lo[r, 0]
            )
            self._cache[name] = [p[0] for p in pairs], [p[1] for p in pairs]
        return self._cache[name]

    def cuts(self, name: str, first: int, numel: int) -> list[int]:
        """Where chunk borders cut a range, counted from its start, with both ends."""
        starts, _ = self._starts_and_rows(name)
        a = bisect.bisect_right(starts, first)
        b = bisect.bisect_left(starts, first + numel)
        return [0, *(s - first for s in starts[a:b]), numel]

    def locate(self, name: str, element: int) -> tuple[int, int]:
        """The row of the chunk with an element, and the element's position in it."""
        starts, rows = self._starts_and_rows(name)
        k = bisect.bisect_right(starts, element) - 1
        return rows[k], element - starts[k]
