"""Towers that lack a tensor: which it is, by their settings and by their other layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megtool import reshard
from megtool.convert.whole_towers import find_gap
from megtool.errors import MappingError
from tests.support.errors import raises
from tests.support.models.nested_cases import CASES, NestedCase

MODULES = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
STACK = [
    f"blocks.{n}.{module}.{kind}"
    for n in range(5)
    for module in MODULES
    for kind in ("weight", "bias")
]
OTHERS = [f"patch_embed.proj.{k}" for k in ("weight", "bias")]


@pytest.mark.parametrize("counts", [frozenset({5}), frozenset[int]()])
def test_any_one_tensor_of_a_stack_is_missed(counts: frozenset[int]) -> None:
    assert find_gap([*OTHERS, *STACK], counts) is None
    for lost in STACK:
        assert find_gap([*OTHERS, *(n for n in STACK if n != lost)], counts) == lost


@pytest.mark.parametrize("layer", range(5))
def test_any_layer_that_the_settings_count_is_missed(layer: int) -> None:
    rest = [n for n in STACK if not n.startswith(f"blocks.{layer}.")]
    found = find_gap(rest, frozenset({5}))
    assert found is not None
    assert found.startswith(f"blocks.{layer}.")


def test_modules_in_a_sequence_are_no_stack() -> None:
    """Convolutions have no bias and the norms between them have; blocks of two kinds alternate."""
    convolutions = [f"stem.{n}.weight" for n in range(6)] + [f"stem.{n}.bias" for n in (1, 3, 5)]
    assert find_gap(convolutions, frozenset({24})) is None
    kinds = ("conv.dw.weight", "attn.q.weight", "attn.k.weight")
    blocks = [f"stage.{n}.{k}" for n in range(6) for k in kinds[n % 2 :]]
    assert find_gap(blocks, frozenset()) is None
    assert find_gap(["proj.0.linear.weight", "proj.2.linear.weight"], frozenset({2, 24})) is None


def test_layers_that_are_packed_have_their_weights() -> None:
    packed = [n.replace(".weight", ".weight_packed") if "blocks.1" in n else n for n in STACK]
    assert find_gap(packed, frozenset({5})) is None
    lost = [n for n in packed if n != "blocks.1.mlp.fc1.weight_packed"]
    assert find_gap(lost, frozenset({5})) == "blocks.1.mlp.fc1.weight"


STACKED = [case for case in CASES if case.family != "gemma4_unified"]  # which has no layers there


@pytest.mark.parametrize("case", STACKED, ids=str)
def test_a_tower_of_every_family_lacks_a_tensor(case: NestedCase, tmp_path: Path) -> None:
    case.build(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    held = load_file(file)
    vision = [n for n in held if ".1." in n and n.endswith("weight")]
    inside = [n for n in vision if "vision" in n or "visual" in n]
    assert inside
    lost = inside[-1]
    save_file({n: t for n, t in held.items() if n != lost}, file, {"format": "pt"})
    with raises(MappingError, lost, id="missing-tensors", hint=True):
        reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
