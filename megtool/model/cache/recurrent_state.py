"""States of mixers between passes: Mamba-2, both delta rules, the gated short convolution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megtool.model.cache.key_windows import num_kept_tokens
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

StateName = Literal["conv", "recurrent"]
"""`conv`: the inputs of the convolution at the last tokens, oldest first, [B, taps - 1, channels],
in the model's dtype; where keys are compressed, what the last tokens give to the next ones.
`recurrent`: what the recurrence has summed up, [B, heads, ...], in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerSize:
    """The sizes of the states of one layer for one sequence, on this rank.

    The recurrence of Mamba-2 keeps [heads, head size, state size], that of a delta net [value
    heads, key size, value size].
    """

    num_taps: int
    num_channels: int
    recurrent: tuple[int, int, int]

    @classmethod
    def mamba(cls, config: ModelConfig, tp: int = 1) -> MixerSize:
        """A Mamba-2 mixer, cut over `tp` ranks by heads and groups."""
        heads, size = config.mamba.mamba_num_heads // tp, config.mamba.mamba_head_dim
        groups = config.mamba.mamba_num_groups // tp
        return cls(
            num_taps=config.mamba.mamba_conv_kernel,
            num_channels=heads * size + 2 * groups * config.mamba.mamba_state_dim,
            recurrent=(heads, size, config.mamba.mamba_state_dim),
        )

    @classmethod
    def delta_net(cls, config: ModelConfig, tp: int = 1) -> MixerSize:
        """A gated delta net or Kimi delta attention, cut over `tp` ranks by key and value heads."""
        keys, values = (
            config.delta.linear_num_key_heads // tp,
            config.delta.linear_num_value_heads // tp,
        )
        key_size, value_size = config.delta.linear_key_head_dim, config.delta.linear_value_head_dim
        return cls(
            num_taps=config.delta.linear_conv_kernel,
            num_channels=2 * keys * key_size + values * value_size,
            recurrent=(values, key_size, value_size),
        )

    @classmethod
    def short_conv(cls, config: ModelConfig, tp: int = 1) -> MixerSize:
        """A gated short convolution, cut over `tp` ranks by channels; it sums up nothing."""
        return cls(
            num_taps=config.short_conv.short_conv_taps,
            num_channels=config.hidden_size // tp,
            recurrent=(0, 0, 0),
        )

    @classmethod
    def compressor(cls, config: ModelConfig, layer: int) -> MixerSize:
        """What makes compressed keys, its indexer's among them; the same on every rank."""
        ratio, overlaps = (
            (config.compression.compress_ratios or ())[layer],
            layer in layer_sets.index_layers(config),
        )
        size = config.attention.head_dim + (config.indexer.index_head_dim if overlaps else 0)
        return cls(
            num_taps=num_kept_tokens(ratio) + 1,
            num_channels=2 * size * (1 + overlaps),
            recurrent=(0, 0, 0),
        )


@dataclass(frozen=True, slots=True)
class Mixers:
    """The layers that have a recurrent mixer, with the sizes of their states."""

    sizes: Mapping[int, MixerSize]

    @classmethod
    def of(cls, config: ModelConfig, layers: Iterable[int], tp: int = 1) -> Mixers:
        """Those of a model among `layers`."""
        sizes = {}
        for layer in layers:
            if layer in layer_sets.mamba_layers(config):
                sizes[layer] = MixerSize.mamba(config, tp)
            elif layer in layer_sets.delta_layers(config) | layer_sets.kda_layers(config):
                sizes[layer] = MixerSize.delta_net(config, tp)
            elif layer in layer_sets.conv_layers(config):
                sizes[layer] = MixerSize.short_conv(config, tp)
            elif layer in config.compression.compressed_layers:
                sizes[layer] = MixerSize.compressor(config, layer)
        return cls(sizes)


class RecurrentStates:
    """States of `num_rows` sequences, zero at first; a pass reads and writes chosen rows.

    They stay where they are: what is written is copied, so that a recorded pass may be replayed.
    In a revertible pass mixers also say what the states were before each of its tokens
    (`write_steps`), of few tokens since it takes as many times the memory; `revert` goes back.
    """

    def __init__(
        self,
        mixers: Mixers,
        num_rows: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        kind = torch.promote_types(dtype, torch.float32)
        self._states: dict[tuple[int, StateName], Tensor] = {}
        for layer, size in mixers.sizes.items():
            shape = (num_rows, size.num_taps - 1, size.num_channels)
            self._states[layer, "conv"] = torch.zeros(shape, dtype=dtype, device=device)
            recurrent = torch.zeros(num_rows, *size.recurrent, dtype=kind, device=device)
            self._states[layer, "recurrent"] = recurrent
        self._device = device
        self._rows_B: Tensor | None = None  # all, in order
        self.is_revertible = False
        self._steps: dict[tuple[int, StateName], Tensor] = {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All states of all layers, [num_rows, ...]."""
        return tuple(self._states.values())

    def choose(self, rows: Sequence[int], *, revertible: bool = False) -> None:
        """Set which rows the next pass is of, and whether it can be reverted."""
        self.is_revertible = revertible and bool(self._states)
        self._steps.clear()
        if self._states:
            self._rows_B = torch.tensor(rows, dtype=torch.int64, device=self._device)

    def choose_by(self, rows_B: Tensor) -> None:
        """As `choose`, by a tensor on the device; the pass cannot be reverted."""
        self.is_revertible = False
        self._steps.clear()
        if self._states:
            self._rows_B = rows_B

    def read(self, layer: int, name: StateName) -> Tensor:
        """The state of the chosen rows; it may be the storage, so it is not to be changed."""
        state = self._states[layer, name]
        return state if self._rows_B is None else state[self._rows_B]

    def write(self, layer: int, name: StateName, value: Tensor) -> None:
        """Keep the state of the chosen rows."""
        state = self._states[layer, name]
        if self._rows_B is None:
            state.copy_(value)
        else:
            state.index_copy_(0, self._rows_B, value.to(state.dtype))

    def write_steps(self, layer: int, name: StateName, steps: Tensor) -> None:
        """Keep what the states of the chosen rows were before each token of a revertible pass.

        `recurrent`: [B, S, heads, ...]. `conv`: inputs before the pass and in it, one after the
        other, [B, taps - 1 + S, channels].
        """
        self._steps[layer, name] = steps

    def revert(self, counts: Mapping[int, int]) -> None:
        """Let rows of the last pass, by their places in it, have read so many of its tokens."""
        if not counts or not self._states:
            return
        device = self._device
        places_R, counts_R = (
            torch.tensor(list(x), dtype=torch.int64, device=device)
            for x in (counts.keys(), counts.values())
        )
        rows_R = places_R if self._rows_B is None else self._rows_B[places_R]
        for (layer, name), state in self._states.items():
            steps = self._steps[layer, name]
            if name == "conv":
                taken_RP = counts_R[:, None] + torch.arange(state.shape[1], device=device)
                value = steps[places_R[:, None], taken_RP]
            else:
                value = steps[places_R, counts_R]
            state.index_copy_(0, rows_R, value.to(state.dtype))

    def zero(self, rows: Sequence[int] | None = None) -> None:
        """Begin anew: all rows, or those given."""
        if rows is None:
            for state in self.tensors:
                state.zero_()
        elif rows and self._states:
            rows_B = torch.tensor(rows, dtype=torch.int64, device=self._device)
            for state in self.tensors:
                state.index_fill_(0, rows_B, 0)
