"""What a model is (ModelConfig) and how it is spread over ranks (ParallelConfig)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megtool.errors import LayoutError, MappingError

MOST_LAYERS, MOST_EXPERTS = 10_000, 1_000_000  # more is no model, but an attack on our memory
NORMS = ("rmsnorm", "layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape, in one vocabulary for every format.

    Sizes count elements, `num_*` count things. Three flags (`qkv_bias`, `attn_out_bias`,
    `mlp_bias`) and `qk_norm` say which optional tensors exist; reading a checkpoint sets them from
    what it holds. `moe_layer_freq` is Megatron's: an int n makes every n-th layer (from the first)
    a mixture of experts, a tuple says so layer by layer. `extra` keeps the keys of the
    configuration it was read from that nothing else here says, verbatim.

    Raises:
        MappingError: a value is impossible; the message names the field.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int = 2048
    tied_embeddings: bool = False
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    gated: bool = True
    activation: str = "silu"
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attn_output_gate: bool = False
    rope_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    moe_layer_freq: int | tuple[int, ...] = 1
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _check_int(name, getattr(self, name), 1)
        for name in _NATURAL:
            _check_int(name, getattr(self, name), 0)
        if self.num_layers > MOST_LAYERS or self.num_layers * self.num_experts > MOST_EXPERTS:
            raise MappingError(
                f"num_layers is {self.num_layers}, num_experts {self.num_experts}",
                hint=f"at most {MOST_LAYERS:,} layers, with {MOST_EXPERTS:,} experts in all",
            )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise MappingError(f"{name} is {getattr(self, name)!r}", hint="true or false")
        for name in ("norm_eps", "rope_base"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise MappingError(f"{name} is {value!r}", hint="a positive number")
        if self.num_heads % self.num_kv_heads:
            raise MappingError(
                f"num_kv_heads is {self.num_kv_heads}, which does not divide "
                f"num_heads {self.num_heads}"
            )
        if self.norm not in NORMS:
            raise MappingError(f"norm is {self.norm!r}", hint=f"known: {', '.join(NORMS)}")
        freq = self.moe_layer_freq
        if (isinstance(freq, int) and freq < 1) or (
            isinstance(freq, tuple) and len(freq) != self.num_layers
        ):
            raise MappingError(
                f"moe_layer_freq is {freq!r}",
                hint=f"a positive int, or one 0 or 1 for each of {self.num_layers} layers",
            )

    @property
    def moe_layers(self) -> frozenset[int]:
        """Indices of the layers whose MLP is a mixture of experts."""
        if not self.num_experts:
            return frozenset()
        freq = self.moe_layer_freq
        if isinstance(freq, int):
            return frozenset(range(0, self.num_layers, freq))
        return frozenset(i for i, is_moe in enumerate(freq) if is_moe)

    @property
    def is_homogeneous(self) -> bool:
        """All layers hold the same tensors, so that they can be stacked on one axis."""
        return len(self.moe_layers) in (0, self.num_layers)


_POSITIVE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
)
_NATURAL = (
    "num_experts",
    "num_experts_per_token",
    "moe_ffn_hidden_size",
    "shared_ffn_hidden_size",
)
_FLAGS = (
    "tied_embeddings",
    "gated",
    "qkv_bias",
    "attn_out_bias",
    "mlp_bias",
    "qk_norm",
    "attn_output_gate",
)
CONFIG_FIELDS = frozenset(f.name for f in fields(ModelConfig))


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MappingError(f"{name} is {value!r}", hint=f"an integer of at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes, named as in Megatron.

    `etp`, the tensor-parallel size of experts, is `tp` unless given. `dp` unless given is the
    smallest that leaves room for the experts: `etp * ep` ranks have to divide `tp * cp * dp`.
    After construction every field is a positive integer.

    Raises:
        LayoutError: an axis is no positive integer, or the experts' ranks do not fit.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 0
    cp: int = 1
    dp: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep", "cp"):
            self._check(name, 1)
        for name in ("etp", "dp"):
            self._check(name, 0)
        if not self.etp:
            object.__setattr__(self, "etp", self.tp)
        experts, dense = self.etp * self.ep, self.tp * self.cp
        least = experts // math.gcd(experts, dense)
        if not self.dp:
            object.__setattr__(self, "dp", least)
        if dense * self.dp % experts:
            raise LayoutError(
                f"etp={self.etp} x ep={self.ep} does not divide "
                f"tp={self.tp} x cp={self.cp} x dp={self.dp}",
                hint=f"dp has to be a multiple of {least}",
            )
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                f"vpp={self.vpp} with pp=1", hint="virtual stages need at least two pipeline stages"
            )

    def _check(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise LayoutError(f"{name} is {value!r}", hint="parallel sizes are positive integers")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Number of replicas of every expert."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)
