"""Real llama.cpp loads the GGUF files of every family, and has the logits of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import byte_level, gguf_models
from tests.support.paths import PEERS
from tests.support.peers.release import install_release
from tests.support.runs.exports import export_gguf

pytestmark = [pytest.mark.peers, pytest.mark.slow]

ROUGH = {
    # llama.cpp computes GELU by a table of float16 numbers.
    "gemma": 1e-3,
    "gemma2": 1e-3,
    "gemma3": 1e-3,
    "starcoder2": 1e-3,
    "gpt2": 1e-3,
    # It rounds the ramp of YaRN's frequencies.
    "gpt_oss": 1e-3,
    "gpt_neox": 1e-3,
    "phi": 1e-3,
    "bloom": 1e-3,
    "bloom-6": 1e-3,
    "mpt": 1e-3,
    "gpt_bigcode": 1e-3,
    "falcon-7b": 1e-3,
    "falcon-40b": 1e-3,
    "gemma3_multimodal": 5e-3,
    "gemma4_multimodal": 3e-3,
    "gemma4_unified": 3e-3,
    # Releases up to October 2026 do not read what is added under the root of its norms.
    "qwen2_5_vl": 1e-3,
    "qwen3_5_moe": 3e-5,
    "gemma4": 3e-3,
    "gemma4-experts": 3e-3,
    "gemma4-small": 3e-3,
}
"""How far families may be off where it is more than 1e-5."""


SHORT = ("deepseek_v32", "glm_moe_dsa")
"""Models whose indexers llama.cpp gives keys of float16: of many tokens it chooses others, where
two are nearly as good, and so of these at most one may be left out."""


LONG = ("deepseek_v4", "deepseek_v4-yarn")
"""Models that compress 128 tokens to a key."""


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of llama.cpp with its Python binding."""
    return install_release("xllamacpp", tmp_path_factory.mktemp("llama-cpp"), "--only-binary=:all:")


def _answer(package: Path, folder: Path) -> Any:
    """What llama.cpp answers to `job.json` beside `model.gguf`."""
    done = subprocess.run(
        [sys.executable, str(PEERS / "llama_cpp_logits.py"), str(folder)],
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.parametrize("name", byte_level.CUTS)
def test_texts_are_cut_as_by_the_tokenizer(name: str, package: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    source = gguf_models.save(tmp_path / "hf", "llama")
    byte_level.cut_as(source, name)
    export_gguf(source, tmp_path / "model.gguf", outtype="f32")
    (tmp_path / "job.json").write_text(json.dumps({"texts": byte_level.TEXTS}))
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    assert _answer(package, tmp_path) == [tokenizer.encode(t).ids for t in byte_level.TEXTS]


@pytest.mark.parametrize("name", [*gguf_models.MODELS, *gguf_models.COMPUTED])
def test_log_probabilities_are_those_of_transformers(
    name: str, package: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    source = gguf_models.save(tmp_path / "hf", name)
    _compare(name, gguf_models.load(source, name), package, tmp_path)


@pytest.mark.parametrize("name", gguf_models.TEXTS_BESIDE_TOWERS)
def test_text_models_beside_towers(name: str, package: Path, tmp_path: Path) -> None:
    """What becomes of the tower is said in a note."""
    pytest.importorskip("transformers")
    model = gguf_models.save_with_tower(tmp_path / "hf", name)
    report = _compare(name, model, package, tmp_path)
    assert any("only the text model is written" in note for note in report.notes)


def _compare(name: str, model: Any, package: Path, folder: Path) -> Any:
    """The report of the file of the model in `hf`, after prompts of several lengths."""
    report = export_gguf(folder / "hf", folder / "model.gguf", outtype="f32")
    size = int(gguf_models.SIZES["vocab_size"])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, size - 30, (40,), generator=generator).tolist()
    prompts = [tokens[:n] for n in (1, 2, 5, 17, 40) if n < 40 or name not in SHORT]
    if name in LONG:
        prompts.append(tokens * 4)
    (folder / "job.json").write_text(json.dumps({"prompts": prompts, "vocab_size": size}))
    actual = torch.tensor(_answer(package, folder))
    with torch.no_grad():
        logits = torch.stack([model(input_ids=torch.tensor([p])).logits[0, -1] for p in prompts])
    expected = logits.log_softmax(-1)
    assert not actual.isnan().any()
    assert (actual - expected).abs().max() < ROUGH.get(name, 1e-5)
    return report
