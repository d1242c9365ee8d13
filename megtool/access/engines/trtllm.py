"""TensorRT-LLM's checkpoint loader, for its PyTorch backend.

    from tensorrt_llm import LLM
    from megtool.access.engines.trtllm import loader_class

    loader = loader_class()(location="s3://bucket/run/iter_0005000")
    llm = LLM(model="HF_FOLDER", checkpoint_loader=loader)

Source: TensorRT-LLM's main branch of October 2026, `_torch/models/checkpoints/`:
`base_checkpoint_loader.py` (`load_weights(checkpoint_dir, mapping, **kwargs)` calls the weight
loader), `base_weight_loader.py` (`load_weights` returns a dict of tensors by name),
`hf/checkpoint_loader.py` (`HfCheckpointLoader(weight_loader=, weight_mapper=, config_loader=)`),
`_torch/models/modeling_utils.py` (the registries), and `_construct_checkpoint_loader`, which makes
a loader of a format from three of them. It has no entry points: a program imports this module and
hands the loader over, or calls `register` and names the format.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from megtool.access.engines.weights import EngineCheckpoint

if TYPE_CHECKING:
    import torch

CHECKPOINT_FORMAT = "megtool"


def register() -> None:
    """Make `checkpoint_format="megtool"` known to TensorRT-LLM in this process.

    The weights are then in the model's folder itself.
    """
    from tensorrt_llm._torch.models.checkpoints.hf.config_loader import HfConfigLoader
    from tensorrt_llm._torch.models.modeling_utils import (
        register_checkpoint_loader,
        register_checkpoint_weight_loader,
        register_config_loader,
    )

    register_checkpoint_weight_loader(CHECKPOINT_FORMAT)(weight_loader_class())
    register_config_loader(CHECKPOINT_FORMAT)(HfConfigLoader)
    register_checkpoint_loader(CHECKPOINT_FORMAT)(loader_class())


@cache
def weight_loader_class() -> type:
    """The loader of weights alone."""
    from tensorrt_llm._torch.models.checkpoints.base_weight_loader import BaseWeightLoader

    class TrtllmWeightLoader(BaseWeightLoader):  # type: ignore[misc]
        """Reads a checkpoint of any format and layout as a dict of tensors."""

        def __init__(self, settings: dict[str, Any] | None = None) -> None:
            self._settings = EngineCheckpoint.check_settings(settings)

        def load_weights(
            self, checkpoint_dir: str, mapping: Any, **_: Any
        ) -> dict[str, torch.Tensor]:
            """All tensors by Hugging Face names: TensorRT-LLM's mappers and modules cut them.

            For one of several ranks, large tensors are read when they are copied.

            Raises:
                MegtoolError: the checkpoint cannot be opened, named or read.
            """
            checkpoint = EngineCheckpoint.of(str(checkpoint_dir), self._settings)
            in_parts = getattr(mapping, "world_size", 1) > 1
            return dict(checkpoint.tensors(model=str(checkpoint_dir), in_parts=in_parts))

    return TrtllmWeightLoader


@cache
def loader_class() -> type:
    """The checkpoint loader, a subclass of the one of Hugging Face folders with other weights.

    Its format stays `HF`, by which TensorRT-LLM finds the mapper of the model's class.
    """
    from tensorrt_llm._torch.models.checkpoints.hf.checkpoint_loader import HfCheckpointLoader

    class TrtllmCheckpointLoader(HfCheckpointLoader):  # type: ignore[misc]
        """Loads weights from any checkpoint, configuration and tokenizer from the model's folder.

        Arguments are the settings of `EngineCheckpoint`.
        """

        def __init__(
            self,
            *,
            weight_loader: Any = None,
            weight_mapper: Any = None,
            config_loader: Any = None,
            **settings: Any,
        ) -> None:
            super().__init__(
                weight_loader=weight_loader or weight_loader_class()(settings),
                weight_mapper=weight_mapper,
                config_loader=config_loader,
            )

    return TrtllmCheckpointLoader
