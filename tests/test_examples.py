"""The example scripts run on a small model and print what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard
from megtool.commands.demo import demo_weights
from megtool.options.layout import ParallelConfig
from tests.support.checkpoints import trained
from tests.support.checkpoints.fp8_trained import rank_files
from tests.support.models import tiny_llama, tiny_text, tiny_tokenizer

ARGUMENTS = {
    "evaluate_perplexity.py": (["text", "out", "text.txt"], "agreement   100.00%"),
    "export_for_engines.py": (["text", "scratch"], "no findings"),
    "export_fp8_trained.py": (["fp8/ranks", "scratch"], "on no data"),
    "finetune.py": (["text", "tuned", "text.txt"], "4 of 4"),
    "generate_text.py": (["text", "Once"], "--- seed 2"),
    "inspect_checkpoint.py": (["hf"], "family      llama"),
    "quantize_twice.py": (["text", "scratch", "text.txt"], "perplexity"),
    "reshard_optimizer.py": (["trained", "out"], "equal"),
    "reshard_tp.py": (["hf", "out"], "tp=3 pp=1"),
    "tokenize_text.py": (["tokenizer", "corpus.jsonl", "tokens"], "3 documents, 5 rows of 8"),
    "verify_roundtrip.py": (["hf", "scratch"], "equal"),
}


REAL = "finetune_and_resume.py"
"""The example that is run on a real model."""


def test_every_example_is_run_here(checkout: Path) -> None:
    assert {p.name for p in (checkout / "examples").glob("*.py")} == {*ARGUMENTS, REAL}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_example_runs(name: str, checkout: Path, tmp_path: Path, materialize: Any) -> None:
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 48}
    tiny_llama.save(tmp_path / "hf", **shape)
    tiny_text.save(tmp_path / "text", hidden_size=48, **shape)
    (tmp_path / "text.txt").write_text("When in the Course of human events, it becomes necessary")
    trained.write(tmp_path / "full", trained.config(), ParallelConfig(), materialize)
    reshard(tmp_path / "full", tmp_path / "trained", optimizer_format="dp_reshardable", dp=2)
    rank_files(tmp_path / "fp8")
    tiny_tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "corpus.jsonl").write_text('{"text": "the model reads a text again"}\n' * 3)
    arguments, promise = ARGUMENTS[name]
    assert promise in output(checkout, tmp_path, name, *arguments)


@pytest.mark.slow
def test_a_real_model_is_finetuned_killed_and_goes_on(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    reshard(demo_weights(), tmp_path / "hf")
    text = checkout / "megtool/data/founding_documents.txt"
    short = ["--train-iters", "10", "--save-interval", "4", "--seq-length", "64"]
    more = ["--data", str(text), "--eval-split", "0.05", *short]
    said = output(checkout, tmp_path, REAL, "hf", "scratch", *more)
    assert "killed      both processes, after step" in said
    assert "from 4 on" in said
    assert "curves      of 10 steps are equal" in said
    assert (tmp_path / "scratch/killed/hf/model.safetensors").is_file()


def output(checkout: Path, folder: Path, name: str, *arguments: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, str(checkout / "examples" / name), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
