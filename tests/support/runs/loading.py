"""What the tests of loading share: a folder opened as a source, and the truth about its slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megtool.convert.dialects import DialectNaming, write_side
from megtool.convert.rank_tensors import RankCoordinates
from megtool.inference.rank_weights import Weights, decoder_of
from megtool.options.layout import ParallelConfig
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_source
from tests.support.checkpoints.rank_slices import slice_tensors

Arrays = dict[str, np.ndarray[Any, Any]]


def source_of(path: Path, **how: Any) -> CheckpointSource:
    """A checkpoint as the commands hand it over."""
    return open_source(path, optimizer=False, **how)


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return (
        tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()
    )


class Truth:
    """The tensors of a Hugging Face folder as safetensors reads them, and a rank's slices."""

    def __init__(self, folder: Path, carry: Callable[..., Arrays]) -> None:
        self._source = source_of(folder)
        self._carry = carry
        self._arrays: Arrays = {}
        for file in sorted(folder.glob("*.safetensors")):
            self._arrays |= {n: bits(t) for n, t in load_file(file).items()}

    def of(self, parallel: ParallelConfig, seat: RankCoordinates, vocab_multiple: int) -> Arrays:
        config, side = decoder_of(self._source)
        target = write_side(
            side,
            dialect="megatron",
            parallel=parallel,
            per_layer=True,
            options=DialectNaming(divisible_by=vocab_multiple),
        )
        whole = self._carry(side, self._arrays, target)
        return slice_tensors(target, whole, config, parallel, seat)


def check(weights: Weights, want: Arrays) -> None:
    """All tensors of a rank have the bits they should have, on cache lines of their own."""
    got = weights.load()
    assert got.keys() == want.keys() == set(weights.tensors)
    for name, tensor in got.items():
        assert tensor.data_ptr() % 64 == 0, name
        assert tensor.is_contiguous(), name
        np.testing.assert_array_equal(bits(tensor), want[name], err_msg=name)
