"""Folding tensor names and drawing them as a tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megtool.commands.name_tree import MAX_LEVELS, draw_tree, fold_tensors
from megtool.dtypes import dtype
from megtool.reports import columns, count, fold_names, shown
from megtool.tensors.sharded import GlobalTensor


def tensor(name: str, shape: tuple[int, ...] = (2,), kind: str = "bfloat16") -> GlobalTensor:
    return GlobalTensor(name=name, shape=shape, dtype=dtype(kind))


def test_layers_fold_and_numbers_inside_words_do_not() -> None:
    names = [f"layers.{i}.w1" for i in range(30)] + ["layers.0.w2"]
    folds = fold_tensors([tensor(n) for n in names])
    assert [(f.name, f.count, f.num_bytes) for f in folds] == [
        ("layers.{0-29}.w1", 30, 120),
        ("layers.0.w2", 1, 4),
    ]


def test_other_shapes_and_types_stay_apart() -> None:
    folds = fold_tensors(
        [tensor("a.0"), tensor("a.1", (3,)), tensor("a.2", kind="float32"), tensor("a.3")]
    )
    assert [f.name for f in folds] == ["a.{0,3}", "a.1", "a.2"]


def test_gaps_are_shown_and_many_of_them_are_not() -> None:
    (some,) = fold_tensors([tensor(f"l.{i}") for i in (0, 1, 2, 5, 7, 8)])
    assert some.name == "l.{0-2,5,7-8}"
    (many,) = fold_tensors([tensor(f"l.{i}") for i in range(0, 100, 2)])
    assert many.name == "l.{0,2,…,98}"


def test_two_levels_of_numbers() -> None:
    (folded,) = fold_tensors([tensor(f"l.{i}.e.{k}.w") for i in range(3) for k in range(4)])
    assert (folded.name, folded.count) == ("l.{0-2}.e.{0-3}.w", 12)


def test_names_of_objects_fold_around_any_mark() -> None:
    names = [f"a._extra_state/shard_{i}_4" for i in range(4)] + ["rng_state/shard_0_1"]
    assert fold_names(names) == [("a._extra_state/shard_{0-3}_4", 4), ("rng_state/shard_0_1", 1)]


def test_a_tree() -> None:
    tensors = [
        tensor("embed.weight", (10, 4)),
        *(tensor(f"layers.{i}.attn.q.weight", (4, 4)) for i in range(2)),
        *(tensor(f"layers.{i}.norm", (4,), "float32") for i in range(2)),
        tensor("scale", ()),
    ]
    assert list(draw_tree(fold_tensors(tensors))) == [
        "embed.weight     [10, 4]  bfloat16  80 B",
        "layers.{0-1}",
        "  attn.q.weight  [4, 4]   bfloat16  64 B  x 2",
        "  norm           [4]      float32   32 B  x 2",
        "scale            []       bfloat16   2 B",
    ]


def test_a_tensor_may_be_the_beginning_of_another() -> None:
    lines = list(draw_tree(fold_tensors([tensor("a"), tensor("a.b"), tensor("a.c")])))
    assert [line.split("  [")[0].rstrip() for line in lines] == ["a", "  b", "  c"]


@given(st.lists(st.text(alphabet="ab.0{}\0\x1b\u0661", max_size=12), unique=True, max_size=30))
def test_every_tensor_is_on_a_line_whatever_its_name(names: list[str]) -> None:
    folds = fold_tensors([tensor(n) for n in names])
    assert sum(f.count for f in folds) == len(names)
    assert sum("bfloat16" in line for line in draw_tree(folds)) == len(folds)
    assert sum(n for _, n in fold_names(names)) == len(names)


def test_hostile_names_cost_no_stack() -> None:
    nested = [tensor(".".join("a" * n)) for n in range(1, 3000, 10)]
    nested += [tensor("x." + "9" * 5000), tensor("")]
    lines = list(draw_tree(fold_tensors(nested)))
    assert sum("bfloat16" in line for line in lines) == len(nested)
    assert max(len(line) - len(line.lstrip()) for line in lines) <= 2 * MAX_LEVELS


def test_small_things() -> None:
    assert (count(999), count(134_515_008), count(2_000_000_000)) == ("999", "134.5 M", "2.0 B")
    assert shown((49152, 576)) == "[49152, 576]"
    assert list(columns([("a", "10"), ("bcd", "2", "x"), ("e",)])) == [
        "a    10",
        "bcd   2  x",
        "e",
    ]
