"""Prove that optimizer state belongs to the model: master weights, rounded, are the weights.

What is proved, and what is not:

- Of every run of a parameter (that one rank stored in a bucket) a few elements at its beginning,
  and of every parameter some in the middle of its first run and at the end of its last, are those
  of the model: all elements with `verify_master_weights`. A parameter at a wrong place would need
  the same numbers in all these places.
- `decode_buckets` refuses a second order that passes the same test with other places for any
  parameter, all of whose elements are compared then: so exactly one of the known orders is right,
  however similar the parameters are. What is the same in all orders (norms that are all ones)
  needs no distinction.
- Moments are at the places of the master weights of the same bucket. That they belong to them is
  not proved: nothing else has them.
- Copies of a parameter or its state, which several ranks store, are equal at their beginning, in
  their middle and at their end: some copies of each, and all of a tied embedding (`check_copies`);
  with `verify_master_weights`, all are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megtool.convert.dialects import CanonicalView
from megtool.convert.megatron.names import EMBEDDING, MAIN, split_optimizer, split_state
from megtool.dtypes import DType
from megtool.errors import FormatError
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue, Replica
from megtool.tensors.placement import Placement, narrow, refine
from megtool.transport.cast import cast, numeric_values
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.replicas import pair_replicas
from megtool.transport.strided import Array

_SHARES = (0.0, 0.5, 1.0)


def check_masters(
    catalogue: Catalogue, side: CanonicalView, *, verify_master_weights: bool = False
) -> None:
    """Compare master weights, rounded, with the weights that `side` reads from `catalogue`.

    Compares some elements at the beginning, in the middle and at the end of every tensor, or with
    `verify_master_weights` all. Masters without weights, and of quantized weights, are skipped: how
    the latter were rounded is not known. Memory is bounded by one part of a tensor.

    Raises:
        FormatError: a master weight is not its weight.
    """
    with CheckpointReader(catalogue, Files()) as reader:
        for name, main, weight in _pairs(catalogue, side):
            kind, target = catalogue[main.stored].dtype, catalogue[weight.stored].dtype
            lo, hi = [0] * len(main.shape), list(main.shape)
            for box in split_box(lo, hi) if verify_master_weights else sample_runs(lo, hi, _SHARES):
                a = reader.open_canonical(narrow(main, *box)).read().reshape(-1)
                b = reader.open_canonical(narrow(weight, *box)).read().reshape(-1)
                wrong = find_difference(a, kind, b, target)
                if wrong is not None:
                    offset, x, y = wrong
                    mismatch = MasterWeightMismatch(
                        key=name, index=unravel_in_box(offset, *box), main=x, weight=y
                    )
                    raise mismatch.to_error(catalogue.root)


def _pairs(catalogue: Catalogue, side: CanonicalView) -> Iterator[tuple[str, Placement, Placement]]:
    """Every weight with a master weight: its name, the master's placement and its own."""
    for name, main in side.placements.items():
        if side.dialect == "identity":
            state, _, key = split_optimizer(name)
        else:
            state, _, key = name.rpartition(":")
        weight = side.placements.get(key)
        if state != MAIN or weight is None:
            continue
        kinds = [catalogue[p.stored] for p in (main, weight)]
        if any(t.packing is not None or not t.dtype.is_float for t in kinds):
            continue
        if main.shift == weight.shift:  # rounded as they are stored
            main, weight = replace(main, shift=0.0), replace(weight, shift=0.0)
        if numel(main.shape) and numel(main.shape) == numel(weight.shape):
            yield key, *refine(main, weight)


PROBE_ELEMENTS = 64
"""Elements compared in each place of a piece that is probed, unless all are."""

MOST_PIECES = 1024
"""Pieces of one tensor that are probed, evenly spaced, unless all are compared."""

MOST_COPIES = 4
"""Second copies of pieces of one tensor that are probed, evenly spaced, unless all are compared.

Which ones changes from tensor to tensor, so that every rank's are."""

_PART_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterWeightMismatch:
    """The first parameter whose master weights are not its weights."""

    key: str
    index: tuple[int, ...]
    main: float
    weight: float

    def to_error(self, root: Path) -> FormatError:
        """What to say when no order of the parameters is any better."""
        return FormatError(
            f"the optimizer's master weight is {self.main:g} where the model has "
            f"{self.weight:g}, at {list(self.index)}",
            file=root,
            tensor=self.key,
            hint="the optimizer belongs to another model or iteration, or its parameters are "
            "registered in an order megtool does not know; --optimizer-format none leaves it out",
            error_id="foreign-optimizer",
        )


def find_mismatch(
    candidate: Catalogue, model: Catalogue, *, verify_master_weights: bool = False
) -> MasterWeightMismatch | None:
    """The first parameter of which probes disagree, or None: then the decoding is right.

    `candidate` holds the state per layer, `model` the weights under the same keys or stacked over
    layers. With `verify_master_weights` every element is compared.

    Raises:
        FormatError: master weights of which the model has no weight.
    """
    keys = _weight_names(model)
    with CheckpointReader(candidate, Files()) as mains, CheckpointReader(model, Files()) as weights:
        for number, tensor in enumerate(candidate.tensors):
            state, _, key = split_state(tensor.name)
            if state != MAIN:
                continue
            weight_name, lead = _find_weight(keys, key, candidate.root)
            rows = candidate.shards.of(number)
            pieces = range(rows.start, rows.stop)
            if not verify_master_weights and len(pieces) > MOST_PIECES:
                pieces = range(rows.start, rows.stop, -(-len(pieces) // MOST_PIECES))
            for k, row in enumerate(pieces):
                lo = candidate.shards.boxes.lo[row, : len(tensor.shape)].tolist()
                hi = candidate.shards.boxes.hi[row, : len(tensor.shape)].tolist()
                shares = _shares(k, len(pieces))
                for box in (
                    split_box(lo, hi) if verify_master_weights else sample_runs(lo, hi, shares)
                ):
                    main = mains.open_canonical(place_box(tensor.name, *box)).read().reshape(-1)
                    weight = weights.open_canonical(
                        place_box(weight_name, [*lead, *box[0]], [*(x + 1 for x in lead), *box[1]])
                    ).read()
                    wrong = find_difference(
                        main, tensor.dtype, weight.reshape(-1), model[weight_name].dtype
                    )
                    if wrong is not None:
                        k_wrong, x, y = wrong
                        return MasterWeightMismatch(
                            key=key, index=unravel_in_box(k_wrong, *box), main=x, weight=y
                        )
    return None


def check_copies(catalogue: Catalogue, *, verify_master_weights: bool = False) -> None:
    """Compare what several ranks store of the same parameter: norms, a tied embedding, their state.

    All elements of all copies with `verify_master_weights`, otherwise some of a bounded number of
    copies.

    Raises:
        FormatError: two differ; names the tensor and both files.
    """
    chosen = _replicas(catalogue) if verify_master_weights else _sample_replicas(catalogue)
    if not chosen:
        return
    first_copies, second_copies = pair_replicas(replace(catalogue, replicas=chosen))
    with (
        CheckpointReader(first_copies, Files()) as first,
        CheckpointReader(second_copies, Files()) as second,
    ):
        for number, (copy, tensor) in enumerate(zip(chosen, first_copies.tensors, strict=True)):
            lo, hi = [0] * len(tensor.shape), list(tensor.shape)
            for box in (
                split_box(lo, hi) if verify_master_weights else sample_runs(lo, hi, (0.0, 0.5, 1.0))
            ):
                placement = place_box(tensor.name, *box)
                a = first.open_canonical(placement).read().reshape(-1)
                b = second.open_canonical(placement).read().reshape(-1)
                differ = np.flatnonzero(a.view(np.uint8) != b.view(np.uint8))
                if len(differ):
                    offset = int(differ[0]) // a.itemsize
                    values = [float(numeric_values(x, tensor.dtype)[offset]) for x in (a, b)]
                    file = int(first_copies.extents.file[number])
                    raise _copies_differ(
                        catalogue, copy, file, unravel_in_box(offset, *box), values
                    )


def _replicas(catalogue: Catalogue) -> list[Replica]:
    """All replicas but those of modules' extra state: scales of fp8 may be a rank's own."""
    names = [t.name for t in catalogue.tensors]
    number = catalogue.shards.tensor
    return [
        r for r in catalogue.replicas if not names[int(number[r.shard])].endswith("._extra_state")
    ]


def _sample_replicas(catalogue: Catalogue) -> list[Replica]:
    """Some replicas of every tensor; all of the embedding, which the last stage trains too."""
    copies_of: dict[int, list[Replica]] = {}
    for copy in _replicas(catalogue):
        copies_of.setdefault(int(catalogue.shards.tensor[copy.shard]), []).append(copy)
    return [
        copy
        for number, copies in copies_of.items()
        for copy in (
            copies if catalogue.tensors[number].name == EMBEDDING else _space_evenly(copies, number)
        )
    ]


def _space_evenly(copies: list[Replica], first: int) -> list[Replica]:
    step = -(-len(copies) // MOST_COPIES)
    return copies[first % step :: step]


def _copies_differ(
    catalogue: Catalogue,
    copy: Replica,
    file: int,
    index: tuple[int, ...],
    values: Sequence[float],
) -> FormatError:
    name = catalogue.tensors[int(catalogue.shards.tensor[copy.shard])].name
    lo = catalogue.shards.boxes.lo[copy.shard].tolist()
    global_index = [i + x for i, x in zip(index, lo, strict=False)]
    way_out = (
        ", or leave the optimizer out: --optimizer-format none" if split_state(name)[0] else ""
    )
    return FormatError(
        f"copies of it differ: {values[0]:g} in {catalogue.files[file].path} and {values[1]:g} "
        f"in {catalogue.files[copy.file].path}, at {global_index}",
        file=catalogue.path(copy.file),
        tensor=name,
        hint="a file is damaged, or of another save: `megtool verify` lists all that differ; take "
        f"another iteration{way_out}",
    )


def _find_weight(keys: dict[str, str], key: str, root: Path) -> tuple[str, tuple[int, ...]]:
    """The stored weight of a per-layer key, and the layer's index in it where it is stacked."""
    if key in keys:
        return keys[key], ()
    head, _, tail = key.partition(".layers.")
    layer, _, suffix = tail.partition(".")
    stacked = f"{head}.layers.{suffix}"
    if layer.isdigit() and stacked in keys:
        return keys[stacked], (int(layer),)
    raise FormatError(
        "the optimizer has state of a parameter that the model lacks",
        file=root,
        tensor=key,
        hint="--optimizer-format none leaves the optimizer out",
    )


def _weight_names(model: Catalogue) -> dict[str, str]:
    """Stored names of weights by their keys without wrappers."""
    split = ((split_state(t.name), t.name) for t in model.tensors)
    return {key: name for (state, _, key), name in split if state == ""}


def _shares(number: int, of: int) -> tuple[float, ...]:
    """How far inside a piece it is probed: at its beginning, and one at its middle or end."""
    return (0.0, *[0.5] * (number == 0), *[1.0] * (number == of - 1))


def sample_runs(
    lo: list[int], hi: list[int], shares: tuple[float, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of a few elements of a box, along its last dimension; no run twice."""
    if not lo:
        yield lo, hi
        return
    size = min(hi[-1] - lo[-1], PROBE_ELEMENTS)
    starts: list[list[int]] = []
    for share in shares:
        last = [
            x + int((h - n - x) * share)
            for x, h, n in zip(lo, hi, _run_shape(lo, size), strict=True)
        ]
        if last not in starts:
            starts.append(last)
            yield last, [x + n for x, n in zip(last, _run_shape(lo, size), strict=True)]


def split_box(lo: list[int], hi: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """A box in parts that fit into memory."""
    shape = [h - x for x, h in zip(lo, hi, strict=True)]
    if numel(shape) <= _PART_ELEMENTS:
        yield lo, hi
        return
    dim = shape.index(max(shape))
    middle = lo[dim] + shape[dim] // 2
    yield from split_box(lo, [*hi[:dim], middle, *hi[dim + 1 :]])
    yield from split_box([*lo[:dim], middle, *lo[dim + 1 :]], hi)


def _run_shape(lo: list[int], size: int) -> list[int]:
    return [*[1] * (len(lo) - 1), size]


def unravel_in_box(offset: int, lo: list[int], hi: list[int]) -> tuple[int, ...]:
    """The index in the tensor of an element of a box."""
    shape = [h - x for x, h in zip(lo, hi, strict=True)]
    index = np.unravel_index(offset, shape) if shape else ()
    return tuple(int(i) + x for i, x in zip(index, lo, strict=True))


def place_box(stored: str, lo: list[int], hi: list[int]) -> Placement:
    """A box of a stored tensor as a tensor of its own."""
    n = len(lo)
    return Placement(
        canonical=stored,
        stored=stored,
        shape=tuple(h - x for x, h in zip(lo, hi, strict=True)),
        dims=tuple(range(n)),
        mults=(1,) * n,
        base=tuple(lo),
    )


def find_difference(
    main: Array, kind: DType, weight: Array, target: DType
) -> tuple[int, float, float] | None:
    """The first element that differs once the master weights have the model's dtype."""
    if kind == target:
        rounded = main
    else:
        rounded = np.empty(main.shape, target.view)
        cast(main, kind, rounded, target)
    differ = np.flatnonzero(rounded != weight)
    if not len(differ):
        return None
    a, b = numeric_values(main, kind), numeric_values(weight, target)
    close = np.isclose(a, b, rtol=_tolerance(weight, target), atol=0.0, equal_nan=True)
    for k in differ[~close[differ]][:1].tolist():
        return k, float(a[k]), float(b[k])
    return None


def _tolerance(weight: Array, target: DType) -> float:
    """Stochastic rounding ends at either neighbor: one unit in the last place is no mismatch.

    Nor is it one that weights were rounded once and kept in float32 since: their last bits are 0.
    """
    narrow = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
    if target.name != "float32":
        return narrow.get(target.name, 0.0)
    bits = weight.view("<u4")
    if not (bits & 0xFFFF).any():
        return narrow["bfloat16"]
    return 0.0 if (bits & 0x1FFF).any() else narrow["float16"]
