"""What a run needs of its checkpoint: no tokenizer for tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megtool import tokenize
from megtool.errors import MegtoolError
from tests.support.models import tiny_text
from tests.support.runs.finetune_runs import save_lines, tune


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save(tmp_path_factory.mktemp("inputs") / "hf")


def without_tokenizer(model: Path, to: Path) -> Path:
    to.mkdir()
    for file in model.iterdir():
        if "token" not in file.name:
            shutil.copy(file, to)
    return to


def test_tokens_need_no_tokenizer(model: Path, tmp_path: Path) -> None:
    """The curve is the one that the same data give with a tokenizer."""
    lines = save_lines(tmp_path)
    tokenize(lines, tmp_path / "tokens", tokenizer=model)
    bare = without_tokenizer(model, tmp_path / "bare")
    data = tmp_path / "tokens.bin"
    first = tune(model, tmp_path / "a", data)
    second = tune(bare, tmp_path / "b", data, eval_data=str(data), eval_interval=3)
    assert second.last_loss == first.last_loss
    assert [step for step, _ in second.evaluations] == [0, 3, 6]
    with pytest.raises(MegtoolError, match="tokenizer"):
        tune(bare, tmp_path / "c", lines)
    with pytest.raises(MegtoolError, match="tokenizer"):
        tune(bare, tmp_path / "d", data, eval_data=str(lines))
