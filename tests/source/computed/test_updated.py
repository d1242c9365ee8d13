"""Adapters that are merged as weights are read: the bits that `reshard --adapter` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megtool
from megtool import export, quantize, reshard
from megtool.errors import FormatError, MappingError, UsageError
from megtool.source.computed import updated as updated_tensors
from tests.support.errors import raises
from tests.support.folders import torch_tensors
from tests.support.models import gguf_models, moe_models, tiny_llama
from tests.support.models.adapted_models import save_adapter
from tests.support.models.tiny_model import tiny_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "hf": {},
    "torch_dist": {"to": "torch_dist", "tp": 2, "pp": 2},
    "megatron": {"to": "megatron", "tp": 2},
    "zarr": {"to": "zarr"},
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}, {"target_modules": "all-linear"}),
    "fused": ("phi3", {}, {"target_modules": ["qkv_proj", "down_proj"]}),
    "transposed": ("gpt2", {}, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
}


def assert_reads_merged(
    plain: Path, merged: Path, adapter: Path | list[Path], dtype: str | None = None
) -> None:
    wanted = torch_tensors(merged)
    view = megtool.open(plain, adapter=adapter, framework="torch").as_("hf", dtype=dtype)
    assert set(view) == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(view[name][:], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", MODELS)
def test_bits_are_those_of_a_merged_model(case: str, layout: str, tmp_path: Path) -> None:
    family, keys, settings = MODELS[case]
    tiny_model(family, tmp_path / "single", **keys)
    save_adapter(tmp_path / "single", tmp_path / "adapter", **settings)
    reshard(tmp_path / "single", tmp_path / "base", dtype="bfloat16")
    reshard(tmp_path / "base", tmp_path / "merged", adapter=tmp_path / "adapter")
    reshard(tmp_path / "base", tmp_path / "plain", **LAYOUTS[layout])
    assert_reads_merged(tmp_path / "plain", tmp_path / "merged", tmp_path / "adapter")


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_bits_of_experts_are_those_of_a_merged_model(name: str, tmp_path: Path) -> None:
    family, _, keys = moe_models.CASES[name]
    sizes = moe_models.SIZES | {"num_hidden_layers": 2}
    tiny_model(family, tmp_path / "base", sizes=sizes, **keys)
    parameters = None if name == "deepseek_v3" else ["mlp.experts.gate_up_proj"]
    modules = ["o_proj", "kv_b_proj"] if parameters is None else ["o_proj"]
    save_adapter(
        tmp_path / "base",
        tmp_path / "adapter",
        target_modules=modules,
        target_parameters=parameters,
    )
    reshard(tmp_path / "base", tmp_path / "merged", adapter=tmp_path / "adapter")
    assert_reads_merged(tmp_path / "base", tmp_path / "merged", tmp_path / "adapter")
    reshard(tmp_path / "base", tmp_path / "plain", to="torch_dist", tp=2, ep=2, etp=1)
    assert_reads_merged(tmp_path / "plain", tmp_path / "merged", tmp_path / "adapter")


def test_bits_of_decoded_weights_are_those_of_a_merged_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    tiny_llama.save(tmp_path / "base", **sizes)
    quantize(tmp_path / "base", tmp_path / "fp8", recipe="fp8_block128", fsync=False)
    save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=ATTENTION)
    reshard(tmp_path / "fp8", tmp_path / "merged", adapter=tmp_path / "adapter")
    assert_reads_merged(tmp_path / "fp8", tmp_path / "merged", tmp_path / "adapter")
    gguf = gguf_models.save(tmp_path / "other", "llama")
    export(gguf, tmp_path / "base.gguf", to="gguf", outtype="q8_0", fsync=False)
    reshard(tmp_path / "base.gguf", tmp_path / "decoded", to="hf")
    save_adapter(tmp_path / "decoded", tmp_path / "second", target_modules=ATTENTION)
    file, second = tmp_path / "base.gguf", tmp_path / "second"
    reshard(file, tmp_path / "merged2", to="hf", adapter=second)
    assert_reads_merged(file, tmp_path / "merged2", second, dtype="bfloat16")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", folder / "base", tie_word_embeddings=False)
    save_adapter(folder / "base", folder / "adapter", target_modules=ATTENTION)
    save_adapter(folder / "base", folder / "more", target_modules=["q_proj", "down_proj"], r=2)
    adapters = [folder / "adapter", folder / "more"]
    reshard(folder / "base", folder / "merged", adapter=adapters)
    reshard(folder / "base", folder / "megatron", to="torch_dist", tp=2, pp=2)
    return folder


@pytest.mark.parametrize("num_bytes", [40, 1000])
def test_bits_do_not_depend_on_blocks_or_order(
    num_bytes: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updated_tensors, "BLOCK_BYTES", num_bytes)
    for plain in ("base", "megatron"):
        assert_reads_merged(base / plain, base / "merged", [base / "more", base / "adapter"])


def test_stored_names_and_ranks_are_those_of_the_checkpoint(base: Path, tmp_path: Path) -> None:
    adapters = [base / "adapter", base / "more"]
    reshard(base / "base", tmp_path / "merged", to="torch_dist", tp=2, pp=2, adapter=adapters)
    stored = megtool.open(tmp_path / "merged").tensors
    view = megtool.open(base / "megatron", adapter=adapters).tensors
    assert set(view) == set(stored)
    assert all((view[n][:] == stored[n][:]).all() for n in stored)
    for rank in range(4):
        layout = {"to": "megatron", "tp": 2, "pp": 2, "rank": rank, "framework": "numpy"}
        ours = dict(megtool.stream(base / "base", adapter=adapters, **layout))
        wanted = dict(megtool.stream(tmp_path / "merged", **layout))
        assert ours.keys() == wanted.keys()
        assert all((ours[n] == wanted[n]).all() for n in wanted)


def test_state_dicts_are_filled_with_merged_weights(base: Path) -> None:
    wanted = torch_tensors(base / "merged")
    state = {n: torch.zeros_like(t) for n, t in wanted.items()}
    adapters = [base / "adapter", base / "more"]
    megtool.load_state_dict(state, base / "base", adapter=adapters)
    assert all(torch.equal(state[n], t) for n, t in wanted.items())
    with raises(UsageError, "open already"):
        megtool.load_state_dict(state, megtool.open(base / "base"), adapter=base / "adapter")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_numbers_that_are_none_are_one_error(value: float, base: Path, tmp_path: Path) -> None:
    save_adapter(base / "base", tmp_path, target_modules=ATTENTION)
    file = tmp_path / "adapter_model.safetensors"
    save_file({n: torch.full_like(t, value) for n, t in load_file(file).items()}, file)
    view = megtool.open(base / "base", adapter=tmp_path).as_("hf")
    with raises(FormatError, id="nan-weights") as e:
        view["model.layers.0.self_attn.q_proj.weight"][:]
    assert str(tmp_path) in str(e.value.file)


def test_weights_that_take_no_update_are_refused(base: Path, tmp_path: Path) -> None:
    tensors = torch_tensors(base / "base")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((base / "base" / "config.json").read_bytes())
    with raises(MappingError, "float8", id="foreign-adapter", tensor=name):
        megtool.open(tmp_path, adapter=base / "adapter")
