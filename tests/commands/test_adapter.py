"""`megtool adapter`: what an adapter changes, and its way through other formats."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import megtool
from megtool.adapters.read import read_adapter
from megtool.cli.app import main
from megtool.errors import (
    DestinationError,
    FormatError,
    MappingError,
    UnknownFamilyError,
    UsageError,
)
from tests.support.models import moe_models
from tests.support.models.adapted_models import (
    EXPERTS,
    add_updates,
    load_model,
    logits,
    read_canonical,
    read_updates,
    save_adapter,
)
from tests.support.models.tiny_model import tiny_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(base, folder, target_modules=ALL)
    return folder


def merged(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    return add_updates(read_canonical(base), read_updates(base, folder))


CASES: dict[str, dict[str, Any]] = {
    "all": {"target_modules": ALL},
    "rslora": {"target_modules": ALL, "use_rslora": True},
    "queries": {"target_modules": ["q_proj", "up_proj"]},
    "one layer": {"target_modules": ALL, "layers_to_transform": [1]},
    "ranks": {"target_modules": ALL, "rank_pattern": {"k_proj": 2, "down_proj": 8}},
    "scales": {"target_modules": ALL, "alpha_pattern": {"k_proj": 3, "down_proj": 24}},
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_goes_to_megatron_bridge_and_back(case: str, base: Path, tmp_path: Path) -> None:
    """By the names of Megatron's fused layers; the base may be in any format on the way."""
    model = save_adapter(base, tmp_path / "0", **CASES[case])
    there = megtool.convert_adapter(tmp_path / "0", tmp_path / "1", to="bridge", base=base)
    assert there.rounded == ()
    assert read_adapter(tmp_path / "1").form == "bridge"
    megtool.reshard(base, tmp_path / "megatron", to="torch_dist", tp=2, fsync=False)
    back = megtool.convert_adapter(
        tmp_path / "1", tmp_path / "2", to="peft", base=tmp_path / "megatron"
    )
    assert back.rounded == ()
    wanted = merged(base, tmp_path / "0")
    for folder in ("1", "2"):
        ours = merged(base, tmp_path / folder)
        assert ours.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(ours[name], tensor, atol=1e-12, rtol=1e-12)
    again = peft.PeftModel.from_pretrained(load_model(base), tmp_path / "2").eval()
    torch.testing.assert_close(logits(again), logits(model), atol=1e-6, rtol=1e-5)


def test_scales_that_differ_by_no_power_of_two_are_reported(base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path / "0", target_modules=ALL, alpha_pattern={"k_proj": 5})
    report = megtool.convert_adapter(tmp_path / "0", tmp_path / "1", to="bridge", base=base)
    assert report.rounded == tuple(
        f"decoder.layers.{n}.self_attention.linear_qkv" for n in range(2)
    )
    wanted, ours = merged(base, tmp_path / "0"), merged(base, tmp_path / "1")
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-7, rtol=1e-6)


def test_inspect_shows_weights_ranks_and_scales(
    adapter: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapter", "inspect", str(adapter), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["form"], report["num_weights"]) == ("peft", 14)
    assert report["settings"]["rank"] == 4
    q = next(w for w in report["weights"] if "q_proj" in w["name"])
    assert q | {"name": ""} == {
        "name": "",
        "count": 2,
        "rank": 4,
        "scale": 1.5,
        "shape": [32, 32],
        "num_experts": None,
        "dtype": "float32",
    }
    assert main(["adapter", "inspect", str(adapter), "--modules"]) == 0
    out = capsys.readouterr().out
    assert "PEFT" in out
    assert "model.layers.1.mlp.down_proj.weight" in out
    megtool.convert_adapter(adapter, tmp_path / "bridge", to="bridge", base=base)
    assert main(["adapter", "inspect", str(tmp_path / "bridge")]) == 0
    assert "linear_qkv" in capsys.readouterr().out


def test_a_dry_run_writes_nothing(
    adapter: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["adapter", "convert", str(adapter), str(tmp_path / "out"), "--base", str(base)]
    for to in ("peft", "bridge", "modelopt"):
        assert main([*words, "--to", to, "--dry-run", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["is_dry"] is True
        assert report["num_tensors"] > 0
        assert [*tmp_path.iterdir()] == []


def test_a_destination_is_replaced_only_if_that_is_asked_for(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    megtool.convert_adapter(adapter, out, to="peft", base=base, fsync=False)
    with pytest.raises(DestinationError) as e:
        megtool.convert_adapter(adapter, out, to="bridge", base=base)
    assert e.value.id == "destination-exists"
    megtool.convert_adapter(adapter, out, to="bridge", base=base, overwrite=True)
    assert read_adapter(out).form == "bridge"
    with pytest.raises(DestinationError):
        megtool.convert_adapter(adapter, adapter, to="bridge", base=base, overwrite=True)


def test_what_cannot_be_converted_is_refused(adapter: Path, base: Path, tmp_path: Path) -> None:
    megtool.convert_adapter(adapter, tmp_path / "bridge", to="bridge", base=base)
    tiny_model("llama", tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(MappingError) as e:
        megtool.convert_adapter(adapter, tmp_path / "x", to="peft", base=tmp_path / "other")
    assert e.value.id == "foreign-adapter"
    with pytest.raises(FormatError) as f:
        megtool.convert_adapter(base, tmp_path / "x", to="peft", base=base)
    assert f.value.id == "not-an-adapter"
    save_adapter(base, tmp_path / "head", target_modules=["lm_head"])
    with pytest.raises(MappingError) as e:
        megtool.convert_adapter(tmp_path / "head", tmp_path / "x", to="bridge", base=base)
    assert e.value.id == "unsupported-adapter"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_go_to_megatron_bridge_and_back(case: str, tmp_path: Path) -> None:
    """They have a matrix each; the first layers of deepseek_v3 have none."""
    family, _, keys = moe_models.CASES[case]
    base = tmp_path / "base"
    tiny_model(family, base, sizes=moe_models.SIZES, **keys)
    save_adapter(base, tmp_path / "peft", target_modules=["o_proj"], target_parameters=EXPERTS, r=3)
    report = megtool.convert_adapter(
        tmp_path / "peft", tmp_path / "bridge", to="bridge", base=base, fsync=False
    )
    assert report.rounded == ()
    config = (tmp_path / "bridge/iter_0000000/run_config.yaml").read_text()
    assert "*.mlp.experts.local_experts.*.linear_fc1" in config
    assert "moe_grouped_gemm: false" in config
    wanted = read_updates(base, tmp_path / "peft")
    updates = read_updates(base, tmp_path / "bridge")
    zeros = updates.keys() - wanted.keys()
    assert all(not updates[n].up[:, :].any() for n in zeros)
    for name, update in wanted.items():
        ours, theirs = (u.scale * u.up[:, :] @ u.down[:, :] for u in (updates[name], update))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    megtool.convert_adapter(
        tmp_path / "bridge", tmp_path / "back", to="peft", base=base, fsync=False
    )
    assert read_updates(base, tmp_path / "back").keys() == updates.keys()


def test_experts_that_share_an_adapter_are_grouped_in_megatron_bridge(tmp_path: Path) -> None:
    family, _, keys = moe_models.CASES["mixtral"]
    base, adapter = tmp_path / "base", tmp_path / "peft"
    tiny_model(family, base, sizes=moe_models.SIZES, **keys)
    save_adapter(base, adapter, target_modules=["o_proj"], target_parameters=EXPERTS[:1], r=3)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():  # A is [E * r, in], B [out, r * E]
        if ".experts." in name and ".lora_A." in name:
            tensors[name] = tensor[:3].repeat(len(tensor) // 3, 1)
        elif ".experts." in name:
            tensors[name] = tensor[:, :3].repeat_interleave(tensor.shape[1] // 3, 1)
    save_file(tensors, path)
    megtool.convert_adapter(adapter, tmp_path / "bridge", to="bridge", base=base, fsync=False)
    config = (tmp_path / "bridge/iter_0000000/run_config.yaml").read_text()
    assert "*.mlp.experts.linear_fc1" in config
    assert "moe_grouped_gemm: true" in config
    with pytest.raises(MappingError) as e:
        megtool.convert_adapter(adapter, tmp_path / "x", to="modelopt", base=base)
    assert e.value.id == "unsupported-adapter"
    line = next(w for w in megtool.inspect_adapter(tmp_path / "bridge").weights if "fc1" in w.name)
    assert line.num_experts is None
    wanted, ours = read_updates(base, adapter), read_updates(base, tmp_path / "bridge")
    assert ours.keys() == wanted.keys()
    for name, update in wanted.items():
        pair = (u.scale * u.up[:, :] @ u.down[:, :] for u in (ours[name], update))
        torch.testing.assert_close(*pair, atol=1e-6, rtol=1e-5)


def test_names_of_peft_need_a_family(adapter: Path, base: Path, tmp_path: Path) -> None:
    megtool.convert_adapter(adapter, tmp_path / "bridge", to="bridge", base=base)
    plain = tmp_path / "plain"
    megtool.reshard(base, plain, to="torch_dist", fsync=False)
    for path in (plain / "release/hf").iterdir():
        path.unlink()
    (plain / "release/hf").rmdir()
    with pytest.raises(UnknownFamilyError):
        megtool.convert_adapter(tmp_path / "bridge", tmp_path / "x", to="peft", base=plain)
    megtool.convert_adapter(
        tmp_path / "bridge", tmp_path / "x", to="peft", base=plain, family="llama"
    )
    assert read_adapter(tmp_path / "x").form == "peft"


@pytest.mark.parametrize("to", ["peft", "bridge", "modelopt"])
def test_an_adapter_in_a_store(to: str, adapter: Path, base: Path) -> None:
    place = f"memory://adapters/{secrets.token_hex(4)}"
    megtool.convert_adapter(adapter, place, to=to, base=base)
    assert megtool.inspect_adapter(place).form == to
    ours, wanted = read_updates(base, place), read_updates(base, adapter)
    assert ours.keys() == wanted.keys()
    for name, update in wanted.items():
        delta = update.up[:, :].double() @ update.down[:, :].double() * update.scale
        other = ours[name].up[:, :].double() @ ours[name].down[:, :].double() * ours[name].scale
        torch.testing.assert_close(other, delta, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dim", "0"),
        ("dim", "[8]"),
        ("alpha", ".inf"),
        ("alpha", ".nan"),
        ("dropout", "-1"),
        ("tensor_model_parallel_size", "0.5"),
        ("tensor_model_parallel_size", "x"),
        ("_target_", ""),
    ],
)
def test_settings_of_megatron_bridge_that_are_wrong_are_refused(
    key: str, value: str, adapter: Path, base: Path, tmp_path: Path
) -> None:
    megtool.convert_adapter(adapter, tmp_path / "out", to="bridge", base=base, fsync=False)
    path = tmp_path / "out/iter_0000000/run_config.yaml"
    text, section = path.read_text(), "megatron.bridge.peft.lora.LoRA"
    if key == "_target_":
        text = text.replace(f'"{section}"', '""')
    else:
        text = re.sub(rf"(?m)^(  {key}:).*$", rf"\g<1> {value}", text)
    path.write_text(text)
    with pytest.raises(FormatError) as e:
        read_adapter(tmp_path / "out")
    assert str(e.value.file).endswith("run_config.yaml")


@pytest.mark.parametrize("to", ["peft", "bridge"])
def test_an_adapter_with_nan_is_not_converted(to: Any, base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path / "a", target_modules=["v_proj"])
    path = tmp_path / "a/adapter_model.safetensors"
    tensors = load_file(path)
    name = next(n for n in tensors if "layers.1" in n and "lora_A" in n)
    tensors[name][1, 2] = float("nan")
    save_file(tensors, path)
    with pytest.raises(FormatError) as e:
        megtool.convert_adapter(tmp_path / "a", tmp_path / "out", to=to, base=base)
    assert e.value.id == "nan-weights"
    assert e.value.tensor == name
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_peft_has_no_iterations(adapter: Path) -> None:
    with pytest.raises(UsageError):
        megtool.inspect_adapter(adapter, iteration="7")
