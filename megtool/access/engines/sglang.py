"""SGLang's loader: `load_format="megtool"`.

    python -m sglang.launch_server --model-path HF_FOLDER --load-format megtool \\
        --model-loader-extra-config '{"location": "s3://bucket/run/iter_0005000"}'

Source: SGLang 0.5.23, `srt/configs/load_config.py` (`_verify_load_format` refuses names that it
does not list, and takes classes), `srt/model_loader/loader.py` (`get_model_loader` makes a loader
of a class; `DefaultModelLoader.load_model` hands `_get_all_weights(model_config, model)` to
`load_weights_and_postprocess`), `srt/plugins/` (the group `sglang.srt.plugins`, `HookRegistry`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from megtool.access.engines.weights import EngineCheckpoint, has_other_ranks
from megtool.errors import UsageError

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "megtool"
_VERIFY = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"


def register() -> None:
    """Make `load_format="megtool"` known to SGLang; an entry point of `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_load_format_choices

    add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(_VERIFY, choose_loader, HookType.AROUND)


def choose_loader(verify: Callable[[Any], None], load_config: Any) -> None:
    """Put the loader in the place of its name, which SGLang takes as it is."""
    name = load_config.load_format
    if isinstance(name, str) and name.lower() == LOAD_FORMAT:
        load_config.load_format = loader_class()
    else:
        verify(load_config)


@cache
def loader_class() -> type:
    """The loader, a subclass of SGLang's default one with other weights.

    It can also be given itself: `sglang.Engine(load_format=loader_class(), ...)`.
    """
    from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader

    class SglangModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """Streams a checkpoint of any format and layout into SGLang's model."""

        def __init__(self, load_config: Any) -> None:
            BaseModelLoader.__init__(self, load_config)  # the settings are not the default loader's
            EngineCheckpoint.check_settings(load_config.model_loader_extra_config)

        def download_model(self, model_config: Any) -> None:
            """Nothing is downloaded ahead: ranges are read while the model is filled."""

        def _get_all_weights(
            self, model_config: Any, model: Any
        ) -> Iterator[tuple[str, torch.Tensor]]:
            """Each tensor of the checkpoint by the name that SGLang's model expects."""
            if getattr(model, "secondary_weights", ()):
                raise UsageError(
                    f"{type(model).__name__} takes weights from more than one folder",
                    hint="--load-format auto with a folder that `megtool export` wrote",
                )
            settings = self.load_config.model_loader_extra_config
            checkpoint = EngineCheckpoint.of(str(model_config.model_path), settings)
            self.counter_before_loading_weights = time.perf_counter()
            yield from checkpoint.tensors(
                model=str(model_config.model_path) if model_config.quantization else None,
                in_parts=has_other_ranks(),
            )

    return SglangModelLoader
