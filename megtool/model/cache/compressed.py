"""The keys that windows of tokens were compressed to, kept between passes (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megtool.model.cache.key_windows import KeyWindows
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


class CompressedKeys:
    """Storage that never moves for the compressed keys of some layers, and of their indexers.

    The key of window w has a slot of its own, the same in all layers with windows of that size:
    `begin` is told of the rows of a pass. The last slot is scratch. What tokens behind the last
    whole window give to the next one is a state of the layer (`recurrent_state`).
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        ratios = config.compression.compress_ratios or ()
        self.ratios = {n: ratios[n] for n in layers if n < len(ratios) and ratios[n]}
        self._keys: dict[int, list[Tensor]] = {}
        self._slots: dict[int, Tensor] = {}

    def make_room(self, ratio: int, num_slots: int) -> None:
        """Storage of layers with windows of `ratio` tokens, zero at first."""
        config = self.config
        for layer in (n for n, r in self.ratios.items() if r == ratio):
            sizes = [config.attention.head_dim]
            if layer in layer_sets.index_layers(config):
                sizes.append(config.indexer.index_head_dim)
            self._keys[layer] = [
                torch.zeros(num_slots + 1, size, dtype=self.dtype, device=self.device)
                for size in sizes
            ]

    def begin(self, ratio: int, slots_BL: Tensor) -> None:
        """Set the slots of a pass: those of each row's windows, those that end in it included."""
        self._slots[ratio] = slots_BL

    def append(self, layer: int, number: int, keys_BWD: Tensor, windows: KeyWindows) -> Tensor:
        """Keep the keys of the windows that end in this pass, of the layer (number 0) or of its
        indexer (1); returns those of all windows of the rows, [B, L, D]."""
        storage, slots_BL = self._keys[layer][number], self._slots[windows.ratio]
        if slots_BL.shape[1]:
            scratch = storage.shape[0] - 1
            numbers_BW = windows.numbers_BW.clamp_max(slots_BL.shape[1] - 1)
            slots_BW = slots_BL.expand(len(keys_BWD), -1).gather(1, numbers_BW)
            if windows.exists_BW is not None:
                slots_BW = torch.where(windows.exists_BW, slots_BW, scratch)
            storage.index_copy_(0, slots_BW.flatten(), keys_BWD.to(self.dtype).flatten(0, 1))
        return storage[slots_BL]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All keys of all layers."""
        return tuple(keys for of_layer in self._keys.values() for keys in of_layer)
