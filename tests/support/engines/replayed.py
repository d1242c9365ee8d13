"""The calls that inference engines make to a loader, in their order, where an engine is not here.

Each function puts modules of one engine into `sys.modules`: base classes with the methods, names
and order of calls of the release that is named, and nothing else of it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


def put_modules(patch: pytest.MonkeyPatch, contents: dict[str, dict[str, Any]]) -> None:
    """Modules by their dotted names, and the packages around them."""
    for name, members in contents.items():
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            dotted = ".".join(parts[:k])
            if dotted not in sys.modules or sys.modules[dotted].__spec__ is not None:
                patch.setitem(sys.modules, dotted, ModuleType(dotted))
        vars(sys.modules[name]).update(members)


class EngineModel(torch.nn.Module):
    """A model of an engine: it takes pairs of Hugging Face names and tensors."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "_") for name in shapes}
        for name, shape in shapes.items():
            self.register_parameter(self.names[name], torch.nn.Parameter(torch.zeros(shape)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            parameter = self.get_parameter(self.names[name])
            assert parameter.shape == tensor.shape
            parameter.data.copy_(tensor)
            loaded.add(self.names[name])
        return loaded


COLUMNS = ("o_proj.weight", "down_proj.weight")


class ShardedEngineModel(EngineModel):
    """A stage with the first layer alone, whose matrices are cut for one rank.

    Sources: vLLM's `ColumnParallelLinear.weight_loader` and `RowParallelLinear.weight_loader`
    (`layers/linear.py`: `narrow` along the output or the input dim, then `copy_`), and
    `is_pp_missing_parameter` (`models/utils.py`: names of layers on other stages are passed over).
    """

    def __init__(self, whole: dict[str, torch.Tensor], rank: int, size: int) -> None:
        self.expected: dict[str, torch.Tensor] = {}
        self.cuts: dict[str, tuple[int, int, int]] = {}
        for name, tensor in whole.items():
            if ".layers." in name and ".layers.0." not in name:
                continue
            dim = int(name.endswith(COLUMNS))
            length = tensor.shape[dim]
            is_cut = ".layers." in name and tensor.ndim == 2
            cut = (dim, rank * length // size, length // size) if is_cut else (0, 0, len(tensor))
            self.cuts[name], self.expected[name] = cut, tensor.narrow(*cut)
        super().__init__({n: tuple(t.shape) for n, t in self.expected.items()})
        self.to(next(iter(whole.values())).dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        cut = ((n, t.narrow(*self.cuts[n])) for n, t in weights if n in self.cuts)
        return super().load_weights(cut)


@dataclasses.dataclass
class EngineLoadConfig:
    """The part of both engines' LoadConfig that loaders read."""

    load_format: Any = "auto"
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)


def put_vllm(patch: pytest.MonkeyPatch) -> dict[str, type]:
    """vLLM 0.33.0: the registry of loaders, and its default one."""
    registry: dict[str, type] = {}

    class BaseModelLoader:
        def __init__(self, load_config: Any) -> None:
            self.load_config = load_config

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            model = vllm_config.create_model()
            self.load_weights(model, model_config)
            return model.eval()

    class DefaultModelLoader(BaseModelLoader):
        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            known = {"enable_multithread_load", "num_threads", "enable_weights_track"}
            if set(load_config.model_loader_extra_config) - known:
                raise ValueError("Unexpected extra config keys")

        def load_weights(self, model: Any, model_config: Any) -> None:
            loaded = model.load_weights(self.get_all_weights(model_config, model))
            missing = {n for n, _ in model.named_parameters()} - loaded
            if model_config.quantization is None and missing:
                raise ValueError(f"Following weights were not initialized: {missing}")

    def register_model_loader(load_format: str) -> Any:
        def wrapper(cls: type) -> type:
            if not issubclass(cls, BaseModelLoader):
                raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
            registry[load_format] = cls
            return cls

        return wrapper

    package = "vllm.model_executor.model_loader"
    put_modules(
        patch,
        {
            package: {"register_model_loader": register_model_loader},
            f"{package}.default_loader": {"DefaultModelLoader": DefaultModelLoader},
        },
    )
    return registry


def put_sglang(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang 0.5.23: hooks of plugins, the check of load formats, and the default loader."""
    hooks: dict[str, Any] = {}
    choices: list[str] = []

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: Any) -> None:
            hooks[target] = hook

    @dataclasses.dataclass
    class LoadConfig(EngineLoadConfig):
        def __post_init__(self) -> None:
            self._verify_load_format()

        def _verify_load_format(self) -> None:
            if isinstance(self.load_format, str) and self.load_format not in ("auto", "dummy"):
                raise ValueError(f"{self.load_format!r} is not a valid LoadFormat")

    class BaseModelLoader:
        def __init__(self, load_config: Any) -> None:
            self.load_config = load_config

    class DefaultModelLoader(BaseModelLoader):
        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            if set(load_config.model_loader_extra_config) - {"num_threads"}:
                raise ValueError("Unexpected extra config keys")

        def load_model(self, *, model_config: Any, device_config: Any) -> Any:
            model = model_config.create_model()
            model.load_weights(self._get_all_weights(model_config, model))
            return model.eval()

    def get_model_loader(load_config: Any) -> Any:
        if isinstance(load_config.load_format, type):
            return load_config.load_format(load_config)
        return DefaultModelLoader(load_config)

    def apply_hooks() -> None:
        (hook,) = hooks.values()
        original = LoadConfig._verify_load_format
        LoadConfig._verify_load_format = lambda self: hook(original, self)  # type: ignore[method-assign]

    put_modules(
        patch,
        {
            "sglang.srt.plugins.hook_registry": {
                "HookRegistry": HookRegistry,
                "HookType": SimpleNamespace(AROUND="around"),
            },
            "sglang.srt.server_args": {"add_load_format_choices": choices.extend},
            "sglang.srt.model_loader.loader": {
                "BaseModelLoader": BaseModelLoader,
                "DefaultModelLoader": DefaultModelLoader,
            },
        },
    )
    return SimpleNamespace(
        hooks=hooks,
        choices=choices,
        LoadConfig=LoadConfig,
        get_model_loader=get_model_loader,
        apply_hooks=apply_hooks,
    )


def put_trtllm(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """TensorRT-LLM of October 2026: three registries, and the loader of Hugging Face folders."""
    loaders: dict[str, Any] = {}
    weight_loaders: dict[str, Any] = {}
    config_loaders: dict[str, Any] = {}

    class BaseWeightLoader:
        def cleanup(self) -> None:
            pass

    class HfConfigLoader:
        pass

    class HfCheckpointLoader:
        def __init__(
            self, *, weight_loader: Any = None, weight_mapper: Any = None, config_loader: Any = None
        ) -> None:
            self.weight_loader, self.weight_mapper = weight_loader, weight_mapper
            self.config_loader = config_loader or HfConfigLoader()
            self.checkpoint_format = "HF"

        def load_weights(self, checkpoint_dir: str, mapping: Any, **kwargs: Any) -> Any:
            return self.weight_loader.load_weights(checkpoint_dir, mapping=mapping, **kwargs)

    def register_in(registry: dict[str, Any]) -> Any:
        return lambda name: lambda cls: registry.setdefault(name, cls)

    def construct(checkpoint_format: str) -> Any:
        weight_loader = weight_loaders[checkpoint_format]()
        config_loader = config_loaders[checkpoint_format]()
        return loaders[checkpoint_format](
            weight_loader=weight_loader, weight_mapper=None, config_loader=config_loader
        )

    package = "tensorrt_llm._torch.models"
    put_modules(
        patch,
        {
            f"{package}.modeling_utils": {
                "register_checkpoint_loader": register_in(loaders),
                "register_checkpoint_weight_loader": register_in(weight_loaders),
                "register_config_loader": register_in(config_loaders),
            },
            f"{package}.checkpoints.base_weight_loader": {"BaseWeightLoader": BaseWeightLoader},
            f"{package}.checkpoints.hf.config_loader": {"HfConfigLoader": HfConfigLoader},
            f"{package}.checkpoints.hf.checkpoint_loader": {
                "HfCheckpointLoader": HfCheckpointLoader
            },
        },
    )
    return SimpleNamespace(construct=construct)
