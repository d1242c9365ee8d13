"""Verify: one checkpoint against its digests, or two against each other in any format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.compare import Delta, Half, Pair, compare
from megtool.checkpoint.digest import TensorDigest
from megtool.checkpoint.files import Files
from megtool.checkpoint.read import Reader
from megtool.checkpoint.replicas import as_pair
from megtool.checkpoint.sweep import usual_threads
from megtool.commands.findings import Difference, DigestCheck, VerifyReport
from megtool.commands.opened import Opened, open_model
from megtool.convert.binding import missing, summarise
from megtool.convert.canonical import VOCABULARY
from megtool.convert.canonical import Model as CanonicalModel
from megtool.convert.dialects import read_side
from megtool.dtypes import DType, dtype
from megtool.errors import MappingError
from megtool.log import Progress, silent
from megtool.tensors.box import numel
from megtool.tensors.relation import Placement
from megtool.tensors.sharded import GlobalTensor

_TIED = "a copy of the tied embedding"
_EMBEDDING = "embed.weight"


def verify(
    a: str | Path,
    b: str | Path | None = None,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    family: str | None = None,
    like: str | Path | None = None,
    iteration: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> VerifyReport:
    """Check that a checkpoint is sound and complete and that its digests hold; or that two are
    equal in content, whatever their formats and layouts, and that the digests of both hold.

    Elements are compared bit by bit, and types must agree; with `atol` or `rtol` they are compared
    as numbers, of whatever types: `|a - b| <= atol + rtol * |b|`. Optimizer state, padding and
    copies are compared where both hold them. `iteration` chooses one of a save folder, of `b` too
    if it is one. Memory is bounded by a few buffers a thread.

    Raises:
        MegtoolError: one cannot be opened or located, or the two have no tensor in common.
    """
    began = time.monotonic()
    chosen = _Choice(family=family, like=None if like is None else Path(like), iteration=iteration)
    first = chosen.open(Path(a))
    if b is None:
        second = None
    else:
        first, second = _both(first, Path(a), Path(b), chosen)
    sides = [first] if second is None else [first, second]
    run = _Run(sides=sides, atol=atol, rtol=rtol, threads=usual_threads(threads), report=progress)
    with Reader(first.catalogue, Files()) as reader:
        if second is None:
            found = run.check([_Side.of(first, reader)])
        else:
            with Reader(second.catalogue, Files()) as other:
                found = run.check([_Side.of(first, reader), _Side.of(second, other)])
    for opened in sides:
        opened.catalogue.check_unchanged()
    named = next((s.model.family for s in sides if s.model and s.model.family), None)
    return VerifyReport(
        a=str(a),
        b=None if b is None else str(b),
        a_format=first.catalogue.format,
        b_format=None if second is None else second.catalogue.format,
        family=named.name if named and first.is_canonical else None,
        matched_by="canonical" if first.is_canonical else "stored",
        atol=atol,
        rtol=rtol,
        num_replicas=sum(len(s.catalogue.replicas) for s in sides),
        seconds=time.monotonic() - began,
        **found,
    )
