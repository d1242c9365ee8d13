"""Two small checkpoints, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import tiny_models


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("quant") / "llama")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.moe(tmp_path_factory.mktemp("quant") / "moe")
