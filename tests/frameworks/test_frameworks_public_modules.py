"""The modules that users import have what `megtool.frameworks` has."""

from __future__ import annotations

from importlib import import_module

import pytest

import megtool


@pytest.mark.parametrize("name", ["dcp", "megatron", "torch_checkpointing", "transformers"])
def test_a_public_module_has_the_objects_of_its_implementation(name: str) -> None:
    if name == "torch_checkpointing":
        pytest.importorskip("torch_checkpointing")
    public, module = import_module(f"megtool.{name}"), import_module(f"megtool.frameworks.{name}")
    assert getattr(megtool, name) is public
    assert sorted(public.__all__) == sorted(module.__all__)
    assert all(getattr(public, n) is getattr(module, n) for n in public.__all__)
