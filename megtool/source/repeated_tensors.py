"""Stored tensors that repeat others, as tied weights do: whether they do is looked at."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from megtool.convert.canonical_view import CanonicalView, FalseCopy, TargetView
from megtool.convert.language.mapping import Row
from megtool.convert.megatron.names import EMBEDDING, OUTPUT
from megtool.errors import MappingError
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
    catalogue: Catalogue, view: CanonicalView, *, is_whole: bool = True
) -> tuple[FalseCopy, ...]:
    """Compare the stored tensors that should be copies of others with these.

    Of each, some elements are compared and, with `is_whole`, then all, streamed. Two names of
    the same bytes of a file are not. Where the original is not selected, nothing is compared.
    """
    out: list[FalseCopy] = []
    if not view.copies:
        return ()
    with CheckpointReader(catalogue, Files()) as reader:
        for name, canonical in view.copies.items():
            if canonical not in view.placements:
                canonical = _TIED.get(canonical, canonical)
            original = view.placements.get(canonical)
            if original is None or _are_same_bytes(catalogue, name, original):
                continue
            difference = _find_difference(reader, name, original)
            if difference is None and is_whole:
                difference = _find_difference(reader, name, original, is_whole=True)
            if difference is not None:
                flag, value = view.keeping.get(name, ("", False))
                if not _has_shape(catalogue[name].shape, original.shape):
                    flag = ""
                out.append(FalseCopy(name, original.stored, difference, flag, value))
    return tuple(out)


def find_repeated_names(source: CheckpointSource, target: TargetView) -> dict[str, list[str]]:
    """The copies of embedding and head that a Hugging Face folder has for multi-token prediction.

    By the names under which a target of the same names stores the originals. Some releases of
    engines need them: `mtp_copies` of `megtool/lint/engines.yaml`.
    """
    view = source.view
    if view.dialect != "hf" or source.format not in ("hf", "safetensors") or source.adapters:
        return {}
    out: dict[str, list[str]] = {}
    for name, canonical in view.copies.items():
        if not view.keeping.get(name, ("", False))[0].startswith("mtp_"):
            continue
        if canonical not in view.placements:
            canonical = _TIED.get(canonical, canonical)
        placed = target.placements.get(canonical)
        if placed is not None and placed.is_identity:
            out.setdefault(placed.stored, []).append(name)
    return out


def refuse_false_copies(source: CheckpointSource) -> None:
    """Refuse a model with stored tensors that should be copies of others, are not, and have no
    place in it.

    Raises:
        MappingError: there is one.
    """
    if not source.false_copies:
        return
    first = source.false_copies[0]
    more = len(source.false_copies) - 1
    raise MappingError(
        f"it is {first}" + (f"; and so are {more} more" if more else ""),
        file=source.path,
        tensor=first.name,
        hint=f"--exclude '{first.name}' leaves it out; nothing that can be written holds it",
        error_id="false-copy",
    )


def _are_same_bytes(catalogue: Catalogue, name: str, original: Placement) -> bool:
    """Whether a stored tensor is another name of the bytes of the original."""
    if not original.is_identity or catalogue[name].dtype != catalogue[original.stored].dtype:
        return False
    a, b = (catalogue.shards.of(catalogue.index[n]) for n in (name, original.stored))
    e = catalogue.extents
    return np.array_equal(e.file[a], e.file[b]) and np.array_equal(e.offset[a], e.offset[b])


def _find_difference(
    reader: CheckpointReader, name: str, original: Placement, *, is_whole: bool = False
) -> str | None:
    """How a stored tensor differs from a canonical one, which may be longer by padding."""
    stored = reader.catalogue[name]
    if not original.is_identity:
        return f"{original.stored} has another layout"
    shape = original.shape
    if not _has_shape(stored.shape, shape):
        return f"its shape is {list(stored.shape)}, not {list(shape)}"
    if not numel(shape):
        return None
    original_dtype = reader.catalogue[original.stored].dtype
    lo, hi = [0] * len(shape), list(shape)
    for box in split_box(lo, hi) if is_whole else sample_runs(lo, hi, (0.0, 0.5, 1.0)):
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


def _has_shape(stored: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a stored tensor has a shape, or more rows."""
    return (
        len(stored) == len(shape)
        and tuple(stored[1:]) == tuple(shape[1:])
        and tuple(stored[:1]) >= tuple(shape[:1])
    )


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
