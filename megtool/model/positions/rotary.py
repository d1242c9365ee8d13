"""Rotary embedding: frequencies for every kind of scaling, cosines and sines of positions.

Formulas as in transformers' `modeling_rope_utils.py`, whose names of the kinds these are: `linear`,
`dynamic` (NTK), `yarn`, `longrope` (also `su`) and `llama3`; `dynamic` with an `alpha` is NTK by
that number, whatever the length.

`dynamic` and `longrope` depend on how long a row is: here by the largest position of the row itself
in the pass (transformers takes the largest of the whole batch, so that a row's numbers depend on
its neighbors there). As in transformers, keys in a cache keep the rotation of the pass that wrote
them: a text that is read in portions, and grows past the length at which these two change, gets
other numbers than in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig


class Rotation(NamedTuple):
    """Cosines and sines `[B, S, R]` (batch may be 1), in the model's dtype, scaled."""

    cos_BSR: Tensor
    sin_BSR: Tensor


def has_rotation(config: ModelConfig, layer: int) -> bool:
    """The layer turns its queries and keys."""
    if config.positions.position_embedding != "rope":
        return False
    without = config.positions.no_rope_layers
    return without is None or layer >= len(without) or not without[layer]


def rotary_size(config: ModelConfig) -> int:
    """How many elements of a head turn (R)."""
    if config.latent.kv_lora_rank:
        return int(config.latent.qk_rope_head_dim * config.positions.rotary_percent)
    return int(config.attention.head_dim * config.positions.rotary_percent)


class Frequencies(NamedTuple):
    """Angles per position, float32 `[R / 2]` (or a row's, `[B, 1, R / 2]`), and what cosines and
    sines are multiplied by (or a row's, `[B, 1, 1]`)."""

    per_position: Tensor
    scale: float | Tensor


class Rotary:
    """Cosines and sines for a model's layers.

    They are computed once per forward pass for each base that the layers have, in float32.

    Raises:
        MappingError: a kind of scaling that is not known, or a key of it that is missing.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> None:
        if config.compression.is_compressed:
            base = config.compression.compress_rope_base
            config = config.with_fields(rope_base=base, rope_local_base=config.positions.rope_base)
        self.config, self.dtype = config, dtype
        self.size = rotary_size(config)
        self.scaling = dict(config.positions.rope_scaling or {})
        self.kind = str(self.scaling.get("rope_type", self.scaling.get("type", "default")))
        if self.kind == "dynamic" and self.scaling.get("alpha"):
            self.kind = _NTK_BY_ALPHA
        self._known: dict[tuple[Any, ...], Frequencies] = {}
        self._of_size: dict[int, Rotary] = {}
        self._last_rotations: tuple[Tensor | None, dict[bool, Rotation]] = (None, {})
        if config.positions.position_embedding == "rope":
            self.frequencies(self.original_length, is_local=False)
            self.frequencies(self.original_length + 1, is_local=False)

    @property
    def depends_on_length(self) -> bool:
        """Whether a token turns by the length of its sequence, too, and not by its place alone."""
        return self.kind in ("dynamic", "longrope", "su")

    @property
    def original_length(self) -> int:
        """Tokens that the model was first trained for."""
        key = "original_max_position_embeddings"
        length = self.scaling.get(key) or self.config.extra.get(key)
        return int(length or self.config.positions.max_positions)

    def of(self, layer: int, positions_BS: Tensor, last_B: Tensor | None = None) -> Rotation | None:
        """The rotation of a layer's queries and keys; None where they do not turn.

        The last positions asked for are remembered, by identity, since all layers share them.
        `last_B` as in `rotation`.
        """
        if not has_rotation(self.config, layer):
            return None
        if self.config.layer_sizes and "head_dim" in self.config.layer_sizes:
            config = self.config.at_layer(layer)
            if config.attention.head_dim not in self._of_size:
                self._of_size[config.attention.head_dim] = Rotary(config, dtype=self.dtype)
            return self._of_size[config.attention.head_dim].of(layer, positions_BS, last_B)
        is_local = (
            self.config.positions.rope_local_base is not None
            and self.config.window.has_window(layer)
        )
        if self.config.compression.compress_ratios is not None:
            is_local = not self.config.compression.compress_ratios[layer]
        if self._last_rotations[0] is not positions_BS:
            self._last_rotations = (positions_BS, {})
        rotations = self._last_rotations[1]
        if is_local not in rotations:
            rotations[is_local] = self.rotation(positions_BS, is_local=is_local, last_B=last_B)
        return rotations[is_local]

    def forget(self) -> None:
        """Discard the last rotations."""
        self._last_rotations = (None, {})
        for rotary in self._of_size.values():
            rotary.forget()

    def rotation(
        self, positions_BS: Tensor, *, is_local: bool = False, last_B: Tensor | None = None
    ) -> Rotation:
        """Cosines and sines of positions, int64 `[B, S]`.

        `last_B` is each row's largest position, where these are not all of them.
        """
        device = positions_BS.device
        if not is_local and self.depends_on_length:
            inv_freq = self._by_row((positions_BS.amax(1) if last_B is None else last_B) + 1)
        else:
            inv_freq = self.frequencies(self.original_length, is_local=is_local, device=device)
        angles = positions_BS[..., None].float() * inv_freq.per_position
        if self.config.positions.rope_interleaved:
            angles = angles.repeat_interleave(2, -1)
        else:
            angles = torch.cat((angles, angles), -1)
        if self.config.positions.rope_reversed:
            angles = -angles
        cos, sin = angles.cos(), angles.sin()
        if isinstance(inv_freq.scale, Tensor) or inv_freq.scale != 1:
            cos, sin = cos * inv_freq.scale, sin * inv_freq.scale
        return Rotation(cos.to(self.dtype), sin.to(self.dtype))

    def _by_row(self, lengths_B: Tensor) -> Frequencies:
        """The frequencies of rows of so many tokens; nothing is read back from the device."""
        device = lengths_B.device
        if self.kind == "dynamic":
            base = float(self.config.positions.rope_base or 10000.0)
            return Frequencies(_ntk(self, base, lengths_B)[:, None], 1.0)
        short, long = (
            self.frequencies(self.original_length + more, is_local=False, device=device)
            for more in (0, 1)
        )
        is_long_B = lengths_B > self.original_length
        chosen = torch.where(is_long_B[:, None, None], long.per_position, short.per_position)
        scale: float | Tensor = short.scale
        if isinstance(long.scale, float) and long.scale != scale:
            scale = torch.where(is_long_B[:, None, None], long.scale, scale)
        return Frequencies(chosen, scale)

    def frequencies(
        self, length: int, *, is_local: bool, device: torch.device | str = "cpu"
    ) -> Frequencies:
        """The frequencies for sequences of `length` tokens."""
        kind = "default" if is_local else self.kind
        if kind not in _KINDS:
            raise MappingError(
                f"rope_scaling is of the kind {kind!r}",
                hint=f"known: {', '.join(_KINDS)}",
                error_id="unsupported-model",
            )
        if kind == "dynamic":
            length = max(length, self.config.positions.max_positions)
        elif kind in ("longrope", "su"):
            length = max(length, self.original_length)
            length = min(length, self.original_length + 1)
        else:
            length = 0
        key = (is_local, length, str(device))
        if key not in self._known:
            base = (
                self.config.positions.rope_local_base
                if is_local
                else self.config.positions.rope_base
            )
            try:
                inv_freq = _KINDS[kind](self, float(base or 10000.0), length)
            except KeyError as missing:
                raise MappingError(
                    f"rope_scaling of the kind {kind!r} lacks {missing.args[0]!r}",
                    error_id="unsupported-model",
                ) from missing
            self._known[key] = Frequencies(inv_freq.per_position.to(device), inv_freq.scale)
        return self._known[key]


_NTK_BY_ALPHA = "dynamic by alpha"


def _powers(base: float, size: int) -> Tensor:
    """`base ** (2 i / size)`: the wavelengths over two pi."""
    return base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)


def _default(rotary: Rotary, base: float, length: int) -> Frequencies:
    return Frequencies(1 / _powers(base, rotary.size), 1.0)


def _linear(rotary: Rotary, base: float, length: int) -> Frequencies:
    return Frequencies(1 / _powers(base, rotary.size) / rotary.scaling["factor"], 1.0)


def _proportional(rotary: Rotary, base: float, length: int) -> Frequencies:
    """The first part of the pairs turns as in a whole head, and the others stand still."""
    s, half = rotary.scaling, rotary.size // 2
    turning = int(s.get("partial_rotary_factor", 1.0) * rotary.size // 2)
    freq = 1 / _powers(base, rotary.size) / s.get("factor", 1.0)
    return Frequencies(torch.where(torch.arange(half) < turning, freq, 0.0), 1.0)


def _dynamic(rotary: Rotary, base: float, length: int) -> Frequencies:
    return Frequencies(_ntk(rotary, base, torch.tensor(length)), 1.0)


def _by_alpha(rotary: Rotary, base: float, length: int) -> Frequencies:
    """NTK-aware, with a larger base whatever the length (Hunyuan)."""
    size = rotary.size
    grown = base * float(rotary.scaling["alpha"]) ** (size / (size - 2))
    return Frequencies(1 / _powers(grown, size), 1.0)


def _ntk(rotary: Rotary, base: float, length: Tensor) -> Tensor:
    """NTK-aware: a larger base once a sequence is longer than the model's positions.

    Frequencies `[..., R / 2]` for lengths `[...]`.
    """
    factor, size, most = (
        float(rotary.scaling["factor"]),
        rotary.size,
        rotary.config.positions.max_positions,
    )
    stretch = factor * length.clamp_min(most).double() / most - (factor - 1)
    grown = (base * stretch ** (size / (size - 2))).float()
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device=length.device).float() / size
    return 1 / grown[..., None] ** exponents


def _llama3(rotary: Rotary, base: float, length: int) -> Frequencies:
    """Stretch long wavelengths, keep short ones, and interpolate in between."""
    s = rotary.scaling
    freq = 1 / _powers(base, rotary.size)
    low, high, factor = s["low_freq_factor"], s["high_freq_factor"], s["factor"]
    rotations = rotary.original_length * freq / (2 * math.pi)
    ramp = ((rotations - low) / (high - low)).clamp(0, 1)
    return Frequencies((1 - ramp) * freq / factor + ramp * freq, 1.0)


def _yarn(rotary: Rotary, base: float, length: int) -> Frequencies:
    """YaRN (arXiv 2309.00071): as Llama 3's by dimension, with a temperature of attention."""
    s, size, original = rotary.scaling, rotary.size, rotary.original_length
    factor = s["factor"] or rotary.config.positions.max_positions / original

    def temperature(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = s.get("attention_factor")
    if scale is None:
        mscale, mscale_all_dim = s.get("mscale"), s.get("mscale_all_dim")
        scale = (
            temperature(mscale) / temperature(mscale_all_dim)
            if mscale and mscale_all_dim
            else temperature()
        )

    def dimension(rotations: float) -> float:
        """The dimension that makes so many rotations over the original length."""
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(size // 2).float() - low) / (high - low)).clamp(0, 1)
    powers = _powers(base, size)
    freq = 1 / (factor * powers) * stretched + 1 / powers * (1 - stretched)
    return Frequencies(freq, float(scale))


def _longrope(rotary: Rotary, base: float, length: int) -> Frequencies:
    """LongRoPE (arXiv 2402.13753): a factor for each dimension, other ones for long sequences."""
    s, original = rotary.scaling, rotary.original_length
    factor = s.get("factor") or rotary.config.positions.max_positions / original
    scale = s.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    kind = "long" if length > original else "short"
    scale = s.get(f"{kind}_mscale", scale)  # which Phi-MoE gives for each
    factors = torch.tensor(s[f"{kind}_factor"])
    return Frequencies(1 / (factors.float() * _powers(base, rotary.size)), float(scale))


_KINDS: Mapping[str, Callable[[Rotary, float, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    _NTK_BY_ALPHA: _by_alpha,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "llama3": _llama3,
}
