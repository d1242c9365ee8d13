"""Models whose sizes are no multiples of 128, quantized by fp8_block128, there and back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, lint, quantize, verify
from tests.support.checkpoints.quantized_weights import MAKERS
from tests.support.folders import write_folder
from tests.support.models import tiny_llama

SIZES = {
    "hidden_size": 200,
    "intermediate_size": 300,
    "head_dim": 40,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "vocab_size": 101,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder, and a quantized one."""
    folder = tmp_path_factory.mktemp("cut")
    tiny_llama.save(folder / "plain", **SIZES)
    quantize(folder / "plain", folder / "blocks", recipe="fp8_block128")
    return folder


def test_scales_are_of_whole_and_cut_blocks(made: Path) -> None:
    stored = load_file(made / "blocks" / "model.safetensors")
    shapes = {n: tuple(t.shape) for n, t in stored.items() if n.endswith("weight_scale")}
    layer = "model.layers.1."
    assert shapes[f"{layer}self_attn.q_proj.weight_scale"] == (2, 1, 2, 1)
    assert shapes[f"{layer}self_attn.k_proj.weight_scale"] == (1, 1, 2, 1)
    assert shapes[f"{layer}mlp.down_proj.weight_scale"] == (2, 1, 3, 1)
    plain = load_file(made / "plain" / "model.safetensors")
    name = f"{layer}mlp.down_proj.weight"
    scale = stored[f"{name}_scale"].reshape(2, 3)
    corner = plain[name][128:, 256:].float()
    assert scale[1, 2] == corner.abs().max() / 448
    codes = stored[name][128:, 256:]
    assert torch.equal(codes.float(), (corner / scale[1, 2]).to(torch.float8_e4m3fn).float())


def test_it_is_verified_alone_and_beside_the_source(made: Path) -> None:
    assert not verify(made / "blocks").differences
    assert verify(made / "plain", made / "blocks").verdict == "close"


def test_damage_in_a_cut_block_is_found(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "blocks", tmp_path / "damaged")
    (folder / "megtool.json").unlink(missing_ok=True)
    file = folder / "model.safetensors"
    stored = load_file(file)
    scale = stored["model.layers.1.mlp.down_proj.weight_scale"]
    scale[1, 0, 2, 0] *= 4
    save_file(stored, file, metadata={"format": "pt"})
    report = verify(made / "plain", folder)
    assert {d.tensor for d in report.differences} == {"layers.1.mlp.down.weight"}


def test_forms_and_decoding(made: Path, tmp_path: Path) -> None:
    export(made / "blocks", tmp_path / "compressed", to="compressed-tensors")
    export(tmp_path / "compressed", tmp_path / "unified", to="unified")
    export(made / "blocks", tmp_path / "hf", to="hf")
    for name in ("compressed", "unified", "hf"):
        assert verify(made / "blocks", tmp_path / name).exit_status == 0
    same = load_file(tmp_path / "unified" / "model.safetensors")
    for name, t in load_file(made / "blocks" / "model.safetensors").items():
        assert t.dtype == same[name].dtype
        assert torch.equal(
            t.reshape(-1).view(torch.uint8), same[name].reshape(-1).view(torch.uint8)
        )


@pytest.mark.parametrize(("target", "divides"), [("vllm", True), ("trtllm", False)])
def test_lint_says_who_loads_cut_blocks(made: Path, target: str, divides: bool) -> None:
    findings = lint(made / "blocks", target=target).findings
    assert ("divides" in {f.id for f in findings}) == divides
    if divides:
        hints = {f.hint for f in findings if f.id == "divides"}
        assert all("compressed-tensors" in h for h in hints)


def test_a_folder_in_deepseeks_own_form(tmp_path: Path) -> None:
    """Real shapes of DeepSeek-V3's attention, with scales as its own kernel makes them."""
    shapes = {"kv_a_proj_with_mqa": (576, 1024), "kv_b_proj": (640, 512), "q_a_proj": (192, 64)}
    generator = torch.Generator().manual_seed(0)
    tensors, plain, config = {}, {}, None
    for last, shape in shapes.items():
        weight = torch.randn(shape, generator=generator).bfloat16()
        made = MAKERS["deepseek"](weight)
        name = f"model.layers.0.self_attn.{last}"
        tensors |= {f"{name}.{part}": t for part, t in made.stored.items()}
        plain[f"{name}.weight"] = made.decoded
        config = made.config
    path = write_folder(tmp_path / "ds", {"quantization_config": config}, tensors)
    export(path, tmp_path / "hf", to="hf")
    decoded = load_file(tmp_path / "hf" / "model.safetensors")
    for name, expected in plain.items():
        assert torch.equal(decoded[name], expected.bfloat16())
    for target in ("vllm", "sglang", "trtllm"):
        ids = {f.id for f in lint(path, target=target).findings if f.severity == "error"}
        assert not ids & {"divides", "group-size", "shape", "blocks"}
