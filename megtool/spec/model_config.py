"""A model's shape: `ModelConfig`, one vocabulary for every family and format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megtool.errors import MappingError
from megtool.spec.checks import (
    check_alibi,
    check_compressed,
    check_fields,
    check_kinds,
    check_layers,
    check_numbers,
    check_rope_scaling,
)
from megtool.spec.layer_sets import (
    DELTA_NET,
    EXPERTS,
    KIMI_DELTA,
    LAYER_SYMBOLS,
    MAMBA,
    SHORT_CONV,
    LayerSets,
)

MOST_LAYERS, MOST_EXPERTS = 10_000, 1_000_000  # more is no model, but an attack on our memory
NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned", "relative", "alibi", "none")
QK_NORMS = ("head", "each", "all")
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
class ModelConfig(LayerSets):
    """A decoder's shape, in one vocabulary for every format.

    Sizes count elements, `num_*` count things. Three flags (`qkv_bias`, `attn_out_bias`,
    `mlp_bias`) and `qk_norm` say which optional tensors exist; reading a checkpoint sets them from
    what it holds. `moe_layer_freq` is Megatron's: an int n makes every n-th layer (from the first)
    a mixture of experts, a tuple says so layer by layer. A token attends to `window_size` tokens,
    itself included (0: to all before it); `window_skip_freq` n lets every n-th layer attend to all,
    a tuple has a 1 for every layer with a window, and None gives one to all. `no_rope_layers` has a
    1 for every layer without rotary embedding. `extra` keeps the keys of the configuration it was
    read from that nothing else here says, verbatim.

    `layer_kinds` names the branches of every layer, in order, by the symbols of Megatron's
    HybridModel: `*` attention, `M` Mamba-2, `G` gated delta net, `K` Kimi delta attention, `-` MLP,
    `E` mixture of experts (`*-` is a layer of a GPT, `M` a layer that is a Mamba mixer alone), and
    `c` for a gated short convolution over `short_conv_taps` tokens. The sizes of both delta rules
    are `linear_*`, and a model has one of the two. None: attention in every layer, and experts or
    an MLP by `moe_layer_freq`. `mtp_kind` are the branches of each layer of multi-token prediction,
    those of the last layer where it is empty; HybridModel may have more there than a mixer and an
    MLP (`num_mtp_inner`).

    `layer_sizes` has, for sizes that vary from layer to layer (any of `VARYING`), one number for
    each layer, and a layer may then have no branch at all; the fields themselves are at least as
    large. `at_layer` is the configuration of one of the layers, whose `layer_sizes` is empty.

    `tied_values` has a 1 for every layer whose values are its keys, before their norm and rotation.
    `value_norm` divides values by their root mean square, and `layer_scalar` says that the output
    of every layer is multiplied by a number of its own, which is not trained.

    `shared_kv` has a 1 for every layer without keys and values of its own: it attends to those of
    the last layer before it that has some and the same window. With `layer_input_size` every layer
    adds what it makes of a vector of that size, which it gets for each token from a second
    embedding and the first residual.

    Where `moe_latent_size` is not 0, routed experts read and return vectors of that size, between
    two projections that all of them share. With `expert_norms` the shared experts have norms of
    their own before and after them, and so have the routed ones. With `router_norm` the router
    reads the residual, divided by its root mean square and times a weight, and multiplies the share
    of each expert by a number of its own.

    Attention is latent where `kv_lora_rank` is not 0: a query head then has `qk_nope_head_dim +
    qk_rope_head_dim` elements, and a rank of 0 for queries means that they are projected directly.
    `router_pre_softmax` says that scores are normalized before the choice of experts, not among
    the chosen. `num_mtp_layers` layers after the last one predict further tokens (multi-token
    prediction); each is like the last one. What projects its two inputs to one has columns for the
    embedding first, or, with `mtp_hidden_first`, for the hidden state. With `mtp_window` they have
    a window, and the sizes of layers that have one.

    Values have as many elements as keys, or `v_head_dim` where that is not 0; they are multiplied
    by `attn_value_scale`. With `window_sinks` layers without a window have no sinks.

    Where `index_num_heads` is not 0, a token of latent attention attends only to the `index_topk`
    tokens before it that an indexer ranks highest (DeepSeek Sparse Attention), by heads of
    `index_head_dim` elements, of which the first `qk_rope_head_dim` turn: in halves, or with
    `index_interleaved` in pairs. `shared_index_layers` has a 1 for every layer without an indexer,
    which attends to the tokens that the last one before it has chosen.

    In a model with `compress_ratios`, one for each layer, keys and values are one head, and the
    same vector, which queries made of `q_lora_rank` numbers attend to within the window. In a layer
    with a ratio r other than 0 they also attend to what every r tokens before are compressed to,
    with r = `OVERLAP_RATIO` out of twice as many tokens and limited to `index_topk` by an indexer;
    such layers turn by `compress_rope_base` and the rotary scaling, the others by `rope_base`
    alone. The output is projected in `out_groups` groups of heads to `out_lora_rank` numbers each.
    Layers of multi-token prediction compress nothing.

    `hyper_streams` is the number of residuals side by side (0: one, as everywhere else), which
    every branch reads and adds to by weights that depend on them; `hyper_iterations` steps make
    the weights among residuals doubly stochastic, with `hyper_eps`. In the first `num_hash_layers`
    layers a table says which experts a token goes to, whatever it attends to.

    In a `bidirectional` model tokens attend to those behind them as well, and a window reaches as
    far to either side; it predicts the tokens that were masked. Words have one of
    `num_token_types`, and learned positions are counted from `position_offset`. `embedding_norm`
    normalizes embeddings. `masked_head` puts a linear layer, the activation and a norm before the
    output layer (which `head_dense_bias` and `head_bias` give a bias).

    With `num_labels` there is no output layer: labels are scored, of a text by its last token (of a
    `bidirectional` model by its first). `score_dense` is a linear layer and tanh before that, and
    scores have a `score_bias`. One label is a reward, or another number.

    With `num_decoder_layers` the layers are an encoder's, and as many of a decoder attend to its
    output. Relative positions have `relative_num_buckets` biases for each head; tokens that are
    `relative_max_distance` or more apart share the last. Layers of a stack share the biases, unless
    they are `relative_per_layer`. With `alibi` a score is less by the distance of its key times a
    slope, which is one over two to a number that is larger from head to head, up to
    `alibi_bias_max`.

    `pre_norms` is false where nothing is normalized before attention and MLP, `first_attn_norm`
    where nothing is before the first layer's attention; `shared_norm` is true where one norm feeds
    both (in parallel), and `norm_bias` false where layer norms have a weight alone; `norm_weight`
    is false where norms have neither. Heads turn backwards with `rope_reversed`. `post_norms`
    normalize what attention and MLP add to the residual; with `norms_after_add` such norms are of
    the sum. `final_norm` says that there is a norm after the last layer. `qk_norm_of` says what a
    norm of queries or keys (`qk_norm`) covers: a `head`, all with the same weights; `each` head
    with weights of its own; `all` heads of a token at once. With `qk_norm_rotated` it comes after
    rotation.

    What only a forward pass asks for: attention multiplies scores by `softmax_scale` (None: one
    over the square root of a query head's size); a cap c bends scores or logits x to
    `c * tanh(x / c)` (0: no cap); embeddings, the output of every residual branch, and logits are
    multiplied by their scales, and so are, where mixers run side by side, what attention is given
    (`attn_in_scale`) and what both add (`attn_out_scale`, `mamba_out_scale`), in a gated MLP the
    half that is activated, before that, and the MLP's output (`mlp_gate_scale`, `mlp_out_scale`),
    and the five parts of a Mamba-2 mixer's projection, z, x, B, C and dt (`mamba_in_scales`). A
    mixer with `mamba_norm` normalizes its output, after its gate or before (`mamba_norm_first`);
    its steps lie within `mamba_step_limit`. A gated MLP clamps the activated half from above and
    the other half on both sides at `activation_limit` (0: not) and adds `glu_offset` to the latter.
    `qk_l2_norm` divides queries and keys by their root mean square after rotation. Layers with
    rotary embedding attend within chunks of `attn_chunk_size` tokens (0: no chunks), and layers
    without one multiply queries at position p by
    `1 + attn_temperature_scale * log(1 + floor((p + 1) / floor_size))`, where `floor_size` is
    `attn_temperature_floor`; with `attn_temperature_rotated` layers with rotary embedding multiply
    them so after it, with p for p + 1. A group of experts is ranked by
    the sum of its `router_group_best` best scores (0: Megatron's number, the experts a token gets
    from each chosen group). With the score `sparsemixer` experts are chosen one after the other,
    each with its share in a softmax over those whose logits are less than `2 * router_jitter` below
    its own, relative to their size. `router_scales_input` multiplies what an expert is given by its
    score, not what it returns. `router_fp32` casts the router and what it is given to float32.

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
    norm_bias: bool = True
    norm_weight: bool = True
    pre_norms: bool = True
    shared_norm: bool = False
    zero_centered_norm: bool = False
    parallel_residual: bool = False
    gated: bool = True
    activation: str = "silu"
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_of: str = "head"
    qk_norm_rotated: bool = False
    attn_output_gate: bool = False
    position_embedding: str = "rope"
    rotary_percent: float = 1.0
    rope_interleaved: bool = False
    rope_reversed: bool = False
    rope_base: float = 10000.0
    rope_local_base: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    window_size: int = 0
    window_skip_freq: int | tuple[int, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = None
    num_token_types: int = 0
    bidirectional: bool = False
    position_offset: int = 0
    embedding_norm: bool = False
    first_attn_norm: bool = True
    final_norm: bool = True
    norms_after_add: bool = False
    masked_head: bool = False
    head_dense_bias: bool = False
    head_bias: bool = False
    num_labels: int = 0
    score_dense: bool = False
    score_bias: bool = False
    num_decoder_layers: int = 0
    relative_num_buckets: int = 0
    relative_max_distance: int = 0
    relative_per_layer: bool = False
    alibi_bias_max: float = 8.0
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_latent_size: int = 0
    expert_norms: bool = False
    router_norm: bool = False
    router_score: str = "softmax"
    router_pre_softmax: bool = False
    router_scaling: float = 1.0
    router_num_groups: int = 0
    router_topk_groups: int = 0
    router_bias: bool = False
    router_expert_bias: bool = False
    shared_expert_gate: bool = False
    attn_sinks: bool = False
    window_sinks: bool = False
    attn_value_scale: float = 1.0
    tied_values: tuple[int, ...] | None = None
    value_norm: bool = False
    layer_scalar: bool = False
    shared_kv: tuple[int, ...] | None = None
    layer_input_size: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    index_num_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    index_interleaved: bool = False
    shared_index_layers: tuple[int, ...] | None = None
    compress_ratios: tuple[int, ...] | None = None
    compress_rope_base: float = 160000.0
    out_groups: int = 0
    out_lora_rank: int = 0
    hyper_streams: int = 0
    hyper_iterations: int = 20
    hyper_eps: float = 1e-6
    num_hash_layers: int = 0
    num_mtp_layers: int = 0
    mtp_hidden_first: bool = False
    mtp_window: bool = False
    layer_kinds: tuple[str, ...] | None = None
    layer_sizes: Mapping[str, tuple[int, ...]] | None = None
    mtp_kind: str = ""
    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state_dim: int = 0
    mamba_num_groups: int = 0
    mamba_conv_kernel: int = 4
    mamba_norm: bool = True
    mamba_norm_first: bool = False
    mamba_in_scales: tuple[float, ...] | None = None
    mamba_step_limit: tuple[float, float] | None = None
    mamba_out_scale: float = 1.0
    attn_in_scale: float = 1.0
    attn_out_scale: float = 1.0
    mlp_gate_scale: float = 1.0
    mlp_out_scale: float = 1.0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel: int = 4
    short_conv_taps: int = 0
    short_conv_bias: bool = False
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
    attn_temperature_rotated: bool = False
    router_group_best: int = 0
    router_jitter: float = 0.0
    router_scales_input: bool = False
    router_fp32: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        further = self.num_mtp_layers * max(1, self.num_mtp_inner)
        num_layers = self.num_layers + further + self.num_decoder_layers
        if num_layers > MOST_LAYERS or num_layers * self.num_experts > MOST_EXPERTS:
            raise MappingError(
                f"num_layers is {self.num_layers}, num_experts {self.num_experts}",
                hint=f"at most {MOST_LAYERS:,} layers, with {MOST_EXPERTS:,} experts in all",
            )
        for name in ("norm_eps", "rope_base", "rotary_percent", "alibi_bias_max"):
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
        if self.qk_norm_of not in QK_NORMS:
            raise MappingError(
                f"qk_norm_of is {self.qk_norm_of!r}", hint=f"known: {', '.join(QK_NORMS)}"
            )
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
        check_alibi(self)
        check_layers(self)
        check_compressed(self)
        check_kinds(self, LAYER_SYMBOLS, _SIZES_OF)
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
    def value_size(self) -> int:
        """Elements of a value of one head."""
        return self.v_head_dim or self.head_dim

    @property
    def residual_size(self) -> int:
        """Numbers of a token between layers: all residuals, where several are side by side."""
        return self.hidden_size * (self.hyper_streams or 1)

    @property
    def is_homogeneous(self) -> bool:
        """Megatron stacks the layers on one axis: they hold the same tensors, and no list says so
        layer by layer (with a list, even of equal entries, Megatron writes one key per layer)."""
        if self.layer_kinds is not None or self.layer_sizes is not None or not self.first_attn_norm:
            return False
        if self.shared_kv_layers or self.is_compressed or self.num_hash_layers:
            return False
        listed = isinstance(self.moe_layer_freq, tuple) and bool(self.num_experts)
        return not listed and len(self.moe_layers) in (0, self.num_layers)

    def at_layer(self, layer: int) -> ModelConfig:
        """The configuration with the sizes of one layer; itself where all have the same."""
        if not self.layer_sizes:
            return self
        sizes: dict[str, Any] = {name: n[layer] for name, n in self.layer_sizes.items()}
        return replace(self, layer_sizes={}, **sizes)


CONFIG_FIELDS = frozenset(f.name for f in fields(ModelConfig))
