"""Types of tensors by llama.cpp's rules, and importance matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import quantize, reshard
from megtool.errors import CalibrationError, FormatError, UsageError
from megtool.export.gguf.file_types import assign_types, parse_file_type
from megtool.source.open import open_source
from megtool.spec.model_config import ModelConfig
from tests.support.errors import raises
from tests.support.models import gguf_models
from tests.support.paths import ROOT
from tests.support.runs.exports import export_gguf

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}


def _types(path: Path) -> dict[str, str]:
    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}


def _config(**more: Any) -> ModelConfig:
    return ModelConfig.from_fields(
        **{
            "num_layers": 16,
            "hidden_size": 256,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "ffn_hidden_size": 512,
            "vocab_size": 320,
            **more,
        }
    )


RECORDED = json.loads((ROOT / "tests/export/gguf/llama_quantize_types.json").read_text())
"""Types that `llama-quantize` gave tensors of small models, by model and file: see `note`."""


@pytest.mark.parametrize("name", RECORDED["models"])
def test_tensors_have_the_types_that_llama_quantize_gives_them(name: str) -> None:
    model = RECORDED["models"][name]
    shapes = {n: tuple(s) for n, s in model["shapes"].items()}
    config = _config(**model["config"])
    for outtype, letters in model["types"].items():
        kinds = {n: RECORDED["kinds"][ord(x) - 97] for n, x in zip(shapes, letters, strict=True)}
        found, _ = assign_types(
            shapes,
            parse_file_type(outtype),
            config,
            model["architecture"],
            has_importance=False,
        )
        assert found == kinds, outtype


def test_large_models_and_importance_have_rules_of_their_own() -> None:
    layers = _config(num_layers=80, num_heads=64, num_kv_heads=8)
    names = ("attn_v", "ffn_down", "attn_k")
    shapes = {f"blk.{i}.{n}.weight": (256, 256) for i in range(80) for n in names}

    def kinds(outtype: str, architecture: str = "llama", **more: Any) -> dict[str, str]:
        options = {"has_importance": False, **more}
        return assign_types(shapes, parse_file_type(outtype), layers, architecture, **options)[0]

    values = {v for n, v in kinds("q4_k_m").items() if "attn_v" in n}
    assert values == {"Q6_K", "Q5_K"}
    assert "Q4_K" in kinds("q4_k_m", "gemma2").values()
    assert {v for n, v in kinds("q4_k_s").items() if "attn_v" in n} == {"Q5_K"}
    assert kinds("q4_0", has_importance=True)["blk.0.ffn_down.weight"] == "Q4_1"
    assert kinds("q4_0")["blk.0.ffn_down.weight"] == "Q4_0"


def test_a_file_of_k_quants_is_read_back(tmp_path: Path) -> None:
    """As a source, decoded as the gguf package does; and its report and metadata."""
    source = gguf_models.save(tmp_path / "hf", "llama", **SIZES)
    export_gguf(source, tmp_path / "f32.gguf", outtype="f32")
    report = export_gguf(source, tmp_path / "m.gguf", outtype="q4_k_m")
    assert report.algo == "Q4_K_M"
    assert any("Q6_K" in n for n in report.notes)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.get_field("general.file_type").contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    reshard(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    back = open_source(tmp_path / "back")
    assert back.catalogue.num_bytes > report.num_bytes
    plain = {t.name: t for t in gguf.GGUFReader(tmp_path / "f32.gguf").tensors}
    for tensor in reader.tensors:
        exact = np.asarray(plain[tensor.name].data)
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(exact.shape)
        assert ((decoded - exact) ** 2).sum() <= 0.01 * (exact**2).sum(), tensor.name
    export_gguf(tmp_path / "m.gguf", tmp_path / "again" / "m.gguf", outtype="f32")
    again = {t.name: t for t in gguf.GGUFReader(tmp_path / "again" / "m.gguf").tensors}
    for tensor in reader.tensors:
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(decoded.reshape(-1), np.asarray(again[tensor.name].data).reshape(-1))


def test_rows_of_no_whole_super_block_become_what_llama_cpp_makes_of_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "head_dim": 48, "intermediate_size": 80}
    source = gguf_models.save(tmp_path / "hf", "llama", **sizes)
    report = export_gguf(source, tmp_path / "m.gguf", outtype="q4_k_m")
    types = _types(tmp_path / "m.gguf")
    assert types["blk.0.attn_q.weight"] == "Q5_0"
    assert types["output.weight"] == "Q8_0"
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert any("no whole blocks" in n and "Q5_0" in n for n in report.notes)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_importance_of_a_calibration_file(name: str, tmp_path: Path) -> None:
    """It lowers the errors it weighs; saved as an imatrix it gives the same file."""
    sizes = {**SIZES, "num_hidden_layers": 2}
    source = gguf_models.save(tmp_path / "hf", name, **sizes)
    calibration = tmp_path / "calibration.safetensors"
    quantize(
        source, calibration, recipe="fp8", calibrate_only=True, synthetic=True, samples=2,
        seq_length=32,
    )  # fmt: skip
    export_gguf(source, tmp_path / "f32.gguf", outtype="f32")
    export_gguf(source, tmp_path / "plain" / "m.gguf", outtype="q3_k_s")
    imatrix = tmp_path / "imatrix.gguf"
    report = export_gguf(
        source, tmp_path / "ours" / "m.gguf", outtype="q3_k_s", imatrix=calibration,
        save_imatrix=imatrix,
    )  # fmt: skip
    assert any("importance matrix weighs" in n for n in report.notes)
    export_gguf(source, tmp_path / "theirs" / "m.gguf", outtype="q3_k_s", imatrix=imatrix)
    ours, theirs = tmp_path / "ours" / "m.gguf", tmp_path / "theirs" / "m.gguf"
    assert ours.read_bytes() == theirs.read_bytes()

    sums = {t.name: np.asarray(t.data) for t in gguf.GGUFReader(imatrix).tensors}
    experts = 4 if name == "mixtral" else 1
    weight = "blk.1.ffn_up_exps.weight" if name == "mixtral" else "blk.1.ffn_up.weight"
    assert sums[f"{weight}.in_sum2"].reshape(-1, 256).shape[0] == experts
    assert sums[f"{weight}.counts"].size == experts
    exact = {t.name: np.asarray(t.data) for t in gguf.GGUFReader(tmp_path / "f32.gguf").tensors}
    errors = []
    for path in (ours, tmp_path / "plain" / "m.gguf"):
        tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == weight)
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        difference = (decoded.reshape(exact[weight].shape) - exact[weight]) ** 2
        columns = sums[f"{weight}.in_sum2"].reshape(experts, -1)
        errors.append((difference.reshape(experts, -1, 256) * columns[:, None]).sum())
    assert errors[0] < 0.98 * errors[1]


def test_importance_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = gguf_models.save(tmp_path / "hf", "llama", **SIZES)
    out = tmp_path / "m.gguf"
    other = gguf_models.save(tmp_path / "other", "llama", num_hidden_layers=2)
    calibration = tmp_path / "calibration.safetensors"
    quantize(
        other, calibration, recipe="fp8", calibrate_only=True, synthetic=True, samples=1,
        seq_length=16,
    )  # fmt: skip
    with raises(
        CalibrationError, file=calibration, hint="--calibrate-only", id="foreign-calibration"
    ):
        export_gguf(source, out, outtype="q4_k_m", imatrix=calibration)
    imatrix = tmp_path / "imatrix.gguf"
    export_gguf(
        other, tmp_path / "o.gguf", outtype="q4_0", imatrix=calibration, save_imatrix=imatrix
    )
    with raises(CalibrationError, tensor="blk.0.attn_q.weight"):
        export_gguf(source, out, outtype="q4_k_m", imatrix=imatrix)
    raw = bytearray(imatrix.read_bytes())
    reader = gguf.GGUFReader(imatrix)
    tensor = next(t for t in reader.tensors if t.name == "blk.0.attn_q.weight.in_sum2")
    raw[tensor.data_offset : tensor.data_offset + 4] = np.float32("nan").tobytes()
    imatrix.write_bytes(raw)
    with raises(CalibrationError, tensor="blk.0.attn_q.weight"):
        export_gguf(other, out, outtype="q4_0", imatrix=imatrix)
    with raises(FormatError, file=tmp_path / "o.gguf"):
        export_gguf(source, out, outtype="q4_k_m", imatrix=tmp_path / "o.gguf")
    with raises(CalibrationError):
        export_gguf(source, out, outtype="q4_k_m", imatrix=source / "config.json")
    with raises(UsageError):
        export_gguf(source, out, outtype="q8_0", imatrix=imatrix)
    with raises(UsageError):
        export_gguf(source, out, outtype="q4_k_m", save_imatrix=imatrix)
    with raises(UsageError):
        export_gguf(source, out, outtype="q2_k_s")
    assert not out.exists()
