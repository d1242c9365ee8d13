"""`megtool generate`: the same text from every format and layout, and errors that help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import generate, reshard
from megtool.cli.app import main
from megtool.commands.demo import demo_weights
from megtool.commands.reports.generate import Answer, GeneratePlan, GenerateReport
from megtool.console import printable
from megtool.errors import (
    FormatError,
    MappingError,
    MegtoolError,
    OutOfMemoryError,
    UsageError,
)
from megtool.inference.runtime import on_ranks
from megtool.options.groups import RuntimeOptions
from tests.support.errors import raises
from tests.support.models import tiny_llama, tiny_text
from tests.support.models.mtp_reference import save_tunable
from tests.support.worlds.torchrun import torchrun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_text.save(tmp_path_factory.mktemp("generate") / "hf")


def texts(source: Path, **options: Any) -> list[str]:
    report = generate(source, device="cpu", max_new_tokens=12, **options)
    assert isinstance(report, GenerateReport)
    return [a.text for a in report.answers]


PROMPTS = ("Hello", "The end")


def test_log_probabilities_come_as_lines_of_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(folder), "-p", "Hello", "-p", "b", "--max-new-tokens", "3"]
    assert main([*words, "--logprobs", "2", "--prompt-logprobs", "--device", "cpu", "-q"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [len(a["logprobs"]) for a in (first, second)] == [3, 3]
    assert [t["text"] for t in first["prompt_logprobs"]] == list("ello")
    assert "prompt_logprobs" not in second, "the only token of the prompt has nothing before it"
    for token in first["logprobs"]:
        assert token["top"][0] == {k: token[k] for k in ("token", "text", "logprob")}
        assert token["top"][1]["logprob"] < token["logprob"] < 0
    assert main([*words, "--logprobs", "0", "--device", "cpu", "-q"]) == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[0])
    assert [t["logprob"] for t in plain["logprobs"]] == [t["logprob"] for t in first["logprobs"]]
    assert plain["text"] == first["text"]
    for wrong in (["--prompt-logprobs"], ["--logprobs", "1", "--speculative", "mtp"]):
        assert main([*words, *wrong]) == 2
    assert "drafts are verified several at a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("to", "layout"),
    [
        ("torch_dist", {"tp": 2, "pp": 2}),
        ("megatron", {"tp": 2}),
        ("dcp", {}),
        ("zarr", {}),
    ],
)
def test_every_format_writes_the_same_text(
    folder: Path, tmp_path: Path, to: str, layout: dict[str, int]
) -> None:
    reshard(folder, tmp_path / "out", to=to, **layout)
    like = {} if (tmp_path / "out").is_dir() and to != "dcp" else {"like": folder}
    assert texts(tmp_path / "out", prompt=PROMPTS, **like) == texts(folder, prompt=PROMPTS)


def test_layers_on_demand_write_the_same_text(folder: Path) -> None:
    expected = texts(folder, prompt=PROMPTS)
    assert texts(folder, prompt=PROMPTS, stream_layers=True) == expected


def test_a_chat_is_put_into_the_template(folder: Path) -> None:
    asked = texts(folder, prompt=["Hi"], chat=True, system="Be brief.")
    spelled = "<s>system: Be brief.</s><s>user: Hi</s><s>assistant: "
    assert asked == texts(folder, prompt=[spelled])
    assert asked != texts(folder, prompt=["Hi"])


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("p.txt", "Hello\n\nThe end\n", None),
        ("p.jsonl", '{"prompt": "Hello"}\n{"prompt": "The end"}\n', None),
        ("p.jsonl", '{"q": "Hello"}\n{"q": "The end"}\n', "q"),
    ],
)
def test_prompts_of_a_file_are_answered_in_order(
    folder: Path, tmp_path: Path, name: str, content: str, field: str | None
) -> None:
    (tmp_path / name).write_text(content)
    heard: list[Answer] = []
    report = generate(
        folder,
        prompts=tmp_path / name,
        field=field,
        max_new_tokens=12,
        batch_size=1,
        device="cpu",
        on_answer=heard.append,
    )
    assert isinstance(report, GenerateReport)
    assert [a.text for a in heard] == texts(folder, prompt=PROMPTS)
    assert [a.prompt for a in heard] == list(PROMPTS)
    assert list(report.lines()) == [], "what was handed on is not printed again"


def test_messages_of_a_file_are_a_chat(folder: Path, tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "Hi"}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(record))
    assert texts(folder, prompts=tmp_path / "p.jsonl") == texts(folder, prompt=["Hi"], chat=True)


def test_the_command_line_prints_the_text_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = texts(folder, prompt=["Hello"])[0]
    line = ["generate", str(folder), "-p", "Hello", "--max-new-tokens", "12", "--device", "cpu"]
    assert main([*line, "-q"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == printable(expected) + "\n"
    assert main([*line, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["answers"][0]["text"] == expected
    assert report["tokens"] == report["answers"][0]["tokens"] <= 12
    assert "tokens/s" in err


def test_a_dry_run_loads_nothing(folder: Path) -> None:
    plan = generate(folder, prompt=PROMPTS, max_new_tokens=5, dry_run=True, tp=2)
    assert isinstance(plan, GeneratePlan)
    assert (plan.num_prompts, plan.max_tokens, plan.layout) == (2, 10, "tp=2")
    assert "prompts     2, of 12 tokens in all" in "\n".join(plan.lines())


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def smaller_vocabulary(folder: Path) -> None:
    tiny_llama.save(folder.parent / "small", vocab_size=200)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((folder.parent / "small" / name).read_bytes())


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ({}, 2, "no prompt"),
        ({"prompt": ["a"], "prompts": "x"}, 2, "--prompt and --prompts"),
        ({"prompts": "nowhere.txt"}, 3, "cannot read"),
        ({"prompt": ["a"], "system": "b"}, 2, "--system has no effect without --chat"),
        ({"prompt": ["a" * 200]}, 2, "the model has 128 positions"),
        ({"prompt": ["a"], "device": "gpu"}, 2, "no device 'gpu'"),
        ({"prompt": ["a"], "dtype": "int8"}, 2, "dtype is 'int8'"),
        ({"prompt": ["a"], "top_k": 3}, 2, "top_k with temperature 0"),
        ({"prompt": ["a"], "stop": [""]}, 2, "a stop string is empty"),
        ({"prompt": ["a"], "tp": 2}, 2, "--tp 2 needs 2 processes"),
        ({"prompt": ["a"], "tokenizer": "nowhere"}, 3, "not a folder with a tokenizer"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path, options: dict[str, Any], status: int, said: str
) -> None:
    with pytest.raises(MegtoolError) as caught:
        generate(folder, **{"device": "cpu", **options})
    assert caught.value.exit_status == status
    assert said in caught.value.message


def test_options_are_refused_before_anything_is_loaded(folder: Path) -> None:
    for wrong, said in (({"stop": [""]}, "a stop string"), ({"tp": 3}, "tp=3 does not divide")):
        with pytest.raises(UsageError, match=said):
            generate(folder, prompt=["a"], dry_run=True, **wrong)
    with pytest.raises(UsageError, match="--max-new-tokens is 0"):
        generate(folder, prompt=["a"], max_new_tokens=0, dry_run=True)


def test_memory_that_a_pass_lacks_is_said() -> None:
    """Of torch's own errors and numpy's; what is not about memory stays what it is."""
    for ask in (lambda: torch.empty(1 << 49, dtype=torch.uint8), lambda: np.empty(1 << 49, "u1")):
        with (
            pytest.raises(OutOfMemoryError, match=r"cpu has no 512(\.0*)? TiB left") as caught,
            on_ranks(RuntimeOptions(device="cpu"), less="--batch-size 1"),
        ):
            ask()
        assert caught.value.hint == "--batch-size 1"
    with pytest.raises(RuntimeError, match="shape"), on_ranks(RuntimeOptions(device="cpu")):
        torch.ones(3) + torch.ones(2, 2).view(5)


@pytest.mark.parametrize(
    ("harm", "kind", "said"),
    [
        (without_tokenizer, FormatError, "no tokenizer"),
        (smaller_vocabulary, MappingError, "vocabulary of 258, and the model one of 200"),
    ],
)
def test_a_tokenizer_that_does_not_serve_is_refused(
    tmp_path: Path, harm: Callable[[Path], None], kind: type[MegtoolError], said: str
) -> None:
    pytest.importorskip("transformers")
    harm(tiny_text.save(tmp_path / "hf"))
    with raises(kind, match=said, hint="--tokenizer FOLDER"):
        generate(tmp_path / "hf", prompt=["a"], device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["--tp", "--pp"])
def test_several_processes_write_the_same_text_once(folder: Path, axis: str) -> None:
    chance = ["--temperature", "0.8", "--seed", "3"]
    line = ["generate", str(folder), "-p", "Hello", "-p", "b", "--max-new-tokens", "12", *chance]
    done = torchrun(2, *line, axis, "2", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    alone = texts(folder, prompt=["Hello", "b"], temperature=0.8, seed=3)
    assert [a["text"] for a in report["answers"]] == alone


@pytest.mark.slow
def test_a_real_model_writes_what_it_writes_in_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = demo_weights()
    reshard(gguf, tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "tp3", to="torch_dist", tp=3, pp=2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    asked = ["What is the capital of France? Answer in one sentence.", "Count to five."]
    expected = []
    for text in asked:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        new = peer.generate(**ids, max_new_tokens=24, do_sample=False)[0]
        expected.append(
            tokenizer.decode(new[ids["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    del peer
    for source in (tmp_path / "hf", tmp_path / "tp3", gguf):
        for rows in (1, 2):
            report = generate(
                source,
                prompt=asked,
                chat=True,
                max_new_tokens=24,
                dtype="float32",
                device="cpu",
                batch_size=rows,
            )
            assert isinstance(report, GenerateReport)
            assert [a.text for a in report.answers] == expected, (source, rows)


def test_a_draft_head_changes_how_fast_a_text_comes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("modelopt.torch.speculative", reason="ModelOpt makes the head")
    from megtool.source.open import open_decoder
    from megtool.train.features.eagle_head import make_eagle_config
    from tests.support.models.eagle_heads import modelopt_eagle, save_head

    config = make_eagle_config({}, open_decoder(folder).config, torch.float32, file="default")
    head = save_head(modelopt_eagle(folder, config), tmp_path / "head")
    capsys.readouterr()  # ModelOpt prints
    words = ["generate", str(folder), "-p", "Hello", "--max-new-tokens", "12", "--device", "cpu"]
    assert main([*words, "--speculative", str(head), "--num-drafts", "2", "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [a["text"] for a in report["answers"]] == texts(folder, prompt=("Hello",))
    assert len(report["acceptance_rates"]) == 2
    assert report["acceptance_length"] == pytest.approx(1 + sum(report["acceptance_rates"]))


def test_drafts_change_how_fast_a_text_comes_and_not_the_text(folder: Path, tmp_path: Path) -> None:
    save_tunable(tmp_path / "mtp", depths=1)
    reshard(tmp_path / "mtp", tmp_path / "megatron", to="torch_dist", tp=2)
    plain = texts(tmp_path / "mtp", prompt=PROMPTS)
    for source in (tmp_path / "mtp", tmp_path / "megatron"):
        report = generate(
            source,
            device="cpu",
            max_new_tokens=12,
            prompt=PROMPTS,
            speculative="mtp",
            tokenizer=tmp_path / "mtp",
        )
        assert isinstance(report, GenerateReport)
        assert [a.text for a in report.answers] == plain
        assert 0 <= report.num_accepted <= report.num_drafted
        assert report.num_drafted > 10
        assert f"% of {report.num_drafted} drafted tokens accepted" in report.summary()
        assert report.to_json()["num_drafted"] == report.num_drafted
    with pytest.raises(UsageError, match="no layers of multi-token prediction"):
        texts(folder, prompt=PROMPTS, speculative="mtp")
    with pytest.raises(FormatError, match="no draft head"):
        texts(folder, prompt=PROMPTS, speculative=str(folder))
    with pytest.raises(UsageError, match="has no effect without a draft head"):
        texts(folder, prompt=PROMPTS, num_drafts=2)
    with pytest.raises(UsageError, match="--stream-layers"):
        texts(tmp_path / "mtp", prompt=PROMPTS, speculative="mtp", stream_layers=True)
