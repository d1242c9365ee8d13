"""Dropout masks determined by the seed, the layer and the rank alone.

No generator's state decides. A layer that is computed again in the backward pass leaves out what it
left out before, whatever ran in between, and ranks agree, or differ, by what they are given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.kernels.elementwise.dropout_add import drop
from megtool.parallel.process_groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """The shares of elements that training leaves out, as Megatron names them.

    `hidden`: of embeddings, and of what attention and MLP add to the residual; `attention`: of the
    weights of keys.

    Raises:
        UsageError: a share is negative, or not below 1.
    """

    hidden: float = 0.0
    attention: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("hidden", self.hidden), ("attention", self.attention)):
            if not 0 <= share < 1:
                raise UsageError(f"{name} dropout is {share}", hint="at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class DropoutSpec:
    """The share of a tensor's elements that is left out, and the seed that decides which: a number,
    or in a CUDA graph a tensor (int64 without dimensions)."""

    share: float
    seed: int | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The dropout masks of one pass.

    `seed` is the pass' own, and the same on the ranks of a tp group. These have the same rows,
    unless `rows` (their place with sequence parallelism, else 0) says otherwise, and leave out the
    same; their heads are not the same (`heads`).
    """

    shares: Dropout
    seed: int | Tensor
    rows: int = 0
    heads: int = 0

    @classmethod
    def of(cls, shares: Dropout, tp: Group, sequence_parallel: bool) -> Draws | None:
        """The masks of the next pass, None if there is no dropout.

        Its seed is that of `seeded_by`, or `draw_seed`.
        """
        if not (shares.hidden or shares.attention):
            return None
        given = _given_seed.get()
        seed = draw_seed() if given is None else given
        return cls(
            shares=shares, seed=seed, rows=tp.rank if sequence_parallel else 0, heads=tp.rank
        )

    def embedded(self, x_TH: Tensor) -> Tensor:
        """Embeddings after dropout."""
        chance = self._chance(self.shares.hidden, f"embedding {self.rows}")
        return x_TH if chance is None else drop(x_TH, chance.share, chance.seed)

    def branches(self, layer: int) -> tuple[DropoutSpec | None, DropoutSpec | None]:
        """The masks for the attention and MLP outputs of a layer."""
        share = self.shares.hidden
        attention, mlp = (
            self._chance(share, f"{layer} {branch} {self.rows}") for branch in ("attention", "mlp")
        )
        return attention, mlp

    def across(self, layer: int) -> DropoutSpec | None:
        """The mask for the output of a layer's attention to an encoder."""
        return self._chance(self.shares.hidden, f"{layer} across {self.rows}")

    def across_weights(self, layer: int) -> DropoutSpec | None:
        """For the weights of that attention, of this rank's heads."""
        return self._chance(self.shares.attention, f"{layer} across weights {self.heads}")

    def attention(self, layer: int, stretch: int) -> DropoutSpec | None:
        """For the weights of a stretch of queries, of this rank's heads."""
        return self._chance(self.shares.attention, f"{layer} weights {stretch} {self.heads}")

    def _chance(self, share: float, place: str) -> DropoutSpec | None:
        if not share:
            return None
        digest = hashlib.sha256(place.encode()).digest()
        return DropoutSpec(share, self.seed ^ int.from_bytes(digest[:7], "little"))


def draw_seed() -> int:
    """The next number of torch's generator of the CPU, which is to be in the same state on all
    ranks of a tp group, and in another one on any other rank."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


_given_seed: ContextVar[Tensor | None] = ContextVar("megtool_dropout_seed", default=None)


@contextmanager
def seeded_by(seed: Tensor | None) -> Iterator[None]:
    """In the block, passes have this seed, and no generator is asked."""
    token = _given_seed.set(seed)
    try:
        yield
    finally:
        _given_seed.reset(token)
