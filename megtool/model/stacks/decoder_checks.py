"""What a decoder refuses: configurations, parts of models, and passes that it does not compute."""

from __future__ import annotations

from collections.abc import Sequence

from megtool.errors import LayoutError, MappingError, UsageError
from megtool.model.batch import Batch
from megtool.spec.model_config import ModelConfig


def check_kind(config: ModelConfig, *, is_alone: bool = True) -> None:
    """Refuse options that no decoder has that is alone, or no decoder at all.

    Raises:
        MappingError: relative positions, or learned positions with multi-token prediction.
    """
    if config.positions.position_embedding == "relative" and is_alone:
        raise MappingError(
            "position_embedding is 'relative', which models of an encoder and a decoder have",
            hint="megtool.model.stacks.pipeline.build_stages builds the class of a configuration",
        )
    if config.mtp.num_mtp_layers and config.positions.position_embedding == "learned":
        raise MappingError(
            "the model has learned positions and layers of multi-token prediction",
            hint="Megatron has these layers with rotary or without positions; leave them out: "
            "megtool reshard SRC DST --exclude GLOB",
        )


def check_whole(config: ModelConfig, layers: Sequence[int]) -> None:
    """Refuse some of the layers of a model whose layers get vectors from an embedding of their own.

    Raises:
        LayoutError: they are not all.
    """
    if config.residual.layer_input_size and len(layers) < config.num_layers:
        raise LayoutError(
            "layers get vectors from an embedding on the first stage, which are not sent to others",
            hint="--pp 1: --tp splits such a model",
        )


def check_compressed_pass(config: ModelConfig, batch: Batch, *, has_cache: bool) -> None:
    """Refuse passes that compressed keys are not computed for.

    Raises:
        UsageError: a cache, and places of tokens that are not counted.
    """
    if config.compression.is_compressed and has_cache and batch.positions_BS is not None:
        raise UsageError(
            "keys in a cache are compressed by counting tokens (DeepSeek-V4), and the batch says "
            "their places",
            hint="leave out positions_BS, and mark padding in valid_BS",
        )
