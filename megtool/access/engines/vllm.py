"""vLLM's loader: `--load-format megtool`.

    vllm serve HF_FOLDER --load-format megtool \\
        --model-loader-extra-config '{"location": "s3://bucket/run/iter_0005000"}'

Source: vLLM 0.33.0, `model_loader/__init__.py` (`register_model_loader`), `base_loader.py`
(`load_model` creates the model and calls `load_weights(model, model_config)`), `default_loader.py`
(`load_weights` hands `get_all_weights(model_config, model)` to `model.load_weights` and checks
that every parameter was loaded), `plugins/__init__.py` (the group `vllm.general_plugins`, whose
functions run in every process, maybe several times).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from megtool.access.engines.weights import EngineCheckpoint, has_other_ranks
from megtool.errors import UsageError

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "megtool"


def register() -> None:
    """Make `load_format="megtool"` known to vLLM; an entry point of `vllm.general_plugins`."""
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader(LOAD_FORMAT)(loader_class())


@cache
def loader_class() -> type:
    """The loader, a subclass of vLLM's default one with other weights."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class VllmModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """Streams a checkpoint of any format and layout into vLLM's model."""

        def __init__(self, load_config: Any) -> None:
            plain = copy.copy(load_config)
            plain.model_loader_extra_config = {}  # the settings are not those of vLLM's loader
            super().__init__(plain)
            settings = load_config.model_loader_extra_config
            self._settings = EngineCheckpoint.check_settings(settings)

        def download_model(self, model_config: Any) -> None:
            """Nothing is downloaded ahead: ranges are read while the model is filled."""

        def get_all_weights(
            self, model_config: Any, model: Any
        ) -> Iterator[tuple[str, torch.Tensor]]:
            """Each tensor of the checkpoint by the name that vLLM's model expects."""
            if getattr(model, "secondary_weights", ()):
                raise UsageError(
                    f"{type(model).__name__} takes weights from more than one folder",
                    hint="--load-format auto with a folder that `megtool export` wrote",
                )
            checkpoint = EngineCheckpoint.of(str(model_config.model), self._settings)
            self.counter_before_loading_weights = time.perf_counter()
            yield from checkpoint.tensors(
                model=str(model_config.model) if model_config.quantization else None,
                in_parts=has_other_ranks(),
            )

    return VllmModelLoader
