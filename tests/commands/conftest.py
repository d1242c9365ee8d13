"""What the tests of `finetune` begin with: a model, and two texts; not to be changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import tiny_text
from tests.support.runs.finetune_runs import TEXT, save_lines


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a Hugging Face folder."""
    return tiny_text.save(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty texts, a line each."""
    return save_lines(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One long text."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT * 60)
    return file
