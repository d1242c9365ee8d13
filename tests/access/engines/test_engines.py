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
import torch.distributed as dist
from safetensors.torch import load_file

from megtool import quantize, reshard
from megtool.access.engines import sglang, trtllm, vllm, weights
from megtool.access.engines.weights import EngineCheckpoint
from megtool.errors import UsageError
from tests.support.counted_reads import CountedReads
from tests.support.engines.replayed import (
    EngineLoadConfig,
    EngineModel,
    ShardedEngineModel,
    put_sglang,
    put_trtllm,
    put_vllm,
)
from tests.support.errors import raises
from tests.support.models import tiny_llama, tiny_models
from tests.support.paths import ROOT
from tests.support.worlds.gloo_world import run_world


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
    model_config = SimpleNamespace(
        model_path=str(config_only), quantization=None, create_model=lambda: model
    )
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


def load_shards(rank: int, size: int, megatron: str, config: str, hf: Path) -> float:
    """vLLM's calls on one of two ranks; what was read over what the rank keeps."""
    dist.init_process_group("gloo")
    weights.DEFERRED_BYTES = 64 << 10
    with pytest.MonkeyPatch.context() as patch:
        registry = put_vllm(patch)
        vllm.register()
        loader = registry["megtool"](
            EngineLoadConfig(model_loader_extra_config={"location": megatron})
        )
        model = ShardedEngineModel(expected_of(hf), rank, size)
        model_config = SimpleNamespace(model=config, revision=None, quantization=None)
        with CountedReads() as files:
            loader.load_weights(model, model_config)
        vllm.loader_class.cache_clear()
    for name, tensor in model.expected.items():
        assert torch.equal(model.get_parameter(model.names[name]), tensor), name
    return files.num_bytes / sum(p.nbytes for p in model.parameters())


def test_a_rank_reads_what_it_copies(tmp_path: Path) -> None:
    """Rows and columns of tensor parallelism, and nothing of a layer on another stage."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16}
    sizes |= {"head_dim": 64, "num_hidden_layers": 2}
    hf = tiny_llama.save(tmp_path / "hf", **sizes)
    reshard(hf, tmp_path / "megatron", to="torch_dist", tp=4, fsync=False)
    for share in run_world(load_shards, 2, str(tmp_path / "megatron"), str(hf), hf):
        assert share <= 1.05


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes."""
    return tensor.reshape(-1).view(torch.uint8)


QUANTIZED = ("int8_weight_only", "fp8_block128", "w4a16_nvfp4", "int4_weight_only")


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=pytest.mark.slow) if n else r for n, r in enumerate(QUANTIZED)]
)
def test_quantized_weights_are_given_as_the_engine_takes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: str, megatron: Path
) -> None:
    """As stored for an engine that loads a quantized model, decoded for any other."""
    tiny_models.llama(tmp_path / "hf")
    quantize(tmp_path / "hf", tmp_path / "coded", recipe=recipe, fsync=False)
    reshard(tmp_path / "coded", tmp_path / "decoded", to="hf", fsync=False)
    registry = put_vllm(monkeypatch)
    vllm.register()
    loader = registry["megtool"](EngineLoadConfig())
    config = SimpleNamespace(model=str(tmp_path / "coded"), quantization="modelopt")
    for quantization, folder in (("modelopt", "coded"), (None, "decoded")):
        config.quantization = quantization
        loaded = dict(loader.get_all_weights(config, None))
        expected = expected_of(tmp_path / folder)
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert loaded[name].dtype == tensor.dtype, name
            assert torch.equal(raw(loaded[name]), raw(tensor)), name
    put_trtllm(monkeypatch)
    given = trtllm.loader_class()().load_weights(str(tmp_path / "coded"), mapping=object())
    assert given.keys() == expected_of(tmp_path / "coded").keys()
    config.quantization = "modelopt"
    other = registry["megtool"](
        EngineLoadConfig(model_loader_extra_config={"location": str(megatron)})
    )
    with raises(UsageError, "quantized", file=megatron, hint="megtool export"):
        list(other.get_all_weights(config, None))


def test_an_engine_that_quantizes_itself_gets_plain_weights(
    monkeypatch: pytest.MonkeyPatch, hf: Path
) -> None:
    registry = put_vllm(monkeypatch)
    vllm.register()
    config = SimpleNamespace(model=str(hf), quantization="fp8")
    loaded = dict(registry["megtool"](EngineLoadConfig()).get_all_weights(config, None))
    assert loaded.keys() == expected_of(hf).keys()


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
