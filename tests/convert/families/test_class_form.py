"""Which forms of storing are read in another, and how rows and numbers lie then."""

from __future__ import annotations

from typing import Any

from megtool.convert.families.class_form import ClassForm, are_other_forms, find_class_form
from megtool.convert.families.detection import family
from megtool.convert.language.mapping import Permuted, Qkv, Row, Shifted
from tests.support.models.small_configs import config

Q, K, V = (f"layers.{{l}}.attn.{name}.weight" for name in "qkv")


def form(name: str, **fields: Any) -> ClassForm | None:
    return find_class_form(config(**fields), family(name))


def test_norms_around_zero_are_read_as_plain_ones_and_back() -> None:
    plain = form("llama", zero_centered_norm=True)
    assert plain is not None
    assert not plain.config.norms.zero_centered_norm
    assert plain.leaf("layers.{l}.attn_norm.weight") == Shifted("layers.{l}.attn_norm.weight", -1)
    assert plain.leaf("layers.{l}.mamba.norm.weight") == "layers.{l}.mamba.norm.weight"
    assert plain.leaf(Q) == Q
    centred = form("gemma")
    assert centred is not None
    assert centred.leaf("norm.weight") == Shifted("norm.weight", 1)
    assert are_other_forms(plain.config, config(zero_centered_norm=True))


def test_rotary_pairs_are_read_as_halves_and_back() -> None:
    halves = form("llama", rope_interleaved=True)
    assert halves is not None
    permuted = Permuted(Q, ("num_heads", "2", "head_dim // 2"), (0, 2, 1))
    assert halves.leaf(Q) == permuted
    assert halves.leaf(V) == V
    row = halves.table((Row("qkv.weight", Qkv(Q, K, V)),))[0]
    assert isinstance(row, Row)
    assert isinstance(row.word, Qkv)
    assert row.word.words[0] == permuted
    assert row.word.names() == (Q, K, V)
    pairs = form("ernie4_5")
    assert pairs is not None
    assert pairs.leaf(K) == Permuted(K, ("num_kv_heads", "head_dim // 2", "2"), (0, 2, 1))


def test_what_has_the_form_already_or_cannot_have_it() -> None:
    assert form("llama") is None
    assert form("llama", rope_interleaved=True, rotary_percent=0.5) is None
    assert form("qwen3", rope_interleaved=True, qk_norm=True, qk_norm_of="all") is None
