"""What a legacy checkpoint cannot hold is refused before any work, with what would do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import inspect, lint, verify
from megtool.errors import FormatError, LayoutError, MappingError, MegtoolError, UsageError
from tests.support import folders
from tests.support.checkpoints.quantized_folder import make_quantized
from tests.support.errors import raises
from tests.support.models import tiny_llama, trtllm_models
from tests.support.runs.exports import export_trtllm_legacy


def refused(kind: type[MegtoolError], work: Callable[[], Any], *words: str) -> MegtoolError:
    """The error, whose text holds all `words`."""
    with pytest.raises(kind) as found:
        work()
    for word in words:
        assert word in str(found.value), str(found.value)
    return found.value


def test_layouts(tmp_path: Path) -> None:
    source, out = trtllm_models.llama(tmp_path / "hf"), tmp_path / "out"

    def export(**more: int) -> Callable[[], Any]:
        return lambda: export_trtllm_legacy(source, out, **more)

    refused(LayoutError, export(tp=3), "tp=3", "4 attention heads", "tp may be 1, 2, 4")
    refused(LayoutError, export(tp=8), "tp may be 1, 2, 4")
    refused(LayoutError, export(pp=3), "4 layers", "pp may be 1, 2, 4")
    refused(UsageError, export(tp=0), "--tp is 0", "1 or more")
    refused(UsageError, lambda: export_trtllm_legacy(source, out, dtype="int8"), "bfloat16")
    assert not out.exists()
    assert not list(folders.staging_folders(tmp_path))


def test_heads_of_keys(tmp_path: Path) -> None:
    """Three heads of keys are on 3 or 6 ranks, not on 2."""
    source = tiny_llama.save(
        tmp_path / "hf", num_attention_heads=6, num_key_value_heads=3, hidden_size=48
    )
    work = lambda: export_trtllm_legacy(source, tmp_path / "out", tp=2)  # noqa: E731
    refused(LayoutError, work, "3 heads of keys", "tp may be 1, 3, 6")


def test_families(tmp_path: Path) -> None:
    source = trtllm_models.llama(
        tmp_path / "hf", model_type="olmo2", architectures=["Olmo2ForCausalLM"]
    )
    refused(MegtoolError, lambda: export_trtllm_legacy(source, tmp_path / "out"))
    source = trtllm_models.llama(tmp_path / "smol", architectures=["GraniteForCausalLM"])
    file = source / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "granite"}
    scales = ("embedding_multiplier", "logits_scaling", "residual_multiplier")
    config |= dict.fromkeys((*scales, "attention_multiplier"), 1.0)
    file.write_text(json.dumps(config))
    work = lambda: export_trtllm_legacy(source, tmp_path / "out")  # noqa: E731
    refused(
        MappingError,
        work,
        "granite",
        "Llama, GPT (GPT-2), Qwen (2 and 3, dense), Mixtral, Gemma, Falcon",
    )


@pytest.mark.parametrize("kind", ["longrope", "yarn", "dynamic"])
def test_rotary_scaling(tmp_path: Path, kind: str) -> None:
    """Engines would multiply frequencies by the factor of a kind they do not know."""
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    source = trtllm_models.llama(tmp_path / "hf", rope_scaling=scaling)
    work = lambda: export_trtllm_legacy(source, tmp_path / "out")  # noqa: E731
    refused(MappingError, work, kind, "linear, llama3", "--to trtllm")


def test_activation(tmp_path: Path) -> None:
    """A name is written as TensorRT-LLM looks it up, and one that it has not is refused."""
    source = trtllm_models.llama(tmp_path / "hf", hidden_act="quick_gelu")
    work = lambda: export_trtllm_legacy(source, tmp_path / "out")  # noqa: E731
    refused(MappingError, work, "'quick_gelu'", "gelu_pytorch_tanh", "--to trtllm")
    source = trtllm_models.llama(tmp_path / "swish", hidden_act="swish")
    export_trtllm_legacy(source, tmp_path / "out", fsync=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_act"] == "silu"


def test_numbers_too_large_for_float16(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][0, :2] = 1e5
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    work = lambda: export_trtllm_legacy(source, tmp_path / "out", tp=4, dtype="float16")  # noqa: E731
    told = refused(FormatError, work, "2 numbers of 1 tensor", "k_proj.weight (2)", "bfloat16")
    assert told.tensor == "model.layers.0.self_attn.k_proj.weight"
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    export_trtllm_legacy(source, tmp_path / "out", tp=4, fsync=False)


@pytest.mark.parametrize("command", [inspect, verify, lint])
@pytest.mark.parametrize("ranks", [1, 4])
def test_what_was_written_is_not_read(
    tmp_path: Path, command: Callable[[Path], Any], ranks: int
) -> None:
    """Not taken for two checkpoints in one folder, or for a broken folder of Hugging Face."""
    source = trtllm_models.llama(tmp_path / "hf")
    export_trtllm_legacy(source, tmp_path / "out", tp=ranks, fsync=False)
    if command is verify:  # of its files alone, by their digests
        assert verify(tmp_path / "out").verdict == "ok"
        refused(UsageError, lambda: verify(source, tmp_path / "out"), "a legacy TensorRT-LLM")
        return
    work = lambda: command(tmp_path / "out")  # noqa: E731
    refused(UsageError, work, "a legacy TensorRT-LLM checkpoint", "trtllm-build")


@pytest.mark.parametrize(("algo", "nearest"), [("W4A16_NVFP4", "int4_awq"), ("MXFP8", "fp8")])
def test_formats(tmp_path: Path, algo: str, nearest: str) -> None:
    source = trtllm_models.llama(tmp_path / "hf")
    made = make_quantized(source, tmp_path / "q", algos=algo, cache=False)
    work = lambda: export_trtllm_legacy(made.path, tmp_path / "out")  # noqa: E731
    refused(MappingError, work, algo, "model.layers.0.mlp.down_proj", nearest, "25 more")


def test_groups(tmp_path: Path) -> None:
    """Four ranks would have 32 columns each of `o`, and groups have 64."""
    source = trtllm_models.llama(tmp_path / "hf", vocab_size=64)
    made = make_quantized(source, tmp_path / "q", algos="W4A16_AWQ", group=64, cache=False)
    work = lambda: export_trtllm_legacy(made.path, tmp_path / "out", tp=4)  # noqa: E731
    refused(LayoutError, work, "128 columns of o", "groups of 64", "tp may be 1, 2")
    export_trtllm_legacy(made.path, tmp_path / "out", tp=2, fsync=False)


def test_siblings_of_other_formats(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf", vocab_size=64)
    algos = {"attn.q": "NVFP4", "attn.k": "", "": "NVFP4"}
    made = make_quantized(source, tmp_path / "q", algos=algos, cache=False)
    work = lambda: export_trtllm_legacy(made.path, tmp_path / "out")  # noqa: E731
    refused(MappingError, work, "layers.0.attn.k is not quantized", "attention.qkv")


def test_layers_that_stages_number_alike(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf", vocab_size=64)
    algos = {"layers.3.attn.o": "", "": "NVFP4"}
    made = make_quantized(source, tmp_path / "q", algos=algos, cache=False)
    work = lambda: export_trtllm_legacy(made.path, tmp_path / "out", pp=2)  # noqa: E731
    refused(MappingError, work, "transformer.layers.1.attention.dense", "pp 1")
    report = export_trtllm_legacy(made.path, tmp_path / "out", pp=1, fsync=False)
    assert report.algo == "NVFP4"


def test_scales_that_are_wrong(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf")
    made = make_quantized(source, tmp_path / "q", algos="FP8", cache=False)
    file, plain = made.path / "model.safetensors", load_file(made.path / "model.safetensors")
    for name in ("mlp.up_proj.weight_scale", "self_attn.o_proj.input_scale"):
        for number in (float("nan"), float("inf"), 3e38):
            scale = {f"model.layers.1.{name}": torch.tensor(number)}
            save_file(plain | scale, file, {"format": "pt"})
            with raises(MappingError, tensor=f"model.layers.1.{name.rpartition('.')[0]}"):
                export_trtllm_legacy(made.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_no_floats(tmp_path: Path) -> None:
    file = trtllm_models.llama(tmp_path / "hf") / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int32)}, file, {"format": "pt"})
    with raises(FormatError, "int32", tensor=name, file=tmp_path / "hf"):
        export_trtllm_legacy(tmp_path / "hf", tmp_path / "out")


def test_scales_that_are_missing(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf")
    made = make_quantized(source, tmp_path / "q", algos="FP8", cache=False)
    file = made.path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.input_scale"]
    save_file(tensors, file, {"format": "pt"})
    work = lambda: export_trtllm_legacy(made.path, tmp_path / "out")  # noqa: E731
    refused(FormatError, work, "model.layers.1.mlp.up_proj")
    del tensors["model.layers.2.mlp.up_proj.weight_scale"]
    save_file(tensors, file, {"format": "pt"})
    refused(FormatError, work, "model.layers.2.mlp.up_proj")
    assert not (tmp_path / "out").exists()
