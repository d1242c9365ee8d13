"""Layers that attend to keys and values of an earlier layer: which one that is."""

from __future__ import annotations

from collections.abc import Iterable

from megtool.errors import LayoutError
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


def kv_source(config: ModelConfig, layer: int) -> int:
    """The layer whose keys and values a layer attends to: itself, or the last one before it with
    some of its own and a window as well, or none as well.
    """
    window = config.window
    shared = layer_sets.shared_kv_layers(config)
    if layer not in shared:
        return layer
    is_local = window.has_window(layer)
    return max(n for n in range(layer) if n not in shared and window.has_window(n) == is_local)


def kv_sources(config: ModelConfig) -> frozenset[int]:
    """The layers to whose keys and values other layers attend."""
    return frozenset(kv_source(config, n) for n in layer_sets.shared_kv_layers(config))


def check_kv_sources(config: ModelConfig, layers: Iterable[int]) -> None:
    """Refuse a part of a model in which a layer lacks the one whose keys and values it shares.

    Raises:
        LayoutError: naming both layers.
    """
    here = set(layers)
    for layer in sorted(here & layer_sets.shared_kv_layers(config)):
        if (source := kv_source(config, layer)) not in here:
            raise LayoutError(
                f"layer {layer} attends to keys and values of layer {source}, which is on another "
                "pipeline stage",
                hint="cut the pipeline before that layer (--pipeline-layout), or use --tp",
            )
