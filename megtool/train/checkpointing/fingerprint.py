"""Fingerprint: a model's weights known again by a sample of them, in every format and layout."""

from __future__ import annotations

from dataclasses import replace

from megtool.checkpoint.catalogue import Catalogue
from megtool.convert.canonical_view import CanonicalView
from megtool.quant.calibration.fingerprint import hash_model

_TENSORS = 2000


def sample_fingerprint(catalogue: Catalogue, side: CanonicalView) -> str:
    """A digest of how the model computes and of names, shapes, types and some rows of its canonical
    weights; of very many, of some of them, the same for every checkpoint of the model.

    Training changes all weights, so other weights of the same shapes have another one; a copy
    elsewhere, or in another format or layout, has the same, and weights of any size take a few
    reads each.

    Raises:
        StorageError: a file cannot be read.
    """
    names = sorted(name for name in side.canonical if ":" not in name)
    some = names[:: max(1, len(names) // _TENSORS)]
    return hash_model(catalogue, replace(side, canonical={n: side.canonical[n] for n in some}))
