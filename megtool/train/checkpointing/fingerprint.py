"""A fingerprint of a model's weights from a sample of them, the same in every format and layout."""

from __future__ import annotations

from dataclasses import replace

from megtool.checkpoint.catalogue import Catalogue
from megtool.convert.canonical_view import CanonicalView
from megtool.quant.calibration.fingerprint import hash_model

_TENSORS = 2000


def sample_fingerprint(catalogue: Catalogue, side: CanonicalView) -> str:
    """A digest of the model's configuration and of names, shapes, dtypes and some rows of its
    canonical weights; of a large number of weights, some are chosen, always the same ones.

    Training changes all weights, and so the digest. A copy in another place, format or layout has
    the same digest. Weights of any size take a few reads each.

    Raises:
        StorageError: a file cannot be read.
    """
    names = sorted(name for name in side.canonical if ":" not in name)
    some = names[:: max(1, len(names) // _TENSORS)]
    return hash_model(catalogue, replace(side, canonical={n: side.canonical[n] for n in some}))
