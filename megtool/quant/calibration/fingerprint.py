"""Fingerprint: which model, recipe and data something was calibrated with, in a few hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megtool import __version__
from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.convert.dialects import Side
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe

if TYPE_CHECKING:
    from megtool.model.batch import Batch

PROBE_BYTES = 4096
"""Of every tensor, from its beginning: training changes all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Hashes, as hexadecimal text, of all that decides what calibration finds.

    `model` is the same for every format and layout of a checkpoint, `recipe` for every way to write
    the same decisions. `version` is megtool's.
    """

    model: str
    recipe: str
    data: str
    seed: int = 0
    version: str = __version__

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the fields that are not the same."""
        names = [f.name for f in fields(self)]
        return [n for n in names if getattr(self, n) != getattr(other, n)]


def fingerprint_of(
    catalogue: Catalogue,
    side: Side,
    recipe: Recipe,
    decisions: Iterable[Decision],
    batches: Sequence[Batch] = (),
    *,
    seed: int = 0,
) -> Fingerprint:
    """The fingerprint of a run."""
    return Fingerprint(
        model=of_model(catalogue, side),
        recipe=of_recipe(recipe, decisions),
        data=of_batches(batches),
        seed=seed,
    )


def of_model(catalogue: Catalogue, side: Side) -> str:
    """Of names, shapes, types and first bytes of all canonical tensors, optimizer state left out.

    Raises:
        StorageError: a file cannot be read.
    """
    found = hashlib.sha256()
    with Reader(catalogue, Files()) as reader:
        for name, tensor in sorted(side.canonical.items()):
            if ":" in name:
                continue
            view = reader.canonical(side.placements[name])
            found.update(_line([name, list(tensor.shape), view.dtype.name]))
            found.update(_probe(view))
    return found.hexdigest()


def _probe(view: Any) -> bytes:
    """The first bytes of a tensor, whatever the tiles are that it is read in."""
    out = bytearray()
    with closing(view.tiles(PROBE_BYTES)) as tiles:
        for _, tile in tiles:
            out += tile[: PROBE_BYTES // tile.itemsize + 1].tobytes()
            if len(out) >= PROBE_BYTES:
                break
    return bytes(out[:PROBE_BYTES])


def of_recipe(recipe: Recipe, decisions: Iterable[Decision]) -> str:
    """Of what every module becomes, and of the algorithm with its options."""
    found = hashlib.sha256(_line({k: recipe.algorithm[k] for k in sorted(recipe.algorithm)}))
    for d in sorted(decisions, key=lambda d: d.module.name):
        if (f := d.format) is None:
            continue
        facts: Mapping[str, Any] = {
            "algo": f.algo or f.kv_algo,
            "choose": list(f.choose),
            "group": f.group_size,
            "bits": f.bits,
            "constant": f.constant,
            "method": f.method,
        }
        found.update(_line([d.module.name, facts]))
    return found.hexdigest()


def of_batches(batches: Sequence[Batch]) -> str:
    """Of tokens and what is said about them; how rows are put into batches does not count."""
    found = hashlib.sha256()
    for batch in batches:
        rows, width = batch.shape
        named = {
            n: getattr(batch, n)
            for n in ("tokens_BS", "positions_BS", "valid_BS", "documents_BS")
            if getattr(batch, n) is not None
        }
        values = {n: t.cpu().expand(rows, width).contiguous().numpy() for n, t in named.items()}
        for row in range(rows):
            for name, value in values.items():
                found.update(_line([name, width]))
                found.update(value[row].astype("<i8").tobytes())
    return found.hexdigest()


def _line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
