"""A folder of SVDQuant's: copied, decoded and compared with all of its tensors, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, finetune, quantize, reshard, verify
from megtool.errors import FormatError, MappingError, RecipeError, UsageError
from megtool.export.gguf.carried_blocks import find_carried
from megtool.quant.resolve import resolve_recipe
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.quant.quantize_sizes import save_llama

DOWN = "model.layers.0.mlp.down_proj"
LORA_A = f"{DOWN}.weight_quantizer._svdquant_lora_a"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_llama(tmp_path_factory.mktemp("svdquant") / "llama")


@pytest.fixture(scope="module")
def folder(llama: Path) -> Path:
    out = llama.parent / "out"
    quantize(
        llama, out, recipe="nvfp4_svdquant", samples=2, seq_length=16, fsync=False, device="cpu"
    )
    return out


def test_unified_is_a_copy(folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "unified", to="unified", fsync=False)
    for name in ("model.safetensors", "hf_quant_config.json", "config.json"):
        if name.endswith("json"):
            read = [json.loads((f / name).read_text()) for f in (folder, tmp_path / "unified")]
            assert read[0] == read[1]
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "unified"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        same = (t.reshape(-1).view(torch.uint8) for t in (tensor, after[name]))
        assert torch.equal(*same), name


def test_every_form_decodes_the_same_weights(folder: Path, llama: Path, tmp_path: Path) -> None:
    reshard(folder, tmp_path / "hf", to="hf", fsync=False)
    reshard(folder, tmp_path / "dist", to="torch_dist", fsync=False)
    reshard(tmp_path / "dist", tmp_path / "back", to="hf", like=folder, fsync=False)
    decoded, back = (load_file(tmp_path / n / "model.safetensors") for n in ("hf", "back"))
    source = load_file(llama / "model.safetensors")
    for name, tensor in decoded.items():
        assert torch.equal(tensor, back[name]), name
        error = (tensor.float() - source[name].float()).norm() / source[name].float().norm()
        assert error < 0.1, name
    assert verify(llama, folder).exit_status == 0


def edited(folder: Path, out: Path, drop: str) -> Path:
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json" and file.name != "megtool.json":
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not n.startswith(drop)}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_what_has_no_place_for_it_refuses_it(folder: Path, llama: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("A checkpoint holds what a model has learned. " * 20)
    with raises(MappingError, "compressed-tensors has no scheme for NVFP4_SVD"):
        export(folder, out, to="compressed-tensors")
    with raises(MappingError, "NVFP4_SVD is no format of legacy", hint="recipe is nvfp4"):
        export(folder, out, to="trtllm-legacy")
    with raises(MappingError, "no place for its low-rank matrices", hint="--to hf writes them"):
        quantize(llama, out, recipe="nvfp4_svdquant", to="torch_dist")
    with raises(RecipeError, "vllm does not load NVFP4_SVD"):
        quantize(llama, out, recipe="nvfp4_svdquant", target="vllm")
    with raises(UsageError, "its low-rank matrices are not trained"):
        finetune(llama, out, data=[text], qat="nvfp4_svdquant", dry_run=True)
    half = edited(folder, tmp_path / "half", LORA_A)
    with raises(FormatError, "and no weight_quantizer._svdquant_lora_a", tensor=f"{DOWN}.weight"):
        reshard(half, out, to="hf")
    none = edited(folder, tmp_path / "none", f"{DOWN}.weight_quantizer")
    with raises(FormatError, "and it has no svdquant_lora_a", tensor=f"{DOWN}.weight"):
        export(none, out, to="unified")


def test_gguf_keeps_no_codes_of_it(folder: Path) -> None:
    source = open_source(folder)
    name = "layers.0.mlp.down.weight"
    place = source.placement_of(name)
    shape = source.view.canonical[name].shape
    assert not find_carried(source.catalogue, {name: place}, {name: place}, {place.stored: shape})


def test_the_format_and_the_method_belong_together(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    text = (
        "description: x\nalgorithm: {}\nformats: {{f: {{algo: {}}}}}\n"
        "rules: [{{match: {{role: fc2}}, format: f}}, {{match: {{glob: '*'}}, format: keep}}]\n"
    )
    recipe.write_text(text.format("max", "NVFP4_SVD"))
    with raises(RecipeError, "max does not compute the low-rank matrices of format 'f'"):
        resolve_recipe(llama, recipe)
    recipe.write_text(text.format("svdquant", "NVFP4"))
    with raises(RecipeError, "svdquant does nothing to format 'f'"):
        resolve_recipe(llama, recipe)
