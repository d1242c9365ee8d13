"""Proof that decoded optimizer state is the model's: master weights, rounded, are the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.transport.cast import cast
from megtool.checkpoint.transport.strided import Array
from megtool.checkpoint.values import numbers
from megtool.convert.megatron import MAIN, split_state
from megtool.dtypes import DType
from megtool.errors import FormatError
from megtool.tensors.relation import Placement

PROBE_ELEMENTS = 64
"""Elements compared at the start of each piece of a parameter, unless all are."""

MOST_PIECES = 1024
"""Pieces of one tensor that are probed, evenly spaced, unless all are compared."""


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
    """
    with Reader(candidate, Files()) as mains, Reader(model, Files()) as weights:
        for number, tensor in enumerate(candidate.tensors):
            state, _, key = split_state(tensor.name)
            if state != MAIN or not tensor.dtype.is_float:
                continue
            found = _weight_of(model, key)
            if found is None:
                continue
            stored, lead = found
            rows = candidate.shards.of(number)
            pieces = range(rows.start, rows.stop)
            if not whole and len(pieces) > MOST_PIECES:
                pieces = range(rows.start, rows.stop, -(-len(pieces) // MOST_PIECES))
            for row in pieces:
                lo = candidate.shards.boxes.lo[row, : len(tensor.shape)].tolist()
                hi = candidate.shards.boxes.hi[row, : len(tensor.shape)].tolist()
                if not whole:
                    lo, hi = _probe(lo, hi)
                main = mains.canonical(_box(tensor.name, lo, hi)).read().reshape(-1)
                weight = weights.canonical(
                    _box(stored, [*lead, *lo], [*(x + 1 for x in lead), *hi])
                ).read()
                wrong = _difference(main, tensor.dtype, weight.reshape(-1), model[stored].dtype)
                if wrong is not None:
                    at, a, b = wrong
                    shape = [h - x for x, h in zip(lo, hi, strict=True)]
                    place = np.unravel_index(at, shape) if shape else ()
                    index = tuple(int(i) + x for i, x in zip(place, lo, strict=True))
                    return Mismatch(key=key, index=index, main=a, weight=b)
    return None


def _weight_of(model: Catalogue, key: str) -> tuple[str, tuple[int, ...]] | None:
    """The stored weight of a per-layer key, and the layer's index in it where it is stacked."""
    by_key = _keys(model)
    if key in by_key:
        return by_key[key], ()
    head, _, rest = key.partition(".layers.")
    layer, _, suffix = rest.partition(".")
    stacked = f"{head}.layers.{suffix}"
    if layer.isdigit() and stacked in by_key:
        return by_key[stacked], (int(layer),)
    return None


def _keys(model: Catalogue) -> dict[str, str]:
    """Stored names of weights by their keys without wrappers."""
    known = model.metadata.get("_keys")
    if not isinstance(known, dict):
        split = ((split_state(t.name), t.name) for t in model.tensors)
        known = {key: name for (state, _, key), name in split if state == ""}
        model.metadata["_keys"] = known
    return known


def _probe(lo: list[int], hi: list[int]) -> tuple[list[int], list[int]]:
    """The first elements of a box, along its last dimension."""
    if not lo:
        return lo, hi
    last = min(hi[-1], lo[-1] + PROBE_ELEMENTS)
    return lo, [*(x + 1 for x in lo[:-1]), last]


def _box(stored: str, lo: list[int], hi: list[int]) -> Placement:
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


def _difference(
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
    close = np.isclose(a, b, rtol=_tolerance(target), atol=0.0, equal_nan=True)
    for at in differ[~close[differ]][:1].tolist():
        return at, float(a[at]), float(b[at])
    return None


def _tolerance(target: DType) -> float:
    """Stochastic rounding ends at either neighbour: one unit in the last place is no mismatch."""
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(target.name, 0.0)
