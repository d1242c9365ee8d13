"""Activations by transformers' names."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from megtool.convert.config.activation import ACTIVATIONS, Activation
from megtool.errors import MappingError
from megtool.kernels.elementwise.activation import activate
from tests.support.models.small_configs import config


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_name_is_transformers_and_the_same_function(name: str) -> None:
    fields: dict[str, object] = {}
    Activation().read({"hidden_act": name}, fields)
    into: dict[str, object] = {}
    Activation().write(config(**fields), into)
    assert into == {"hidden_act": name}
    x = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(activate(x, name), ACT2FN[name](x), rtol=1e-5, atol=1e-5)


def test_others_and_none() -> None:
    fields: dict[str, object] = {}
    Activation("act", "gelu_new").read({"act": None}, fields)
    assert fields == {"activation": "gelu_new"}
    for unknown in ("laplace", "xielu", 3, ["silu"]):
        with pytest.raises(MappingError, match="hidden_act="):
            Activation().read({"hidden_act": unknown}, fields)
