"""Models of transformers from checkpoints of every format, against transformers' own loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megtool
from megtool import quantize, reshard
from megtool.errors import FormatError, MappingError, UsageError
from megtool.transformers import from_pretrained
from tests.support.errors import raises
from tests.support.limits import run_limited
from tests.support.models import gguf_models, tiny_models
from tests.support.models.adapted_models import save_adapter
from tests.support.models.nested_cases import CASES, edit_config
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.exports import export_gguf

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(28).reshape(2, 14)
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
FORMATS: dict[str, dict[str, Any]] = {
    "torch_dist": {"tp": 2, "pp": 2},
    "megatron": {"tp": 2, "pp": 2},
    "zarr": {},
}


def noisy(model: Any) -> None:
    """Norms and biases, too, are random, so that none can take another's place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)


def models(root: Path) -> dict[str, Path]:
    """Folders of a dense, a tied and an expert model."""
    for family, keys in {"llama": {}, "qwen3": {"tie_word_embeddings": True}}.items():
        tiny_model(family, root / family, fill=noisy, dtype="bfloat16", **keys)
    tiny_model("qwen3_moe", root / "qwen3_moe", fill=noisy, **MOE)
    return {p.name: p for p in root.iterdir()}


def own_model(folder: Path) -> Any:
    """transformers' own model of a Hugging Face folder."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype="auto")


def assert_equal(ours: Any, own: Any) -> None:
    """The same class, weights, buffers and logits, bit for bit."""
    assert type(ours) is type(own)
    expected, loaded = dict(own.state_dict()), dict(ours.state_dict())
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name
    with torch.no_grad():
        assert torch.equal(
            ours.eval()(input_ids=TOKENS).logits, own.eval()(input_ids=TOKENS).logits
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return models(tmp_path_factory.mktemp("models"))


def test_experts_are_stacked_as_transformers_stacks_them(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders["qwen3_moe"]
    reshard(folder, tmp_path / "out", to="torch_dist", tp=2, pp=2, fsync=False)
    ours = from_pretrained(tmp_path / "out")
    assert_equal(ours, own_model(folder))
    assert ours.name_or_path == str(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_every_kind_of_model_from_all_formats(
    folders: dict[str, Path], to: str, tmp_path: Path
) -> None:
    CASES[0].build(tmp_path / "nested_hf")
    for name, folder in {**folders, "nested": tmp_path / "nested_hf"}.items():
        assert_equal(from_pretrained(folder), own_model(folder))
        reshard(folder, tmp_path / name, to=to, fsync=False, **FORMATS[to])
        assert_equal(from_pretrained(tmp_path / name), own_model(folder))


def test_a_checkpoint_without_config_json_says_enough(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    own = own_model(folders["llama"])
    reshard(folders["llama"], tmp_path / "out", to="torch_dist", tp=2, fsync=False)
    shutil.rmtree(tmp_path / "out" / "release" / "hf")
    ours = from_pretrained(tmp_path / "out", family="llama")
    assert ours.dtype == torch.bfloat16
    assert_equal(ours, own)
    like = from_pretrained(tmp_path / "out", like=folders["llama"], dtype="float32")
    assert like.dtype == torch.float32
    assert torch.equal(like.model.norm.weight, own.model.norm.weight.float())


def test_a_gguf_file_is_decoded(tmp_path: Path) -> None:
    gguf_models.save(tmp_path / "hf", "qwen3", dtype="bfloat16")
    export_gguf(tmp_path / "hf", tmp_path / "model.gguf", fsync=False)
    own = own_model(tmp_path / "hf")
    ours = from_pretrained(tmp_path / "model.gguf", dtype="bfloat16")
    assert_equal(ours, own)


def test_a_quantized_folder_is_decoded(tmp_path: Path) -> None:
    tiny_models.llama(tmp_path / "hf")
    quantize(tmp_path / "hf", tmp_path / "int8", recipe="int8_weight_only", fsync=False)
    reshard(tmp_path / "int8", tmp_path / "decoded", to="hf", fsync=False)
    ours = from_pretrained(tmp_path / "int8")
    assert getattr(ours.config, "quantization_config", None) is None
    assert_equal(ours, own_model(tmp_path / "decoded"))


def test_an_open_checkpoint_and_arguments_of_transformers(folders: dict[str, Path]) -> None:
    checkpoint = megtool.open(folders["llama"], optimizer=False)
    ours = megtool.transformers.from_pretrained(checkpoint, attn_implementation="eager")
    assert ours.config._attn_implementation == "eager"
    with raises(UsageError, match="'state_dict' is no argument"):
        from_pretrained(checkpoint, state_dict={})


def test_adapters_are_merged_as_reshard_merges_them(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    base, adapters = folders["llama"], [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(adapters):
        save_adapter(base, folder, target_modules=["q_proj", "down_proj"], r=4 + number)
    reshard(base, tmp_path / "tp2", to="torch_dist", tp=2, fsync=False)
    reshard(base, tmp_path / "merged", adapter=adapters, fsync=False)
    ours = from_pretrained(tmp_path / "tp2", adapter=adapters)
    assert_equal(ours, own_model(tmp_path / "merged"))
    with raises(UsageError, "is open already", hint="adapter=FOLDER"):
        from_pretrained(megtool.open(base), adapter=adapters[0])
    with raises(FormatError, id="not-an-adapter"):
        from_pretrained(base, adapter=base)


def test_the_generation_config_comes_along(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    tiny_model("llama", folder)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 7, "do_sample": True}))
    assert from_pretrained(folder).generation_config.top_k == 7


def test_what_cannot_be_loaded_is_said(folders: dict[str, Path], tmp_path: Path) -> None:
    reshard(folders["llama"], tmp_path / "unnamed", to="torch_dist", fsync=False)
    shutil.rmtree(tmp_path / "unnamed" / "release" / "hf")
    (tmp_path / "unnamed" / "release" / "megtool.json").unlink()
    with raises(MappingError, match="family"):
        from_pretrained(tmp_path / "unnamed")
    tiny_model("llama", tmp_path / "hf")
    edit_config(tmp_path / "hf", lambda c: c.update(architectures=["NewForCausalLM"]))
    with raises(MappingError, match=r"transformers .* does not have the class 'NewForCausalLM'"):
        from_pretrained(tmp_path / "hf", family="llama")
    edit_config(tmp_path / "hf", lambda c: c.update(model_type="new"))
    with raises(MappingError, match=r"does not have the model_type 'new'"):
        from_pretrained(tmp_path / "hf", family="llama")


def test_a_model_with_missing_tensors_is_not_returned(tmp_path: Path) -> None:
    """transformers itself would fill them with random numbers, and warn."""
    tiny_model("llama", tmp_path / "hf")
    tagger = ["LlamaForTokenClassification"]
    edit_config(tmp_path / "hf", lambda c: c.update(architectures=tagger))
    with raises(MappingError, "lacks 2 of them", tensor="score.bias"):
        from_pretrained(tmp_path / "hf")


PEAK = """
import json, sys, torch
import transformers.models.llama.modeling_llama
from megtool.reshard.execute import peak_rss_bytes
from megtool.transformers import from_pretrained
from megtool.reshard.execute import peak_rss_bytes
before = peak_rss_bytes()
model = from_pretrained(sys.argv[1], dtype=sys.argv[2])
size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
print(json.dumps([peak_rss_bytes() - before, size]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("to", "dtype"), [("hf", "float32"), ("torch_dist", "bfloat16")])
def test_memory_is_the_models_and_little_more(to: str, dtype: str, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "vocab_size": 32000,
    }
    tiny_model("llama", tmp_path / "hf", sizes=gguf_models.SIZES | sizes)
    source = tmp_path / "hf"
    if to != "hf":
        reshard(source, tmp_path / "out", to=to, tp=2, pp=2, fsync=False)
        source = tmp_path / "out"
    run = run_limited(["-c", PEAK, source, dtype])
    assert run.status == 0, run.err
    peak, size = json.loads(run.out)
    assert peak <= size + (256 << 20)
