"""T5 generates, is scored and is trained: the numbers are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import evaluate, export, finetune, generate, reshard, verify
from megtool.commands.reports.evaluate import EvaluateReport
from megtool.commands.reports.generate import GenerateReport
from megtool.errors import LayoutError, UsageError
from megtool.options.config_file import build_options
from megtool.source.open import open_decoder
from megtool.train.datasets import open_datasets
from megtool.train.options.config import TrainConfig
from megtool.train.run_log import read_log
from tests.support.errors import raises
from tests.support.models import tiny_t5
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.finetune_runs import curve, tune
from tests.support.worlds.gloo_world import run_world

transformers = pytest.importorskip("transformers")

PROMPTS = (
    "Once upon a time",
    "Why?",
    "translate English to German: the house is wonderful, and so is the garden.",
    "And now for something else",
)
NAMES = [*tiny_t5.KEYS, *(pytest.param(n, marks=pytest.mark.slow) for n in tiny_t5.MODEL_TYPES)]
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("t5")
    cases = tiny_t5.KEYS | {name: {"family": name} for name in tiny_t5.MODEL_TYPES}
    return {n: (root / n, tiny_t5.save(root / n, **keys)) for n, keys in cases.items()}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": p, "completion": f"Because {p[:5]}"} for p in PROMPTS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    return file


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_transformers(name: str, models: dict[str, tuple[Path, Any]]) -> None:
    """Prompts of unequal length, all at once, and two at a time."""
    folder, theirs = models[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    # transformers' own cache has too few layers where the decoder has more of them.
    how = {"max_new_tokens": 12, "do_sample": False, "use_cache": False}
    want = tokenizer.batch_decode(theirs.generate(**inputs, **how), skip_special_tokens=True)
    assert len(set(want)) > 2
    for batch_size in (4, 2):
        found = generate(folder, prompt=PROMPTS, max_new_tokens=12, batch_size=batch_size, **CPU)
        assert isinstance(found, GenerateReport)
        assert [a.text for a in found.answers] == want
        assert found.answers[1].num_prompt_tokens == len("Why?") + 1
    drawn = [
        generate(folder, prompt=PROMPTS, max_new_tokens=9, temperature=1, batch_size=n, **CPU)
        for n in (4, 1)
    ]
    assert all(isinstance(d, GenerateReport) for d in drawn)
    assert [a.text for a in drawn[0].answers] == [a.text for a in drawn[1].answers]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", NAMES)
def test_a_score_is_that_of_transformers(
    name: str, models: dict[str, tuple[Path, Any]], pairs: Path, tmp_path: Path
) -> None:
    folder, theirs = models[name]
    reshard(folder, tmp_path / "two", to="torch_dist", tp=2, fsync=False)
    found = evaluate(tmp_path / "two", data=pairs, **CPU)
    assert isinstance(found, EvaluateReport)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    for prompt in PROMPTS:
        source = tokenizer(prompt, return_tensors="pt").input_ids
        target = tokenizer(f"Because {prompt[:5]}", return_tensors="pt").input_ids
        with torch.no_grad():
            total += float(theirs(input_ids=source, labels=target).loss) * target.numel()
        count += target.numel()
    assert found.loss == pytest.approx(total / count, abs=1e-5)
    assert found.tokens == 3 * count
    (tmp_path / "text.txt").write_text(" ".join(PROMPTS) * 3)
    plain = evaluate(folder, data=tmp_path / "text.txt", window=50, against=folder, **CPU)
    assert isinstance(plain, EvaluateReport)
    assert plain.against is not None
    assert plain.against.kl_max == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("t5", "pairs"),
        ("t5", "texts"),
        pytest.param("flan", "pairs", marks=pytest.mark.slow),
        pytest.param("mt5", "pairs", marks=pytest.mark.slow),
        pytest.param("umt5", "pairs", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_transformers_and_adamw(
    name: str, kind: str, pairs: Path, data: Path, tmp_path: Path
) -> None:
    keys = tiny_t5.KEYS.get(name, {"family": name, "fill": tiny_t5.untie})
    model = tiny_model(**{"family": "t5", "sizes": tiny_t5.SIZES} | keys, folder=tmp_path / "hf")
    model.eval()
    tiny_t5.save_tokenizer(tmp_path / "hf")
    file = pairs if kind == "pairs" else data
    how: dict[str, Any] = {
        "seq_length": 76,
        "train_iters": 5,
        "global_batch_size": 2,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "device": "cpu",
    }
    finetune(tmp_path / "hf", tmp_path / "out", data=[str(file)], fsync=False, threads=1, **how)
    losses = [line["loss"] for line in read_log(tmp_path / "out/log.jsonl") if "loss" in line]
    source = open_decoder(tmp_path / "hf", two_stacks=True)
    rows = open_datasets(
        build_options(TrainConfig, {"data": (str(file),), **how}), source, cache=None
    ).train
    weights = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for step, ours in enumerate(losses):
        batch = rows.rows(2 * step, 2)
        assert batch.sources_BE is not None
        assert batch.source_valid_BE is not None
        loss = model(
            input_ids=torch.from_numpy(batch.sources_BE),
            attention_mask=torch.from_numpy(batch.source_valid_BE).long(),
            decoder_input_ids=torch.from_numpy(batch.tokens_BS),
            labels=torch.from_numpy(batch.labels_BS),
        ).loss
        assert ours == pytest.approx(loss.item(), abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert len(losses) == 5
    export(tmp_path / "out", tmp_path / "trained", to="hf")
    trained = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "trained")
    for name, parameter in trained.named_parameters():
        assert (parameter - model.get_parameter(name)).abs().max() < 1e-4, name


@pytest.mark.parametrize(
    "name", ["flan", *(pytest.param(n, marks=pytest.mark.slow) for n in tiny_t5.MODEL_TYPES)]
)
def test_a_run_goes_on_with_the_same_bits(
    name: str, models: dict[str, tuple[Path, Any]], data: Path, tmp_path: Path
) -> None:
    folder = models[name][0]
    how: dict[str, Any] = {"train_iters": 3, "eval_split": 0.2, "device": "cpu", "seq_length": 40}
    how["dist_ckpt_optim_format"] = "dp_reshardable"  # buckets, in Megatron's order of parameters
    tune(folder, tmp_path / "reference", data, **how)
    assert (
        tune(folder, tmp_path / "out", data, **how, exit_duration_in_mins=1e-9).outcome.iteration
        == 1
    )
    tune(folder, tmp_path / "out", data, **how)
    assert curve(tmp_path / "out") == curve(tmp_path / "reference")
    assert verify(tmp_path / "out", tmp_path / "reference").exit_status == 0


def test_what_only_decoders_do_is_refused(
    models: dict[str, tuple[Path, Any]], pairs: Path, tmp_path: Path
) -> None:
    folder = models["t5"][0]
    with raises(UsageError, "the model has an encoder"):
        evaluate(folder, tasks="arc_easy")
    with raises(UsageError, "--stride"):
        evaluate(folder, data=pairs, window=20, stride=10)
    for name, value in (("lora_rank", 4), ("fp8_recipe", "delayed"), ("teacher", folder)):
        with raises(UsageError, "is for decoders, and the model has an encoder"):
            tune(folder, tmp_path / "out", pairs, **{name: value})
    with raises(UsageError, "the model has an encoder", hint="--tp"):
        generate(folder, prompt=["Why?"], stream_layers=True, **CPU)
    with raises(LayoutError, "encoder_pp does not say", hint="--encoder-pp 1"):
        tune(folder, tmp_path / "out", pairs, pp=2)
    with raises(LayoutError, "context parallelism"):
        tune(folder, tmp_path / "out", pairs, cp=2)


def on_rank(rank: int, size: int, model: str, out: str, data: str, more: dict[str, Any]) -> None:
    tune(model, out, data, device="cpu", seq_length=40, **more)


LAYOUTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("t5", 2, {"tp": 2}),
    ("t5", 2, {"tp": 2, "sequence_parallel": True}),
    ("t5", 3, {"pp": 3, "encoder_pp": 1}),
    ("flan", 4, {"pp": 4, "encoder_pp": 1, "dist_ckpt_optim_format": "dp_reshardable"}),
    ("t5", 4, {"pp": 2, "encoder_pp": 1, "dp": 2, "use_distributed_optimizer": True}),
    ("mt5", 2, {"pp": 2, "encoder_pp": 1, "dist_ckpt_optim_format": "dp_reshardable"}),
    ("umt5", 4, {"pp": 4, "encoder_pp": 2, "dist_ckpt_optim_format": "dp_reshardable"}),
    ("umt5", 4, {"tp": 2, "pp": 2, "encoder_pp": 1, "dist_ckpt_optim_format": "dp_reshardable"}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "more"), LAYOUTS, ids=str)
def test_a_run_goes_on_at_another_layout(
    name: str,
    size: int,
    more: dict[str, Any],
    data: Path,
    tmp_path: Path,
) -> None:
    """Two steps on one rank, and two on several, draw the curve of four on one; so do all four on
    several, and the weights are the same."""
    model, whole, out = str(tmp_path / "hf"), tmp_path / "whole", tmp_path / "out"
    keys = tiny_t5.KEYS.get(name, {"family": name, "fill": tiny_t5.untie})
    tiny_model(**{"family": "t5", "sizes": tiny_t5.SIZES} | keys, folder=tmp_path / "hf")
    tiny_t5.save_tokenizer(tmp_path / "hf")
    how: dict[str, Any] = {"lr_decay_iters": 4, "save_interval": 2, "global_batch_size": 4}
    how["adam_eps"] = 1e-4  # steps of small gradients are not of the size of large ones
    run_world(on_rank, 1, model, str(whole), str(data), how | {"train_iters": 4})
    run_world(on_rank, 1, model, str(out), str(data), how | {"train_iters": 2})
    run_world(on_rank, size, model, str(out), str(data), how | {"train_iters": 4} | more)
    fresh = tmp_path / "fresh"
    run_world(on_rank, size, model, str(fresh), str(data), how | {"train_iters": 4} | more)
    curves = [
        [(x["loss"], x["grad_norm"]) for x in read_log(f / "log.jsonl") if "loss" in x]
        for f in (whole, out, fresh)
    ]
    for ours in curves[1:]:
        for pair, expected in zip(ours, curves[0], strict=True):
            assert pair == pytest.approx(expected, rel=1e-6)
        assert len(ours) == 4
    for folder in (out, fresh):
        assert verify(folder, whole, rtol=0, atol=1e-6).exit_status == 0


def on_stages(rank: int, size: int, model: str, file: str, more: dict[str, Any]) -> Any:
    how = CPU | more
    texts = generate(model, prompt=PROMPTS, max_new_tokens=12, batch_size=3, **how)
    assert isinstance(texts, GenerateReport)
    score = evaluate(model, data=file, **how)
    assert isinstance(score, EvaluateReport)
    return [answer.text for answer in texts.answers], score.loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("t5", {"pp": 3, "encoder_pp": 2}),
        ("flan", {"pp": 4, "encoder_pp": 1}),
        ("umt5", {"pp": 2, "encoder_pp": 1}),
    ],
    ids=str,
)
def test_stages_write_and_score_what_one_process_does(
    name: str, more: dict[str, Any], models: dict[str, tuple[Path, Any]], pairs: Path
) -> None:
    model = str(models[name][0])
    (texts, loss), *_ = run_world(on_stages, 1, model, str(pairs), {})
    assert len(set(texts)) > 2
    for found in run_world(on_stages, more["pp"], model, str(pairs), more):
        assert found[0] == texts
        assert found[1] == pytest.approx(loss, rel=1e-6)
