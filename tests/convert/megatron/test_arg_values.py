"""Stored forms of values, as plain ones."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.megatron.arg_values import as_flag, last_name, plain_value
from megtool.errors import MappingError
from megtool.pickles.reader import inert_global


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        ("True", True),
        ("false", False),
        ("None", None),
        ("0.5", 0.5),
        ("-3", -3),
        ("(15, 0)", (15, 0)),
        ("[0]*3+[1]*2", [0, 0, 0, 1, 1]),
        ("([0]*1+[1]*1)*2", [0, 1, 0, 1]),
        ("M-M*", "M-M*"),
        ("-M", "-M"),
        ("none", "none"),
        ("[0]*9999999", "[0]*9999999"),
        ("(lambda: 1)()", "(lambda: 1)()"),
        ({"_target_": "torch.nn.functional.silu", "_call_": False}, "silu"),
        (["1", "x"], [1, "x"]),
        (7, 7),
    ],
)
def test_stored_forms(stored: Any, value: Any) -> None:
    assert plain_value(stored) == value


def test_members_of_enums_are_their_values() -> None:
    kind = inert_global("megatron.core.transformer.enums", "AttnBackend")
    assert plain_value(kind(5)) == 5


def test_names_and_flags() -> None:
    assert last_name("torch._C._nn.gelu") == "gelu"
    assert as_flag("x", 1) is True
    assert as_flag("x", None) is False
    with pytest.raises(MappingError, match="x is 'maybe'"):
        as_flag("x", "maybe")
