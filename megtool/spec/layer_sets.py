"""Which layers of a model have which branches, those of multi-token prediction among them."""

from __future__ import annotations

from functools import lru_cache

from megtool.spec.checks import OVERLAP_RATIO

ATTENTION, MAMBA, DELTA_NET, KIMI_DELTA, MLP, EXPERTS = HYBRID_SYMBOLS = (
    *("*", "M", "G", "K"),
    *("-", "E"),
)
"""Branches of a layer, as Megatron's HybridModel calls them."""
SHORT_CONV = "c"
"""A gated short convolution, which Megatron does not have."""
LAYER_SYMBOLS = (*HYBRID_SYMBOLS, SHORT_CONV)
MIXERS = ATTENTION + MAMBA + DELTA_NET + KIMI_DELTA + SHORT_CONV


class LayerSets:
    """Sets of layers, by the fields of `ModelConfig` that are declared here."""

    __slots__ = ()

    num_layers: int
    attn_sinks: bool
    window_sinks: bool
    mtp_window: bool
    num_experts: int
    index_num_heads: int
    num_hash_layers: int
    layer_input_size: int
    window_size: int
    window_skip_freq: int | tuple[int, ...] | None
    moe_layer_freq: int | tuple[int, ...]
    layer_kinds: tuple[str, ...] | None
    mtp_kind: str
    compress_ratios: tuple[int, ...] | None
    shared_index_layers: tuple[int, ...] | None
    tied_values: tuple[int, ...] | None
    shared_kv: tuple[int, ...] | None

    @property
    def attn_layers(self) -> frozenset[int]:
        """Indices of the layers that have attention."""
        return self._layers_with(ATTENTION)

    def has_window(self, layer: int) -> bool:
        """The layer attends within a sliding window."""
        skip = self.window_skip_freq
        if not self.window_size:
            return False
        if skip is None:
            return True
        return bool((layer + 1) % skip) if isinstance(skip, int) else bool(skip[layer])

    @property
    def sink_layers(self) -> frozenset[int]:
        """Indices of the layers whose attention may have sinks."""
        if not self.window_sinks:
            return self.attn_layers
        return frozenset(i for i in self.attn_layers if self.has_window(i))

    @property
    def mtp_size_layer(self) -> int:
        """The layer whose sizes those of multi-token prediction have, where they vary."""
        windowed = (i for i in range(self.num_layers) if self.has_window(i))
        return next(windowed, self.num_layers - 1) if self.mtp_window else self.num_layers - 1

    @property
    def mamba_layers(self) -> frozenset[int]:
        """Indices of the layers that have a Mamba-2 mixer."""
        return self._layers_with(MAMBA)

    @property
    def delta_layers(self) -> frozenset[int]:
        """Indices of the layers that have a gated delta net."""
        return self._layers_with(DELTA_NET)

    @property
    def kda_layers(self) -> frozenset[int]:
        """Indices of the layers that have Kimi delta attention."""
        return self._layers_with(KIMI_DELTA)

    @property
    def conv_layers(self) -> frozenset[int]:
        """Indices of the layers that have a gated short convolution."""
        return self._layers_with(SHORT_CONV)

    @property
    def mixer_layers(self) -> frozenset[int]:
        """Indices of the layers whose first branch mixes tokens: attention, Mamba-2, a delta rule,
        a short convolution."""
        return self._layers_with(MIXERS)

    @property
    def index_layers(self) -> frozenset[int]:
        """Indices of the layers with an indexer of the tokens that attention is limited to."""
        if not self.index_num_heads:
            return frozenset()
        if self.compress_ratios is not None:
            return frozenset(i for i, r in enumerate(self.compress_ratios) if r == OVERLAP_RATIO)
        shared = self.shared_index_layers or ()
        return self.attn_layers - {i for i, is_shared in enumerate(shared) if is_shared}

    @property
    def is_compressed(self) -> bool:
        """Keys and values are one head, and some layers also attend to compressed ones."""
        return self.compress_ratios is not None

    @property
    def heavy_layers(self) -> frozenset[int]:
        """Indices of the layers that compress keys without overlap, and attend to all of them."""
        ratios = self.compress_ratios or ()
        return frozenset(i for i, r in enumerate(ratios) if r not in (0, OVERLAP_RATIO))

    @property
    def heavy_ratio(self) -> int:
        """How many tokens make one key in such layers; 0 if there are none."""
        return max((self.compress_ratios or (0,))[i] for i in (self.heavy_layers or (0,)))

    @property
    def compressed_layers(self) -> frozenset[int]:
        """Layers with compressed keys."""
        return frozenset(i for i, ratio in enumerate(self.compress_ratios or ()) if ratio)

    @property
    def hash_layers(self) -> frozenset[int]:
        """Indices of the layers in which a table chooses the experts."""
        return frozenset(range(self.num_hash_layers))

    def index_source(self, layer: int) -> int:
        """The layer whose indexer chooses the tokens that a layer attends to."""
        return max(i for i in self.index_layers if i <= layer)

    @property
    def parallel_layers(self) -> frozenset[int]:
        """Indices of the layers that mix tokens in several branches, side by side."""
        return _find_parallel(self.layer_kinds)

    @property
    def dense_layers(self) -> frozenset[int]:
        """Indices of the layers that have an MLP."""
        if self.layer_kinds is None:
            moe_layers = self.moe_layers
            everywhere = _find_layers(None, self.num_layers, ATTENTION)
            return everywhere - moe_layers if moe_layers else everywhere
        return self._layers_with(MLP)

    @property
    def tied_value_layers(self) -> frozenset[int]:
        """Indices of the layers whose values are their keys."""
        return frozenset(i for i, is_tied in enumerate(self.tied_values or ()) if is_tied)

    @property
    def shared_kv_layers(self) -> frozenset[int]:
        """Indices of the layers that attend to keys and values of an earlier one."""
        return frozenset(i for i, is_shared in enumerate(self.shared_kv or ()) if is_shared)

    @property
    def has_side_inputs(self) -> bool:
        """Layers read what earlier parts of a pass have left beside the residual: keys and values
        of another layer, or vectors from an embedding of their own."""
        return bool(self.shared_kv_layers or self.layer_input_size)

    @property
    def mtp_branches(self) -> str:
        """The branches of a layer of multi-token prediction, as in `layer_kinds`."""
        if self.mtp_kind:
            return self.mtp_kind
        if self.layer_kinds is not None:
            return self.layer_kinds[-1]
        return ATTENTION + (EXPERTS if self.num_layers - 1 in self.moe_layers else MLP)

    @property
    def num_mtp_branches(self) -> int:
        """How many branches a layer of multi-token prediction has."""
        return len(self.mtp_branches)

    @property
    def num_mtp_inner(self) -> int:
        """How many layers a layer of multi-token prediction has inside, numbered and of one branch
        each; 0 where it is a mixer, an MLP or experts, or a mixer and one of these."""
        kind = self.mtp_kind
        is_one = len(kind) < 2 or (
            len(kind) == 2 and kind[0] not in MLP + EXPERTS and kind[1] in MLP + EXPERTS
        )
        return 0 if is_one else len(kind)

    @property
    def _mtp_layer(self) -> str:
        """The branches of a layer of multi-token prediction without numbered layers inside."""
        return "" if self.num_mtp_inner else self.mtp_branches

    @property
    def has_mtp_attn(self) -> bool:
        """Layers of multi-token prediction have attention."""
        return ATTENTION in self._mtp_layer

    @property
    def has_mtp_sink(self) -> bool:
        """Layers of multi-token prediction have attention that may have sinks."""
        return self.has_mtp_attn and (self.mtp_window or not self.window_sinks)

    @property
    def has_mtp_index(self) -> bool:
        """Layers of multi-token prediction have an indexer."""
        return self.has_mtp_attn and bool(self.index_num_heads) and not self.is_compressed

    @property
    def has_mtp_heavy(self) -> bool:
        """Layers of multi-token prediction compress keys."""
        return False

    @property
    def has_mtp_hash(self) -> bool:
        """A table chooses the experts of layers of multi-token prediction."""
        return False

    @property
    def has_mtp_tied_value(self) -> bool:
        """Layers of multi-token prediction have attention whose values are its keys."""
        return self.has_mtp_attn and self.num_layers - 1 in self.tied_value_layers

    @property
    def has_mtp_shared_kv(self) -> bool:
        """Layers of multi-token prediction attend to keys and values of another layer."""
        return self.has_mtp_attn and self.num_layers - 1 in self.shared_kv_layers

    @property
    def has_mtp_mamba(self) -> bool:
        """Layers of multi-token prediction have a Mamba-2 mixer."""
        return MAMBA in self._mtp_layer

    @property
    def has_mtp_delta(self) -> bool:
        """Layers of multi-token prediction have a gated delta net."""
        return DELTA_NET in self._mtp_layer

    @property
    def has_mtp_kda(self) -> bool:
        """Layers of multi-token prediction have Kimi delta attention."""
        return KIMI_DELTA in self._mtp_layer

    @property
    def has_mtp_conv(self) -> bool:
        """Layers of multi-token prediction have a gated short convolution."""
        return SHORT_CONV in self._mtp_layer

    @property
    def has_mtp_mixer(self) -> bool:
        """Layers of multi-token prediction have a branch that mixes tokens."""
        return bool(set(self._mtp_layer) & set(MIXERS))

    @property
    def has_mtp_parallel(self) -> bool:
        """Layers of multi-token prediction mix tokens in several branches, side by side."""
        return bool(_find_parallel((self._mtp_layer,)))

    @property
    def has_mtp_dense(self) -> bool:
        """Layers of multi-token prediction have an MLP."""
        return MLP in self._mtp_layer

    @property
    def has_mtp_moe(self) -> bool:
        """Layers of multi-token prediction have experts."""
        return EXPERTS in self._mtp_layer and bool(self.num_experts)

    def _layers_with(self, symbols: str) -> frozenset[int]:
        return _find_layers(self.layer_kinds, self.num_layers, symbols)

    @property
    def moe_layers(self) -> frozenset[int]:
        """Indices of the layers whose MLP is a mixture of experts."""
        if not self.num_experts:
            return frozenset()
        if self.layer_kinds is not None:
            return self._layers_with(EXPERTS)
        freq = self.moe_layer_freq
        if isinstance(freq, int):
            return frozenset(range(0, self.num_layers, freq))
        return frozenset(i for i, is_moe in enumerate(freq) if is_moe)


@lru_cache(maxsize=64)
def _find_layers(kinds: tuple[str, ...] | None, num_layers: int, symbols: str) -> frozenset[int]:
    """The layers that have a branch of one of the symbols; without kinds all have attention."""
    if kinds is None:
        return frozenset(range(num_layers) if ATTENTION in symbols else ())
    return frozenset(i for i, kind in enumerate(kinds) if set(kind) & set(symbols))


@lru_cache(maxsize=64)
def _find_parallel(kinds: tuple[str, ...] | None) -> frozenset[int]:
    """The layers that have more than one branch which mixes tokens."""
    return frozenset(i for i, kind in enumerate(kinds or ()) if len(set(kind) & set(MIXERS)) > 1)
