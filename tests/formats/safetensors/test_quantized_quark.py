"""Folders of AMD Quark: decoded as Quark does, and what it packs in other ways is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, lint, reshard, verify
from megtool.errors import FormatError
from tests.support.errors import raises
from tests.support.models import tiny_llama

GATE = "model.layers.0.mlp.gate_proj"
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}


def _channels(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}


def _mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As `Pack_fp4` packs and `to_e8m0_uint8` stores: the first of two columns lies below."""
    blocks = weight.reshape(len(weight), -1, 32)
    power = (blocks.abs().amax(-1) / 6).log2().ceil()
    steps = blocks / 2 ** power[..., None]
    codes = (steps.abs()[..., None] - FP4).abs().argmin(-1) | (steps < 0).int() << 3
    codes = codes.reshape(weight.shape).to(torch.uint8)
    return {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": (power + 127).to(torch.uint8),
    }


def _decoded(kind: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The numbers of a weight, as Quark's `dequantize` has them."""
    codes, scale = parts["weight"], parts["weight_scale"]
    if kind == "fp8":
        return codes.float() * scale
    if kind == "int8":
        return codes.float() * scale[:, None]
    nibbles = torch.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1).int()
    values = FP4[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    powers = 2.0 ** (scale.int() - 127)
    return values * powers.repeat_interleave(32, 1)


KINDS = {
    "fp8": (_fp8, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}),
    "int8": (_channels, {"dtype": "int8", "qscheme": "per_channel"}),
    "mxfp4": (
        _mxfp4,
        {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
    ),
}


def _save(folder: Path, kind: str, **spec: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder as Quark writes it, and its weights decoded."""
    plain = tiny_llama.save(folder, hidden_size=64, intermediate_size=96)
    tensors, stored, want = load_file(plain / "model.safetensors"), {}, {}
    encode, declared = KINDS[kind]
    for name, tensor in tensors.items():
        if "proj" not in name:
            stored[name] = want[name] = tensor
            continue
        parts = encode(tensor.float())
        base = name.removesuffix("weight")
        stored |= {base + n: t.contiguous() for n, t in parts.items()}
        want[name] = _decoded(kind, parts)
    save_file(stored, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "quark",
        "global_quant_config": {"weight": declared | spec, "input_tensors": None},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }
    (plain / "config.json").write_text(json.dumps(config))
    return plain, want


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_decoded(kind: str, tmp_path: Path) -> None:
    folder, want = _save(tmp_path / "quark", kind)
    reshard(folder, tmp_path / "plain", to="hf", dtype="float32")
    found = load_file(tmp_path / "plain/model.safetensors")
    assert set(found) == set(want)
    for name, tensor in want.items():
        np.testing.assert_allclose(found[name].float(), tensor.float(), rtol=2e-7, err_msg=name)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert "quantization_config" not in config
    assert verify(folder, tmp_path / "plain", rtol=1e-2).exit_status == 0


def test_what_is_packed_otherwise_is_refused(tmp_path: Path) -> None:
    folder, _ = _save(tmp_path / "quark", "int8", qscheme="per_group", group_size=32)
    with raises(FormatError, id="unsupported-quantization"):
        reshard(folder, tmp_path / "plain", to="hf")
    folder, _ = _save(tmp_path / "int4", "int8", dtype="int4")
    with raises(FormatError, id="unsupported-quantization"):
        reshard(folder, tmp_path / "plain", to="hf")
    folder, _ = _save(tmp_path / "fp8", "fp8")
    with raises(FormatError, id="unsupported-quantization"):
        export(folder, tmp_path / "out", to="compressed-tensors")


def _change(folder: Path, **parts: torch.Tensor) -> None:
    """Put other parts of a weight into a folder."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{GATE}.{name}": tensor for name, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "number"), [("fp8", float("nan")), ("fp8", 3e38), ("mxfp4", 255), ("mxfp4", 254)]
)
def test_scales_that_make_nan_are_refused(kind: str, number: float, tmp_path: Path) -> None:
    folder, _ = _save(tmp_path / "quark", kind)
    scale = load_file(folder / "model.safetensors")[f"{GATE}.weight_scale"]
    _change(folder, weight_scale=torch.full_like(scale, number))
    with raises(
        FormatError,
        file=folder / "model.safetensors",
        tensor=f"{GATE}.weight",
        hint="lint",
        id="nan-scales",
    ):
        reshard(folder, tmp_path / "plain", to="hf")
    assert not (tmp_path / "plain").exists()
    assert any(f.id == "scale-value" and f.module == GATE for f in lint(folder).findings)


def test_scales_without_codes_are_refused(tmp_path: Path) -> None:
    folder, want = _save(tmp_path / "quark", "fp8")
    _change(folder, weight=want[f"{GATE}.weight"])
    with raises(FormatError, "float32", tensor=f"{GATE}.weight_scale"):
        reshard(folder, tmp_path / "plain", to="hf")


def test_engines_that_do_not_load_it_are_named(tmp_path: Path) -> None:
    folder, _ = _save(tmp_path / "quark", "fp8")
    attention = "model.layers.0.self_attn"  # scales of an FP8 cache, as Quark names them
    scales = {f"{attention}.{x}_proj.output_scale": torch.tensor(0.5) for x in "kv"}
    tensors = load_file(folder / "model.safetensors") | scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = lint(folder)
    assert not any(f.id == "tensors-unknown" for f in report.findings)
    assert report.form == "quark"
    assert {f.target for f in report.findings if f.severity == "error"} == {"trtllm"}
