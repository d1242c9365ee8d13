"""Bad input to the engines' loaders: one typed error, whichever engine it comes through.

The engines are not installed here; the calls that they make are replayed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import quantize, reshard
from megtool.access.engines import sglang, trtllm, vllm
from megtool.errors import FormatError, MappingError, MegtoolError, UsageError
from tests.support.engines.replayed import EngineLoadConfig, put_sglang, put_trtllm, put_vllm
from tests.support.errors import raises
from tests.support.models import tiny_llama, tiny_models

Q = "model.layers.0.self_attn.q_proj.weight"


def by_vllm(patch: pytest.MonkeyPatch, model: Path, settings: Any) -> dict[str, torch.Tensor]:
    registry = put_vllm(patch)
    vllm.register()
    loader = registry["megtool"](EngineLoadConfig(model_loader_extra_config=settings))
    config = SimpleNamespace(model=str(model), revision=None, quantization="modelopt")
    return dict(loader.get_all_weights(config, None))  # type: ignore[attr-defined]


def by_sglang(patch: pytest.MonkeyPatch, model: Path, settings: Any) -> dict[str, torch.Tensor]:
    engine = put_sglang(patch)
    sglang.register()
    engine.apply_hooks()
    config = engine.LoadConfig(load_format="megtool", model_loader_extra_config=settings)
    loader = engine.get_model_loader(config)
    model_config = SimpleNamespace(model_path=str(model), quantization="modelopt")
    return dict(loader._get_all_weights(model_config, None))


def by_trtllm(patch: pytest.MonkeyPatch, model: Path, settings: Any) -> dict[str, torch.Tensor]:
    put_trtllm(patch)
    if not isinstance(settings, dict):
        loader = trtllm.loader_class()(weight_loader=trtllm.weight_loader_class()(settings))
    else:
        loader = trtllm.loader_class()(**settings)
    weights: dict[str, torch.Tensor] = loader.load_weights(str(model), mapping=object())
    return weights


ENGINES = {"vllm": by_vllm, "sglang": by_sglang, "trtllm": by_trtllm}


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


def copy_without(folder: Path, out: Path, name: str) -> None:
    """A folder that lacks one tensor."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    del tensors[name]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def copy_config(folder: Path, out: Path, **changes: Any) -> None:
    """The configuration of a folder alone, with changes."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, and what engines get as their model: most of it is wrong."""
    root = tmp_path_factory.mktemp("places")
    hf = tiny_llama.save(root / "hf", num_hidden_layers=2)
    reshard(hf, root / "megatron", to="torch_dist", tp=2, fsync=False)
    copy_config(hf, root / "model")
    copy_config(hf, root / "wide", hidden_size=64)
    copy_config(hf, root / "deep", num_hidden_layers=3)
    copy_without(hf, root / "less", Q)
    (root / "empty").mkdir()
    tiny_models.llama(root / "plain")
    quantize(root / "plain", root / "coded", recipe="int8_weight_only", fsync=False)
    copy_without(root / "coded", root / "no weight", Q)
    copy_without(root / "coded", root / "no scale", f"{Q}_scale")
    copy_without(root / "coded", root / "no norm", "model.norm.weight")
    copy_config(root / "plain", root / "damaged")
    (root / "damaged" / "config.json").write_text("{")
    return root


@dataclass(frozen=True)
class Fault:
    """What an engine is started with; `location` is a name among the places."""

    error: type[MegtoolError]
    texts: tuple[str, ...]
    model: str = "model"
    location: str | None = "megatron"
    settings: Any = None


FAULTS = {
    "no such checkpoint": Fault(FormatError, ("does not exist", "nowhere"), location="nowhere"),
    "no checkpoint": Fault(FormatError, ("not a checkpoint", "empty"), location="empty"),
    "an empty location": Fault(UsageError, ("''",), location="", settings={"location": ""}),
    "no weights beside the model": Fault(FormatError, (".safetensors", "model"), location=None),
    "no model": Fault(FormatError, ("nothing", "config.json"), model="nothing"),
    "a damaged model": Fault(FormatError, ("JSON", "damaged"), model="damaged"),
    "a missing tensor": Fault(MappingError, ("missing", "layers.0.attn.q"), location="less"),
    "another size": Fault(MappingError, ("[101, 64]",), model="wide"),
    "more layers": Fault(MappingError, ("[3, 32]",), model="deep"),
    "another family": Fault(MappingError, ("q_norm",), settings={"family": "qwen3"}),
    "no family": Fault(MappingError, ("'llama9'",), settings={"family": "llama9"}),
    "no such iteration": Fault(FormatError, ("99",), settings={"iteration": 99}),
    "no iteration": Fault(UsageError, ("'soon'",), settings={"iteration": "soon"}),
    "no type": Fault(FormatError, ("'bf17'",), settings={"dtype": "bf17"}),
    "a type of integers": Fault(UsageError, ("int8",), settings={"dtype": "int8"}),
    "a type that is a number": Fault(UsageError, ("'dtype' is 16",), settings={"dtype": 16}),
    "a misspelt setting": Fault(UsageError, ("'family_name'",), settings={"family_name": "llama"}),
    "a rank": Fault(UsageError, ("'rank'",), settings={"rank": 9}),
    "other quantization": Fault(UsageError, ("quantized", "megatron"), model="coded"),
    "a quantized weight less": Fault(
        FormatError, ("missing", f"{Q}_scale"), model="no weight", location=None
    ),
    "a scale less": Fault(FormatError, ("missing", Q), model="no scale", location=None),
    "a norm less": Fault(MappingError, ("missing", "norm"), model="no norm", location=None),
    "a cast of codes": Fault(
        UsageError, ("'dtype'",), model="coded", location=None, settings={"dtype": "bfloat16"}
    ),
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_one_typed_error(
    places: Path, monkeypatch: pytest.MonkeyPatch, engine: Callable[..., Any], fault: Fault
) -> None:
    settings = dict(fault.settings or {})
    if fault.location is not None:
        settings.setdefault("location", str(places / fault.location))
    with raises(fault.error, *fault.texts):
        engine(monkeypatch, places / fault.model, settings)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("settings", ['{"location": "x"}', ["location"], 5], ids=repr)
def test_settings_that_are_no_mapping_are_refused(
    places: Path, monkeypatch: pytest.MonkeyPatch, engine: Callable[..., Any], settings: Any
) -> None:
    with raises(UsageError, "settings", repr(settings), hint="location"):
        engine(monkeypatch, places / "model", settings)


def test_quantization_that_megtool_does_not_decode_is_for_the_engine(
    places: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All is given as it is stored; for an engine that wants plain weights there are none."""
    folder = tmp_path / "coded"
    shutil.copytree(places / "coded", folder)
    (folder / "hf_quant_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    for engine in ENGINES.values():
        assert engine(monkeypatch, folder, {}).keys() == stored.keys()
    vllm.loader_class.cache_clear()
    registry = put_vllm(monkeypatch)
    vllm.register()
    loader: Any = registry["megtool"](EngineLoadConfig())
    plain = SimpleNamespace(model=str(folder), quantization=None)
    with raises(FormatError, "aqlm", id="unsupported-quantization"):
        list(loader.get_all_weights(plain, None))
