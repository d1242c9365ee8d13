"""Quantized folders: the same numbers from the ranks, scales where engines look for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megtool.dtypes import dtype
from megtool.errors import MappingError
from megtool.number_formats.small_floats import single
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.checkpoints.quantized_folder import make_quantized
from tests.support.checkpoints.trtllm_joined import config_of, joined, ranks_of
from tests.support.errors import raises
from tests.support.models import trtllm_models
from tests.support.runs.exports import export_trtllm_legacy

ALGOS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "W8A8_SQ_PER_CHANNEL",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "NVFP4",
)


def decoded_source(folder: Path) -> dict[str, Tensor]:
    """What megtool reads the folder's weights as (float32), by the names of `joined`."""
    opened = open_source(folder)
    out = {}
    with CheckpointReader(opened.catalogue, Files()) as reader:
        for t in opened.catalogue.tensors:
            tensor = reader.open_stored(t.name)
            tensor.dtype = dtype("float32")
            out[t.name] = torch.from_numpy(np.array(single(tensor.read(), "float32")))
    renamed = {}
    for name, tensor in out.items():
        short = name.removeprefix("model.")
        for old, new in trtllm_models.RENAMED.items():
            short = short.replace(f"{old}.", f"{new}.")
        renamed[short] = tensor
    return renamed


def check(folder: Path, source: Path, *, step: float = 0.0) -> None:
    """Weights are those of the source; where one scale replaced several, within `step` of the
    largest magnitude, half the distance of the numbers that are there."""
    found, want = joined(folder), decoded_source(source)
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        got, more = found[name].float()[: len(tensor)], found[name][len(tensor) :]
        assert not more.any()  # rows that pad a vocabulary
        if name.endswith("norm.weight") or not step:
            torch.testing.assert_close(got, tensor, rtol=0, atol=0, msg=name)
        else:
            off = (got - tensor).abs()
            assert (off <= tensor.abs() * step + tensor.abs().max() * 2.0**-9).all(), name


@pytest.mark.parametrize("algo", ALGOS)
def test_numbers_stay(tmp_path: Path, algo: str) -> None:
    """FP8 siblings of several scales are encoded again; a step of e4m3 is 1/8, half of it 1/16."""
    source = trtllm_models.llama(tmp_path / "hf", vocab_size=100, num_hidden_layers=2)
    made = make_quantized(source, tmp_path / "q", algos=algo, group=32, smooth="AWQ" in algo)
    alone = algo == "FP8"
    for tp, pp in ((1, 1), (4, 2)):
        out = tmp_path / f"{tp}{pp}"
        report = export_trtllm_legacy(made.path, out, tp=tp, pp=pp, fsync=False)
        check(out, made.path, step=1 / 16 + 1e-6 if alone else 0.0)
        assert report.exact + report.requantized == 14
        assert report.algo == algo
        assert bool(report.requantized) is alone
        c = config_of(out)
        assert c["quantization"]["quant_algo"] == algo
        assert c["quantization"]["kv_cache_quant_algo"] == "FP8"
        assert c["quantization"]["exclude_modules"] == ["lm_head"]
        assert c["vocab_size"] == (128 if "AWQ" in algo else 100)
        for rank in ranks_of(out):
            _check_shapes(rank, algo, tp)


def _check_shapes(rank: dict[str, Tensor], algo: str, tp: int) -> None:
    at = "transformer.layers.0"
    for module, rows, width in (
        ("attention.qkv", 128 // tp + 2 * max(64 // tp, 32), 128),
        ("attention.dense", 128, 128 // tp),
        ("mlp.fc", 256 // tp, 128),
        ("mlp.proj", 128, 256 // tp),
    ):
        got = {
            n.removeprefix(f"{at}.{module}."): t
            for n, t in rank.items()
            if n.startswith(f"{at}.{module}.")
        }
        shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in got.items()}
        one, by_row = ("float32", (1,)), ("float32", (rows,))
        groups = ("float32", (rows, width // 32))
        factors = ("bfloat16", (width,))
        pairs = ("int8", (rows // 2, width))
        want = {
            "FP8": {
                "weight": ("float8_e4m3fn", (rows, width)),
                "weights_scaling_factor": one,
                "activation_scaling_factor": one,
            },
            "FP8_PER_CHANNEL_PER_TOKEN": {
                "weight": ("float8_e4m3fn", (rows, width)),
                "per_channel_scale": by_row,
            },
            "W8A8_SQ_PER_CHANNEL": {
                "weight": ("int8", (rows, width)),
                "weights_scaling_factor": by_row,
                "activation_scaling_factor": one,
                "prequant_scaling_factor": factors,
            },
            "W4A16_AWQ": {
                "weight": pairs,
                "weights_scaling_factor": groups,
                "prequant_scaling_factor": factors,
            },
            "W4A8_AWQ": {
                "weight": pairs,
                "weights_scaling_factor": groups,
                "weights_scaling_factor_2": one,
                "activation_scaling_factor": one,
                "prequant_scaling_factor": factors,
            },
            "NVFP4": {
                "weight": ("uint8", (rows, width // 2)),
                "weights_scaling_factor": ("float8_e4m3fn", (rows, width // 16)),
                "weights_scaling_factor_2": one,
                "activation_scaling_factor": one,
            },
        }[algo]
        assert shapes == want, module
    for name in ("k", "v", "kv"):
        assert rank[f"{at}.attention.{name}_cache_scaling_factor"].tolist() == [1.0]


def test_factors_follow_columns(tmp_path: Path) -> None:
    """A rank has those of its columns; where a norm took them, engines are given ones."""
    source = trtllm_models.llama(tmp_path / "hf", vocab_size=64)
    made = make_quantized(source, tmp_path / "q", algos="W4A16_AWQ", group=32, smooth=True)
    export_trtllm_legacy(made.path, tmp_path / "out", tp=2, fsync=False)
    want = load_file(made.path / "model.safetensors")
    ranks = ranks_of(tmp_path / "out")
    for theirs, ours in (("self_attn.o_proj", "attention.dense"), ("mlp.down_proj", "mlp.proj")):
        parts = [r[f"transformer.layers.1.{ours}.prequant_scaling_factor"] for r in ranks]
        assert torch.equal(torch.cat(parts), want[f"model.layers.1.{theirs}.pre_quant_scale"])
    for ours in ("attention.qkv", "mlp.fc", "mlp.gate"):
        for r in ranks:
            assert (r[f"transformer.layers.1.{ours}.prequant_scaling_factor"] == 1).all()
    assert config_of(tmp_path / "out")["quantization"]["pre_quant_scale"] is True


@pytest.mark.parametrize("algo", ["FP8", "NVFP4", "W4A16_AWQ"])
def test_mixtral(tmp_path: Path, algo: str) -> None:
    """Halves of an expert have one scale; all experts one of inputs."""
    source = trtllm_models.mixtral(tmp_path / "hf")
    made = make_quantized(source, tmp_path / "q", algos=algo, group=32, cache=False)
    tensors = load_file(made.path / "model.safetensors")
    inputs = {}
    for name in tensors:
        if name.endswith("input_scale"):
            inputs[name] = tensors[name] * (1 + len(inputs) % 7)
    save_file(tensors | inputs, made.path / "model.safetensors", {"format": "pt"})
    export_trtllm_legacy(made.path, tmp_path / "out", tp=2, pp=2, fsync=False)
    check(tmp_path / "out", made.path, step=1 / 16 + 1e-6 if algo == "FP8" else 0.0)
    rank = ranks_of(tmp_path / "out")[0]
    mlp = "transformer.layers.0.mlp"
    if algo == "FP8":
        assert rank[f"{mlp}.fc.weights_scaling_factor"].shape == (4, 1)
        experts = "model.layers.0.block_sparse_moe.experts"
        for module, names in (("fc", ("w1", "w3")), ("proj", ("w2",))):
            for e in range(4):
                own = [tensors[f"{experts}.{e}.{n}.weight_scale"] for n in names]
                assert rank[f"{mlp}.{module}.weights_scaling_factor"][e] == max(own)
            fed = [inputs[f"{experts}.{e}.{n}.input_scale"] for e in range(4) for n in names]
            assert rank[f"{mlp}.{module}.activation_scaling_factor"].tolist() == [float(max(fed))]
    quantization = config_of(tmp_path / "out")["quantization"]
    assert "transformer.layers.0.mlp.router" in quantization["exclude_modules"]


def test_mixed_precision(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf", vocab_size=64)
    algos = {"attn.o": "FP8_PER_CHANNEL_PER_TOKEN", "": "NVFP4"}
    made = make_quantized(source, tmp_path / "q", algos=algos, cache=True)
    report = export_trtllm_legacy(made.path, tmp_path / "out", tp=2, pp=2, fsync=False)
    check(tmp_path / "out", made.path)
    assert report.algo == "MIXED_PRECISION"
    said = json.loads((tmp_path / "out" / "quant_cfg.json").read_text())
    assert config_of(tmp_path / "out")["quantization"] == {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
    }
    assert said["quant_algo"] == "MIXED_PRECISION"
    assert said["kv_cache_quant_algo"] == "FP8"
    at = "transformer.layers.1"
    assert said["quantized_layers"][f"{at}.attention.dense"] == {
        "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"
    }
    assert said["quantized_layers"][f"{at}.mlp.fc"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert len(said["quantized_layers"]) == 2 * 5  # a stage's layers: all stages call them alike


def test_cache_scales(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf")
    made = make_quantized(source, tmp_path / "q", algos="FP8")
    file = made.path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("v_scale"):
            tensors[name] = torch.tensor(0.02)
    tensors["model.layers.3.self_attn.k_proj.k_scale"] = torch.tensor(1.5)
    save_file(tensors, file, {"format": "pt"})
    report = export_trtllm_legacy(made.path, tmp_path / "out", fsync=False)
    assert any("KV cache" in n for n in report.notes)
    [rank] = ranks_of(tmp_path / "out")
    for layer, want in ((0, (1, 1, 1)), (3, (1.5, 1, 1.5))):
        at = f"transformer.layers.{layer}.attention"
        found = [float(rank[f"{at}.{n}_cache_scaling_factor"]) for n in ("k", "v", "kv")]
        assert found == pytest.approx(want)


def test_weights_that_engines_quantize_themselves(tmp_path: Path) -> None:
    """INT8 weights alone: engines store them for one kind of GPU, out of plain ones."""
    source = trtllm_models.llama(tmp_path / "hf")
    made = make_quantized(source, tmp_path / "q", algos="W8A16", cache=False)
    report = export_trtllm_legacy(made.path, tmp_path / "out", tp=2, fsync=False)
    assert report.decoded == 28
    assert report.algo == "W8A16"
    found, want = joined(tmp_path / "out"), decoded_source(made.path)
    for name, tensor in want.items():
        assert torch.equal(found[name].float(), tensor.bfloat16().float()), name


def test_what_engines_quantize_themselves_and_what_they_leave(tmp_path: Path) -> None:
    """Kept modules are excluded, by patterns that fit names of weights too; caches have scales."""
    source = trtllm_models.llama(tmp_path / "hf")
    algos = {f"layers.0.mlp.{n}": "" for n in ("gate", "up", "down")} | {"": "W8A16"}
    made = make_quantized(source, tmp_path / "q", algos=algos)
    report = export_trtllm_legacy(made.path, tmp_path / "out", tp=2, fsync=False)
    assert (report.algo, report.kv_algo) == ("W8A16", "FP8")
    said = config_of(tmp_path / "out")["quantization"]
    kept = [f"transformer.layers.0.mlp.{n}*" for n in ("fc", "gate", "proj")]
    assert said == {
        "quant_algo": "W8A16",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head*", *kept],
    }
    for rank in ranks_of(tmp_path / "out"):
        for layer in range(4):
            at = f"transformer.layers.{layer}.attention"
            found = [float(rank[f"{at}.{n}_cache_scaling_factor"]) for n in ("k", "v", "kv")]
            assert found == [1, 1, 1]
    algos = {"attn.q": "", "": "W8A16"}
    made = make_quantized(source, tmp_path / "mixed", algos=algos)
    with raises(MappingError, "attn.q", "attn.k", "W8A16"):
        export_trtllm_legacy(made.path, tmp_path / "other")
