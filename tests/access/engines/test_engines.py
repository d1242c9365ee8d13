"""Loaders of inference engines: a Megatron checkpoint is served without a converted copy.

The engines are not installed here; the calls that they make are replayed (see
`tests/support/engines/replayed.py` for the releases).
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megtool import reshard
from megtool.access.engines import sglang, trtllm, vllm
from megtool.access.engines.weights import EngineCheckpoint
from megtool.errors import UsageError
from tests.support.engines.replayed import (
    EngineLoadConfig,
    EngineModel,
    put_sglang,
    put_trtllm,
    put_vllm,
)
from tests.support.errors import raises
from tests.support.models import tiny_llama
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("model") / "hf", num_hidden_layers=2)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory, hf: Path) -> Path:
    out = tmp_path_factory.mktemp("model") / "megatron"
    reshard(hf, out, to="torch_dist", tp=2, pp=2)
    return out


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory, hf: Path) -> Path:
    """What an engine gets as its model: no weights, just the configuration."""
    out = tmp_path_factory.mktemp("model") / "config"
    out.mkdir()
    shutil.copy(hf / "config.json", out)
    return out


@pytest.fixture(autouse=True)
def fresh_classes() -> Iterator[None]:
    yield
    for made in (
        vllm.loader_class,
        sglang.loader_class,
        trtllm.loader_class,
        trtllm.weight_loader_class,
    ):
        made.cache_clear()


@cache
def expected_of(hf: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in hf.glob("*.safetensors") for k, v in load_file(path).items()}


def model_for(hf: Path) -> EngineModel:
    return EngineModel({n: tuple(t.shape) for n, t in expected_of(hf).items()})


def assert_filled(model: EngineModel, hf: Path) -> None:
    for name, tensor in expected_of(hf).items():
        assert torch.equal(model.get_parameter(model.names[name]), tensor.float()), name


def test_vllm_fills_its_model(
    monkeypatch: pytest.MonkeyPatch, hf: Path, megatron: Path, config_only: Path
) -> None:
    registry = put_vllm(monkeypatch)
    vllm.register()
    vllm.register()  # plugins are run in every process, maybe several times
    settings = {"location": str(megatron)}
    config = EngineLoadConfig(load_format="megtool", model_loader_extra_config=settings)
    loader = registry["megtool"](config)
    model_config = SimpleNamespace(model=str(config_only), revision=None, quantization=None)
    loader.download_model(model_config)
    model = model_for(hf)
    vllm_config = SimpleNamespace(create_model=lambda: model)
    assert loader.load_model(vllm_config=vllm_config, model_config=model_config) is model
    assert_filled(model, hf)
    assert config.model_loader_extra_config == settings
    model.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match="more"):  # vLLM's own check of what was loaded
        loader.load_weights(model, model_config)
    model.secondary_weights = ("other",)
    with raises(UsageError, "EngineModel"):
        loader.load_weights(model, model_config)


def test_sglang_fills_its_model(
    monkeypatch: pytest.MonkeyPatch, hf: Path, megatron: Path, config_only: Path
) -> None:
    engine = put_sglang(monkeypatch)
    sglang.register()
    assert engine.choices == ["megtool"]
    assert list(engine.hooks) == ["sglang.srt.configs.load_config.LoadConfig._verify_load_format"]
    engine.apply_hooks()
    assert engine.LoadConfig(load_format="auto").load_format == "auto"
    with pytest.raises(ValueError, match="other"):
        engine.LoadConfig(load_format="other")
    settings = {"location": str(megatron), "dtype": "float32"}
    config = engine.LoadConfig(load_format="MegTool", model_loader_extra_config=settings)
    loader = engine.get_model_loader(config)
    model = model_for(hf)
    model_config = SimpleNamespace(model_path=str(config_only), create_model=lambda: model)
    loader.download_model(model_config)
    assert loader.load_model(model_config=model_config, device_config=None) is model
    assert_filled(model, hf)


def test_trtllm_gets_a_dict_of_weights(
    monkeypatch: pytest.MonkeyPatch, hf: Path, megatron: Path, config_only: Path
) -> None:
    engine = put_trtllm(monkeypatch)
    loader = trtllm.loader_class()(location=str(megatron))
    weights = loader.load_weights(str(config_only), mapping=object(), model=None)
    assert loader.checkpoint_format == "HF"
    assert weights.keys() == expected_of(hf).keys()
    assert all(torch.equal(weights[n], t) for n, t in expected_of(hf).items())
    trtllm.register()
    trtllm.register()
    weights = engine.construct("megtool").load_weights(str(hf), mapping=object())
    assert all(torch.equal(weights[n], t) for n, t in expected_of(hf).items())


def test_settings_say_where_the_weights_are(tmp_path: Path, config_only: Path) -> None:
    model = str(config_only)
    assert EngineCheckpoint.of(model, None) == EngineCheckpoint(location=model)
    other = EngineCheckpoint.of(model, {"location": "s3://bucket/x", "iteration": 5})
    assert other == EngineCheckpoint(location="s3://bucket/x", like=model, iteration=5)
    hub = EngineCheckpoint.of("meta/llama", {})
    assert hub.location == "hf://meta/llama"
    assert EngineCheckpoint.of("meta/llama", {"location": "/x"}).like == "hf://meta/llama"
    with raises(UsageError, "locaton", hint="location"):
        EngineCheckpoint.of(model, {"locaton": "/x"})
    bad: Any
    for bad in (True, 2.5, ["x"], {}):
        with raises(UsageError, "location"):
            EngineCheckpoint.of(model, {"location": bad})


def test_entry_points_name_what_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    assert set(groups) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for group in groups.values():
        for value in group.values():
            module, _, function = value.partition(":")
            assert callable(getattr(import_module(module), function))
