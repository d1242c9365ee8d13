"""NVFP4 of quantized folders in GGUF files: the same codes, scales and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megtool
from megtool.errors import FormatError, UsageError
from tests.support.errors import raises
from tests.support.models import gguf_models
from tests.support.runs.exports import export_gguf

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

SIZES = {"hidden_size": 128, "intermediate_size": 192}


def save(folder: Path, model: str = "llama", recipe: str = "nvfp4", **sizes: int) -> Path:
    """A small model, quantized."""
    source = gguf_models.save(folder / "hf", model, **{**SIZES, **sizes})
    megtool.quantize(source, folder / "quantized", recipe=recipe)
    return folder / "quantized"


def read(path: Path) -> dict[str, Any]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def numbers_of(path: Path) -> dict[str, np.ndarray]:
    """What weights of blocks are, by the gguf library, times their scales."""
    held = read(path)
    out = {}
    for name, t in held.items():
        if t.tensor_type.name == "NVFP4":
            values = gguf.quants.dequantize(t.data, t.tensor_type)
            scale = np.array(held[name.removesuffix("weight") + "scale"].data)
            out[name] = values * scale.reshape(-1, *[1] * (values.ndim - 1))
    return out


def compare(quantized: Path, folder: Path, *, count: int) -> list[str]:
    """The notes of a file with `count` weights of blocks, whose numbers are those decoded."""
    report = export_gguf(quantized, folder / "model.gguf", outtype="nvfp4")
    export_gguf(quantized, folder / "plain.gguf", outtype="f32")
    found, plain = numbers_of(folder / "model.gguf"), read(folder / "plain.gguf")
    assert len(found) == count
    for name, values in found.items():
        want = np.asarray(plain[name].data)
        assert np.abs(values - want).max() <= 2**-22 * np.abs(want).max(), name
    assert gguf.GGUFReader(folder / "model.gguf").fields["general.file_type"].contents() == 39
    return list(report.notes)


@pytest.mark.parametrize(
    ("model", "count", "sizes"),
    [("llama", 14, {}), ("qwen3-moe", 14, {"moe_intermediate_size": 64})],
)
def test_numbers_are_those_of_the_folder(
    model: str, count: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Also where queries and keys are sorted, and experts stacked, each with a scale."""
    quantized = save(tmp_path, model, **sizes)
    (note,) = compare(quantized, tmp_path, count=count)
    assert note == "2 of {} tensors are BF16: token_embd.weight, output.weight".format(
        len(read(tmp_path / "model.gguf"))
    )
    (tmp_path / "ct").mkdir()
    megtool.export(quantized, tmp_path / "ct" / "folder", to="compressed-tensors")
    compare(tmp_path / "ct" / "folder", tmp_path / "ct", count=count)
    ours, theirs = (read(f / "model.gguf") for f in (tmp_path, tmp_path / "ct"))
    for name, t in ours.items():
        if t.tensor_type.name == "NVFP4":
            assert (t.data == theirs[name].data).all()


@pytest.mark.parametrize(
    ("model", "sizes"), [("llama", {}), ("qwen3-moe", {"moe_intermediate_size": 64})]
)
def test_files_are_read_back(model: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Weights times their scales, whole and in part, at any layout; other scales are left out."""
    quantized = save(tmp_path, model, **sizes)
    export_gguf(quantized, tmp_path / "model.gguf", outtype="nvfp4")
    want = megtool.open(quantized, framework="torch").as_("hf")
    found = megtool.open(tmp_path / "model.gguf", framework="torch").as_("hf")
    assert [*found] == [*want]
    for name in found:
        is_block = "proj" in name and want[name].ndim > 1
        near = 1e-6 if is_block else torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(found[name][:].float(), want[name][:].float(), rtol=near, atol=0)
    name = next(n for n in found if n.endswith("down_proj.weight"))
    box = np.s_[3:9, 5:61]
    torch.testing.assert_close(found[name][box], want[name][:][box].float(), rtol=1e-6, atol=0)
    options = {"dtype": "float32", "fsync": False}
    megtool.reshard(tmp_path / "model.gguf", tmp_path / "tp2", to="torch_dist", tp=2, **options)
    megtool.reshard(tmp_path / "tp2", tmp_path / "moved", to="hf", **options)
    moved = megtool.open(tmp_path / "moved", framework="torch").tensors
    assert all(moved[n][:].equal(found[n][:].float()) for n in found)


def test_scales_of_other_shapes_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    codes = np.zeros((4, 36), np.uint8)
    kind = gguf.GGMLQuantizationType.NVFP4
    writer.add_tensor("blk.0.attn_q.weight", codes, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_q.scale", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with raises(
        FormatError,
        "'blk.0.attn_q.scale', the scale of a weight [4, 64], is float32 [3]",
        file=tmp_path / "model.gguf",
        tensor="blk.0.attn_q.weight",
        hint="one float32 number",
    ):
        megtool.open(tmp_path / "model.gguf")


def test_codes_and_scales_are_those_of_the_folder(tmp_path: Path) -> None:
    quantized = save(tmp_path)
    export_gguf(quantized, tmp_path / "model.gguf", outtype="nvfp4")
    (file,) = quantized.glob("*.safetensors")
    held = load_bytes(file)
    name = "model.layers.1.mlp.down_proj.weight"
    blocks = np.asarray(read(tmp_path / "model.gguf")["blk.1.ffn_down.weight"].data)
    blocks = blocks.reshape(len(blocks), -1, 36)
    assert (blocks[..., :4].reshape(len(blocks), -1) == held[f"{name}_scale"]).all()
    halves = blocks[..., 4:].reshape(len(blocks), -1, 8)
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(len(blocks), -1)
    stored = held[name]
    assert (codes[:, 0::2] == stored & 15).all()
    assert (codes[:, 1::2] == stored >> 4).all()


def load_bytes(file: Path) -> dict[str, np.ndarray]:
    """Tensors of one byte an element."""
    held = {n: t for n, t in load_file(file).items() if t.element_size() == 1}
    return {n: t.view(torch.uint8).numpy() for n, t in held.items()}


@pytest.mark.parametrize("is_compressed", [False, True])
def test_other_formats_beside_it_become_bf16(is_compressed: bool, tmp_path: Path) -> None:
    """FP8 attention beside NVFP4 experts, as folders of several formats have it."""
    quantized = save(tmp_path, "qwen3-moe", "mixed_nvfp4_fp8", moe_intermediate_size=64)
    if is_compressed:
        megtool.export(quantized, tmp_path / "ct", to="compressed-tensors")
        quantized = tmp_path / "ct"
    (note,) = compare(quantized, tmp_path, count=6)
    assert note.startswith("10 of 33 tensors are BF16: token_embd.weight, blk.0.attn_q.weight")


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    source = gguf_models.save(tmp_path / "hf", "llama", **SIZES)
    with raises(UsageError, "NVFP4 in SRC, and none is", hint="--recipe nvfp4"):
        export_gguf(source, tmp_path / "a.gguf", outtype="nvfp4")
    quantized = save(tmp_path / "narrow", hidden_size=96, intermediate_size=96)
    with raises(UsageError, "none is"):  # 64 columns do not divide rows
        export_gguf(quantized, tmp_path / "b.gguf", outtype="nvfp4")
    assert not list(tmp_path.glob("*.gguf"))


def test_scales_with_a_sign_are_refused(tmp_path: Path) -> None:
    quantized = save(tmp_path)
    (file,) = quantized.glob("*.safetensors")
    held = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    held[name].view(torch.uint8)[3, 1] |= 0x80
    save_file(held, file, {"format": "pt"})
    (quantized / "megtool.json").unlink(missing_ok=True)
    weight = "model.layers.0.mlp.up_proj.weight"
    with raises(FormatError, "negative or NaN", tensor=weight, file=quantized):
        export_gguf(quantized, tmp_path / "model.gguf", outtype="nvfp4")
    for number in (float("nan"), 1e38):
        save_file(held | {f"{weight}_scale_2": torch.tensor(number)}, file, {"format": "pt"})
        with raises(FormatError, tensor=weight, hint="lint", id="nan-scales"):
            export_gguf(quantized, tmp_path / "model.gguf", outtype="nvfp4")
    assert not (tmp_path / "model.gguf").exists()
