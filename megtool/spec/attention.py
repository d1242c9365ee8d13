"""Fields of softmax attention: heads, scores, windows, and latent (low-rank) keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.errors import MappingError
from megtool.spec.checks import check_part
from megtool.spec.facts import fact


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPart:
    """Heads of attention, their optional tensors, and the arithmetic of scores and values.

    Flags of biases say which optional tensors there are; reading a checkpoint sets them from what
    it holds.
    """

    num_heads: int = fact("heads", hf="num_attention_heads", megatron="num_attention_heads")
    """Heads of queries."""
    num_kv_heads: int = fact("heads", hf="num_key_value_heads", megatron="num_query_groups")
    """Heads of keys and values, a divisor of `num_heads`."""
    head_dim: int = fact("elements", hf="head_dim", megatron="kv_channels")
    """Size of a key, and of a query, of one head."""
    v_head_dim: int = fact("elements", 0, hf="v_head_dim", megatron="v_head_dim")
    """Size of a value of one head; 0: as a key."""
    qkv_bias: bool = fact("flag", False, hf="attention_bias", megatron="add_qkv_bias")
    """Projections of queries, keys and values have biases."""
    attn_out_bias: bool = fact("flag", False, hf="attention_bias", megatron="add_bias_linear")
    """The output projection has a bias."""
    attn_output_gate: bool = fact(
        "flag", False, hf="attn_output_gate", megatron="attention_output_gate"
    )
    """The output is multiplied by the sigmoid of a projection of the input."""
    attn_sinks: bool = fact("flag", False, hf=None, megatron="softmax_type")
    """Each head has a learned score that takes part in the softmax and attends to nothing."""
    attn_zero_sinks: bool = fact("flag", False, hf=None, megatron="softmax_type")
    """Each head has such a score that is 0 and not learned (softmax "off by one")."""
    softmax_scale: float | None = fact(
        "factor", None, hf="attention_multiplier", megatron="softmax_scale", from_family=True
    )
    """Multiplies scores; None: one over the square root of a query head's size."""
    attn_softcap: float = fact(
        "score", 0.0, hf="attn_logit_softcapping", megatron=None, limits="not negative"
    )
    """A cap c bends scores x to `c * tanh(x / c)`; 0: no cap."""
    attn_value_scale: float = fact(
        "factor", 1.0, hf="attention_value_scale", megatron="attention_value_scale"
    )
    """Multiplies values."""
    qkv_clip: float = fact("number", 0.0, hf="clip_qkv", megatron=None, limits="not negative")
    """Queries, keys and values are clamped to so much on both sides, before rotation; 0: not."""
    attn_scale_by_layer: bool = fact(
        "flag", False, hf="scale_attn_by_inverse_layer_idx", megatron=None
    )
    """Scores are divided by the number of their layer, counted from 1."""
    value_norm: bool = fact("flag", False, hf=None, megatron=None)
    """Values are divided by their root mean square."""
    tied_values: tuple[int, ...] | None = fact(
        "flags by layer",
        None,
        hf="attention_k_eq_v",
        megatron="attention_k_eq_v",
        from_family=True,
    )
    """A 1 for every layer whose values are its keys, before their norm and rotation."""
    shared_kv: tuple[int, ...] | None = fact(
        "flags by layer", None, hf="num_kv_shared_layers", megatron="num_kv_shared_layers"
    )
    """A 1 for every layer without keys and values of its own: it attends to those of the last
    layer before it that has some and the same window."""
    attn_temperature_floor: int = fact("tokens", 0, hf="floor_scale", megatron=None)
    """The floor f of the temperature below."""
    attn_temperature_scale: float = fact("factor", 0.0, hf="attn_scale", megatron=None)
    """Layers without rotary embedding multiply queries at position p by
    `1 + scale * log(1 + floor((p + 1) / f))`."""
    attn_temperature_rotated: bool = fact("flag", False, hf=None, megatron=None)
    """Layers with rotary embedding do so after it, with p for p + 1."""
    attn_in_scale: float = fact("factor", 1.0, hf="attention_in_multiplier", megatron=None)
    """Multiplies the input of attention where mixers run side by side."""
    attn_out_scale: float = fact("factor", 1.0, hf="attention_out_multiplier", megatron=None)
    """Multiplies the output of attention where mixers run side by side."""

    def __post_init__(self) -> None:
        check_part(self)
        if self.num_heads % self.num_kv_heads:
            raise MappingError(
                f"num_kv_heads is {self.num_kv_heads}, which does not divide "
                f"num_heads {self.num_heads}"
            )

    @property
    def value_size(self) -> int:
        """Elements of a value of one head."""
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPart:
    """Sliding windows: how far a layer attends, and which layers have one."""

    window_size: int = fact("tokens", 0, hf="sliding_window", megatron="window_size")
    """How many tokens a token attends to, itself included; 0: all before it. In a bidirectional
    model the window reaches as far to either side."""
    window_skip_freq: int | tuple[int, ...] | None = fact(
        "layers, or flags by layer", None, hf="layer_types", megatron="window_attn_skip_freq"
    )
    """With n every n-th layer attends to all; a tuple has a 1 for every layer with a window. None:
    all have one."""
    window_sinks: bool = fact("flag", False, hf=None, megatron="swa_num_query_groups")
    """Layers without a window have no sinks."""
    attn_chunk_size: int = fact("tokens", 0, hf="attention_chunk_size", megatron=None)
    """Layers attend within chunks of so many tokens; 0: no chunks."""
    chunk_layers: tuple[int, ...] | None = fact(
        "flags by layer", None, hf="layer_types", megatron=None
    )
    """A 1 for every layer that does; None: those with rotary embedding."""

    def __post_init__(self) -> None:
        check_part(self)

    def has_window(self, layer: int) -> bool:
        """Return whether a layer attends within a sliding window."""
        skip = self.window_skip_freq
        if not self.window_size:
            return False
        if skip is None:
            return True
        return bool((layer + 1) % skip) if isinstance(skip, int) else bool(skip[layer])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPart:
    """Multi-head latent attention: keys and values from one low-rank vector."""

    q_lora_rank: int = fact("elements", 0, hf="q_lora_rank", megatron="q_lora_rank")
    """Size of the vector that queries are made of; 0: they are projected directly."""
    kv_lora_rank: int = fact("elements", 0, hf="kv_lora_rank", megatron="kv_lora_rank")
    """Size of the vector that keys and values are made of; 0: attention is not latent."""
    qk_nope_head_dim: int = fact("elements", 0, hf="qk_nope_head_dim", megatron="qk_head_dim")
    """Elements of a query head that do not turn."""
    qk_rope_head_dim: int = fact(
        "elements", 0, hf="qk_rope_head_dim", megatron="qk_pos_emb_head_dim"
    )
    """Elements of a query head that turn."""
    latent_norm_eps: float = fact(
        "number", 0.0, hf=None, megatron=None, from_family=False, limits="not negative"
    )
    """Added in the norms of both vectors; 0: `norm_eps`, as in the other norms, and in Megatron."""

    def __post_init__(self) -> None:
        check_part(self)
