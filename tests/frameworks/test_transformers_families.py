"""A model of transformers of every family from `torch_dist`, against transformers' own loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard
from megtool.errors import MappingError
from megtool.transformers import from_pretrained
from tests.support.errors import raises
from tests.support.models.every_family import MODELS

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

WITHOUT_CLASS = {"bailing_moe_v2", "mimo", "nemotron_nas", "openelm"}
"""Families whose code comes with the checkpoint, and which transformers does not have."""


def own_model(folder: Path) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype="auto")


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those that are not saved among them."""
    return {**model.state_dict(), **dict(model.named_buffers())}


def settings_of(model: Any) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    settings.pop("_name_or_path", None)
    return settings


@pytest.mark.parametrize("family", sorted(MODELS))
def test_every_family_is_transformers_own_model(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    MODELS[family](folder)
    reshard(folder, tmp_path / "out", to="torch_dist", tp=2, fsync=False)
    if family in WITHOUT_CLASS:
        with raises(MappingError, match="transformers .* does not have the model_type"):
            from_pretrained(tmp_path / "out")
        return
    ours, own = from_pretrained(tmp_path / "out"), own_model(folder)
    assert type(ours) is type(own)
    assert settings_of(ours) == settings_of(own)
    expected, loaded = tensors_of(own), tensors_of(ours)
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name
