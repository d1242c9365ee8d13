"""A Megatron model in the form that its family's class computes it: other numbers, one function.

Two settings of Megatron are forms of storing: weights of norms around zero, and rotary pairs side
by side. A class of transformers has one form; where args say the other one, tensors are read as the
class stores them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megtool.convert.families.family import Family
from megtool.convert.language.mapping import Permuted, Row, Shifted, Table, Word, WordLike
from megtool.convert.language.mapping import word as as_word
from megtool.spec.model_config import ModelConfig

Leaf = Callable[[str], WordLike]


@dataclass(frozen=True, slots=True)
class ClassForm:
    """The configuration as the class has it, and how Megatron stores its canonical tensors."""

    config: ModelConfig
    leaf: Leaf

    def table(self, table: Table) -> Table:
        """Return rows of Megatron's names that read the class's tensors."""
        return tuple(
            replace(row, word=_rewrite(row.word, self.leaf)) if isinstance(row, Row) else row
            for row in table
        )


def find_class_form(config: ModelConfig, family: Family) -> ClassForm | None:
    """Return the form of a Megatron model that its family's class has; None if it is that already.

    What cannot be read in another form stays, for the writer to refuse.
    """
    changed: dict[str, Any] = {}
    shift = 0.0
    has_centre = _class_value(family, "zero_centered_norm")
    if has_centre is not None and has_centre != config.norms.zero_centered_norm:
        changed["zero_centered_norm"] = has_centre
        shift = 1.0 if has_centre else -1.0
    pairs = _class_value(family, "rope_interleaved")
    turns = pairs is not None and pairs != config.positions.rope_interleaved
    if turns and _can_reorder(config):
        changed["rope_interleaved"] = pairs
    if not changed:
        return None
    grid: tuple[str, ...] = ()
    if "rope_interleaved" in changed:
        grid = ("head_dim // 2", "2") if pairs else ("2", "head_dim // 2")

    def leaf(name: str) -> WordLike:
        out: WordLike = name
        if grid and (heads := _heads_of(name)) is not None:
            order = (0, 2, 1) if heads else (1, 0)
            out = Permuted(out, (*heads, *grid), order)
        if shift and _is_norm(name):
            out = Shifted(out, by=shift)
        return out

    return ClassForm(config=config.with_fields(**changed), leaf=leaf)


def are_other_forms(a: ModelConfig, b: ModelConfig) -> bool:
    """Return whether tensors of one configuration are stored in another form than the other's."""
    return any(a.get(name) != b.get(name) for name in ("zero_centered_norm", "rope_interleaved"))


def _class_value(family: Family, field: str) -> bool | None:
    """The form that the class has; None where a key says it."""
    if any(getattr(s, "field", None) == field for s in family.settings):
        return None
    return bool(family.traits.get(field, False))


def _can_reorder(config: ModelConfig) -> bool:
    """Whether all rows of queries and keys turn, and nothing else has their order."""
    is_plain = not (
        config.latent.kv_lora_rank
        or config.compression.is_compressed
        or config.indexer.index_num_heads
        or config.layer_sizes
        or config.num_decoder_layers
    )
    has_whole_norms = not config.norms.qk_norm or config.norms.qk_norm_of == "head"
    has_own_values = not (config.attention.tied_values or config.attention.shared_kv)
    is_rope = config.positions.position_embedding == "rope"
    turns_whole = config.positions.rotary_percent == 1 and not config.attention.attn_sinks
    return is_plain and has_whole_norms and has_own_values and is_rope and turns_whole


def _heads_of(name: str) -> tuple[str, ...] | None:
    """How many heads the rows of a tensor are; none of a norm of each; None of another tensor."""
    module = name.rpartition(".")[0]
    if module.endswith(".attn.q"):
        return ("num_heads",)
    if module.endswith(".attn.k"):
        return ("num_kv_heads",)
    return () if module.endswith((".attn.q_norm", ".attn.k_norm")) else None


def _is_norm(name: str) -> bool:
    is_weight = name.endswith("norm.weight")
    return is_weight and ".mamba." not in name and ".index." not in name


def _rewrite(word: WordLike, leaf: Leaf) -> WordLike:
    if isinstance(word, str):
        return leaf(word)
    inner = {name: getattr(word, name) for name in ("of", "words") if hasattr(word, name)}
    if not inner:
        return leaf(word.names()[0])  # a name alone
    out: Word = copy.copy(word)
    for name, value in inner.items():
        if name == "of":
            object.__setattr__(out, name, _rewrite(value, leaf))
        else:
            object.__setattr__(out, name, tuple(as_word(_rewrite(w, leaf)) for w in value))
    return out
