"""Conditions: what each of them means, and what is told about those that mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.quant.recipes.modules import ModuleInfo
from megtool.quant.recipes.rules import RecipeProblems, read_condition
from tests.support.models import tiny_models
from tests.support.quant.recipe_texts import from_plain


def condition(match: object) -> tuple[object, RecipeProblems]:
    problems = RecipeProblems("x.yaml")
    return read_condition(from_plain(match), problems), problems


def chosen(match: object, path: Path) -> list[str]:
    found, problems = condition(match)
    assert problems.problems == []
    return [m.name for m in tiny_models.modules(path) if found.matches(m)]


@pytest.mark.parametrize(
    ("match", "names"),
    [
        ({"exact": "layers.2.attn.q"}, ["layers.2.attn.q"]),
        ({"glob": "layers.[12].attn.q"}, ["layers.1.attn.q", "layers.2.attn.q"]),
        ({"regex": r"layers\.\d\.attn\.q", "layers": -1}, ["layers.3.attn.q"]),
        ({"regex": "attn"}, []),
        (
            {"layers": "-1:", "role": ["qkv", "kv"]},
            [f"layers.3.attn.{x}" for x in ["q", "k", "v", "kv"]],
        ),
        ({"kind": "embedding"}, ["embed"]),
        ({"role": "lm_head"}, ["head"]),
        (
            {"role": "fc2", "not": {"any": [{"layers": 0}, {"layers": "2-3"}]}},
            ["layers.1.mlp.down"],
        ),
        ({"all": [{"role": "proj"}, {"layers": ":1"}]}, ["layers.0.attn.o"]),
        ({"names": "hf", "exact": "model.layers.0.self_attn.o_proj"}, ["layers.0.attn.o"]),
        ({"names": "megatron", "glob": "*.layers.3.mlp.linear_fc2"}, ["layers.3.mlp.down"]),
        ({"kind": "norm", "not": {"glob": "layers.*"}}, ["norm"]),
    ],
)
def test_what_conditions_mean(match: object, names: list[str], llama: Path) -> None:
    assert chosen(match, llama) == names


def test_roles_of_experts(moe: Path) -> None:
    assert chosen({"role": "router"}, moe) == [f"layers.{n}.mlp.router" for n in (1, 2, 3)]
    assert len(chosen({"role": "expert"}, moe)) == 3 * 4 * 3
    assert (
        chosen({"all": [{"role": "expert"}, {"role": "fc1"}, {"glob": "*.2.experts*"}]}, moe) == []
    )
    assert chosen({"glob": "layers.2.mlp.experts.3.*", "role": "fc1"}, moe) == [
        "layers.2.mlp.experts.3.gate",
        "layers.2.mlp.experts.3.up",
    ]
    grouped = {"names": "megatron", "glob": "decoder.layers.2.mlp.experts.linear_fc2"}
    single = {"names": "megatron", "glob": "*.2.mlp.experts.local_experts.1.linear_fc2"}
    assert chosen(grouped, moe) == [f"layers.2.mlp.experts.{e}.down" for e in range(4)]
    assert chosen(single, moe) == ["layers.2.mlp.experts.1.down"]


ENDS = st.none() | st.integers(-9, 9)


@given(first=ENDS, last=ENDS, depth=st.integers(1, 6))
def test_slices_of_layers_are_pythons(first: int | None, last: int | None, depth: int) -> None:
    text = f"{'' if first is None else first}:{'' if last is None else last}"
    found, problems = condition({"layers": text})
    assert problems.problems == []
    held = [n for n in range(depth) if found.matches(module(n, depth))]
    assert held == list(range(depth))[first:last]


@given(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=4), depth=st.integers(8, 9))
def test_lists_of_layers(numbers: list[int], depth: int) -> None:
    text = ",".join(f"{n}-{n + 1}" if n % 2 else f"{n - depth}" for n in numbers)
    found, _ = condition({"layers": text})
    wanted = {m for n in numbers for m in ((n, n + 1) if n % 2 else (n,))}
    assert {n for n in range(depth) if found.matches(module(n, depth))} == wanted & set(
        range(depth)
    )


def module(layer: int, depth: int) -> ModuleInfo:
    return ModuleInfo(
        name=f"layers.{layer}.attn.q",
        kind="linear",
        roles=frozenset({"qkv"}),
        layer=layer,
        num_layers=depth,
        shape=(8, 8),
        num_bytes=128,
    )


@pytest.mark.parametrize(
    ("match", "told"),
    [
        ({}, "at least one condition"),
        ({"globb": "*"}, "did you mean 'glob'"),
        ({"role": "expret"}, "did you mean 'expert'"),
        ({"kind": "liner"}, "did you mean 'linear'"),
        ({"layers": "3-1"}, "layers '3-1'"),
        ({"layers": "last"}, "such as 5, -1"),
        ({"regex": "("}, "invalid regex '('"),
        ({"glob": [1.5]}, "glob is 1.5"),
        ({"any": {}}, "'any' needs a list"),
        ({"glob": "*", "names": "hugging"}, "unknown names 'hugging'"),
        ({"not": {"rol": "qkv"}}, "did you mean 'role'"),
    ],
)
def test_what_is_told(match: object, told: str) -> None:
    _, problems = condition(match)
    assert told in " ".join(f"{text} ({hint})" for _, text, hint in problems.problems)
