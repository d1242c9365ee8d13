"""Quantized Hugging Face folders resharded: plain weights, equal to what the peers decode."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megtool import reshard, verify
from megtool.errors import FormatError
from tests.support.checkpoints.quantized_llama import write_quantized_llama
from tests.support.checkpoints.quantized_weights import MAKERS, gpt_oss
from tests.support.checkpoints.quantized_weights import write as write_folder

KINDS = [
    "deepseek",
    "fp8 tensor",
    "fp8 channel",
    "int8 channel",
    "int4 group",
    "int4 uneven",
    "nvfp4",
    "modelopt fp8",
    "modelopt nvfp4",
]


def held(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        out |= load_file(file)
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.peers if "modelopt" in k else ()) for k in KINDS]
)
def test_to_plain_weights(kind: str, tmp_path: Path) -> None:
    want = write_quantized_llama(tmp_path / "hf", kind)
    report = reshard(tmp_path / "hf", tmp_path / "out", to="hf", dtype="bfloat16", strict=True)
    same(held(tmp_path / "out"), want)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    assert (tmp_path / "out/tokenizer.json").exists()
    reasons = {d.name: d.reason for d in report.dropped}
    assert "not needed" in reasons["model.layers.0.self_attn.k_proj.k_scale"]
    verified = verify(tmp_path / "hf", tmp_path / "out")
    # made one by one, parts of a fused projection have scales of their own, and the list is short
    assert [d for d in verified.differences if d.kind != "metadata"] == []
    assert {w.sqnr_db for w in verified.weights} == {math.inf}


@pytest.mark.parametrize("kind", ["deepseek", "int4 uneven"])
def test_by_way_of_megatron(kind: str, tmp_path: Path) -> None:
    want = write_quantized_llama(tmp_path / "hf", kind)
    reshard(tmp_path / "hf", tmp_path / "ranks", to="torch_dist", tp=2, pp=2)
    reshard(tmp_path / "ranks", tmp_path / "out", to="hf")
    same(held(tmp_path / "out"), want)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert verify(tmp_path / "hf", tmp_path / "ranks").verdict == "equal"


def test_transformers_loads_what_comes_out(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    want = write_quantized_llama(tmp_path / "hf", "fp8 channel")
    reshard(tmp_path / "hf", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    same({n: t for n, t in model.state_dict().items() if n in want}, want)


def test_without_a_dtype_only_quantized_weights_change(tmp_path: Path) -> None:
    weight = torch.randn(70, 40, generator=torch.Generator().manual_seed(1))
    made = MAKERS["deepseek"](weight.to(torch.bfloat16))
    stored = {f"x.{name}": t for name, t in made.stored.items()} | {"bias": torch.ones(5)}
    write_folder(tmp_path / "hf", stored, made.config)
    reshard(tmp_path / "hf", tmp_path / "out")
    same(held(tmp_path / "out"), {"x.weight": made.decoded, "bias": torch.ones(5)})
    reshard(tmp_path / "hf", tmp_path / "wide", dtype="float32")
    wide = held(tmp_path / "wide")["x.weight"]
    assert torch.equal(wide.to(torch.bfloat16), made.decoded)
    assert not torch.equal(wide, made.decoded.float()), "not rounded twice"


def test_experts_of_gpt_oss_under_little_memory(tmp_path: Path) -> None:
    shape = (4, 320, 9)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(100, 130, shape, dtype=torch.uint8)
    stored = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}
    write_folder(tmp_path / "hf", stored, {"quant_method": "mxfp4"}, parts=2)
    reshard(tmp_path / "hf", tmp_path / "out", memory="1MiB", threads=2)
    same(held(tmp_path / "out"), {"e.down_proj": gpt_oss(blocks, scales)})


def test_one_file_keeps_what_is_stored(tmp_path: Path) -> None:
    write_quantized_llama(tmp_path / "hf", "deepseek")
    file = sorted((tmp_path / "hf").glob("*.safetensors"))[0]
    reshard(file, tmp_path / "copy.safetensors", to="safetensors")
    same(load_file(tmp_path / "copy.safetensors"), load_file(file))


def test_an_unknown_method_is_refused_with_a_way_out(tmp_path: Path) -> None:
    write_quantized_llama(tmp_path / "hf", "deepseek")
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["quant_method"] = "aqlm"
    path.write_text(json.dumps(config))
    with pytest.raises(FormatError, match="aqlm"):
        reshard(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
