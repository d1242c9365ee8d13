"""A model's shape (ModelConfig), its layout over ranks (ParallelConfig), and layout options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megtool.errors import LayoutError, MappingError
from megtool.options.field import LAYOUT, Options, layout_size, option

MOST_LAYERS, MOST_EXPERTS = 10_000, 1_000_000  # more is no model, but an attack on our memory
NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned", "relative", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape, in one vocabulary for every format.

    Sizes count elements, `num_*` count things. Three flags (`qkv_bias`, `attn_out_bias`,
    `mlp_bias`) and `qk_norm` say which optional tensors exist; reading a checkpoint sets them from
    what it holds. `moe_layer_freq` is Megatron's: an int n makes every n-th layer (from the first)
    a mixture of experts, a tuple says so layer by layer. A token attends to `window_size` tokens,
    itself included (0: to all before it); `window_skip_freq` n lets every n-th layer attend to all,
    a tuple has a 1 for every layer with a window, and None gives one to all. `no_rope_layers` has a
    1 for every layer without rotary embedding. `extra` keeps the keys of the configuration it was
    read from that nothing else here says, verbatim.

    Attention is latent where `kv_lora_rank` is not 0: a query head then has `qk_nope_head_dim +
    qk_rope_head_dim` elements, and a rank of 0 for queries means that they are projected directly.
    `router_pre_softmax` says that scores are normalized before the choice of experts, not among
    the chosen. `num_mtp_layers` layers after the last one predict further tokens (multi-token
    prediction); each is like the last one.

    What only a forward pass asks for: attention multiplies scores by `softmax_scale` (None: one
    over the square root of a query head's size); a cap c bends scores or logits x to
    `c * tanh(x / c)` (0: no cap); embeddings, the output of every residual branch, and logits are
    multiplied by their scales; a gated MLP clamps the activated half from above and the other half
    on both sides at `activation_limit` (0: not) and adds `glu_offset` to the latter. `qk_l2_norm`
    divides queries and keys by their root mean square after rotation. Layers with rotary embedding
    attend within chunks of `attn_chunk_size` tokens (0: no chunks), and layers without one multiply
    queries at position p by `1 + attn_temperature_scale * log(1 + floor((p + 1) / floor_size))`,
    where `floor_size` is `attn_temperature_floor`. A group of experts is ranked by the sum of its
    `router_group_best` best scores (0: Megatron's number, the experts a token gets from each chosen
    group). `router_scales_input` multiplies what an expert is given by its score, not what it
    returns. `router_fp32` casts the router and what it is given to float32.

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
    zero_centered_norm: bool = False
    parallel_residual: bool = False
    gated: bool = True
    activation: str = "silu"
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attn_output_gate: bool = False
    position_embedding: str = "rope"
    rotary_percent: float = 1.0
    rope_interleaved: bool = False
    rope_base: float = 10000.0
    rope_local_base: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    window_size: int = 0
    window_skip_freq: int | tuple[int, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = None
    num_token_types: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    moe_layer_freq: int | tuple[int, ...] = 1
    router_score: str = "softmax"
    router_pre_softmax: bool = False
    router_scaling: float = 1.0
    router_num_groups: int = 0
    router_topk_groups: int = 0
    router_bias: bool = False
    router_expert_bias: bool = False
    shared_expert_gate: bool = False
    attn_sinks: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_mtp_layers: int = 0
    softmax_scale: float | None = None
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    activation_limit: float = 0.0
    glu_offset: float = 0.0
    qk_l2_norm: bool = False
    post_norms: bool = False
    attn_chunk_size: int = 0
    attn_temperature_floor: int = 0
    attn_temperature_scale: float = 0.0
    router_group_best: int = 0
    router_scales_input: bool = False
    router_fp32: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _check_int(name, getattr(self, name), 1)
        for name in _NATURAL:
            _check_int(name, getattr(self, name), 0)
        num_layers = self.num_layers + self.num_mtp_layers
        if num_layers > MOST_LAYERS or num_layers * self.num_experts > MOST_EXPERTS:
            raise MappingError(
                f"num_layers is {self.num_layers}, num_experts {self.num_experts}",
                hint=f"at most {MOST_LAYERS:,} layers, with {MOST_EXPERTS:,} experts in all",
            )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise MappingError(f"{name} is {getattr(self, name)!r}", hint="true or false")
        for name in ("norm_eps", "rope_base", "rotary_percent"):
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
        if self.position_embedding not in POSITIONS:
            raise MappingError(
                f"position_embedding is {self.position_embedding!r}",
                hint=f"known: {', '.join(POSITIONS)}",
            )
        latent = (self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim)
        if self.kv_lora_rank and not all(latent):
            raise MappingError(
                f"kv_lora_rank is {self.kv_lora_rank}, but query and value heads have {latent}",
                hint="latent attention needs the sizes of its heads",
            )
        check_numbers(self)
        check_layers(self)
        turning = self.qk_rope_head_dim if self.kv_lora_rank else self.head_dim
        share = 1.0 if self.kv_lora_rank else self.rotary_percent
        check_rope_scaling(self.rope_scaling, int(turning * share))
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
        """Megatron stacks the layers on one axis: they hold the same tensors, and no list says so
        layer by layer (with a list, even of equal entries, Megatron writes one key per layer)."""
        listed = isinstance(self.moe_layer_freq, tuple) and bool(self.num_experts)
        return not listed and len(self.moe_layers) in (0, self.num_layers)


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
    "window_size",
    "num_token_types",
    "num_experts",
    "num_experts_per_token",
    "moe_ffn_hidden_size",
    "shared_ffn_hidden_size",
    "router_num_groups",
    "router_topk_groups",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_mtp_layers",
    "attn_chunk_size",
    "attn_temperature_floor",
    "router_group_best",
)
_FLAGS = (
    "tied_embeddings",
    "gated",
    "qkv_bias",
    "attn_out_bias",
    "mlp_bias",
    "qk_norm",
    "attn_output_gate",
    "router_pre_softmax",
    "router_bias",
    "router_expert_bias",
    "shared_expert_gate",
    "attn_sinks",
    "rope_interleaved",
    "zero_centered_norm",
    "parallel_residual",
    "qk_l2_norm",
    "post_norms",
    "router_scales_input",
    "router_fp32",
)
CONFIG_FIELDS = frozenset(f.name for f in fields(ModelConfig))


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MappingError(f"{name} is {value!r}", hint=f"an integer of at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes, named as in Megatron, and how layers go to pipeline stages.

    `etp`, the tensor-parallel size of experts, is `tp` unless given. `dp` unless given is the
    smallest that leaves room for the experts: `etp * ep` ranks have to divide `tp * cp * dp`.
    `vpp` unless given is what `pipeline_layout` says, or 1. After construction every size is a
    positive integer.

    Layers are split evenly over the pipeline stages, unless `first_stage_layers` or
    `last_stage_layers` gives one of the outer stages a number of its own, or the embedding or the
    loss is accounted for as if it were a layer, or `pipeline_layout` says it chunk by chunk in
    Megatron's own words: `Et*3|(tt|)*29m|L` (see `megtool.parallel.pipeline_split`, which
    knows what divides which number of layers).

    Raises:
        LayoutError: an axis is no positive integer, the experts' ranks do not fit, or two ways of
            splitting layers are mixed.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 0
    ep: int = 1
    etp: int = 0
    cp: int = 1
    dp: int = 0
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    pipeline_layout: str | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "cp"):
            self._check(name, 1)
        for name in ("vpp", "etp", "dp"):
            self._check(name, 0)
        if not self.etp:
            object.__setattr__(self, "etp", self.tp)
        experts, dense = self.etp * self.ep, self.tp * self.cp
        least = experts // math.gcd(experts, dense)
        if not self.dp:
            object.__setattr__(self, "dp", least)
        if self.dp % least:
            below, above = self.dp // least * least, -(-self.dp // least) * least
            near = f"{below} or {above}" if below else f"{above}"
            raise LayoutError(
                f"etp={self.etp} x ep={self.ep} does not divide "
                f"tp={self.tp} x cp={self.cp} x dp={self.dp}",
                hint=f"dp has to be a multiple of {least}: the nearest is {near}",
            )
        self._check_split()
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                f"vpp is {self.vpp}, but pp is 1",
                hint="virtual stages need at least two pipeline stages",
            )

    def _check(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise LayoutError(f"{name} is {value!r}", hint="parallel sizes are positive integers")

    def _check_split(self) -> None:
        """One way of splitting layers, and `vpp` from an explicit layout."""
        uneven = [f for f in ("first_stage_layers", "last_stage_layers") if self._has(f)]
        for name in uneven:
            self._check(name, 1)
        if len(uneven) + 1 > self.pp and uneven:
            raise LayoutError(
                f"{' and '.join(uneven)} cannot be set with pp={self.pp}",
                hint=f"an uneven split needs at least {len(uneven) + 1} pipeline stages",
            )
        accounted = [f for f in ("account_for_embedding", "account_for_loss") if self._has(f)]
        for name in accounted:
            if getattr(self, name) is not True:
                raise LayoutError(f"{name} is {getattr(self, name)!r}", hint="true or false")
        explicit = ["pipeline_layout"] if self.pipeline_layout is not None else []
        if len(ways := [w[0] for w in (explicit, uneven, accounted) if w]) > 1:
            raise LayoutError(
                f"{ways[0]} and {ways[1]} exclude each other", hint="give one of them"
            )
        if self.pipeline_layout is not None:
            chunks = len(pipeline_chunks(self.pipeline_layout))
            if chunks > 1 and self.pp == 1:
                raise LayoutError(
                    f"pipeline_layout has {chunks} chunks, and pp is 1",
                    hint=f"--pp says how many stages share them: {chunks}, or a divisor of it",
                )
            if chunks % self.pp or self.vpp not in (0, chunks // self.pp):
                vpp = f" x vpp={self.vpp}" if self.vpp else " or a multiple of it"
                raise LayoutError(
                    f"pipeline_layout has {chunks} chunks, not pp={self.pp}{vpp}",
                    hint="'|' parts chunks: one for each stage and virtual stage",
                )
            object.__setattr__(self, "vpp", chunks // self.pp)
        object.__setattr__(self, "vpp", self.vpp or 1)

    def _has(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Number of replicas of every expert."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(Options):
    """A parallel layout as a user gives it: None (or False) leaves a field to the checkpoint.

    The fields are those of `ParallelConfig`.
    """

    tp: int | None = layout_size("tp", note="; default of all axes but --dp: as in the source")
    pp: int | None = layout_size("pp")
    vpp: int | None = layout_size("vpp")
    ep: int | None = layout_size("ep")
    etp: int | None = layout_size("etp")
    cp: int | None = layout_size("cp")
    dp: int | None = layout_size("dp", note="; default: the smallest number that fits")
    first_stage_layers: int | None = option(
        LAYOUT, "Layers of the first pipeline stage.", metavar="N", minimum=1
    )
    last_stage_layers: int | None = option(
        LAYOUT, "Layers of the last pipeline stage.", metavar="N", minimum=1
    )
    account_for_embedding: bool = option(LAYOUT, "Count the embedding as a layer.", False)
    account_for_loss: bool = option(LAYOUT, "Count the loss as a layer.", False)
    pipeline_layout: str | None = option(
        LAYOUT,
        "Layers of every stage in Megatron's notation, such as Et*3|(tt|)*29m|L.",
        metavar="TEXT",
    )

    def explicit(self) -> dict[str, Any]:
        """The fields that are given, as keywords of `ParallelConfig`."""
        values = {f.name: getattr(self, f.name) for f in fields(LayoutOptions)}
        return {k: v for k, v in values.items() if v is not None and v is not False}


_TIMES = (re.compile(r"\(([^()]+)\)\*([0-9]{1,9})"), re.compile(r"(.)\*([0-9]{1,9})"))
_MOST_CHUNK_TEXT = 4 * MOST_LAYERS


def pipeline_chunks(text: str) -> tuple[str, ...]:
    """The chunks of an explicit pipeline layout: a letter for each layer, `""` for an empty one.

    Letters are `E` embedding, `t` decoder layer, `m` layer of multi-token prediction and `L` loss;
    `|` parts chunks, `x*3` and `(..)*3` repeat (parentheses do not nest), commas say nothing.
    Chunks come in the order of layers: all stages of the first virtual stage, then of the next.

    Raises:
        LayoutError: another letter, or more layers than any model has.
    """
    if not isinstance(text, str):
        raise LayoutError(f"pipeline_layout is {text!r}", hint="for example 'Ett|tt|ttL'")
    plain = text.replace(",", "")
    for pattern in _TIMES:
        length = len(plain) + sum(
            len(m[1]) * int(m[2]) - len(m[0]) for m in pattern.finditer(plain)
        )
        if max(length, len(plain)) > _MOST_CHUNK_TEXT:
            raise LayoutError(
                f"pipeline_layout {text[:60]!r} describes {length:,} layers and chunks",
                hint=f"at most {_MOST_CHUNK_TEXT:,}",
            )
        plain = pattern.sub(lambda m: m[1] * int(m[2]), plain)
    if strange := set(plain) - set("EtmL|"):
        raise LayoutError(
            f"pipeline_layout {text[:60]!r} holds {min(strange)!r}",
            hint="E embedding, t layer, m multi-token prediction, L loss, | next chunk; "
            "x*3 and (..)*3 repeat",
        )
    return tuple(plain.split("|"))


_POSITIVE_OR_NONE = ("softmax_scale", "rope_local_base")  # or None
_NOT_NEGATIVE = ("attn_softcap", "logit_softcap", "activation_limit")
_FINITE = (
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "router_scaling",
    "glu_offset",
    "attn_temperature_scale",
)


def check_numbers(config: ModelConfig) -> None:
    """Refuse scales, caps and limits that no forward pass can use; `config` is a ModelConfig.

    Raises:
        MappingError: the message names the field.
    """
    for name in _POSITIVE_OR_NONE:
        value = getattr(config, name)
        if value is not None and not (_is_number(value) and value > 0):
            raise MappingError(f"{name} is {value!r}", hint="a positive number, or nothing")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not (_is_number(value) and value >= 0):
            raise MappingError(f"{name} is {value!r}", hint="a positive number, or 0 for none")
    for name in _FINITE:
        if not _is_number(value := getattr(config, name)):
            raise MappingError(f"{name} is {value!r}", hint="a finite number")


def check_layers(config: ModelConfig) -> None:
    """Refuse lists that are not one flag for each layer, and layers counted in steps of none.

    Layers of multi-token prediction may have flags, too.

    Raises:
        MappingError: the message names the field.
    """
    counts = (config.num_layers, config.num_layers + config.num_mtp_layers)
    skip, without = config.window_skip_freq, config.no_rope_layers
    flags = f"one 0 or 1 for each of {config.num_layers} layers"
    is_step = isinstance(skip, int) and not isinstance(skip, bool) and skip > 0
    if skip is not None and not is_step and not _are_flags(skip, counts):
        raise MappingError(f"window_skip_freq is {skip!r}", hint=f"a positive int, or {flags}")
    if without is not None and not _are_flags(without, counts):
        raise MappingError(f"no_rope_layers is {without!r}", hint=flags)


def check_rope_scaling(scaling: Mapping[str, Any] | None, rotary_size: int) -> None:
    """Refuse factors that are no positive numbers, or not one for each of `rotary_size / 2` pairs.

    A factor of None is left to be worked out from the numbers of positions.

    Raises:
        MappingError: the message names the field and the key in it.
    """
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        raise MappingError(f"rope_scaling is {scaling!r}", hint="a table of a kind and its numbers")
    factor = scaling.get("factor")
    if factor is not None and not (_is_number(factor) and factor > 0):
        raise MappingError(f"rope_scaling has the factor {factor!r}", hint="a positive number")
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if factors is None:
            continue
        if not _is_list(factors) or not all(_is_number(f) and f > 0 for f in factors):
            raise MappingError(
                f"{name} of rope_scaling is {str(factors)[:80]}", hint="a list of positive numbers"
            )
        if len(factors) != rotary_size // 2:
            raise MappingError(
                f"{name} of rope_scaling has {len(factors)} numbers",
                hint=f"{rotary_size // 2}: one for each pair of the {rotary_size} elements of a "
                "head that turn",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _are_flags(value: object, counts: tuple[int, ...]) -> bool:
    """Zeros and ones (or false and true), as many as one of `counts`."""
    return isinstance(value, Sequence) and len(value) in counts and all(v in (0, 1) for v in value)
