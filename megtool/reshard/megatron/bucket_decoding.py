"""Decode: flat optimizer buffers read as state of the model's tensors.

Nothing on disk says which parameter lies where in a bucket. The registration order says it, and
there are several; so every known order is tried, the likely one first, until one fills all buckets
exactly and every master weight it finds, rounded, is the model's weight (see `proof`). Then each
other order has to be wrong about one of the parameters that it puts elsewhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.megatron_metadata import args_of
from megtool.checkpoint.rechunk import regroup
from megtool.convert.megatron import MAIN, split_state
from megtool.convert.rank_parameters import Parameter
from megtool.errors import FormatError, MappingError
from megtool.reshard.megatron.box_runs import Collected, boxes_of
from megtool.reshard.megatron.master_weight_check import Mismatch, disproof
from megtool.tensors import buckets
from megtool.tensors.buckets import Slot
from megtool.tensors.registration_order import ORDERS, Order, likely_orders, registered
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's state: its unpadded size in elements, and the stored tensor of every state.

    It begins at element `offset` of these tensors.
    """

    size: int
    states: Mapping[str, str]
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One flat buffer: the parameters in it, as its rank's file or the model lists them.

    `buckets` are its buckets in order. Where `is_coalesced`, they are one after the other in a
    single one, cut by one of the `bucket_sizes` (None: not at all).
    """

    members: Sequence[Parameter]
    buckets: Sequence[Bucket]
    is_coalesced: bool = False
    bucket_sizes: Sequence[int | None] = (None,)

    def place(self, ordered: Sequence[Parameter]) -> list[Laid] | None:
        """Where each parameter lies; None when so ordered they do not fill the buffer."""
        numels = [p.numel for p in ordered]
        if not self.is_coalesced:
            sizes = [b.size for b in self.buckets]
            slots = buckets.fit(numels, sizes) or buckets.fit(numels, sizes, alignment=1)
            if slots is None:
                return None
            held = [self.buckets[s.bucket] for s in slots]
            return [Laid(p, b, s) for p, b, s in zip(ordered, held, slots, strict=True)]
        (whole,) = self.buckets
        slots = buckets.split_coalesced(
            numels, [p.is_shared for p in ordered], whole.size, self.bucket_sizes
        )
        if slots is None:
            return None
        return [Laid(p, whole, s) for p, s in zip(ordered, slots, strict=True)]


@dataclass(frozen=True, slots=True)
class Laid:
    """A parameter, the bucket it lies in, and where."""

    parameter: Parameter
    bucket: Bucket
    slot: Slot


def decode(
    catalogue: Catalogue,
    holders: Sequence[Holder],
    is_flat: Callable[[str], bool],
    *,
    whole: bool = False,
) -> Catalogue:
    """The catalogue with flat buffers as `optimizer.state.STATE.KEY`, one tensor per layer.

    `catalogue` holds the model's weights, stacked or per layer, and the buffers, which are those
    tensors that `is_flat` names. `whole` compares all master weights with the model's, instead of
    some elements of each parameter. The order found is kept in `metadata["registration_order"]`
    (None: one that only the rank's file knows).

    Raises:
        FormatError: buckets are incomplete; no known order fills the buffers; in every one that
            does, master weights are not the model's weights (names the first parameter that is
            not), or they are in two that differ.
    """
    _check(catalogue, holders)
    worst: Mismatch | None = None
    tried: set[object] = set()
    orders = _orders(catalogue)
    for k, order in enumerate(orders):
        laid = _lay(holders, order)
        if laid is None or (key := _places(laid)) in tried:
            continue
        tried.add(key)
        candidate = _regrouped(catalogue, laid, is_flat)
        mismatch = disproof(candidate, catalogue, whole=whole)
        if mismatch is None and order is not None:  # a file that lists its own is believed
            mismatch = _check_alone(catalogue, holders, laid, orders[k + 1 :], is_flat)
        if mismatch is None:
            candidate.metadata["registration_order"] = order or _order_of(holders)
            return candidate
        worst = worst or mismatch
    if worst is not None:
        raise worst.error(catalogue.root)
    raise FormatError(
        "the optimizer's buckets do not add up to this model's parameters in any known order: "
        f"{_first_misfit(holders)}",
        file=catalogue.root,
        hint="the optimizer belongs to another model or layout; --optimizer none leaves it out",
    )


def _places(laid: Sequence[Laid]) -> tuple[object, ...]:
    """Where the parameters lie, as something to compare."""
    return tuple(
        sorted(
            (
                next(iter(x.bucket.states.values())),
                x.bucket.offset + x.slot.start,
                x.parameter.key,
                x.parameter.expert,
            )
            for x in laid
        )
    )


def _check_alone(
    catalogue: Catalogue,
    holders: Sequence[Holder],
    laid: Sequence[Laid],
    others: Sequence[Order | None],
    is_flat: Callable[[str], bool],
) -> Mismatch | None:
    """Prove wrong every other order that says something else than `laid`, or find `laid` wrong.

    An order that holds as well, to the last element of all that it puts elsewhere, leaves `laid`
    to be compared as thoroughly.

    Raises:
        FormatError: both hold.
    """
    known = {_places([x]): x for x in laid}
    tried: set[object] = set()
    for order in others:
        other = _lay(holders, order)
        if other is None or (key := _places(other)) in tried:
            continue
        tried.add(key)
        rival = {_places([x]): x for x in other}
        elsewhere = [x for place, x in rival.items() if place not in known]
        few = elsewhere[:: max(len(elsewhere) // _FEW, 1)]
        if not elsewhere or any(
            _wrong(catalogue, some, is_flat, whole)
            for some, whole in ((few, False), (elsewhere, False), (elsewhere, True))
        ):
            continue
        here = [x for place, x in known.items() if place not in rival]
        if mismatch := _wrong(catalogue, here, is_flat, True):
            return mismatch
        raise FormatError(
            f"the optimizer's state fits the model in two orders ({order} is one), which differ "
            "in where it lies",
            file=catalogue.root,
            tensor=elsewhere[0].parameter.key,
            hint="parameters of equal values cannot be told apart: --optimizer none leaves the "
            "optimizer out",
        )
    return None


_FEW = 16


def _wrong(
    catalogue: Catalogue, laid: Sequence[Laid], is_flat: Callable[[str], bool], whole: bool
) -> Mismatch | None:
    return disproof(_regrouped(catalogue, laid, is_flat), catalogue, whole=whole)


def _check(catalogue: Catalogue, holders: Sequence[Holder]) -> None:
    """All buckets hold the same states, of one size each, and master weights among them.

    Raises:
        FormatError: one does not; names its tensor.
    """
    most = {s for h in holders for b in h.buckets for s in b.states}
    for bucket in (b for h in holders for b in h.buckets):
        some = next(iter(bucket.states.values()))
        if lacking := sorted(most - bucket.states.keys()):
            raise FormatError(
                f"its bucket has no {lacking[0]!r}, which others have",
                file=catalogue.root,
                tensor=some,
                hint=f"the optimizer state is incomplete; {_LEAVE_OUT}",
            )
        for state, name in bucket.states.items():
            tensor = catalogue[name]
            if not bucket.offset and tensor.shape != (bucket.size,):
                raise FormatError(
                    f"states of one bucket differ in size: {list(tensor.shape)} here, "
                    f"{bucket.size} elements in {some!r}",
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
                tensor=some,
                hint=f"nothing tells which parameter lies where; {_LEAVE_OUT}",
            )


_LEAVE_OUT = "--optimizer none leaves the optimizer out"


def _is_main(state: str) -> bool:
    return split_state(f"optimizer.state.{state}.x")[0] == MAIN


def _first_misfit(holders: Sequence[Holder]) -> str:
    """The first buffer that no order fills, and how much it and its parameters hold."""
    for holder in holders:
        if all(holder.place([holder.members[i] for i in o]) is None for o in _known(holder)):
            wanted = sum(p.numel for p in holder.members)
            held = sum(b.size for b in holder.buckets)
            sizes = ", ".join(str(b.size) for b in holder.buckets[:8])
            more = ", ..." if len(holder.buckets) > 8 else ""
            first = next(iter(holder.buckets[0].states.values())) if holder.buckets else "a rank"
            return (
                f"{held} elements (buckets of {sizes}{more}) in the buffer of {first!r}, and "
                f"{wanted} in its {len(holder.members)} parameters"
            )
    return "no order fills all buffers at once"


def _known(holder: Holder) -> list[list[int]]:
    keys = [(p.module_key, p.expert) for p in holder.members]
    try:
        return [list(range(len(keys))), *(registered(keys, order) for order in ORDERS)]
    except MappingError:
        return [list(range(len(keys)))]


def _orders(catalogue: Catalogue) -> list[Order | None]:
    """Orders to try: a rank's file lists its own, otherwise what the args make likely."""
    args = args_of(catalogue)
    listed: list[Order | None] = [None] if catalogue.format == "megatron" else []
    return listed + list(likely_orders(args.get("transformer_impl"), args.get("moe_grouped_gemm")))


def _order_of(holders: Sequence[Holder]) -> Order | None:
    """The known order in which files list their parameters, if it is one.

    Megatron's own layers show by the name of their first norm.
    """
    keys = [p.module_key for holder in holders for p in holder.members]
    is_local = any(".input_layernorm." in k for k in keys)
    for order in likely_orders("local" if is_local else None, None):
        try:
            if all(_is_in(order, holder.members) for holder in holders):
                return order
        except MappingError:
            return None
    return None


def _is_in(order: Order, members: Sequence[Parameter]) -> bool:
    places = registered([(p.module_key, p.expert) for p in members], order)
    return places == list(range(len(members)))


def _lay(holders: Sequence[Holder], order: Order | None) -> list[Laid] | None:
    """Where every parameter lies; None when an order does not fill a buffer."""
    out: list[Laid] = []
    for holder in holders:
        ordered = list(holder.members)
        if order is not None:
            try:
                places = registered([(p.module_key, p.expert) for p in ordered], order)
            except MappingError:
                if holder.is_coalesced:  # the file's own order is the better one
                    return None
                raise
            ordered = [ordered[i] for i in places]
        laid = holder.place(ordered)
        if laid is None:
            return None
        out += laid
    return out


def _regrouped(
    catalogue: Catalogue, laid: Sequence[Laid], is_flat: Callable[[str], bool]
) -> Catalogue:
    """The catalogue with every parameter's state in model space."""
    collected = Collected()
    chunks = _Chunks(catalogue)
    copies: dict[object, list[Laid]] = {}
    for item in laid:
        copies.setdefault((item.parameter.key, item.parameter.boxes), []).append(item)
    for items in copies.values():
        for state in items[0].bucket.states:
            held = [
                (x.bucket.states[state], x.bucket.offset + x.slot.start, x.slot.numel)
                for x in items
                if state in x.bucket.states
            ]
            # Copies are cut alike, wherever their ranks' ranges end: then they can be compared.
            cuts = sorted({c for at in held for c in chunks.cuts(*at)})
            p = items[0].parameter
            for name, first, _ in held:
                kind = catalogue[name].dtype
                tensor = GlobalTensor(
                    name=f"optimizer.state.{state}.{p.key}", shape=p.shape, dtype=kind
                )
                for a, b in pairwise(cuts):
                    shard, start = chunks.at(name, first + a)
                    for box, position in boxes_of(p, a, b):
                        collected.add(tensor, box, shard, start + position)
    return regroup(catalogue, lambda n: not is_flat(n), collected.regrouping())


class _Chunks:
    """Where the chunks of 1-d stored tensors begin."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._known: dict[str, tuple[list[int], list[int]]] = {}

    def _of(self, name: str) -> tuple[list[int], list[int]]:
        """Starts of a tensor's chunks, ascending, and their rows."""
        if name not in self._known:
            rows = self._catalogue.shards.of(self._catalogue.index[name])
            boxes = self._catalogue.shards.boxes
            pairs = sorted(
                (int(boxes.lo[r, 0]), r)
                for r in range(rows.start, rows.stop)
                if boxes.hi[r, 0] > boxes.lo[r, 0]
            )
            self._known[name] = [p[0] for p in pairs], [p[1] for p in pairs]
        return self._known[name]

    def cuts(self, name: str, first: int, numel: int) -> list[int]:
        """Where a range is cut, counted from its start; its two ends are among them."""
        starts, _ = self._of(name)
        a = bisect.bisect_right(starts, first)
        b = bisect.bisect_left(starts, first + numel)
        return [0, *(s - first for s in starts[a:b]), numel]

    def at(self, name: str, element: int) -> tuple[int, int]:
        """The row of the chunk that holds an element, and the element's position in it."""
        starts, rows = self._of(name)
        k = bisect.bisect_right(starts, element) - 1
        return rows[k], element - starts[k]
