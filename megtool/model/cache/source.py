"""What a decoder attends to of an encoder: its states, or keys and values made of them before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.kernels.attention.mask import Mask
from megtool.spec.model_config import ModelConfig


def source_mask(valid_BE: Tensor | None) -> Mask:
    """The mask of queries that attend to all tokens of a source but padding."""
    return Mask() if valid_BE is None else Mask(valid_BL=valid_BE)


class SourceCache:
    """Keys and values of sources, a slot for each, for a decoder that writes token by token.

    `choose` names the slots that are the rows of the next pass. A pass with sources calls `begin`
    once, and `write` in every layer; a later one calls `read` in every layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        max_tokens: int,
        layers: Iterable[int],
        tp: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_slots, config.attention.num_heads // tp, max_tokens, config.attention.head_dim)
        numbers = tuple(layers)
        self.keys = {n: torch.zeros(shape, dtype=dtype, device=device) for n in numbers}
        self.values = {n: torch.zeros(shape, dtype=dtype, device=device) for n in numbers}
        self.valid_RE = torch.zeros(num_slots, max_tokens, dtype=torch.bool, device=device)
        self.widths = [0] * num_slots
        self._slots: list[int] = []
        self._rows_B = torch.zeros(0, dtype=torch.int64, device=device)

    def choose(self, slots: Sequence[int]) -> None:
        """Set the slots of the rows of the next passes."""
        if list(slots) != self._slots:
            self._slots = list(slots)
            self._rows_B = torch.tensor(self._slots, device=self.valid_RE.device)

    @property
    def width(self) -> int:
        """Tokens of the longest source that was chosen, padding included."""
        return max(self.widths[slot] for slot in self._slots)

    def begin(self, shape: tuple[int, int], valid_BE: Tensor | None) -> None:
        """Take in which tokens of the chosen rows' sources are no padding.

        Raises:
            UsageError: they are not as many rows, or are longer than the cache.
        """
        rows, width = shape
        if rows != len(self._slots) or width > self.valid_RE.shape[1]:
            raise UsageError(
                f"{rows} sources of {width} tokens, and {len(self._slots)} slots of "
                f"{self.valid_RE.shape[1]} are chosen"
            )
        for slot in self._slots:
            self.widths[slot] = width
        self.valid_RE[self._rows_B] = False
        self.valid_RE[self._rows_B, :width] = True if valid_BE is None else valid_BE

    def write(self, layer: int, key_BKED: Tensor, value_BKED: Tensor) -> None:
        """Keep a layer's keys and values of the chosen rows."""
        width = key_BKED.shape[2]
        self.keys[layer][self._rows_B, :, :width] = key_BKED
        self.values[layer][self._rows_B, :, :width] = value_BKED

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of the chosen rows, [B, K, E, D]; a view where all are."""
        width, keys, values = self.width, self.keys[layer], self.values[layer]
        if self._slots == list(range(len(self.widths))):
            return keys[:, :, :width], values[:, :, :width]
        return keys[self._rows_B, :, :width], values[self._rows_B, :, :width]

    def mask(self) -> Mask:
        """Which tokens of the chosen rows' sources are attended to."""
        return source_mask(self.valid_RE[self._rows_B, : self.width])


@dataclass(slots=True, kw_only=True)
class EncodedSource:
    """What the layers of a decoder attend to across: E tokens of each row's source.

    `states_EH` are the encoder's output as rows (with sequence parallelism this rank's), or None
    where a cache has keys and values of all layers.
    """

    num_tokens: int
    mask: Mask
    states_EH: Tensor | None = None
    cache: SourceCache | None = None
