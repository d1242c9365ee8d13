"""Quantized folders that other tools wrote, against what those tools read."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megtool
from megtool import reshard
from megtool.errors import FormatError
from megtool.export.hf.engine_arithmetic import read_stored_quantization
from megtool.export.hf.read_quantized import read_quantized_modules
from megtool.formats.safetensors.reader import open_checkpoint
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.folders import torch_tensors

FOLDERS = Path(__file__).parent / "folders"
NAMES = sorted(p.name for p in FOLDERS.iterdir())
ONE_OF_EACH = [
    n
    for n in (
        *("gptq_4_asym_act_order", "gptq_4_sym_g32", "gptq_3_g32", "ar_awq_4"),
        *("bnb_nf4_double", "bnb_int8", "mlx_4_g64", "mlx_6_g64"),
    )
    if n in NAMES
]


def sha256(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_the_tool_reads(tmp_path: Path, name: str) -> None:
    truth = json.loads((FOLDERS / name / "truth.json").read_text())["tensors"]
    dtype = next(iter(truth.values()))["dtype"]
    out = tmp_path / "out"
    reshard(FOLDERS / name, out, to="hf", dtype=dtype, fsync=False)
    written = torch_tensors(out)
    assert truth.keys() <= written.keys()
    wrong = [n for n, t in truth.items() if sha256(written[n]) != t["sha256"]]
    assert not wrong
    stored = load_file(FOLDERS / name / "model.safetensors")
    for plain in written.keys() - truth.keys():
        assert torch.equal(written[plain], stored[plain].to(getattr(torch, dtype)))
    config = json.loads((out / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & config.keys()
    assert not (out / "quantize_config.json").exists()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_slice_is_that_of_the_whole(name: str) -> None:
    view = megtool.open(FOLDERS / name).as_("hf", framework="torch")
    for part in ("self_attn.v_proj", "mlp.down_proj"):
        weight = view[f"model.layers.0.{part}.weight"]
        whole = weight[:]
        rows, columns = whole.shape
        for a, b, c, d in (
            (0, 1, 0, columns),
            (3, rows - 2, 5, columns - 7),
            (rows - 1, rows, 0, 1),
            (9, 12, 33, 35),
        ):
            assert torch.equal(weight[a:b, c:d], whole[a:b, c:d])


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_engines_round_no_inputs_of_weights_alone(name: str) -> None:
    source = open_source(FOLDERS / name, optimizer=False)
    if name == "bnb_int8":
        with raises(FormatError, "LLM.int8", hint="--dequantize"):
            read_stored_quantization(source)
        return
    stored = read_stored_quantization(source)
    assert stored is not None
    assert not stored.inputs
    assert not stored.caches


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_codes_are_kept_in_no_other_form(name: str) -> None:
    with raises(FormatError, hint="--to hf", id="unsupported-quantization"):
        read_quantized_modules(FOLDERS / name)


# ---- damaged and hostile folders

Edit = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
_Q = "model.layers.0.self_attn.q_proj."


def state(tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    """Change the state of a weight of bitsandbytes."""
    key = next(n for n in tensors if n.startswith(_Q) and "quant_state" in n)
    value = json.loads(bytes(tensors[key].tolist())) | changes
    tensors[key] = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def replace(name: str, value: torch.Tensor) -> Edit:
    return lambda tensors, config: tensors.update({_Q + name: value})


def drop(name: str) -> Edit:
    def edit(tensors: dict[str, torch.Tensor], _config: dict[str, Any]) -> None:
        del tensors[_Q + name]

    return edit


FAULTS: dict[tuple[str, str], Edit] = {
    ("gptq_4_asym_act_order", "no scales"): drop("scales"),
    ("gptq_4_asym_act_order", "no zeros"): drop("qzeros"),
    ("gptq_4_asym_act_order", "no words"): drop("qweight"),
    ("gptq_4_asym_act_order", "group beyond the last"): replace(
        "g_idx", torch.full((64,), 1 << 30, dtype=torch.int32)
    ),
    ("gptq_4_asym_act_order", "negative group"): replace(
        "g_idx", torch.full((64,), -1, dtype=torch.int32)
    ),
    ("gptq_4_asym_act_order", "short g_idx"): replace("g_idx", torch.zeros(3, dtype=torch.int32)),
    ("gptq_4_asym_act_order", "scales of other modules"): replace(
        "scales", torch.ones(2, 32, dtype=torch.float16)
    ),
    ("gptq_4_asym_act_order", "no groups"): replace(
        "scales", torch.ones(0, 64, dtype=torch.float16)
    ),
    ("gptq_4_asym_act_order", "marlin"): lambda t, c: c["quantization_config"].update(
        checkpoint_format="marlin"
    ),
    ("ar_awq_4", "gemv"): lambda t, c: c["quantization_config"].update(version="gemv"),
    ("ar_awq_4", "no zeros"): drop("qzeros"),
    ("bnb_nf4_double", "no absmax"): drop("weight.absmax"),
    ("bnb_nf4_double", "no nested scales"): drop("weight.nested_absmax"),
    ("bnb_nf4_double", "no codes"): drop("weight"),
    ("bnb_nf4_double", "a shape that lies"): lambda t, c: state(t, shape=[1 << 30, 1 << 30]),
    ("bnb_nf4_double", "no shape"): lambda t, c: state(t, shape="all"),
    ("bnb_nf4_double", "blocks of nothing"): lambda t, c: state(t, blocksize=0),
    ("bnb_nf4_double", "offset of text"): lambda t, c: state(t, nested_offset="x"),
    ("bnb_nf4_double", "unknown numbers"): lambda t, c: state(t, quant_type="int4"),
    ("bnb_int8", "no scales"): drop("SCB"),
    ("mlx_4_g64", "no biases"): drop("biases"),
    ("mlx_4_g64", "mxfp4"): lambda t, c: c["quantization"].update(mode="mxfp4"),
    ("mlx_4_g64", "groups of nothing"): lambda t, c: c["quantization"].update(group_size=0),
    ("mlx_4_g64", "huge groups"): lambda t, c: c["quantization"].update(group_size=1 << 62),
}


@pytest.mark.parametrize(("name", "fault"), [k for k in FAULTS if k[0] in NAMES])
def test_faults_are_named(tmp_path: Path, name: str, fault: str) -> None:
    folder = shutil.copytree(FOLDERS / name, tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    FAULTS[name, fault](tensors, config)
    if name.startswith("mlx"):
        config["quantization_config"] = config["quantization"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with raises(FormatError, hint=True) as e:
        open_checkpoint(folder)
    assert str(folder) in (e.value.file or "")


def test_too_few_nested_scales_are_an_error(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "bnb_nf4_double", tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(".nested_absmax")]:
        tensors[name] = tensors[name][:0].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with raises(FormatError, "too few"):
        reshard(folder, tmp_path / "out", to="hf", fsync=False)


def test_a_config_of_mlx_from_before_it_wrote_two_keys(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "mlx_4_g64", tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    assert "quantization" in config
    (folder / "config.json").write_text(json.dumps(config))
    packings = {t.packing for t in open_checkpoint(folder).tensors}
    assert "mlx4:64" in packings


def test_the_file_of_autogptq_is_read_where_config_json_says_nothing(tmp_path: Path) -> None:
    name = next((n for n in NAMES if n == "gptq_4_sym_g32"), None)
    if name is None:
        pytest.skip("no such folder")
    folder = shutil.copytree(FOLDERS / name, tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    old = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True}
    (folder / "quantize_config.json").write_text(json.dumps(old))
    reshard(folder, tmp_path / "out", to="hf", dtype="float16", fsync=False)
    truth = json.loads((FOLDERS / name / "truth.json").read_text())["tensors"]
    written = torch_tensors(tmp_path / "out")
    assert all(sha256(written[n]) == t["sha256"] for n, t in truth.items())
