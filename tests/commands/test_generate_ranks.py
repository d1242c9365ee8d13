"""`generate` and `evaluate` of experts under torchrun: every layout says what one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megtool import evaluate, generate, reshard
from megtool.commands.generate import GenerateReport
from megtool.commands.reports.evaluate import EvaluateReport
from tests.support.models import tiny_text
from tests.support.worlds.torchrun import torchrun

pytestmark = pytest.mark.slow
PROMPTS = ["Hello", "b", "The end"]
TEXT = "It was a dark and stormy night; the rain fell in torrents, except at intervals.\n" * 3
layouts = pytest.mark.parametrize(
    "axes",
    [
        *(["--tp", "2"], ["--pp", "2"], ["--ep", "2"], ["--tp", "2", "--ep", "2", "--etp", "1"]),
        ["--cp", "2"],
        pytest.param(["--cp", "2", "--ep", "2"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with a tokenizer, as torch_dist of another layout than any above."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("experts")
    config = transformers.Qwen3MoeConfig(
        vocab_size=tiny_text.VOCABULARY,
        hidden_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        eos_token_id=tiny_text.END,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).float()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(root / "hf")
    tiny_text.save_tokenizer(root / "hf")
    (root / "text.txt").write_text(TEXT)
    reshard(root / "hf", root / "dist", to="torch_dist", fsync=False, tp=4, ep=2, etp=1, dp=1)
    return root / "dist"


@layouts
def test_the_same_text(checkpoint: Path, axes: list[str]) -> None:
    alone = generate(checkpoint, prompt=PROMPTS, max_new_tokens=12, device="cpu")
    assert isinstance(alone, GenerateReport)
    prompts = [word for prompt in PROMPTS for word in ("-p", prompt)]
    line = ["generate", str(checkpoint), *prompts, "--max-new-tokens", "12", "--device", "cpu"]
    done = torchrun(2, *line, *axes, "--json")
    assert done.returncode == 0, done.stderr
    found = [a["text"] for a in json.loads(done.stdout)["answers"]]
    assert found == [a.text for a in alone.answers]
    assert len(set(found)) == len(PROMPTS)


@pytest.mark.parametrize(
    "axes",
    [
        ["--tp", "2"],
        ["--pp", "2"],
        ["--ep", "2"],
        ["--tp", "2", "--ep", "2", "--etp", "1"],
        ["--cp", "2"],
        ["--context-parallel-size", "2", "--ep", "2"],
    ],
    ids=" ".join,
)
def test_the_same_score(checkpoint: Path, axes: list[str]) -> None:
    text = checkpoint.parent / "text.txt"
    alone = evaluate(checkpoint, data=text, window=32, device="cpu")
    assert isinstance(alone, EvaluateReport)
    line = ["evaluate", str(checkpoint), "--data", str(text), "--window", "32", "--device", "cpu"]
    done = torchrun(2, *line, *axes, "--json", "-q")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loss"] == pytest.approx(alone.loss, rel=1e-6)
    assert found["tokens"] == alone.tokens
