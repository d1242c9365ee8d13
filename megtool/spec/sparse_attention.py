"""Fields of sparse attention: indexers that choose tokens, and compressed keys."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.spec.checks import check_part
from megtool.spec.facts import fact

OVERLAP_RATIO = 4
"""Of layers whose compressed keys overlap, and are chosen by an indexer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerPart:
    """Indexers of DeepSeek Sparse Attention, which rank the tokens that a token attends to."""

    index_num_heads: int = fact("heads", 0, hf="index_n_heads", megatron="dsa_indexer_n_heads")
    """Heads of an indexer; 0: there is none."""
    index_head_dim: int = fact("elements", 0, hf="index_head_dim", megatron="dsa_indexer_head_dim")
    """Size of a head of an indexer; its first `qk_rope_head_dim` elements turn."""
    index_topk: int = fact("tokens", 0, hf="index_topk", megatron="dsa_indexer_topk")
    """How many tokens a token attends to, those ranked highest."""
    index_interleaved: bool = fact("flag", False, hf=None, megatron="dsa_indexer_rope_interleaved")
    """Heads of an indexer turn in pairs, not in halves."""
    shared_index_layers: tuple[int, ...] | None = fact(
        "flags by layer", None, hf="indexer_types", megatron="dsa_indexer_topk_freq"
    )
    """A 1 for every layer without an indexer: it attends to what the last one before it chose."""

    def __post_init__(self) -> None:
        check_part(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionPart:
    """Keys and values that are one head and the same vector, compressed over several tokens.

    Queries are made of `q_lora_rank` numbers and attend to single tokens within the window. Layers
    of multi-token prediction compress nothing.
    """

    compress_ratios: tuple[int, ...] | None = fact(
        "tokens by layer", None, hf="compress_ratios", megatron="csa_compress_ratios"
    )
    """How many tokens before the window make one key, by layer; 0: the layer has a window alone.
    With r = `OVERLAP_RATIO` keys are made of 2 r tokens and chosen by an indexer."""
    compress_rope_base: float = fact(
        "base",
        160000.0,
        hf="compress_rope_theta",
        megatron="csa_compress_rotary_base",
        limits="positive",
    )
    """Base of the rotary embedding of layers that compress, with `rope_scaling`; others turn by
    `rope_base` alone."""
    out_groups: int = fact("groups", 0, hf="o_groups", megatron="o_groups")
    """Groups of heads, each projected on its own before the output projection."""
    out_lora_rank: int = fact("elements", 0, hf="o_lora_rank", megatron="o_lora_rank")
    """Size of what each group is projected to."""

    def __post_init__(self) -> None:
        check_part(self)

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
        """Indices of the layers with compressed keys."""
        return frozenset(i for i, ratio in enumerate(self.compress_ratios or ()) if ratio)
