"""Copies of embedding and head in layers of multi-token prediction, by engine and release."""

from __future__ import annotations

from pathlib import Path

import pytest

from megtool import lint, quantize, reshard
from tests.support.checkpoints.folder_edits import config, put
from tests.support.folders import torch_tensors
from tests.support.models import mtp_models

HEADS = {f"model.layers.{n}.shared_head.head.weight" for n in (4, 5)}
EMBEDDINGS = {f"model.layers.{n}.embed_tokens.weight" for n in (4, 5)}
QUANTIZED = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with two layers of multi-token prediction, and neither heads nor embeddings there."""
    path = tmp_path_factory.mktemp("mtp")
    mtp_models.glm4_moe(path / "glm4_moe")
    mtp_models.deepseek_v32(path / "deepseek_v32")
    return path


def missing(folder: Path, target: str) -> set[str]:
    findings = [f for f in lint(folder, target=target).findings if f.id == "mtp-copies"]
    assert all(f.severity == "warning" and f.source.startswith("https://") for f in findings)
    return {f.module for f in findings}


@pytest.mark.parametrize(
    ("model", "target", "plain", "quantized"),
    [
        ("deepseek_v32", "vllm@0.14.1", HEADS | EMBEDDINGS, HEADS),
        ("deepseek_v32", "vllm@0.16.0", HEADS | EMBEDDINGS, set()),
        ("deepseek_v32", "vllm@0.20.2", HEADS | EMBEDDINGS, set()),
        ("deepseek_v32", "vllm@0.21.0", set(), set()),
        ("deepseek_v32", "vllm", set(), set()),
        ("glm4_moe", "vllm@0.11.0", HEADS | EMBEDDINGS, HEADS),
        ("glm4_moe", "vllm@0.11.1", set(), set()),
        ("deepseek_v32", "sglang@0.5", set(), set()),
        ("deepseek_v32", "trtllm@1.0.0", set(), set()),
    ],
)
def test_releases_that_need_them(
    folders: Path, model: str, target: str, plain: set[str], quantized: set[str]
) -> None:
    config(lambda c: c.pop("quantization_config", None))(folders / model)
    assert missing(folders / model, target) == plain
    config(lambda c: c.update(quantization_config=QUANTIZED))(folders / model)
    assert missing(folders / model, target) == quantized
    config(lambda c: c.pop("quantization_config"))(folders / model)


def test_one_that_is_there_is_not_missed(folders: Path, tmp_path: Path) -> None:
    reshard(folders / "glm4_moe", tmp_path / "hf", to="hf", fsync=False)
    head = torch_tensors(folders / "glm4_moe")["lm_head.weight"]
    put("model.layers.5.shared_head.head.weight", head)(tmp_path / "hf")
    assert missing(tmp_path / "hf", "vllm@0.11.0") == {*EMBEDDINGS, min(HEADS)}


def test_quantize_names_what_its_target_misses(folders: Path, tmp_path: Path) -> None:
    for target, count in ((None, 0), ("vllm@0.15.0", 2), ("vllm@0.16.0", 0)):
        report = quantize(
            folders / "deepseek_v32",
            tmp_path / str(target),
            recipe="fp8_per_channel",
            target=target,
            fsync=False,
        )
        missed = [n for n in report.notes if "shared_head.head.weight is in no file" in n]
        assert len(missed) == count
