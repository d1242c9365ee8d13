"""Stored tensors that repeat others, as tied weights do: whether they do is looked at."""

from __future__ import annotations

import re

import numpy as np

from megtool.convert.language.mapping import Row
from megtool.convert.megatron.names import EMBEDDING, OUTPUT
from megtool.megatron_state.optimizer.master_weight_check import (
    place_box,
    sample_runs,
    split_box,
    unravel_in_box,
)
from megtool.source.checkpoint import CheckpointSource, ModelIdentity
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader

_TIED = {"head.weight": "embed.weight"}
"""Canonical tensors that are absent where embeddings are tied, and the ones that replace them."""


def find_false_copies(
    source: CheckpointSource, *, verify_master_weights: bool = False
) -> dict[str, str]:
    """Stored tensors that should be copies of others and differ, each with the difference.

    Some elements of each are compared, all with `verify_master_weights`. Where the original is not
    selected, nothing is compared.
    """
    side = source.view
    out: dict[str, str] = {}
    if not side.copies:
        return out
    with CheckpointReader(source.catalogue, Files()) as reader:
        for name, canonical in side.copies.items():
            if canonical not in side.placements:
                canonical = _TIED.get(canonical, canonical)
            original = side.placements.get(canonical)
            if original is None:
                continue
            difference = _find_difference(
                reader, name, original, verify_master_weights=verify_master_weights
            )
            if difference is not None:
                out[name] = f"not a copy of {original.stored}, though it should be: {difference}"
    return out


def _find_difference(
    reader: CheckpointReader, name: str, original: Placement, *, verify_master_weights: bool = False
) -> str | None:
    """How a stored tensor differs from a canonical one, which may be longer by padding."""
    stored = reader.catalogue[name]
    if not original.is_identity:
        return f"{original.stored} has another layout"
    shape = original.shape
    if len(stored.shape) != len(shape) or any(
        n < m if d == 0 else n != m
        for d, (n, m) in enumerate(zip(stored.shape, shape, strict=True))
    ):
        return f"its shape is {list(stored.shape)}, not {list(shape)}"
    if not numel(shape):
        return None
    original_dtype = reader.catalogue[original.stored].dtype
    lo, hi = [0] * len(shape), list(shape)
    for box in split_box(lo, hi) if verify_master_weights else sample_runs(lo, hi, (0.0, 0.5, 1.0)):
        a, b = (
            reader.open_canonical(place_box(n, *box)).read().reshape(-1)
            for n in (original.stored, name)
        )
        x, y = numeric_values(a, original_dtype), numeric_values(b, stored.dtype)
        differ = np.flatnonzero(~np.isclose(x, y, rtol=0.0, atol=0.0, equal_nan=True))
        if len(differ):
            k = int(differ[0])
            index = list(unravel_in_box(k, *box))
            return f"{float(y[k]):g} where that has {float(x[k]):g}, at {index}"
    return None


def has_own_head(catalogue: Catalogue, model: ModelIdentity) -> bool:
    """Whether a model whose config.json ties its embeddings has an output layer of its own.

    Such are models of families with `head_unties`. Some elements are compared.
    """
    family, config = model.family, model.config
    if family is None or not family.head_unties or not config.embedding.tied_embeddings:
        return False
    rows = (r for r in family.hf if isinstance(r, Row))
    words = {r.word: r.stored for r in rows if isinstance(r.word, str)}
    for head, embedding in ((words["head.weight"], words["embed.weight"]), (OUTPUT, EMBEDDING)):
        heads, embeddings = (_of_tensor_rank(catalogue, name) for name in (head, embedding))
        if not heads or not embeddings:
            continue
        # Of rank files, the first stage's embedding, and the output layer of the last.
        original = Placement.identity(min(embeddings), catalogue[min(embeddings)].shape)
        with CheckpointReader(catalogue, Files()) as reader:
            return _find_difference(reader, max(heads), original) is not None
    return False


def _of_tensor_rank(catalogue: Catalogue, name: str) -> list[str]:
    """A weight under its name, or the first tensor rank's parts of it on pipeline stages."""
    of_rank = re.compile(rf"(?:mp_rank_00(?:_\d+)?/model_optim_rng/model/)?{re.escape(name)}")
    return [t.name for t in catalogue.tensors if of_rank.fullmatch(t.name)]
