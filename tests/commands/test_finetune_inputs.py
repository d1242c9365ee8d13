"""What a run needs of its checkpoint: no tokenizer for tokens, and no multi-token prediction."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megtool import finetune, reshard, tokenize
from megtool.errors import MappingError, MegtoolError
from megtool.inference import load
from megtool.reshard.open_source import open_decoder
from megtool.train.config import TrainConfig
from megtool.train.preflight import check_run
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


def test_multi_token_prediction_is_refused_before_any_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from tests.support.models import moe_cases

    (tmp_path / "mtp").mkdir()
    moe_cases.with_mtp(tmp_path / "mtp")
    reshard(tmp_path / "mtp", tmp_path / "megatron", to="torch_dist")
    lines = save_lines(tmp_path)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(load, "load", never)
    monkeypatch.setattr("megtool.train.datasets.open_dataset", never)
    for source, prefix in [("mtp", "model.layers.4."), ("megatron", "mtp.layers.0.")]:
        for dry_run in (True, False):
            with pytest.raises(MappingError, match="2 such layers") as caught:
                finetune(
                    tmp_path / source,
                    tmp_path / "out",
                    data=[str(lines)],
                    tokenizer=model,
                    dry_run=dry_run,
                )
            assert "--exclude" in (caught.value.hint or "")
            assert caught.value.tensor
            assert caught.value.tensor.startswith(prefix)
            assert prefix in (caught.value.hint or "")
        assert not (tmp_path / "out").exists()
    reshard(
        tmp_path / "mtp",
        tmp_path / "plain",
        to="hf",
        exclude=["model.layers.4.*", "model.layers.5.*"],
    )
    check_run(open_decoder(tmp_path / "plain"), TrainConfig(data=(str(lines),)))
