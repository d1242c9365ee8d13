"""How the next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megtool.errors import UsageError
from megtool.options.field import Options, option
from megtool.options.groups import TEXT

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Sampling(Options):
    """How the next token is chosen.

    Logits are divided by `temperature` (0: the likeliest token, no chance at all); then only the
    `top_k` likeliest tokens stay (None: all), then of these the fewest whose probabilities add up
    to `top_p`. `seed` and the number of a sequence make its draws.

    Raises:
        UsageError: a value is impossible; the message names it.
    """

    temperature: float = option(
        TEXT, "0: always the most likely token; higher: more random.", 0.0, metavar="X"
    )
    top_p: float | None = option(
        TEXT, "Sample from the most likely tokens with this total probability.", metavar="X"
    )
    top_k: int | None = option(TEXT, "Sample from this many most likely tokens.", metavar="N")
    seed: int = option(TEXT, "Same seed, same answer.", 0, metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature < 0:
            raise UsageError(f"temperature is {self.temperature!r}", hint="0 (greedy) or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p!r}", hint="more than 0, and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k is {self.top_k!r}", hint="1 or more")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            name = "top_p" if self.top_p is not None else "top_k"
            raise UsageError(
                f"{name} with temperature 0, which is greedy",
                hint="add --temperature, such as 0.7",
            )

    @property
    def is_greedy(self) -> bool:
        """Nothing is left to chance."""
        return self.temperature == 0

    def generator(self, number: int) -> torch.Generator:
        """Return the source of draws of sequence `number` (from 0)."""
        import torch

        mixed = (self.seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 1) % (1 << 63)
        return torch.Generator().manual_seed(mixed)
