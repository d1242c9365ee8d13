"""Quantized folders computed as engines do, beside the libraries that made them."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megtool import evaluate, export, generate, quantize
from megtool.errors import FormatError, UsageError
from megtool.export.hf.engine_arithmetic import read_stored_quantization, run_as_engine
from megtool.inference.forward import Forward
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.source.open import open_decoder
from tests.support.errors import raises
from tests.support.quant.modelopt_on_transformers import export_svdquant
from tests.support.quant.quantize_sizes import save_llama

TOKENS = torch.arange(96).view(2, 48) * 37 % 250


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("arithmetic") / "llama"
    return save_llama(folder)


@pytest.fixture(scope="module")
def text(llama: Path) -> Path:
    file = llama.parent / "text.txt"
    file.write_text("A checkpoint holds what a model has learned, and how far it got. " * 12)
    return file


@functools.cache
def quantized(llama: Path, recipe: str, text: Path | None = None) -> tuple[Path, Any]:
    out = llama.parent / recipe
    calibrated = {} if recipe in ("fp8_block128", "mxfp8") else {"samples": 4, "seq_length": 32}
    report = quantize(
        llama,
        out,
        recipe=recipe,
        eval_data=text,
        threads=1,
        fsync=False,
        device="cpu",
        **calibrated,
    )
    return out, report


def logits(folder: Path, *, as_engine: bool = True) -> Tensor:
    source = open_decoder(folder)
    decoder = load(source, dtype="float32")
    if as_engine:
        assert run_as_engine(Forward(decoder), source)
    with torch.inference_mode():
        return decoder(Batch(tokens_BS=TOKENS))


def distance(got: Tensor, want: Tensor) -> float:
    return float((got - want.reshape(got.shape)).norm() / want.norm())


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8_kv_fp8",
        "int8_sq",
        "fp8_block128",
        "nvfp4_svdquant",
        *(
            pytest.param(r, marks=pytest.mark.slow)
            for r in (
                "nvfp4_awq",
                "fp8_per_channel",
                "mxfp8",
                "mxfp4",
                "w4a8_awq",
                "kv_nvfp4",
                "int4_awq",
            )
        ),
    ],
)
def test_evaluate_measures_what_quantize_does(llama: Path, text: Path, recipe: str) -> None:
    out, report = quantized(llama, recipe, text)
    found = evaluate(out, data=text, device="cpu", threads=1)
    assert found.perplexity == pytest.approx(report.evaluation.perplexity_after, rel=1e-8)
    decoded = evaluate(out, data=text, device="cpu", threads=1, dequantize=True)
    if recipe != "int4_awq":  # whose inputs engines do not round
        assert decoded.perplexity != pytest.approx(found.perplexity, rel=1e-6)


def test_compressed_tensors_are_the_same_model(llama: Path, tmp_path: Path) -> None:
    """One model in the forms of ModelOpt and of compressed-tensors (whose scales divide)."""
    out, _ = quantized(llama, "nvfp4")
    export(out, tmp_path / "ct", to="compressed-tensors", fsync=False)
    stored = read_stored_quantization(open_decoder(tmp_path / "ct"))
    assert stored is not None
    assert {r.kind for r in stored.inputs.values()} == {"nvfp4:16"}
    assert distance(logits(tmp_path / "ct"), logits(out)) < 1e-5


def in_compressed_tensors(
    llama: Path, out: Path, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> Tensor:
    """Logits by compressed-tensors' own modules, whose model is then saved in `out`."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if (scale := getattr(module, "weight_scale", None)) is None:
            continue
        weight, per = module.weight.data, scale.shape[-1] if scale.ndim == 2 else 1
        largest = weight.view(weight.shape[0], per, -1).abs().amax(-1)
        if weights["strategy"] == "tensor":
            largest = torch.full(scale.shape, 0.4)  # one scale for modules that run as one
        most = 448 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1) - 0.5
        scale.data.copy_(largest.reshape(scale.shape) / most)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(5 / most)
    with torch.no_grad():
        want: Tensor = model(TOKENS).logits
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    return want


FLOAT8, INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
DYNAMIC = {"strategy": "token", "dynamic": True}
SCHEMES = {
    "float-static": ({**FLOAT8, "strategy": "tensor"}, {**FLOAT8, "strategy": "tensor"}, 1e-5),
    "float-dynamic": ({**FLOAT8, "strategy": "channel"}, {**FLOAT8, **DYNAMIC}, 1e-5),
    "int-static": ({**INT8, "strategy": "channel"}, {**INT8, "strategy": "tensor"}, 1e-5),
    # compressed-tensors scales by amax / 127.5, and engines' kernels by amax / 127.
    "int-dynamic": ({**INT8, "strategy": "channel"}, {**INT8, **DYNAMIC}, 0.02),
    "int4": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None, 1e-5),
}


@pytest.mark.peers
@pytest.mark.parametrize("scheme", SCHEMES)
def test_as_compressed_tensors_computes(llama: Path, tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("compressed_tensors")
    weights, inputs, limit = SCHEMES[scheme]
    want = in_compressed_tensors(llama, tmp_path / "ct", weights, inputs)
    assert distance(logits(tmp_path / "ct"), want) < limit
    if inputs is not None and scheme != "int-dynamic":
        assert distance(logits(tmp_path / "ct", as_engine=False), want) > 100 * limit


@pytest.mark.peers
@pytest.mark.parametrize(
    ("preset", "limit"),
    [
        ("FP8_DEFAULT_CFG", 2e-3),
        ("FP8_KV", 2e-3),
        ("INT8_SMOOTHQUANT_CFG", 5e-3),
        # ModelOpt multiplies by 448 / amax, which rounds a few ties to the other side.
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", 1.8e-2),
    ],
)
def test_as_modelopt_computes(llama: Path, tmp_path: Path, preset: str, limit: float) -> None:
    """ModelOpt's fake-quantized model, with the weights that it exports."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(getattr(mtq, preset.replace("FP8_KV", "FP8_DEFAULT_CFG")))
    if preset == "FP8_KV":
        config["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        model = mtq.quantize(model, config, lambda m: m(TOKENS))
        for module in model.modules():
            quantizer = getattr(module, "weight_quantizer", None)
            amax = getattr(quantizer, "amax", None)
            if "FP8" in preset and amax is not None and amax.numel() == 1:
                quantizer.amax = torch.tensor(0.5)  # one scale for modules that run as one
        exported = copy.deepcopy(model)
        export_hf_checkpoint(exported, export_dir=tmp_path / "out")
    decoded = load_file(tmp_path / "out" / "model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            if (codes := decoded.get(f"{name}.weight")) is None or codes.element_size() > 1:
                continue
            scale = decoded[f"{name}.weight_scale"]
            module.weight.copy_(codes.float() * scale.reshape(-1, 1))
            module.weight_quantizer.disable()
        want = model(TOKENS).logits
    assert distance(logits(tmp_path / "out"), want) < limit
    assert distance(logits(tmp_path / "out", as_engine=False), want) > 2 * limit


@pytest.mark.peers
def test_as_modelopt_computes_svdquant(llama: Path, tmp_path: Path) -> None:
    """ModelOpt's fake-quantized model after its export has fused siblings, and what it exports."""
    pytest.importorskip("modelopt.torch.quantization")
    want, out = export_svdquant(llama, tmp_path / "out", TOKENS, rank=4)
    assert distance(logits(out), want) < 1e-5
    assert distance(logits(out, as_engine=False), want) > 0.02


def test_siblings_take_the_larger_scale_of_their_inputs(llama: Path, tmp_path: Path) -> None:
    out, _ = quantized(llama, "fp8")
    edited = changed(
        out, tmp_path / "edited", lambda t: t[f"{ATTENTION}.k_proj.input_scale"].mul_(2)
    )
    stored = changed(
        out,
        tmp_path / "all",
        lambda t: [t[f"{ATTENTION}.{n}_proj.input_scale"].mul_(2) for n in "qkv"],
    )
    assert torch.equal(logits(edited), logits(stored))


ATTENTION = "model.layers.0.self_attn"


def changed(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and file.name != "megtool.json":
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_refusals(llama: Path, text: Path, tmp_path: Path) -> None:
    out, _ = quantized(llama, "fp8")
    with raises(UsageError, "--dequantize has no effect"):
        evaluate(llama, data=text, dequantize=True, dry_run=True)
    with raises(UsageError, "--dequantize has no effect"):
        generate(llama, prompt=["a"], dequantize=True, dry_run=True)
    lost = changed(out, tmp_path / "lost", lambda t: t.pop(f"{ATTENTION}.o_proj.input_scale"))
    with raises(FormatError, "o_proj.input_scale", "is missing"):
        generate(lost, prompt=["a"], max_new_tokens=1, device="cpu")
    assert generate(lost, prompt=["a"], max_new_tokens=1, device="cpu", dequantize=True).num_tokens
    odd = changed(out, tmp_path / "odd", lambda t: None)
    config = json.loads((odd / "hf_quant_config.json").read_text())
    config["quantization"]["kv_cache_quant_algo"] = "INT8"
    (odd / "hf_quant_config.json").write_text(json.dumps(config))
    with raises(FormatError, "KV cache is quantized as INT8"):
        generate(odd, prompt=["a"], max_new_tokens=1, device="cpu")
