"""Models that score labels: converted, evaluated and fine-tuned as transformers has them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from megtool import evaluate, export, finetune, generate, quantize, reshard, verify
from megtool.commands.reports.evaluate import LabelReport
from megtool.data.labeled_texts import LabeledDataset
from megtool.errors import FormatError, MappingError, UsageError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.options.config_file import build_options
from megtool.source.open import open_decoder, open_source
from megtool.train.datasets import open_datasets
from megtool.train.options.config import TrainConfig
from megtool.train.run_log import read_log
from tests.support.errors import raises
from tests.support.models.label_models import LABEL_MODELS, save_label_model
from tests.support.worlds.torchrun import torchrun

transformers = pytest.importorskip("transformers")

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "runs",
    "far",
    "away",
]
STEPS, ROWS = 5, 4


def some_text(draws: random.Random) -> str:
    return " ".join(draws.choices(WORDS, k=draws.randint(1, 9)))


def write_records(path: Path, kind: str, count: int = 24) -> Path:
    """Records of labeled texts or pairs of answers."""
    draws = random.Random(0)
    records: list[dict[str, Any]] = []
    for n in range(count):
        match kind:
            case "classes":
                label = n % 3 if n % 2 else f"label {n % 3}"
                records.append({"text": some_text(draws), "label": label})
            case "numbers":
                records.append({"text": some_text(draws), "label": draws.uniform(-2, 2)})
            case _:
                sides = {side: some_text(draws) for side in ("chosen", "rejected")}
                records.append(sides | {"prompt": some_text(draws) + ": "})
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def reward_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """What transformers scores a text with, alone: [L]."""
    scores: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return scores


@pytest.mark.parametrize(
    "family",
    [
        f if f in ("qwen3", "modernbert") else pytest.param(f, marks=pytest.mark.slow)
        for f in LABEL_MODELS
    ],
)
def test_scores_and_round_trips_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_label_model(family, tmp_path / "hf")
    ids = torch.randint(3, 250, (2, 11))
    with torch.no_grad():
        expected = model(ids).logits
        source = open_source(tmp_path / "hf")
        found = load(source, dtype="float32")(Batch(tokens_BS=ids))
    place = 0 if source.config.bidirectional else -1
    torch.testing.assert_close(found[:, place], expected, atol=1e-5, rtol=0)
    reshard(tmp_path / "hf", tmp_path / "td", to="torch_dist", tp=2, pp=2, fsync=False)
    reshard(tmp_path / "td", tmp_path / "rank files", to="megatron", tp=2, fsync=False)
    reshard(tmp_path / "rank files", tmp_path / "dcp", to="dcp", fsync=False)
    reshard(tmp_path / "dcp", tmp_path / "back", to="hf", fsync=False)
    assert verify(tmp_path / "hf", tmp_path / "back").verdict == "equal"
    config, own = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("back", "hf"))
    assert config == own
    again = type(model).from_pretrained(tmp_path / "back", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "classes"),
        pytest.param("llama", "numbers", marks=pytest.mark.slow),
        ("llama", "preferences"),
        pytest.param("roberta", "classes", marks=pytest.mark.slow),
        *(
            pytest.param(f, "classes", marks=pytest.mark.slow)
            for f in LABEL_MODELS
            if f not in ("llama", "roberta", "mixtral")
        ),
        pytest.param("bert_post_norm", "preferences", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_transformers_and_adamw(family: str, kind: str, tmp_path: Path) -> None:
    model = save_label_model(family, tmp_path / "hf", num_labels=3 if kind == "classes" else 1)
    file = write_records(tmp_path / "data.jsonl", kind)
    how: dict[str, Any] = {
        "train_iters": STEPS,
        "global_batch_size": ROWS,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "device": "cpu",
    }
    finetune(tmp_path / "hf", tmp_path / "out", data=[str(file)], fsync=False, threads=1, **how)
    losses = [line["loss"] for line in read_log(tmp_path / "out/log.jsonl") if "loss" in line]
    source = open_decoder(tmp_path / "hf", encoders=True, labels=True)
    data = open_datasets(
        build_options(TrainConfig, {"data": (str(file),), **how}), source, cache=None
    ).train
    assert isinstance(data, LabeledDataset)
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for step, ours in enumerate(losses):
        texts = [data.labeled.texts[data.number_of(ROWS * step + n)] for n in range(ROWS)]
        scores = [[reward_of(model, side) for side in text.sides] for text in texts]
        if kind == "preferences":
            loss = torch.stack([-F.logsigmoid(a - b) for a, b in scores]).mean()
        else:
            logits = torch.stack([s[0] for s in scores])
            labels = torch.tensor([t.label for t in texts])
            if kind == "numbers":
                loss = F.mse_loss(logits[:, 0], labels.to(torch.int32).view(torch.float32))
            else:
                loss = F.cross_entropy(logits, labels)
        assert ours == pytest.approx(loss.item(), abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert len(losses) == STEPS
    export(tmp_path / "out", tmp_path / "trained", to="hf")
    trained = type(model).from_pretrained(tmp_path / "trained", dtype=torch.float32)
    for name, parameter in trained.named_parameters():
        # The gradient of a key's bias is nothing but rounding: softmax ignores it.
        if not name.endswith(("key.bias", "c_attn.bias")):
            assert (parameter - model.get_parameter(name)).abs().max() < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classes", "preferences"])
@pytest.mark.parametrize(
    "axes",
    [
        ["--tp", "2"],
        ["--tp", "2", "--sequence-parallel"],
        ["--pp", "2"],
        ["--cp", "2"],
        [],
        ["--tp", "2", "--sequence-parallel", "--pp", "2"],
        ["--tp", "2", "--sequence-parallel", "--cp", "2"],
    ],
    ids=" ".join,
)
def test_every_layout_trains_alike(kind: str, axes: list[str], tmp_path: Path) -> None:
    save_label_model("llama", tmp_path / "hf", num_labels=3 if kind == "classes" else 1)
    file = write_records(tmp_path / "data.jsonl", kind)
    other = write_records(tmp_path / "other.jsonl", kind, count=7)
    words = ["--data", str(file), "--eval-data", str(other), "--lr", "1e-3"]
    words += ["--train-iters", "4", "--global-batch-size", "4", "--no-fsync", "--device", "cpu"]
    how = {"train_iters": 4, "global_batch_size": 4, "lr": 1e-3, "device": "cpu", "fsync": False}
    alone = finetune(
        tmp_path / "hf", tmp_path / "alone", data=[str(file)], eval_data=str(other), **how
    )
    sizes = [int(n) for n in axes if n.isdigit()]
    world = 4 if len(sizes) == 2 else 2
    done = torchrun(world, "finetune", str(tmp_path / "hf"), str(tmp_path / "out"), *words, *axes)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = {n: list(read_log(tmp_path / n / "log.jsonl")) for n in ("alone", "out")}
    for key in ("loss", "grad_norm", "eval_loss"):
        ours, expected = ([x[key] for x in lines[n] if key in x] for n in ("out", "alone"))
        assert ours == pytest.approx(expected, abs=1e-5), key
    labels = [x["labels"] for x in lines["out"] if "labels" in x]
    assert labels == [4] * 4
    assert alone.outcome.iteration == 4
    for folder in ("alone", "out"):
        export(tmp_path / folder, tmp_path / f"{folder} hf", to="hf")
    model = transformers.AutoModelForSequenceClassification
    first, second = (model.from_pretrained(tmp_path / f"{n} hf") for n in ("alone", "out"))
    for name, parameter in first.named_parameters():
        assert (parameter - second.get_parameter(name)).abs().max() < 1e-4, name


@pytest.mark.parametrize(("family", "kind"), [("llama", "classes"), ("roberta", "classes")])
def test_classes_are_evaluated_as_by_transformers(family: str, kind: str, tmp_path: Path) -> None:
    model = save_label_model(family, tmp_path / "hf")
    file = write_records(tmp_path / "data.jsonl", kind)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        logits = torch.stack([reward_of(model, tokenizer(r["text"])["input_ids"]) for r in records])
    labels = torch.arange(len(records)) % 3
    out = tmp_path / "predictions.jsonl"
    report = evaluate(tmp_path / "hf", data=str(file), predictions=out, batch_size=5, device="cpu")
    assert isinstance(report, LabelReport)
    assert report.loss == pytest.approx(float(F.cross_entropy(logits, labels)), abs=1e-5)
    assert report.accuracy == float((logits.argmax(-1) == labels).double().mean())
    assert sum(c["texts"] for c in report.classes.values()) == len(records)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    best = [f"label {n}" for n in logits.argmax(-1).tolist()]
    assert [line["label"] for line in lines] == best
    assert [line["expected"] for line in lines] == [f"label {n}" for n in labels.tolist()]
    shares = torch.tensor([list(line["probabilities"].values()) for line in lines])
    torch.testing.assert_close(shares, logits.softmax(-1), atol=1e-5, rtol=0)
    unlabeled = tmp_path / "unlabeled.jsonl"
    unlabeled.write_text("".join(json.dumps({"text": r["text"]}) + "\n" for r in records))
    again = evaluate(tmp_path / "hf", data=str(unlabeled), predictions=out, device="cpu")
    assert isinstance(again, LabelReport)
    assert (again.labeled, again.loss, again.accuracy) == (0, None, None)
    assert [json.loads(x)["label"] for x in out.read_text().splitlines()] == best


def test_rewards_and_numbers_are_evaluated(tmp_path: Path) -> None:
    model = save_label_model("llama", tmp_path / "hf", num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")

    def reward(text: str) -> float:
        with torch.no_grad():
            return float(reward_of(model, tokenizer(text)["input_ids"]))

    pairs = write_records(tmp_path / "pairs.jsonl", "preferences")
    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    margins = torch.tensor(
        [reward(r["prompt"] + r["chosen"]) - reward(r["prompt"] + r["rejected"]) for r in records]
    )
    report = evaluate(tmp_path / "hf", data=str(pairs), device="cpu")
    assert isinstance(report, LabelReport)
    assert report.loss == pytest.approx(float(-F.logsigmoid(margins).mean()), abs=1e-5)
    assert report.accuracy == float((margins > 0).double().mean())
    numbers = write_records(tmp_path / "numbers.jsonl", "numbers")
    records = [json.loads(line) for line in numbers.read_text().splitlines()]
    errors = torch.tensor([reward(r["text"]) - r["label"] for r in records])
    report = evaluate(tmp_path / "hf", data=str(numbers), device="cpu")
    assert isinstance(report, LabelReport)
    assert report.loss == pytest.approx(float(errors.square().mean()), abs=1e-5)
    assert report.mean_error == pytest.approx(float(errors.abs().mean()), abs=1e-5)
    for option in ({"tasks": "arc_easy"}, {"join": True}, {"against": tmp_path / "hf"}):
        with raises(UsageError, "is for models of tokens"):
            evaluate(tmp_path / "hf", data=str(numbers), device="cpu", **option)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [["--tp", "2"], ["--pp", "2"], ["--cp", "2"]], ids=" ".join)
def test_every_layout_evaluates_alike(axes: list[str], tmp_path: Path) -> None:
    save_label_model("llama", tmp_path / "hf")
    file = write_records(tmp_path / "data.jsonl", "classes")
    alone = evaluate(tmp_path / "hf", data=str(file), device="cpu")
    assert isinstance(alone, LabelReport)
    words = ("evaluate", str(tmp_path / "hf"), "--data", str(file), "--device", "cpu", "--json")
    done = torchrun(2, *words, *axes)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["loss"] == pytest.approx(alone.loss, abs=1e-6)
    assert report["classes"] == alone.classes


def test_a_run_with_a_validation_split_resumes(tmp_path: Path) -> None:
    save_label_model("llama", tmp_path / "hf")
    file = write_records(tmp_path / "data.jsonl", "classes")
    how: dict[str, Any] = {"data": [str(file)], "eval_split": 0.25, "device": "cpu", "lr": 1e-3}
    how |= {"global_batch_size": 4, "fsync": False, "lr_decay_style": "constant"}
    whole = finetune(tmp_path / "hf", tmp_path / "whole", train_iters=4, **how)
    finetune(tmp_path / "hf", tmp_path / "out", train_iters=2, **how)
    again = finetune(tmp_path / "hf", tmp_path / "out", train_iters=4, **how)
    assert again.start_iteration == 2
    assert again.last_loss == whole.last_loss
    assert again.evaluations[-1] == whole.evaluations[-1]


def test_what_scores_labels_writes_no_text(tmp_path: Path) -> None:
    save_label_model("llama", tmp_path / "hf")
    with raises(MappingError, "scores 3 labels", hint="megtool evaluate"):
        generate(tmp_path / "hf", prompt=["a"], device="cpu")
    with raises(MappingError, "scores labels"):
        export(tmp_path / "hf", tmp_path / "m.gguf", to="gguf")
    with raises(UsageError, "--lora-rank is for models of tokens"):
        file = write_records(tmp_path / "data.jsonl", "classes")
        finetune(tmp_path / "hf", tmp_path / "out", data=[str(file)], lora_rank=4, device="cpu")


@pytest.mark.parametrize(
    ("record", "num_labels", "error", "words"),
    [
        ({"text": "a"}, 3, FormatError, "line 2 has no 'label'"),
        ({"text": "a", "label": 3}, 3, FormatError, "the label 3 is none of the model's 3"),
        ({"text": "a", "label": "other"}, 3, FormatError, "'other' is none"),
        ({"text": "a", "label": "good"}, 1, FormatError, "is no finite number"),
        ({"text": "a", "label": 1e300}, 1, FormatError, "is no finite number"),
        ({"text": "", "label": 1}, 3, FormatError, "line 2 has an empty text"),
        ({"label": 1}, 3, FormatError, "none of the fields"),
    ],
)
def test_bad_records_are_named(
    record: dict[str, Any],
    num_labels: int,
    error: type[FormatError],
    words: str,
    tmp_path: Path,
) -> None:
    save_label_model("llama", tmp_path / "hf", num_labels=num_labels)
    lines = [{"text": "good", "label": 1}, record]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in lines))
    with raises(error, words):
        finetune(tmp_path / "hf", tmp_path / "out", data=[str(file)], device="cpu", dry_run=True)


def test_pairs_need_one_label_and_two_answers(tmp_path: Path) -> None:
    save_label_model("llama", tmp_path / "hf")
    file = write_records(tmp_path / "pairs.jsonl", "preferences")
    with raises(UsageError, "the model 3 labels", hint="a reward model has one label"):
        finetune(tmp_path / "hf", tmp_path / "out", data=[str(file)], device="cpu", dry_run=True)
    save_label_model("llama", tmp_path / "reward", num_labels=1)
    file.write_text('{"chosen": "a", "rejected": "b"}\n{"chosen": "a", "rejected": ["b"]}\n')
    with raises(FormatError, "line 2: 'rejected' is no text"):
        finetune(tmp_path / "reward", tmp_path / "o", data=[str(file)], device="cpu", dry_run=True)


def test_the_head_is_not_quantized(tmp_path: Path) -> None:
    model = save_label_model("llama", tmp_path / "hf")
    quantize(
        tmp_path / "hf", tmp_path / "int8", recipe="int8_weight_only", device="cpu", fsync=False
    )
    with safe_open(tmp_path / "int8/model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("score.weight"), model.score.weight)
        assert file.get_tensor("model.layers.0.self_attn.q_proj.weight").dtype == torch.int8
    config = json.loads((tmp_path / "int8/config.json").read_text())
    assert "score" in config["quantization_config"]["ignore"]


def test_other_heads_are_refused(tmp_path: Path) -> None:
    save_label_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForTokenClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises(MappingError, "LlamaForTokenClassification", "those of whole texts"):
        open_decoder(tmp_path, labels=True)
