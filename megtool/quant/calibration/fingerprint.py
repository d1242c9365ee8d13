"""Hashes of the model, recipe and data of a calibration."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool import __version__
from megtool.convert.dialects import CanonicalView
from megtool.errors import FormatError
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement, narrow
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.shard_locator import count_cuttable_dims

if TYPE_CHECKING:
    from megtool.model.batch import Batch

NUM_PROBES, PROBE_ELEMENTS = 8, 2048
"""Number and size of the probes of each tensor: training changes all of them."""

_UNUSED_FIELDS = frozenset(
    ("extra", "max_positions", "moe_layer_freq", "window_skip_freq", "num_mtp_layers")
)
"""Config fields that no forward pass uses, or that have several equivalent spellings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Hashes, in hexadecimal, of everything that a calibration result depends on.

    `model` is the same for every format and layout of a checkpoint, `recipe` for every spelling of
    the same decisions. `version` is megtool's.
    """

    model: str
    recipe: str
    data: str
    seed: int = 0
    version: str = __version__

    def differences(self, fingerprint: Fingerprint) -> list[str]:
        """Names of the fields that differ."""
        names = [f.name for f in fields(self)]
        return [n for n in names if getattr(self, n) != getattr(fingerprint, n)]


def compute_fingerprint(
    catalogue: Catalogue,
    side: CanonicalView,
    recipe: Recipe,
    decisions: Iterable[Decision],
    batches: Sequence[Batch] = (),
    *,
    seed: int = 0,
) -> Fingerprint:
    """Compute the fingerprint of a run."""
    return Fingerprint(
        model=hash_model(catalogue, side),
        recipe=hash_recipe(recipe, decisions),
        data=hash_batches(batches),
        seed=seed,
    )


def hash_model(catalogue: Catalogue, side: CanonicalView) -> str:
    """Hash the model config, and names, shapes, dtypes and sampled bytes of all canonical tensors
    without optimizer state.

    `NUM_PROBES` places of each tensor are sampled: this detects further training and large edits,
    but not a few changed elements elsewhere.

    Raises:
        StorageError: a file cannot be read.
    """
    digest = hashlib.sha256()
    if side.config is not None:
        digest.update(_line(_forward_config(side.config)))
    with CheckpointReader(catalogue, Files()) as reader:
        for name, tensor in sorted(side.canonical.items()):
            if ":" in name:
                continue
            placement = side.placements[name]
            dtype = reader.open_canonical(placement).dtype.name
            digest.update(_line([name, list(tensor.shape), dtype]))
            if 0 not in tensor.shape:
                for part in _probe_tensor(reader, placement, tensor.shape):
                    digest.update(part)
    return digest.hexdigest()


def _forward_config(config: ModelConfig) -> dict[str, Any]:
    """The config values that affect a forward pass, the same for every format."""
    positions = config.positions
    values = {n: v for n, v in config.to_fields().items() if n not in _UNUSED_FIELDS}
    if positions.rope_scaling is not None:  # nothing else uses the maximum length
        values["max_positions"] = positions.max_positions
        values["rope_scaling"] = {k: v for k, v in positions.rope_scaling.items() if v is not None}
    values["moe_layers"] = sorted(layer_sets.moe_layers(config))
    skip, layers = config.window.window_skip_freq, range(config.num_layers)
    if not isinstance(skip, tuple):
        skip = tuple(int(skip is None or (layer + 1) % skip != 0) for layer in layers)
    values["windows"] = skip if config.window.window_size else None
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """The same for 1 and 1.0, and for a list and a tuple."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _probe_tensor(
    reader: CheckpointReader, placement: Placement, shape: Sequence[int]
) -> Iterator[bytes]:
    """Yield the bytes of a tensor at probes spread over rows and columns.

    They do not depend on how the tensor is stored: `placement` may have more dimensions than
    `shape`.
    """
    rows, columns = math.prod(shape[:-1]), math.prod(shape[-1:])
    width, last = min(PROBE_ELEMENTS, columns), NUM_PROBES - 1
    probes = [
        (i * (rows - 1) // last, (3 * i % NUM_PROBES) * (columns - width) // last)
        for i in range(NUM_PROBES)
    ]
    sizes = [math.prod(placement.shape[:k]) for k in range(len(placement.shape) + 1)]
    outer = sizes.index(rows) if rows in sizes else len(sizes)
    try:
        depth = count_cuttable_dims(placement, reader.catalogue[placement.stored])
    except FormatError:
        depth = -1
    if depth < outer:  # rows cannot be read separately
        tensor = reader.open_canonical(placement).read().reshape(rows, columns)
        for row, start in dict.fromkeys(probes):
            yield tensor[row, start : start + width].tobytes()
        return
    for row, start in dict.fromkeys(probes):
        index = np.unravel_index(row, placement.shape[:outer])
        lo = [int(i) for i in index] + [0] * (len(placement.shape) - outer)
        hi = [int(i) + 1 for i in index] + list(placement.shape[outer:])
        cut = depth == len(placement.shape) == outer + 1  # else the row is read whole
        if cut:
            lo[-1], hi[-1] = start, start + width
        part = reader.open_canonical(narrow(placement, lo, hi)).read().reshape(-1)
        yield (part if cut else part[start : start + width]).tobytes()


def hash_recipe(recipe: Recipe, decisions: Iterable[Decision]) -> str:
    """Hash the format of every module, and the algorithm with its options."""
    digest = hashlib.sha256(_line({k: recipe.algorithm[k] for k in sorted(recipe.algorithm)}))
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
        } | ({"input_amax": f.input_amax} if f.input_amax else {})
        facts = {**facts, "round_twice": True} if f.round_twice else facts
        facts = {**facts, "block_scales": f.block_scales} if f.block_scales else facts
        digest.update(_line([d.module.name, facts]))
    return digest.hexdigest()


def hash_batches(batches: Sequence[Batch]) -> str:
    """Hash tokens, positions and masks, independent of how rows are batched."""
    digest = hashlib.sha256()
    for batch in batches:
        rows, width = batch.shape
        tensors = {
            n: getattr(batch, n)
            for n in ("tokens_BS", "positions_BS", "valid_BS", "documents_BS")
            if getattr(batch, n) is not None
        }
        values = {n: t.cpu().expand(rows, width).contiguous().numpy() for n, t in tensors.items()}
        for row in range(rows):
            for name, value in values.items():
                digest.update(_line([name, width]))
                digest.update(value[row].astype("<i8").tobytes())
    return digest.hexdigest()


def _line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
