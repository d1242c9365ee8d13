"""Masters: master weights held against the weights, where the state needs no decoding."""

from __future__ import annotations

from collections.abc import Iterator

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.convert.dialects import Side
from megtool.convert.megatron import MAIN, split_optimizer
from megtool.reshard.megatron.bucket_order_check import (
    Mismatch,
    difference,
    index_of,
    parts,
    probes,
)
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement, narrow, refine

_SHARES = (0.0, 0.5, 1.0)


def check_masters(catalogue: Catalogue, side: Side, *, whole: bool = False) -> None:
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


def _pairs(catalogue: Catalogue, side: Side) -> Iterator[tuple[str, Placement, Placement]]:
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
