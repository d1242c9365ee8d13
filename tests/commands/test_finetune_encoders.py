"""Encoders learn to predict masked tokens, and are scored by that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import evaluate, export, generate, reshard, verify
from megtool.commands.reports.evaluate import EvaluateReport
from megtool.data.masking import Masking
from megtool.data.packing import IGNORED
from megtool.data.tokenizer import Tokenizer
from megtool.errors import LayoutError, MappingError, UsageError
from megtool.train.run_log import MEASUREMENTS, read_log
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.models.dense_cases import LOCAL, PADDED
from tests.support.models.tiny_model import SIZES, TIED, tiny_model
from tests.support.runs.finetune_runs import curve, tune
from tests.support.worlds.gloo_world import run_world

transformers = pytest.importorskip("transformers")

KEYS: dict[str, dict[str, Any]] = {
    "roberta": TIED | PADDED | {"max_position_embeddings": 66},
    "modernbert": TIED | LOCAL,
}
WORDS = {"vocab_size": tiny_text.VOCABULARY, "eos_token_id": tiny_text.END}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("encoders")
    for family, keys in KEYS.items():
        tiny_model(family, root / family, sizes=SIZES | WORDS, **keys)
        tiny_text.save_tokenizer(root / family, has_mask=True)
    return {family: root / family for family in KEYS}


@pytest.fixture
def model(models: dict[str, Path]) -> Path:
    return models["roberta"]


def test_a_run_lowers_the_loss_and_goes_on_with_the_same_bits(
    model: Path, data: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"train_iters": 8, "lr": 1e-2, "eval_split": 0.2, "mask_prob": 0.3}
    reference, out = tmp_path / "reference", tmp_path / "out"
    report = tune(model, reference, data, **how)
    assert report.evaluations[-1][1] < report.evaluations[0][1] - 0.5
    assert tune(model, out, data, **how, exit_duration_in_mins=1e-9).outcome.iteration == 1
    tune(model, out, data, **how)
    assert curve(out) == curve(reference)
    assert verify(out, reference).exit_status == 0
    export(out, tmp_path / "hf", to="hf")
    trained = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    assert type(trained).__name__ == "RobertaForMaskedLM"
    labels = [line["labels"] for line in read_log(out / "log.jsonl") if "labels" in line]
    assert all(0 < n < 2 * 32 for n in labels)


@pytest.mark.parametrize("family", KEYS)
def test_a_score_is_that_of_transformers(
    family: str, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    model, text = models[family], "As it was in the beginning, is now, and ever shall be."
    (tmp_path / "text.txt").write_text(text)
    reshard(model, tmp_path / "two", to="torch_dist", tp=2, fsync=False)
    found = evaluate(tmp_path / "two", data=tmp_path / "text.txt", device="cpu", dtype="float32")
    assert isinstance(found, EvaluateReport)
    tokenizer = Tokenizer.from_folder(model)
    tokens = np.asarray(tokenizer.encode(text), np.int64)
    inputs, labels = Masking.of(tokenizer, tiny_text.VOCABULARY).masked(tokens, 0)
    first = 2 if family == "roberta" else 0
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(model)
    with torch.no_grad():
        logits = theirs(
            torch.from_numpy(inputs)[None], position_ids=torch.arange(len(inputs))[None] + first
        ).logits[0]
    want = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
    assert found.loss == pytest.approx(want.item(), abs=1e-5)
    assert found.tokens == (labels != IGNORED).sum() > 0
    parts = evaluate(model, data=data, device="cpu", window=20, stride=10, against=model)
    assert isinstance(parts, EvaluateReport)
    assert parts.against is not None
    assert (parts.against.kl_max, parts.against.loss) == (0.0, pytest.approx(parts.loss))


def test_what_only_decoders_do_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    with raises(MappingError, "an encoder, which generates no text"):
        generate(model, prompt=["Once"])
    with raises(UsageError, "the model is an encoder", hint="--data FILE"):
        evaluate(model, tasks="arc_easy")
    with raises(LayoutError, "cp is 2", hint="--tp and --pp"):
        tune(model, tmp_path / "out", data, cp=2)
    tiny_text.save(tmp_path / "llama")
    tiny_text.save_tokenizer(tmp_path / "plain")
    with raises(UsageError, "the other predicts the next"):
        evaluate(model, data=data, against=tmp_path / "llama")
    with raises(UsageError, "no tokenizer with a mask token"):
        tune(model, tmp_path / "out", data, tokenizer=tmp_path / "plain")
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "Why?", "completion": "Because."}')
    for run in (lambda: tune(model, tmp_path / "out", chats), lambda: evaluate(model, data=chats)):
        with raises(UsageError, "the model predicts masked tokens", hint="plain texts"):
            run()


def on_rank(rank: int, size: int, model: str, out: str, data: str, more: dict[str, Any]) -> None:
    tune(model, out, data, **more)


@pytest.mark.slow
@pytest.mark.parametrize("family", KEYS)
@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}], ids=str)
def test_ranks_draw_the_curve_of_one(family, layout, models, data, tmp_path) -> None:
    model = str(models[family])
    run_world(on_rank, 1, model, str(tmp_path / "one"), str(data), {"train_iters": 3})
    run_world(on_rank, 2, model, str(tmp_path / "two"), str(data), {"train_iters": 3, **layout})
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    for ours, theirs in zip(two, one, strict=True):
        for key in ours.keys() - MEASUREMENTS:
            assert ours[key] == pytest.approx(theirs[key], abs=2e-5), key
