"""Verbs on models that nest a text model: it alone runs and is quantized, and towers stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, finetune, lint, quantize, reshard, verify
from megtool.cli.app import main
from megtool.errors import MappingError
from megtool.quantize.report import QuantizeReport
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.folders import read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models import tiny_text
from tests.support.models.nested_cases import CASES, NestedCase
from tests.support.quant.quantize_sizes import SMALL

GEMMA, MISTRAL, LLAMA, QWEN, DELTA = (
    next(case for case in CASES if case.family == name)
    for name in ("gemma3_multimodal", "mistral3", "llama4_multimodal", "qwen3_vl", "qwen3_5")
)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 32,
    "vocab_size": tiny_text.VOCABULARY,
    "max_position_embeddings": 128,
    "eos_token_id": tiny_text.END,
}
FILE = "model.safetensors"
NOTE = "only the text model is run"


def save(case: NestedCase, folder: Path) -> Path:
    case.build(folder, **SIZES | ({"intermediate_size_mlp": 128} if case is LLAMA else {}))
    tiny_text.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(GEMMA, tmp_path_factory.mktemp("gemma") / "hf")


@pytest.fixture(scope="module")
def tuned(gemma: Path, data: Path) -> Path:
    """A run of three steps, which saves in the background."""
    folder = gemma.parent / "tuned"
    options: dict[str, Any] = {"train_iters": 3, "seq_length": 32, "global_batch_size": 2}
    finetune(gemma, folder, data=[str(data)], lr=1e-3, threads=1, fsync=False, **options)
    return folder


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_a_note_says_that_the_text_model_runs(
    verb: str, gemma: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"generate": ["--prompt", "When", "--max-new-tokens", "2"]}
    given["evaluate"] = ["--data", str(data), "--window", "32"]
    assert main([verb, str(gemma), *given[verb], "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.count(NOTE) == 1
    assert [NOTE in w for w in json.loads(out)["warnings"]] == [True]


def test_finetune_saves_towers_unchanged(gemma: Path, tuned: Path, tmp_path: Path) -> None:
    before = stored(gemma)
    reshard(tuned, tmp_path / "hf", to="hf", fsync=False)
    after = stored(tmp_path / "hf")
    towers = {n for n in before if not n.startswith("language_model.")}
    assert after.keys() == before.keys()
    assert {n for n in before if after[n] == before[n]} == towers
    assert verify(tuned).exit_status == 0


def test_finetune_saves_towers_under_megatrons_names(data: Path, tmp_path: Path) -> None:
    source = save(QWEN, tmp_path / "hf")
    options: dict[str, Any] = {"train_iters": 1, "seq_length": 32, "threads": 1, "fsync": False}
    finetune(source, tmp_path / "tuned", data=[str(data)], lr=1e-3, **options)
    names = {t.name for t in open_source(tmp_path / "tuned").catalogue.tensors}
    assert "vision_model.decoder.layers.self_attention.linear_qkv.weight" in names
    reshard(tmp_path / "tuned", tmp_path / "back", to="hf", fsync=False)
    before, after = stored(source), stored(tmp_path / "back")
    assert after.keys() == before.keys()
    assert {n for n in before if after[n] == before[n]} == {n for n in before if ".visual." in n}


def test_state_of_the_text_model_is_resharded(tuned: Path, tmp_path: Path) -> None:
    reshard(tuned, tmp_path / "two", tp=2, pp=2, fsync=False)
    reshard(tmp_path / "two", tmp_path / "dcp", to="dcp", fsync=False)
    assert verify(tuned, tmp_path / "dcp").verdict == "equal"
    names = [t.name for t in open_source(tmp_path / "two").catalogue.tensors]
    state = "optimizer.state.exp_avg."
    assert state + "language_model.embedding.word_embeddings.weight" in names
    assert not any(n.startswith((state + "vision", state + "multi")) for n in names)


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_towers(gemma: Path, data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_iters": 4, "seq_length": 32, "global_batch_size": 2}
    options |= {"data": [str(data)], "lr": 1e-3, "threads": 1, "fsync": False, "save_interval": 2}
    finetune(gemma, tmp_path / "ref", **options)
    finetune(gemma, tmp_path / "out", **options, exit_duration_in_mins=1e-9)
    finetune(gemma, tmp_path / "out", **options)
    assert verify(tmp_path / "out", tmp_path / "ref").verdict == "equal"


QUANTIZED = [
    (GEMMA, "fp8", ["language_model.lm_head", "multi_modal_projector*", "vision_tower*"], "vllm"),
    (QWEN, "int4_awq", ["lm_head", "model.visual*"], "trtllm"),
    (
        DELTA,
        "fp8",
        ["lm_head", "model.visual*"]
        + [
            f"model.language_model.layers.{i}.linear_attn.in_proj_{x}"
            for i in range(3)
            for x in "ab"
        ],
        "vllm",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "recipe", "ignored", "target"), QUANTIZED, ids=str)
def test_the_text_model_alone_is_quantized(
    case: NestedCase, recipe: str, ignored: list[str], target: str, tmp_path: Path
) -> None:
    folder, out = save(case, tmp_path / "hf"), tmp_path / "out"
    report = quantize(folder, out, recipe=recipe, **SMALL)
    assert isinstance(report, QuantizeReport)
    config = read_config(out)["quantization_config"]
    assert set(config["ignore"]) <= set(ignored)
    assert set(ignored) - set(config["ignore"]) <= {"multi_modal_projector*"}  # it has no module
    before, after = stored(folder), stored(out)
    towers = open_source(folder).view.towers()
    names = {open_source(folder).view.placements[n].stored for n in towers}
    assert {n: after[n] for n in names} == {n: before[n] for n in names}
    assert any(n.endswith(".weight_scale") for n in after)
    assert verify(out, folder).exit_status == 0
    found = lint(out, target=[target])
    assert [f for f in found.findings if f.severity == "error"] == []


@pytest.mark.slow
def test_compressed_tensors_names_the_modules_of_towers(tmp_path: Path) -> None:
    """Its loaders compare whole names, so there are no globs."""
    folder = save(MISTRAL, tmp_path / "hf")
    quantize(folder, tmp_path / "fp8", recipe="fp8", **SMALL)
    export(tmp_path / "fp8", tmp_path / "out", to="compressed-tensors")
    ignored = set(read_config(tmp_path / "out")["quantization_config"]["ignore"])
    assert {
        "language_model.lm_head",
        "multi_modal_projector.linear_1",
        "vision_tower.transformer.layers.1.attention.q_proj",
    } <= ignored
    assert lint(tmp_path / "out", target=["vllm"]).num_errors == 0
    assert verify(tmp_path / "out", folder).exit_status == 0


def test_experts_of_llama_4_are_quantized_beside_its_tower(tmp_path: Path) -> None:
    folder = save(LLAMA, tmp_path / "hf")
    quantize(folder, tmp_path / "out", recipe="int4_weight_only", threads=1)
    names = set(stored(tmp_path / "out"))
    assert "language_model.model.layers.1.feed_forward.experts.0.up_proj.weight_scale" in names
    assert "vision_model.patch_embedding.linear.weight" in names
    assert verify(tmp_path / "out", folder).exit_status == 0


@pytest.mark.parametrize(
    "options",
    [{"optimizer_format": "dp_reshardable", "tp": 2, "pp": 2}, {"to": "megatron"}],
    ids=str,
)
def test_buckets_hold_the_state_of_the_text_model(
    options: dict[str, Any], tuned: Path, tmp_path: Path
) -> None:
    """As those of a run whose tower is frozen, which therefore is in no bucket."""
    reshard(tuned, tmp_path / "buckets", fsync=False, **options)
    assert verify(tuned, tmp_path / "buckets").verdict == "equal"
    back = {"to": "torch_dist", "optimizer_format": "fully_reshardable"}
    reshard(tmp_path / "buckets", tmp_path / "back", fsync=False, **back)
    assert verify(tuned, tmp_path / "back").verdict == "equal"


@pytest.mark.slow
def test_buckets_have_no_state_of_towers_with_megatrons_names(data: Path, tmp_path: Path) -> None:
    """The layers of Qwen3.5's tower are cut over ranks as those of its text are, and frozen."""
    options: dict[str, Any] = {"train_iters": 2, "seq_length": 32, "threads": 1, "fsync": False}
    finetune(save(DELTA, tmp_path / "hf"), tmp_path / "0", data=[str(data)], lr=1e-3, **options)
    steps: list[dict[str, Any]] = [
        {"to": "torch_dist", "optimizer_format": "dp_reshardable", "tp": 2},
        {"to": "megatron", "tp": 2, "pp": 2},
        {"to": "torch_dist", "optimizer_format": "dp_reshardable", "pp": 2},
        {"to": "torch_dist", "optimizer_format": "fully_reshardable"},
    ]
    for number, step in enumerate(steps):
        reshard(tmp_path / f"{number}", tmp_path / f"{number + 1}", fsync=False, **step)
        assert verify(tmp_path / "0", tmp_path / f"{number + 1}").verdict == "equal", step


def test_state_of_towers_is_held_by_name_alone(tmp_path: Path) -> None:
    """In which order a model registers a tower's parameters, nothing says."""
    save(GEMMA, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / FILE)
    state = {f"optimizer.state.param.{n}": t.float() for n, t in weights.items()}
    for name in ("exp_avg", "exp_avg_sq"):
        state |= {f"optimizer.state.{name}.{n}": torch.rand(t.shape) for n, t in weights.items()}
    save_file(weights | state, tmp_path / "hf" / FILE, {"format": "pt"})
    reshard(tmp_path / "hf", tmp_path / "two", to="torch_dist", tp=2, pp=2, fsync=False)
    names = {t.name for t in open_source(tmp_path / "two").catalogue.tensors}
    assert "optimizer.state.exp_avg.multi_modal_projector.mm_soft_emb_norm.weight" in names
    reshard(tmp_path / "two", tmp_path / "one", to="dcp", fsync=False)
    assert verify(tmp_path / "hf", tmp_path / "one").verdict == "equal"
    with raises(MappingError, "not known"):
        reshard(tmp_path / "two", tmp_path / "ranks", to="megatron", fsync=False)
