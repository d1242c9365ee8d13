"""A tiny Llama in many formats and layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megtool import reshard
from tests.support.checkpoints.layouts import LAYOUTS
from tests.support.folders import torch_tensors
from tests.support.models import tiny_llama


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder in three files."""
    return tiny_llama.save(tmp_path_factory.mktemp("access") / "hf", parts=3)


@pytest.fixture(scope="session")
def tensors(llama: Path) -> dict[str, torch.Tensor]:
    """What the folder holds."""
    return torch_tensors(llama)


@pytest.fixture(scope="session")
def anywhere(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in other formats."""
    out = tmp_path_factory.mktemp("anywhere")
    for name, options in LAYOUTS.items():
        reshard(llama, out / name, **options)
    return {"hf": llama, **{name: out / name for name in LAYOUTS}}
