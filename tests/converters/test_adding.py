"""The page on adding a family, followed: its example is saved, and a checkpoint goes through."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megtool import reshard
from megtool.convert.families.detection import detect_family, family, family_names
from megtool.errors import UnknownFamilyError
from tests.support.paths import ROOT

CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "layers": 2,
    "width": 8,
    "inner": 12,
    "heads": 4,
    "words": 30,
    "act": "silu",
    "kept": "verbatim",
}


@pytest.fixture
def toy(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's example as a file of the converters folder."""
    page = (checkout / "converters" / "README.md").read_text()
    (example,) = page.split("```python\n")[1:]
    folder = tmp_path / "converters"
    folder.mkdir()
    (folder / "toy.py").write_text(example.split("```")[0])
    package = importlib.import_module("megtool.converters")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    yield
    sys.modules.pop("megtool.converters.toy", None)


@pytest.mark.usefixtures("toy")
def test_the_page_adds_a_family(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "toy" in family_names()
    shapes = {"words": (30, 8), "norm": (8,)}
    for i in range(2):
        shapes |= {f"blocks.{i}.{n}": (8,) for n in ("norm1", "norm2", "scale")}
        shapes |= {f"blocks.{i}.attention": (24, 8), f"blocks.{i}.out": (8, 8)}
        shapes |= {f"blocks.{i}.in": (8, 24), f"blocks.{i}.down": (12, 8)}
    rng = np.random.default_rng(0)
    arrays = {n: rng.random(s).astype(np.float32) for n, s in shapes.items()}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    save_file(arrays, tmp_path / "hf" / "model.safetensors")

    report = reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, fsync=False)
    assert report.family == "toy"
    assert "no scale per layer" in caplog.text
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert again.keys() == arrays.keys()
    assert all((again[n] == a).all() for n, a in arrays.items())
    found = family("toy").write_config(family("toy").read_config(CONFIG))
    assert {k: found[k] for k in CONFIG} == CONFIG


def test_families_are_data(checkout: Path) -> None:
    """Converters import `megtool.convert` and hold no code."""
    import ast

    for file in sorted((checkout / "converters").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If | ast.For), file
            if isinstance(node, ast.ImportFrom):
                assert node.module == "megtool.convert", file
            assert not isinstance(node, ast.Import | ast.Lambda | ast.comprehension), file


def test_causal_models_of_transformers_are_known_or_refused_with_the_way_to_add_them() -> None:
    """What is not known is listed on the page of families."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    listed = {a for x in names for a in ([x] if isinstance(x, str) else x)}
    refused = set()
    for architecture in listed:
        try:
            assert architecture in detect_family({"architectures": [architecture]}).architectures
        except UnknownFamilyError as error:
            refused.add(architecture)
            assert repr(architecture) in str(error)
            assert "converters/README.md" in error.hint
    page = (ROOT / "docs" / "reference" / "families.md").read_text().partition("## Not known")[2]
    told = set(re.findall(r"`(\w+)`", page))
    if version("transformers") in page:  # else the page tells of another release
        assert told == refused


BRIDGED = """
BailingMoeV2ForCausalLM DeciLMForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM
DeepseekV4ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneMoEForCausalLM
FalconH1ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration
Gemma4ForCausalLM Gemma4ForConditionalGeneration GemmaForCausalLM Glm4MoeForCausalLM
Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM HYV3ForCausalLM
KimiK25ForConditionalGeneration LlamaForCausalLM MiMoForCausalLM MiMoV2FlashForCausalLM
MiniMaxM2ForCausalLM Mistral3ForConditionalGeneration MistralForCausalLM NemotronForCausalLM
NemotronHForCausalLM OlmoeForCausalLM Qwen2ForCausalLM Qwen2_5_VLForConditionalGeneration
Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3VLForConditionalGeneration
Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration
Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
"""
"""Of the classes that Megatron-Bridge registers a bridge for (067f987, 2026-08-22), those that are
known here; of others it has audio, omni and vision models, Sarvam, Step and Kimi K3."""


def test_most_models_of_megatron_bridge_are_known() -> None:
    for architecture in BRIDGED.split():
        assert architecture in detect_family({"architectures": [architecture]}).architectures
    assert len(BRIDGED.split()) > 40
    kimi = {"architectures": ["KimiK2ForCausalLM"], "model_type": "kimi_k2"}
    assert detect_family(kimi).name == "deepseek_v3"
