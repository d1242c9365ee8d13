"""A model's configuration: `ModelConfig`, one vocabulary for every family and format.

Each concept is a part with fields of its own. No two parts have a field of the same name, so that
tables of families, recipes and messages name a field by its name alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from megtool.errors import MappingError
from megtool.spec.attention import AttentionPart, LatentPart, WindowPart
from megtool.spec.checks import are_flags, check_int, check_part, is_list
from megtool.spec.facts import FieldFacts, fact, read_facts
from megtool.spec.feed_forward import MlpPart, MoePart, RouterPart
from megtool.spec.layer_symbols import (
    DELTA_NET,
    EXPERTS,
    KIMI_DELTA,
    LAYER_SYMBOLS,
    MAMBA,
    SHORT_CONV,
)
from megtool.spec.norms import NormPart, ResidualPart
from megtool.spec.positions import PositionPart, check_rope_scaling
from megtool.spec.recurrent import DeltaPart, MambaPart, ShortConvPart
from megtool.spec.sparse_attention import OVERLAP_RATIO, CompressionPart, IndexerPart
from megtool.spec.vocabulary import EmbeddingPart, HeadPart, MtpPart

MOST_LAYERS, MOST_EXPERTS = 10_000, 1_000_000  # more is no model, but an attack on our memory
VARYING = ("num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")
"""Fields that `layer_sizes` may have."""

_DELTA_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_SIZES_OF = {
    MAMBA: ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
    DELTA_NET: _DELTA_SIZES,
    KIMI_DELTA: _DELTA_SIZES,
    EXPERTS: ("num_experts",),
    SHORT_CONV: ("short_conv_taps",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model as its layers and, for every concept, a part.

    `from_fields` makes one of fields by name, `with_fields` changes some, `get` reads one, and
    `to_fields` returns all.

    Raises:
        MappingError: a value is impossible; the message names the field.
    """

    num_layers: int = fact("layers", hf="num_hidden_layers", megatron="num_layers")
    """Layers, those of multi-token prediction not counted; with a decoder, the encoder's."""
    hidden_size: int = fact("elements", hf="hidden_size", megatron="hidden_size")
    """Size of the residual."""
    layer_kinds: tuple[str, ...] | None = fact(
        "symbols by layer", None, hf="layer_types", megatron="hybrid_layer_pattern"
    )
    """Branches of every layer, in order, by the symbols of `layer_symbols` (`*-` is a layer of a
    GPT, `M` a Mamba-2 mixer alone). None: attention everywhere, and experts or an MLP by
    `moe_layer_freq`."""
    layer_sizes: Mapping[str, tuple[int, ...]] | None = fact(
        "numbers by layer",
        None,
        hf="block_configs",
        megatron="heterogeneous_layers_config_encoded_json",
    )
    """Values by layer of any of `VARYING`, whose own fields are at least as large; a layer may
    then have no branch at all. Empty for the configuration of one layer."""
    bidirectional: bool = fact("flag", False, hf=None, megatron=None)
    """Tokens attend to those after them as well, and the model predicts masked ones."""
    num_decoder_layers: int = fact(
        "layers", 0, hf="num_decoder_layers", megatron="decoder_num_layers"
    )
    """Layers of a decoder that attends to the output of the others; 0: there is none."""
    extra: Mapping[str, Any] = fact(
        "keys",
        factory=dict,
        hf=None,
        megatron=None,
        changes_function=False,
        from_family=False,
    )
    """Keys of the configuration it was read from that no other field says, verbatim."""
    attention: AttentionPart
    mlp: MlpPart
    embedding: EmbeddingPart
    window: WindowPart = field(default_factory=WindowPart)
    latent: LatentPart = field(default_factory=LatentPart)
    indexer: IndexerPart = field(default_factory=IndexerPart)
    compression: CompressionPart = field(default_factory=CompressionPart)
    positions: PositionPart = field(default_factory=PositionPart)
    norms: NormPart = field(default_factory=NormPart)
    residual: ResidualPart = field(default_factory=ResidualPart)
    moe: MoePart = field(default_factory=MoePart)
    router: RouterPart = field(default_factory=RouterPart)
    mamba: MambaPart = field(default_factory=MambaPart)
    delta: DeltaPart = field(default_factory=DeltaPart)
    short_conv: ShortConvPart = field(default_factory=ShortConvPart)
    mtp: MtpPart = field(default_factory=MtpPart)
    head: HeadPart = field(default_factory=HeadPart)

    def __post_init__(self) -> None:
        check_part(self)
        _check_counts(self)
        _check_latent(self)
        _check_alibi(self)
        _check_layers(self)
        _check_compressed(self)
        _check_kinds(self)
        turning = self.attention.head_dim * self.positions.rotary_percent
        if self.latent.kv_lora_rank:
            turning = self.latent.qk_rope_head_dim * self.positions.rotary_percent
        check_rope_scaling(self.positions.rope_scaling, int(turning))
        freq = self.moe.moe_layer_freq
        if (isinstance(freq, int) and freq < 1) or (
            isinstance(freq, tuple) and len(freq) != self.num_layers
        ):
            raise MappingError(
                f"moe_layer_freq is {freq!r}",
                hint=f"a positive int, or one 0 or 1 for each of {self.num_layers} layers",
            )

    @classmethod
    def from_fields(cls, **values: Any) -> ModelConfig:
        """Make a configuration from fields of any part, by name.

        Raises:
            MappingError: a value is impossible; the message names the field.
            TypeError: a required field is missing, or a name is no field.
        """
        by_part = _sort_by_part(values)
        own = by_part.pop("", {})
        return cls(**own, **{name: kind(**by_part.get(name, {})) for name, kind in PARTS.items()})

    def with_fields(self, **values: Any) -> ModelConfig:
        """Return the configuration with other values of some fields, by name.

        Raises:
            MappingError: a value is impossible; the message names the field.
            TypeError: a name is no field.
        """
        by_part = _sort_by_part(values)
        own = by_part.pop("", {})
        parts = {n: replace(getattr(self, n), **changed) for n, changed in by_part.items()}
        return replace(self, **own, **parts)

    def to_fields(self) -> dict[str, Any]:
        """Return the values of all fields of all parts, by name."""
        return {name: self.get(name) for name in CONFIG_FIELDS}

    def get(self, name: str) -> Any:
        """Return the value of a field, or of a property of a part, by name.

        Raises:
            KeyError: no part has it.
        """
        part = PART_OF[name]
        return getattr(getattr(self, part) if part else self, name)

    @property
    def residual_size(self) -> int:
        """Numbers of a token between layers: all residuals, where several are side by side."""
        return self.hidden_size * (self.residual.hyper_streams or 1)

    def at_layer(self, layer: int) -> ModelConfig:
        """Return the configuration with the sizes of one layer; itself where all are the same."""
        if not self.layer_sizes:
            return self
        sizes = {name: numbers[layer] for name, numbers in self.layer_sizes.items()}
        return self.with_fields(layer_sizes={}, **sizes)

    def by_layer(self) -> list[ModelConfig]:
        """Return what `at_layer` returns of every layer; layers of the same sizes share one."""
        if not self.layer_sizes:
            return [self] * self.num_layers
        first: dict[tuple[Any, ...], ModelConfig] = {}
        out: list[ModelConfig] = []
        for layer in range(self.num_layers):
            sizes = tuple(numbers[layer] for numbers in self.layer_sizes.values())
            if sizes not in first:
                first[sizes] = self.at_layer(layer)
            out.append(first[sizes])
        return out


PARTS: dict[str, type] = {
    name: kind
    for name, kind in get_type_hints(ModelConfig).items()
    if isinstance(kind, type) and kind.__module__.startswith("megtool.spec.")
}
"""The class of every part."""

CONFIG_FIELDS: dict[str, FieldFacts] = {
    name: facts
    for part in (ModelConfig, *PARTS.values())
    for name, (_, facts) in read_facts(part).items()
}
"""The facts of every field of every part."""

PART_OF: dict[str, str] = {
    name: part
    for part, kind in {"": ModelConfig, **PARTS}.items()
    for name in (*read_facts(kind), *(n for n, v in vars(kind).items() if isinstance(v, property)))
}
"""The part that has a field or a property; empty for those of the model."""


def _sort_by_part(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in CONFIG_FIELDS:
            raise TypeError(f"ModelConfig has no field {name!r}")
        by_part.setdefault(PART_OF[name], {})[name] = value
    return by_part


def _check_counts(config: ModelConfig) -> None:
    further = config.mtp.num_mtp_layers * max(1, config.mtp.num_mtp_inner)
    num_layers = config.num_layers + further + config.num_decoder_layers
    if num_layers > MOST_LAYERS or num_layers * config.moe.num_experts > MOST_EXPERTS:
        raise MappingError(
            f"num_layers is {config.num_layers}, num_experts {config.moe.num_experts}",
            hint=f"at most {MOST_LAYERS:,} layers, with {MOST_EXPERTS:,} experts in all",
        )


def _check_latent(config: ModelConfig) -> None:
    sizes = (
        config.latent.qk_nope_head_dim + config.latent.qk_rope_head_dim,
        config.attention.v_head_dim,
    )
    if config.latent.kv_lora_rank and not all(sizes):
        raise MappingError(
            f"kv_lora_rank is {config.latent.kv_lora_rank}, but query and value heads have {sizes}",
            hint="latent attention needs the sizes of its heads",
        )


def _check_alibi(config: ModelConfig) -> None:
    """Refuse slopes of scores beside what no model has with them."""
    if config.positions.position_embedding != "alibi":
        return
    others = ("kv_lora_rank", "attn_sinks", "attn_zero_sinks", "attn_softcap", "compress_ratios")
    for name in (*others, "bidirectional"):
        if value := config.get(name):
            raise MappingError(
                f"{name} is {value!r} in a model whose scores have a slope (alibi)",
                hint="such slopes are added to plain scores of tokens before",
                error_id="unsupported-model",
            )


def _check_sizes(config: ModelConfig) -> None:
    """Refuse sizes by layer that are not one positive number for each, or that do not fit."""
    if (sizes := config.layer_sizes) is None:
        return
    if not isinstance(sizes, Mapping) or set(sizes) - set(VARYING):
        raise MappingError(
            f"layer_sizes is {str(sizes)[:80]}",
            hint=f"numbers by layer, of {', '.join(VARYING)}",
        )
    if (config.mtp.num_mtp_layers and not config.mtp.mtp_window) or config.latent.kv_lora_rank:
        raise MappingError(
            "sizes vary by layer in a model with latent attention or multi-token prediction",
            hint="layers of multi-token prediction may have those of layers with a window",
            error_id="unsupported-model",
        )
    for name, numbers in sizes.items():
        if not isinstance(numbers, tuple) or len(numbers) != config.num_layers:
            raise MappingError(
                f"{name} of layer_sizes is {str(numbers)[:80]}",
                hint=f"one number for each of {config.num_layers} layers",
            )
        for number in numbers:
            check_int(f"{name} of a layer", number, 1)
        if max(numbers) > config.get(name):
            raise MappingError(f"a layer has {name}={max(numbers)}, and the model says less")


def _check_indexer(config: ModelConfig, counts: tuple[int, ...]) -> None:
    """Refuse indexers without sizes, and layers that share a choice which nobody has made."""
    shared = config.indexer.shared_index_layers
    if shared is not None and (not are_flags(shared, counts) or shared[0]):
        raise MappingError(
            f"shared_index_layers is {str(shared)[:80]}",
            hint=f"one 0 or 1 for each of {config.num_layers} layers, and 0 for the first",
        )
    if not config.indexer.index_num_heads:
        return
    needed = ("q_lora_rank", "index_topk")
    for name in needed if config.compression.is_compressed else ("kv_lora_rank", *needed):
        if not config.get(name):
            raise MappingError(
                f"{name} is 0, but there are {config.indexer.index_num_heads} heads of an indexer",
                hint="an indexer reads the compressed queries of latent attention",
            )
    turning = config.latent.qk_rope_head_dim
    if config.compression.is_compressed:
        turning = int(config.attention.head_dim * config.positions.rotary_percent)
    if config.indexer.index_head_dim < turning:
        raise MappingError(
            f"index_head_dim is {config.indexer.index_head_dim}, less than the {turning} elements "
            "that turn",
            hint="at least qk_rope_head_dim",
        )


def _check_shared_kv(config: ModelConfig, counts: tuple[int, ...]) -> None:
    """Refuse layers that share keys and values which no earlier layer has."""
    shared = config.attention.shared_kv
    if shared is None:
        return
    if not are_flags(shared, counts) or shared[0]:
        raise MappingError(
            f"shared_kv is {str(shared)[:80]}",
            hint=f"one 0 or 1 for each of {config.num_layers} layers, and 0 for the first",
        )
    if any(shared) and (
        config.latent.kv_lora_rank or config.mtp.num_mtp_layers or config.attention.attn_output_gate
    ):
        raise MappingError(
            "layers share keys and values in a model with latent or gated attention, or with "
            "multi-token prediction",
            hint="such a model has none of these",
            error_id="unsupported-model",
        )


def _check_compressed(config: ModelConfig) -> None:
    """Refuse compressed keys, residuals side by side, and tables of experts that cannot be."""
    if config.router.num_hash_layers > (config.num_layers if config.moe.num_experts else 0):
        raise MappingError(
            f"num_hash_layers is {config.router.num_hash_layers}, of {config.num_layers} layers",
            hint="a table of experts is for layers with experts",
        )
    ratios = config.compression.compress_ratios
    if ratios is None:
        return
    if not is_list(ratios) or len(ratios) != config.num_layers:
        raise MappingError(
            f"compress_ratios is {str(ratios)[:80]}",
            hint=f"one number for each of {config.num_layers} layers",
        )
    for ratio in ratios:
        check_int("compress_ratios of a layer", ratio, 0)
    if len(heavy := sorted({r for r in ratios if r not in (0, OVERLAP_RATIO)})) > 1:
        raise MappingError(
            f"compress_ratios has {heavy}",
            hint=f"0, {OVERLAP_RATIO}, and one other number",
            error_id="unsupported-model",
        )
    for name in ("q_lora_rank", "out_groups", "out_lora_rank", "window_size"):
        if not config.get(name):
            raise MappingError(f"{name} is 0, but there are compress_ratios", hint="more than 0")
    if OVERLAP_RATIO in ratios and not config.indexer.index_num_heads:
        raise MappingError(
            f"index_num_heads is 0, but layers compress every {OVERLAP_RATIO} tokens",
            hint="such layers choose by an indexer among what they attend to",
        )
    groups = config.compression.out_groups
    heads, kv_heads = config.attention.num_heads, config.attention.num_kv_heads
    if kv_heads != 1 or heads % groups:
        raise MappingError(
            f"num_kv_heads is {kv_heads}, out_groups {groups} of {heads} heads",
            hint="one head of keys and values, and equal groups",
        )


def _check_layers(config: ModelConfig) -> None:
    """Refuse lists that are not one flag for each layer, and layers counted in steps of none.

    Layers of multi-token prediction may have flags, too.
    """
    attention = config.attention
    counts = (config.num_layers, config.num_layers + config.mtp.num_mtp_layers)
    skip, without = config.window.window_skip_freq, config.positions.no_rope_layers
    flags = f"one 0 or 1 for each of {config.num_layers} layers"
    is_step = isinstance(skip, int) and not isinstance(skip, bool) and skip > 0
    if skip is not None and not is_step and not are_flags(skip, counts):
        raise MappingError(f"window_skip_freq is {skip!r}", hint=f"a positive int, or {flags}")
    chunked = config.window.chunk_layers
    if chunked is not None and not are_flags(chunked, counts):
        raise MappingError(f"chunk_layers is {chunked!r}", hint=flags)
    if without is not None and not are_flags(without, counts):
        raise MappingError(f"no_rope_layers is {without!r}", hint=flags)
    if attention.tied_values is not None and not are_flags(attention.tied_values, counts):
        raise MappingError(f"tied_values is {attention.tied_values!r}", hint=flags)
    _check_shared_kv(config, counts)
    _check_sizes(config)
    _check_indexer(config, counts)


def _check_kinds(config: ModelConfig) -> None:
    """Refuse kinds of layers that are unknown, not one for each, or lack their sizes."""
    kinds, mtp = config.layer_kinds, config.mtp.mtp_kind
    known = " ".join(LAYER_SYMBOLS)
    if not isinstance(mtp, str) or set(mtp) - set(LAYER_SYMBOLS):
        raise MappingError(f"mtp_kind is {mtp!r:.40}", hint=f"branches in order, of {known}")
    if kinds is None:
        return
    if len(kinds) != config.num_layers or not all(
        isinstance(k, str)
        and (k or config.layer_sizes is not None)
        and set(k) <= set(LAYER_SYMBOLS)
        for k in kinds
    ):
        raise MappingError(
            f"layer_kinds is {str(kinds)[:80]}",
            hint=f"the branches of each of {config.num_layers} layers, of {known}",
        )
    joined = "".join(kinds)
    if {"G", "K"} <= set(joined + mtp):
        raise MappingError(
            "layers have gated delta nets and Kimi delta attention, whose sizes are one set",
            hint="a model has one of the two",
            error_id="unsupported-model",
        )
    heads = (config.delta.linear_num_key_heads, config.delta.linear_num_value_heads)
    if "K" in joined + mtp and heads[0] != heads[1]:
        raise MappingError(
            f"Kimi delta attention has {heads[0]} heads of keys and {heads[1]} of values",
            hint="as many of both",
            error_id="unsupported-model",
        )
    for symbol, names in _SIZES_OF.items():
        lacking = [n for n in names if not config.get(n)]
        if symbol in joined and lacking:
            raise MappingError(
                f"{lacking[0]} is 0, but layers of the kind {symbol!r} need it",
                hint="layer_kinds and the sizes of its layers belong together",
            )
