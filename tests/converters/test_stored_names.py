"""Every tensor of transformers' own model is one that the family's table knows, in its shape."""

from __future__ import annotations

import pytest

from megtool.convert.dialects import read_side
from megtool.convert.families.detection import family
from megtool.dtypes import dtype
from megtool.tensors.sharded import GlobalTensor

pytest.importorskip("transformers")

import torch

from tests.support.models.dense_cases import CASES, MORE
from tests.support.models.tiny_model import CLASSES, class_of, tiny_config

OF_FAMILY = {case.family: case for case in (*CASES, *MORE) if case.family != "gpt_neox"}
"""A case of each family; transformers saves the head of gpt_neox under another name."""


@pytest.mark.parametrize("name", OF_FAMILY)
def test_stored_tensors_are_the_familys(name: str) -> None:
    architecture, known = CLASSES[name][0], family(name)
    made = tiny_config(name, **OF_FAMILY[name].keys)
    with torch.device("meta"):
        model = class_of(architecture)(made)
    tensors = [
        GlobalTensor(name=key, shape=tuple(t.shape), dtype=dtype("float32"))
        for key, t in model.state_dict().items()
    ]
    config = known.read_config(made.to_dict() | {"architectures": [architecture]})
    read_side(tensors, family=known, config=config, dialect="hf")
