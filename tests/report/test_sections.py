"""Reports as text: rows, tables and notes; tensor names, folded and drawn as a tree."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.commands.inspection.name_tree import MAX_LEVELS, draw_tree, fold_tensors
from megtool.commands.verbs import VERBS
from megtool.dtypes import dtype
from megtool.report.sections import (
    Report,
    Row,
    Section,
    Table,
    count,
    finite_json,
    fold_names,
    shown,
)
from megtool.tensors.sharded import GlobalTensor

ROOT = Path(__file__).resolve().parents[2]


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
    assert list(draw_tree(fold_tensors(tensors)).lines()) == [
        "embed.weight     [10, 4]  bfloat16  80 B",
        "layers.{0-1}",
        "  attn.q.weight  [4, 4]   bfloat16  64 B  x 2",
        "  norm           [4]      float32   32 B  x 2",
        "scale            []       bfloat16   2 B",
    ]


def test_a_tensor_may_be_the_beginning_of_another() -> None:
    lines = list(draw_tree(fold_tensors([tensor("a"), tensor("a.b"), tensor("a.c")])).lines())
    assert [line.split("  [")[0].rstrip() for line in lines] == ["a", "  b", "  c"]


@given(st.lists(st.text(alphabet="ab.0{}\0\x1b\u0661", max_size=12), unique=True, max_size=30))
def test_every_tensor_is_on_a_line_whatever_its_name(names: list[str]) -> None:
    folds = fold_tensors([tensor(n) for n in names])
    assert sum(f.count for f in folds) == len(names)
    assert sum("bfloat16" in line for line in draw_tree(folds).lines()) == len(folds)
    assert sum(n for _, n in fold_names(names)) == len(names)


def test_hostile_names_cost_no_stack() -> None:
    nested = [tensor(".".join("a" * n)) for n in range(1, 3000, 10)]
    nested += [tensor("x." + "9" * 5000), tensor("")]
    lines = list(draw_tree(fold_tensors(nested)).lines())
    assert sum("bfloat16" in line for line in lines) == len(nested)
    assert max(len(line) - len(line.lstrip()) for line in lines) <= 2 * MAX_LEVELS


def test_small_things() -> None:
    assert (count(999), count(134_515_008), count(2_000_000_000)) == ("999", "134.5 M", "2.0 B")
    assert shown((49152, 576)) == "[49152, 576]"


def test_a_table_is_aligned_without_a_header_or_full_rows() -> None:
    table = Table(rows=[("a", "10"), ("bcd", "2", "x"), ("e",)])
    assert list(table.lines()) == ["a    10", "bcd   2  x", "e"]
    assert list(Table(rows=[]).lines()) == []


def test_a_table_in_a_file_is_never_cut_or_folded() -> None:
    name = "x" * 500
    lines = list(Table(header=("name", "bytes"), rows=[(name, "1 B")]).lines())
    assert lines == [f"name{' ' * 498}bytes", f"{name}    1 B"]


@pytest.mark.parametrize("width", [10, 41, 60, 200])
def test_a_table_on_a_terminal_folds_names_alone_and_loses_nothing(width: int) -> None:
    name, number = "model.layers.0." * 4, "123456789.0 KiB"
    lines = list(Table(header=("name", "bytes"), rows=[(name, number)]).lines(width))
    assert max(map(len, lines)) <= (width if width >= 41 else 80)
    assert number in "\n".join(lines)
    folded = "".join(line.replace("bytes", "").replace(number, "").strip() for line in lines)
    assert folded == f"name{name}"


def test_only_a_header_has_color() -> None:
    table = Table(header=("name",), rows=[("[red]a[/red]\x1b[31m",)])
    header, row = table.lines(80, color=True)
    assert header.startswith("\x1b[1m")
    assert row == "[red]a[/red]\\x1b[31m"
    assert "\x1b" not in "".join(table.lines(80))


def test_a_very_long_table_is_separated_by_tabs() -> None:
    rows = [(f"layers.{n}", str(n)) for n in range(Table.MAX_ALIGNED)]
    lines = list(Table(header=("name", "n"), rows=rows).lines())
    assert len(lines) == Table.MAX_ALIGNED + 1
    assert (lines[0], lines[12]) == ("name\tn", "layers.11\t11")
    assert "\t" not in "".join(Table(rows=rows).lines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Small(Report):
    """A report with all parts."""

    name: str

    def title(self) -> str:
        return self.name

    def rows(self) -> Iterator[Row]:
        yield "family", "llama"

    def sections(self) -> Iterator[Section]:
        yield Section(rows=[("a long label", "1"), ("b", "2")])
        yield Section()
        yield Section(title="end", table=Table(rows=[("x", "y")]), texts=["z"])


def test_parts_of_a_report_are_in_order_and_apart() -> None:
    report = Small(name="a\x1b", notes=tuple(f"note {n}" for n in range(10)))
    assert list(report.lines()) == [
        "a\\x1b",
        "  family      llama",
        *(f"  note        note {n}" for n in range(8)),
        "  note        and 2 more (--json lists them)",
        "",
        "  a long label  1",
        "  b             2",
        "",
        "end",
        "x  y",
        "z",
    ]
    assert list(Small(name="a", is_shown=True).lines()) == []
    assert next(iter(Small(name="").lines())) == "  family      llama"


def test_a_report_as_data_ends_with_its_remarks() -> None:
    data = Small(name="a", notes=("n",), warnings=("w",)).to_json()
    assert list(data.items()) == [("name", "a"), ("notes", ["n"]), ("warnings", ["w"])]


def test_every_verb_returns_a_report() -> None:
    reports = [*(ROOT / "megtool").rglob("*report.py")]
    reports += (ROOT / "megtool/commands/reports").glob("[a-z]*.py")
    for path in [*reports, ROOT / "megtool/quantize/plan.py"]:
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    returned = {inspect.signature(verb.function).return_annotation for verb in VERBS}
    names = {name for annotation in returned for name in annotation.split(" | ")}
    assert names <= {kind.__name__ for kind in subclasses(Report)}


def subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_numbers_that_json_lacks_become_texts() -> None:
    values = {"a": float("nan"), "b": [float("inf")], 3: 1.0}
    assert finite_json(values) == {"a": "nan", "b": ["inf"], "3": 1.0}


@pytest.mark.parametrize(
    "name", ["a\nFORGED", "a\rFORGED", "a\u2028FORGED", "a\x85FORGED", "\x1b[2J"]
)
def test_a_name_out_of_a_file_makes_no_line(name: str) -> None:
    section = Section(
        title=name, rows=[(name, name)], table=Table(rows=[(name, name)]), texts=[name]
    )
    lines = [*section.lines()]
    assert len(lines) == 4
    assert all(line.splitlines() == [line] and "\x1b" not in line for line in lines)
