"""Masters: master weights held against the weights, where the state needs no decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megtool.checkpoint.catalogue import Catalogue, Replica
from megtool.checkpoint.numeric_values import numbers
from megtool.checkpoint.read import Reader
from megtool.checkpoint.replicas import as_pair
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.transport.cast import cast
from megtool.checkpoint.transport.strided import Array
from megtool.convert.dialects import CanonicalView
from megtool.convert.megatron import MAIN, split_optimizer, split_state
from megtool.convert.rank_parameters import EMBEDDING
from megtool.dtypes import DType
from megtool.errors import FormatError
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement, narrow, refine

_SHARES = (0.0, 0.5, 1.0)


def check_masters(catalogue: Catalogue, side: CanonicalView, *, whole: bool = False) -> None:
    """Compare master weights, rounded, with the weights `side` reads from `catalogue`.

    Some elements at the beginning, in the middle and at the end of every tensor, or with `whole`
    all of them. Masters of weights that are not there, and quantized weights, are passed over:
    nothing says how the latter were rounded. Memory is bounded by one part of a tensor.

    Raises:
        FormatError: a master weight is not its weight.
    """
    with Reader(catalogue, Files()) as reader:
        for name, main, weight in _pairs(catalogue, side):
            kind, target = catalogue[main.stored].dtype, catalogue[weight.stored].dtype
            lo, hi = [0] * len(main.shape), list(main.shape)
            for box in parts(lo, hi) if whole else probes(lo, hi, _SHARES):
                a = reader.canonical(narrow(main, *box)).read().reshape(-1)
                b = reader.canonical(narrow(weight, *box)).read().reshape(-1)
                wrong = difference(a, kind, b, target)
                if wrong is not None:
                    at, x, y = wrong
                    found = Mismatch(key=name, index=index_of(at, *box), main=x, weight=y)
                    raise found.error(catalogue.root)


def _pairs(catalogue: Catalogue, side: CanonicalView) -> Iterator[tuple[str, Placement, Placement]]:
    """Every weight that has a master: its name, the master's place and its own."""
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
class Mismatch:
    """The first parameter whose master weights are not its weights."""

    key: str
    index: tuple[int, ...]
    main: float
    weight: float

    def error(self, root: Path) -> FormatError:
        """What to say when no order of the parameters is any better."""
        return FormatError(
            f"the optimizer's master weight is {self.main:g} where the model has "
            f"{self.weight:g}, at {list(self.index)}",
            file=root,
            tensor=self.key,
            hint="the optimizer belongs to another model or iteration, or its parameters are "
            "registered in an order megtool does not know; --optimizer none leaves it out",
        )


def disproof(candidate: Catalogue, model: Catalogue, *, whole: bool = False) -> Mismatch | None:
    """The first parameter of which probes disagree, or None: then the decoding is right.

    `candidate` holds the state per layer, `model` the weights under the same keys or stacked over
    layers. With `whole` every element is compared.

    Raises:
        FormatError: master weights of which the model has no weight.
    """
    keys = _keys(model)
    with Reader(candidate, Files()) as mains, Reader(model, Files()) as weights:
        for number, tensor in enumerate(candidate.tensors):
            state, _, key = split_state(tensor.name)
            if state != MAIN:
                continue
            stored, lead = _weight_of(keys, key, candidate.root)
            rows = candidate.shards.of(number)
            pieces = range(rows.start, rows.stop)
            if not whole and len(pieces) > MOST_PIECES:
                pieces = range(rows.start, rows.stop, -(-len(pieces) // MOST_PIECES))
            for k, row in enumerate(pieces):
                lo = candidate.shards.boxes.lo[row, : len(tensor.shape)].tolist()
                hi = candidate.shards.boxes.hi[row, : len(tensor.shape)].tolist()
                shares = _shares(k, len(pieces))
                for box in parts(lo, hi) if whole else probes(lo, hi, shares):
                    main = mains.canonical(box_of(tensor.name, *box)).read().reshape(-1)
                    weight = weights.canonical(
                        box_of(stored, [*lead, *box[0]], [*(x + 1 for x in lead), *box[1]])
                    ).read()
                    wrong = difference(main, tensor.dtype, weight.reshape(-1), model[stored].dtype)
                    if wrong is not None:
                        at, x, y = wrong
                        return Mismatch(key=key, index=index_of(at, *box), main=x, weight=y)
    return None


def check_copies(catalogue: Catalogue, *, whole: bool = False) -> None:
    """Compare what several ranks store of the same parameter: norms, a tied embedding, their state.

    All elements of all copies with `whole`, otherwise some of a bounded number of copies.

    Raises:
        FormatError: two differ; names the tensor and both files.
    """
    chosen = _replicas(catalogue) if whole else _some(catalogue)
    if not chosen:
        return
    one, other = as_pair(replace(catalogue, replicas=chosen))
    with Reader(one, Files()) as first, Reader(other, Files()) as second:
        for number, (copy, tensor) in enumerate(zip(chosen, one.tensors, strict=True)):
            lo, hi = [0] * len(tensor.shape), list(tensor.shape)
            for box in parts(lo, hi) if whole else probes(lo, hi, (0.0, 0.5, 1.0)):
                place = box_of(tensor.name, *box)
                a = first.canonical(place).read().reshape(-1)
                b = second.canonical(place).read().reshape(-1)
                differ = np.flatnonzero(a.view(np.uint8) != b.view(np.uint8))
                if len(differ):
                    at = int(differ[0]) // a.itemsize
                    values = [float(numbers(x, tensor.dtype)[at]) for x in (a, b)]
                    file = int(one.extents.file[number])
                    raise _differing(catalogue, copy, file, index_of(at, *box), values)


def _replicas(catalogue: Catalogue) -> list[Replica]:
    """All replicas but those of modules' extra state: scales of fp8 may be a rank's own."""
    names = [t.name for t in catalogue.tensors]
    number = catalogue.shards.tensor
    return [
        r for r in catalogue.replicas if not names[int(number[r.shard])].endswith("._extra_state")
    ]


def _some(catalogue: Catalogue) -> list[Replica]:
    """Some replicas of every tensor; all of the embedding, which the last stage trains too."""
    found: dict[int, list[Replica]] = {}
    for copy in _replicas(catalogue):
        found.setdefault(int(catalogue.shards.tensor[copy.shard]), []).append(copy)
    return [
        copy
        for number, copies in found.items()
        for copy in (
            copies if catalogue.tensors[number].name == EMBEDDING else _spaced(copies, number)
        )
    ]


def _spaced(copies: list[Replica], first: int) -> list[Replica]:
    step = -(-len(copies) // MOST_COPIES)
    return copies[first % step :: step]


def _differing(
    catalogue: Catalogue,
    copy: Replica,
    file: int,
    index: tuple[int, ...],
    values: Sequence[float],
) -> FormatError:
    name = catalogue.tensors[int(catalogue.shards.tensor[copy.shard])].name
    lo = catalogue.shards.boxes.lo[copy.shard].tolist()
    at = [i + x for i, x in zip(index, lo, strict=False)]
    way_out = ", or leave the optimizer out: --optimizer none" if split_state(name)[0] else ""
    return FormatError(
        f"copies of it differ: {values[0]:g} in {catalogue.files[file].path} and {values[1]:g} "
        f"in {catalogue.files[copy.file].path}, at {at}",
        file=catalogue.path(copy.file),
        tensor=name,
        hint="a file is damaged, or of another save: `megtool verify` lists all that differ; take "
        f"another iteration{way_out}",
    )


def _weight_of(keys: dict[str, str], key: str, root: Path) -> tuple[str, tuple[int, ...]]:
    """The stored weight of a per-layer key, and the layer's index in it where it is stacked."""
    if key in keys:
        return keys[key], ()
    head, _, rest = key.partition(".layers.")
    layer, _, suffix = rest.partition(".")
    stacked = f"{head}.layers.{suffix}"
    if layer.isdigit() and stacked in keys:
        return keys[stacked], (int(layer),)
    raise FormatError(
        "the optimizer has state of a parameter that the model lacks",
        file=root,
        tensor=key,
        hint="--optimizer none leaves the optimizer out",
    )


def _keys(model: Catalogue) -> dict[str, str]:
    """Stored names of weights by their keys without wrappers."""
    split = ((split_state(t.name), t.name) for t in model.tensors)
    return {key: name for (state, _, key), name in split if state == ""}


def _shares(number: int, of: int) -> tuple[float, ...]:
    """How far inside a piece it is probed: at its beginning, and one at its middle or end."""
    return (0.0, *[0.5] * (number == 0), *[1.0] * (number == of - 1))


def probes(
    lo: list[int], hi: list[int], shares: tuple[float, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of a few elements of a box, along its last dimension; no run twice."""
    if not lo:
        yield lo, hi
        return
    size = min(hi[-1] - lo[-1], PROBE_ELEMENTS)
    seen: list[list[int]] = []
    for share in shares:
        last = [
            x + int((h - n - x) * share) for x, h, n in zip(lo, hi, _ends(lo, size), strict=True)
        ]
        if last not in seen:
            seen.append(last)
            yield last, [x + n for x, n in zip(last, _ends(lo, size), strict=True)]


def parts(lo: list[int], hi: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """A box in parts that fit into memory."""
    shape = [h - x for x, h in zip(lo, hi, strict=True)]
    if numel(shape) <= _PART_ELEMENTS:
        yield lo, hi
        return
    dim = shape.index(max(shape))
    middle = lo[dim] + shape[dim] // 2
    yield from parts(lo, [*hi[:dim], middle, *hi[dim + 1 :]])
    yield from parts([*lo[:dim], middle, *lo[dim + 1 :]], hi)


def _ends(lo: list[int], size: int) -> list[int]:
    return [*[1] * (len(lo) - 1), size]


def index_of(at: int, lo: list[int], hi: list[int]) -> tuple[int, ...]:
    """The index in the tensor of an element of a box."""
    shape = [h - x for x, h in zip(lo, hi, strict=True)]
    place = np.unravel_index(at, shape) if shape else ()
    return tuple(int(i) + x for i, x in zip(place, lo, strict=True))


def box_of(stored: str, lo: list[int], hi: list[int]) -> Placement:
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


def difference(
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
    a, b = numbers(main, kind), numbers(weight, target)
    close = np.isclose(a, b, rtol=_tolerance(weight, target), atol=0.0, equal_nan=True)
    for at in differ[~close[differ]][:1].tolist():
        return at, float(a[at]), float(b[at])
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
