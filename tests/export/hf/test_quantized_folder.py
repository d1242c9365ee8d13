"""Quantized folders exported to other forms, and what real loaders make of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megtool import export, quantize
from megtool.errors import DestinationError, FormatError, MappingError, UsageError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.quant.quantize_sizes import save_llama
from tests.support.quant.write_runs import canonical_values

TOKENS = torch.arange(48).view(2, 24) * 37 % 128
FREE = ["fp8_per_channel", "int8_weight_only", "int4_weight_only", "mxfp8", "mxfp4", "w4a16_nvfp4"]
SHOWN = ["fp8", "nvfp4", "kv_fp8"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model quantized by recipes, each when first asked for."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("export")
    save_llama(root / "hf")
    return {"": root / "hf"}


def of(made: dict[str, Path], recipe: str) -> Path:
    if recipe not in made:
        out = made[""].parent / recipe
        quantize(made[""], out, recipe=recipe, samples=4, seq_length=32, threads=1, fsync=False)
        made[recipe] = out
    return made[recipe]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    return out


def quiet(source: Path, destination: Path, **options: Any) -> Any:
    return export(source, destination, threads=1, fsync=False, **options)


def logits(folder: Path) -> torch.Tensor:
    opened = open_source(folder)
    assert opened.view.config is not None
    source = opened
    with torch.inference_mode():
        return load(source, dtype="float32")(Batch(tokens_BS=TOKENS))


@pytest.mark.parametrize("recipe", FREE + SHOWN)
def test_there_and_back(made: dict[str, Path], tmp_path: Path, recipe: str) -> None:
    """ModelOpt's folder as compressed-tensors, and again: the same bytes and config."""
    first = of(made, recipe)
    there = quiet(first, tmp_path / "ct", to="compressed-tensors")
    assert (there.exact, there.requantized) == (0 if recipe == "kv_fp8" else 14, 0)
    assert there.kv_algo == json.loads((first / "hf_quant_config.json").read_text())[
        "quantization"
    ].get("kv_cache_quant_algo")
    quiet(tmp_path / "ct", tmp_path / "back", to="unified")
    want, got = tensors(first), tensors(tmp_path / "back")
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        a, b = got[name].contiguous(), tensor.contiguous()
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if "nvfp4" in recipe and name.endswith(("weight_scale_2", "input_scale")):
            torch.testing.assert_close(a, b, rtol=2e-7, atol=0)  # a reciprocal of a reciprocal
        else:
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), (
                name
            )
    for name in ("config.json", "hf_quant_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (first / name).read_bytes(), name


@pytest.mark.parametrize(
    "recipe", ["fp8", "fp8_per_channel", "int8_weight_only", "int4_weight_only"]
)
def test_transformers_loads_it(made: dict[str, Path], tmp_path: Path, recipe: str) -> None:
    """transformers with compressed-tensors: the logits of our own reader of the first form."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    first = of(made, recipe)
    quiet(first, tmp_path / "ct", to="compressed-tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "ct",
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(run_compressed=False),
        )
    model.eval()
    for module in model.modules():  # weights alone: inputs as they are
        if hasattr(module, "quantization_enabled"):
            module.quantization_enabled = False
    with torch.inference_mode():
        got = model(TOKENS).logits
    want = logits(first)
    assert float((got - want).norm() / want.norm()) < 1e-5


SEARCHED = {
    "nvfp4_gptq": ("nvfp4-pack-quantized", {"strategy": "tensor_group", "group_size": 16}),
    "mxfp4_gptq": (
        "mxfp4-pack-quantized",
        {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
}


@pytest.mark.parametrize("recipe", SEARCHED)
def test_peers_decode_chosen_codes(made: dict[str, Path], tmp_path: Path, recipe: str) -> None:
    """Codes of GPTQ and scales of a search: compressed-tensors and ModelOpt decode our values."""
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("modelopt")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor

    first = of(made, recipe)
    quiet(first, tmp_path / "ct", to="compressed-tensors")
    form, words = SEARCHED[recipe]
    given = QuantizationArgs(symmetric=True, num_bits=4, type="float", **words)
    scheme = QuantizationScheme(targets=["Linear"], weights=given)
    compressor = BaseCompressor.load_from_registry(form)
    ours, theirs = tensors(first), tensors(tmp_path / "ct")
    want = canonical_values(first)
    for name, module in (("attn.o", "self_attn.o_proj"), ("mlp.down", "mlp.down_proj")):
        weight = torch.from_numpy(want[f"layers.1.{name}.weight"])
        base = f"model.layers.1.{module}."
        state = {n.removeprefix(base): t for n, t in theirs.items() if n.startswith(base)}
        got = compressor.decompress(state, scheme)["weight"].float()
        torch.testing.assert_close(got, weight, rtol=8e-3, atol=0)  # computed in bfloat16
        codes, scale = ours[base + "weight"], ours[base + "weight_scale"]
        if recipe == "nvfp4_gptq":
            packed = NVFP4QTensor(weight.shape, torch.float32, codes)
            second = ours[base + "weight_scale_2"]
            got = packed.dequantize(scale=scale, double_scale=second, block_sizes={-1: 16})
        else:
            packed = MXFP4QTensor(weight.shape, torch.float32, codes)
            got = packed.dequantize(scale=scale, block_sizes={-1: 32})
        torch.testing.assert_close(got, weight, rtol=4e-3, atol=0)


def test_what_has_no_place(made: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with raises(MappingError, match=r"factors of columns.*down_proj", hint="fold: true"):
        quiet(of(made, "int8_sq"), out, to="compressed-tensors")
    with pytest.raises(MappingError, match="sglang does not load MXFP8"):
        quiet(of(made, "mxfp8"), out, to="sglang")
    with pytest.raises(UsageError, match="not quantized"):
        quiet(made[""], out, to="compressed-tensors")
    with pytest.raises(UsageError, match="two engines"):
        quiet(of(made, "fp8"), out, to="vllm", target="sglang")
    with pytest.raises(UsageError, match=r"nothing is known about vllm 0\.1"):
        quiet(of(made, "fp8"), out, to="vllm", target="vllm@0.1")
    with pytest.raises(UsageError, match="--tp has no effect"):
        quiet(of(made, "fp8"), out, to="vllm", tp=2)
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(DestinationError):
        quiet(of(made, "fp8"), out, to="vllm")
    assert [p.name for p in out.iterdir()] == ["mine"]


def test_a_scale_is_missing(made: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for path in of(made, "fp8").iterdir():
        if path.suffix == ".json":
            (broken / path.name).write_bytes(path.read_bytes())
    held = tensors(of(made, "fp8"))
    name = "model.layers.1.mlp.up_proj.input_scale"
    del held[name]
    (broken / "megtool.json").unlink(missing_ok=True)
    (broken / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(held, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"input_scale.*missing"):
        quiet(broken, tmp_path / "out", to="vllm")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_for_an_engine(made: dict[str, Path], tmp_path: Path, engine: str) -> None:
    report = quiet(of(made, "fp8"), tmp_path / "out", to=engine)
    assert report.engine == engine
    config = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert config["quantization"]["quant_algo"] == "FP8"
    assert torch.equal(logits(tmp_path / "out"), logits(of(made, "fp8")))


def test_a_cache_alone(made: dict[str, Path], tmp_path: Path) -> None:
    """A folder whose KV cache alone is quantized keeps it, or says that it goes."""
    first, out = of(made, "kv_fp8"), tmp_path / "out"
    report = quiet(first, out, to="unified")
    assert (report.kv_algo, report.algo) == ("FP8", "")
    assert tensors(out).keys() == tensors(first).keys()
    assert (out / "config.json").read_bytes() == (first / "config.json").read_bytes()
    with pytest.raises(MappingError, match="nothing but the KV cache is quantized"):
        quiet(first, tmp_path / "vllm", to="vllm")
    with raises(MappingError, "KV", "NVFP4"):
        quiet(of(made, "kv_nvfp4"), tmp_path / "ct", to="compressed-tensors")
    report = quiet(first, tmp_path / "hf", to="hf")
    assert any("scales of inputs and of the KV cache are left out" in n for n in report.notes)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


def test_decoded(made: dict[str, Path], tmp_path: Path) -> None:
    report = quiet(of(made, "fp8"), tmp_path / "out", to="hf")
    assert report.decoded == 14
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    close = (logits(tmp_path / "out") - logits(of(made, "fp8"))).norm()
    assert close / logits(of(made, "fp8")).norm() < 1e-2  # rounded to bfloat16


def test_a_dry_run(made: dict[str, Path], tmp_path: Path) -> None:
    report = quiet(of(made, "fp8"), tmp_path / "out", to="compressed-tensors", dry_run=True)
    assert report.is_dry
    assert not (tmp_path / "out").exists()
    assert "config.json" in report.files
