"""Words: what each stores, against numpy, and that reading inverts writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.convert import (
    Cat,
    Grouped,
    Interleaved,
    Padded,
    Permuted,
    Qkv,
    Row,
    Stacked,
    Transposed,
    Weight,
)
from megtool.convert.language.binding import Binding
from megtool.convert.language.canonical import CanonicalModel
from megtool.convert.language.mapping import Word, WordLike
from megtool.dtypes import dtype
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

F32 = dtype("float32")
VOCABULARY = {
    "q": Weight(("num_heads * head_dim", "hidden_size")),
    "k": Weight(("num_kv_heads * head_dim", "hidden_size")),
    "v": Weight(("num_kv_heads * head_dim", "hidden_size")),
    "gate": Weight(("num_heads * head_dim", "hidden_size")),
    "a.{l}": Weight(("ffn_hidden_size", "hidden_size")),
    "b.{l}": Weight(("ffn_hidden_size", "hidden_size")),
    "x.{l}.{e}": Weight(("ffn_hidden_size", "hidden_size")),
    "y.{l}.{e}": Weight(("ffn_hidden_size", "hidden_size")),
}


def config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 4,
        "ffn_hidden_size": 6,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 10,
        "num_experts": 2,
    }
    return ModelConfig.from_fields(**{**sizes, **changes})


def names_of(model: CanonicalModel, w: Word) -> list[str]:
    return [p.name for p in w.layout(model).parts]


def put(stored: np.ndarray, p: Placement, value: np.ndarray) -> None:
    """Write a canonical array where its placement says, one element at a time."""
    for at in np.ndindex(*p.shape):
        index = list(p.base)
        for i, d, m in zip(at, p.dims, p.mults, strict=True):
            index[d] += i * m
        assert np.isnan(stored[tuple(index)]), "written twice"
        stored[tuple(index)] = value.reshape(p.shape)[at]


def build(
    w: WordLike,
    model: CanonicalModel,
    arrays: dict[str, np.ndarray],
    stored: str = "s",
    pad_to: int = 1,
) -> np.ndarray:
    """The stored array that a word makes of canonical ones; the padding stays NaN."""
    binding = Binding((Row(stored, w),), model)
    canonical = {n: GlobalTensor(name=n, shape=a.shape, dtype=F32) for n, a in arrays.items()}
    made = binding.write(canonical, pad_to=pad_to)
    (tensor,) = made.tensors
    assert made.unplaced == []
    out = np.full(tensor.shape, np.nan)
    for name, p in made.placements.items():
        put(out, p, arrays[name])
    back = binding.read([tensor])
    assert back.placements == made.placements
    assert {n: t.shape for n, t in back.canonical.items()} == {
        n: a.shape for n, a in arrays.items()
    }
    return out


def random(model: CanonicalModel, patterns: dict[str, str]) -> dict[str, np.ndarray]:
    """Distinct values for canonical tensors: name to the pattern of its shape."""
    rng = np.random.default_rng(0)
    return {n: rng.random(model.shape(p)) for n, p in patterns.items()}


def megatron_qkv(cfg: ModelConfig, arrays: dict[str, np.ndarray], order: str) -> np.ndarray:
    """Per query group: its rows of every tensor in order, by explicit loops."""
    rows = []
    for g in range(cfg.attention.num_kv_heads):
        for name in order.split():
            per_group = arrays[name].shape[0] // cfg.attention.num_kv_heads
            rows.append(arrays[name][g * per_group : (g + 1) * per_group])
    return np.concatenate(rows)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_qkv_is_megatrons_group_order(groups: int, per: int, d: int, has_gate: bool) -> None:
    cfg = config(num_heads=groups * per, num_kv_heads=groups, head_dim=d)
    model = CanonicalModel(cfg, VOCABULARY)
    names = ["q", "gate", "k", "v"] if has_gate else ["q", "k", "v"]
    arrays = random(model, {n: n for n in names})
    w = Qkv("q", "k", "v", gate="gate" if has_gate else None)
    stored = build(w, model, arrays)
    assert (stored == megatron_qkv(cfg, arrays, " ".join(names))).all()
    if not has_gate:
        fused = stored.reshape(groups, per + 2, d, cfg.hidden_size)
        assert (fused[:, :per].reshape(-1, cfg.hidden_size) == arrays["q"]).all()
        assert (fused[:, per].reshape(-1, cfg.hidden_size) == arrays["k"]).all()
        assert (fused[:, per + 1].reshape(-1, cfg.hidden_size) == arrays["v"]).all()


def test_each_word_against_numpy() -> None:
    cfg = config(num_kv_heads=6)
    model = CanonicalModel(cfg, VOCABULARY)
    a = random(model, {"q": "q", "k": "k", "v": "v"})
    q, k, v = a["q"], a["k"], a["v"]
    assert (build(Cat("q", "k"), model, {"q": q, "k": k}) == np.concatenate([q, k])).all()
    side = build(Cat("q", "k", dim=-1), model, {"q": q, "k": k})
    assert (side == np.concatenate([q, k], 1)).all()
    assert (build(Transposed("q"), model, {"q": q}) == q.T).all()
    neox = build(Grouped("q", "k", "v", by="num_heads"), model, a)
    heads = np.stack([x.reshape(6, 4, 4) for x in (q, k, v)], 1)
    assert (neox == heads.reshape(72, 4)).all()
    wide = build(Transposed(Interleaved("q", "k")), model, {"q": q, "k": k})
    assert (wide[:, ::2] == q.T).all()
    assert (wide[:, 1::2] == k.T).all()
    again = build(Interleaved(Transposed("q"), Transposed("k"), dim=-1), model, {"q": q, "k": k})
    assert (again == wide).all()
    gguf = build(Permuted("q", ("num_heads", 2, "head_dim // 2"), (0, 2, 1)), model, {"q": q})
    assert (gguf == q.reshape(6, 2, 2, 4).swapaxes(1, 2).reshape(24, 4)).all()


def test_layers_and_experts_stack_on_leading_axes() -> None:
    model = CanonicalModel(config(), VOCABULARY)
    patterns = {f"{n}.{i}.{j}": f"{n}.{{l}}.{{e}}" for n in "xy" for i in range(3) for j in (0, 1)}
    a = random(model, patterns)
    fused = Stacked(Stacked(Cat("x.{l}.{e}", "y.{l}.{e}"), "e"), "l")
    stored = build(fused, model, a)
    assert stored.shape == (3, 2, 12, 4)
    for i in range(3):
        for j in range(2):
            assert (stored[i, j] == np.concatenate([a[f"x.{i}.{j}"], a[f"y.{i}.{j}"]])).all()
    turned = build(Transposed(fused), model, a)
    assert (turned == stored.swapaxes(2, 3)).all()


def test_padding_is_marked_and_read_back() -> None:
    model = CanonicalModel(config(), VOCABULARY)
    a = random(model, {"k": "k"})
    stored = build(Padded("k"), model, a, pad_to=16)
    assert stored.shape == (16, 4)
    assert (stored[:8] == a["k"]).all()
    assert np.isnan(stored[8:]).all()
    binding = Binding((Row("s", Padded("k")),), model)
    found = binding.read([GlobalTensor(name="s", shape=(16, 4), dtype=F32)])
    assert found.padding == {"s": 8}


SPLITS = st.sampled_from([Cat, Interleaved])


@st.composite
def words(draw: st.DrawFn, name: str = "a.{l}", depth: int = 0) -> Word:
    """Words nested at random over the two tensors of a layer."""
    inner: WordLike = name
    if draw(st.booleans()):
        inner = Permuted(inner, (3, 2, "ffn_hidden_size // 6"), draw(st.permutations(range(3))))
    other: WordLike = "b.{l}"
    turned = draw(st.booleans())
    if turned:
        inner, other = Transposed(inner), Transposed(other)
    w = draw(SPLITS)(inner, other, dim=draw(st.sampled_from([0, 1])))
    w = Stacked(w, "l") if draw(st.booleans()) else w
    return Transposed(w) if draw(st.booleans()) else w


@given(words(), st.sampled_from([6, 12, 18]))
def test_words_invert(w: Word, ffn: int) -> None:
    model = CanonicalModel(config(ffn_hidden_size=ffn), VOCABULARY)
    bound = names_of(model, w)
    if any("{l}" in n for n in bound):
        layers, stored = [0], "s.{l}"
        model = CanonicalModel(config(ffn_hidden_size=ffn, num_layers=1), VOCABULARY)
    else:
        layers, stored = [0, 1, 2], "s"
    a = random(model, {f"{n}.{i}": f"{n}.{{l}}" for n in "ab" for i in layers})
    out = build(w, model, a, stored)
    assert not np.isnan(out).any()
    assert sorted(out.reshape(-1)) == sorted(np.concatenate([x.reshape(-1) for x in a.values()]))


def test_writing_casts_floats_and_refuses_what_does_not_mix() -> None:
    model = CanonicalModel(config(num_kv_heads=6), VOCABULARY)
    binding = Binding((Row("s", Cat("q", "k")),), model)

    def written(q: str, k: str, **options: Any) -> str:
        kinds = {"q": dtype(q), "k": dtype(k)}
        tensors = {n: GlobalTensor(name=n, shape=(24, 4), dtype=t) for n, t in kinds.items()}
        return binding.write(tensors, **options).tensors[0].dtype.name

    assert written("bfloat16", "bfloat16") == "bfloat16"
    assert written("bfloat16", "float32") == "float32"
    assert written("bfloat16", "float32", cast=dtype("float16")) == "float16"
    assert written("int8", "int8", cast=dtype("float16")) == "int8"
    with pytest.raises(MappingError, match="different dtypes"):
        written("int8", "float32")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row("s", "nothing"), "is not a canonical tensor"),
        (Row("s", "a.{l}"), "lacks the index"),
        (Row("s", Cat("q", Transposed("k"))), "cannot be concatenated"),
        (Row("s", Grouped("q", "k", by=5)), "do not fall into 5 groups"),
        (Row("s", Permuted("q", (5, 5), (1, 0))), "not a grid"),
        (Row("s", Grouped("q", by="no_field")), "is not a field"),
        (Row("s", "q", when="num_heads.real"), "Attribute"),
        (Row("s", "q", when="num_heads +"), "no expression"),
    ],
)
def test_a_wrong_row_says_so(row: Row, said: str) -> None:
    binding = Binding((row,), CanonicalModel(config(), VOCABULARY))
    with pytest.raises(MappingError, match=said):
        binding.read([GlobalTensor(name="s", shape=(24, 4), dtype=F32)])


def test_numbers_in_names_are_indices_or_as_written() -> None:
    model = CanonicalModel(config(), VOCABULARY)
    binding = Binding((Row("w1.{l}.x", "a.{l}"), Row("w2.{l}.x", "a.{l}")), model)
    names = ("w1.1.x", "w2.0.x", "w3.0.x", "w01.0.x", "w1.0.y", "w1.0.x.0", "w1..x")
    found = binding.read([GlobalTensor(name=n, shape=(6, 4), dtype=F32) for n in names])
    assert {c: p.stored for c, p in found.placements.items()} == {"a.1": "w1.1.x", "a.0": "w2.0.x"}
    assert found.unmatched == list(names[2:])
    for pattern in ("w{l}1", "w1{l}", "w{l}{l}"):
        with pytest.raises(MappingError, match="several ways"):
            Binding((Row(pattern, "a.{l}"),), model)


def test_alternatives_read_any_and_write_the_first(carry: Callable[..., Any]) -> None:
    model = CanonicalModel(config(), VOCABULARY)
    table = (
        Row("fused.{l}", Cat("a.{l}", "b.{l}"), also=("old.{l}",)),
        Row("a_of.{l}", "a.{l}"),
        Row("b_of.{l}", "b.{l}"),
    )
    binding = Binding(table, model)
    shapes = {"old.0": (12, 4), "a_of.1": (6, 4), "b_of.1": (6, 4), "fused.2": (12, 4)}
    found = binding.read([GlobalTensor(name=n, shape=s, dtype=F32) for n, s in shapes.items()])
    assert sorted(found.canonical) == sorted(f"{n}.{i}" for n in "ab" for i in range(3))
    made = binding.write(found.canonical)
    assert [t.name for t in made.tensors] == ["fused.0", "fused.1", "fused.2"]
    twice = [GlobalTensor(name=n, shape=(12, 4), dtype=F32) for n in ("old.0", "fused.0")]
    with pytest.raises(MappingError, match="both hold"):
        binding.read(twice)
