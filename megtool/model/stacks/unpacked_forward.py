"""Layers whose frozen weights are kept in another form, and made for each pass of the layer.

For the backward pass a weight is not saved but made again, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megtool.model.stacks.decoder import Decoder

MakeWeight = Callable[[], Tensor]
_ATTRIBUTE = "_megtool_made_weights"


@dataclass(frozen=True, slots=True)
class _MadeAgain:
    """A view of a weight that the backward pass needs."""

    make: MakeWeight
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class UnpackedForward:
    """The forward pass of a layer, around which `weights` (by name in the layer) are made.

    If the layer `is_recomputed` the pass is done again for the backward pass, and saves nothing.
    """

    def __init__(self, layer: nn.Module, weights: Mapping[str, MakeWeight]) -> None:
        self._layer, self._weights = layer, dict(weights)
        self._forward: Callable[..., Any] = layer.forward
        self.is_recomputed = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The layer's result."""
        with self._made() as by_storage:
            if self.is_recomputed or not torch.is_grad_enabled():
                return self._forward(*args, **named)

            def pack(tensor: Tensor) -> Any:
                make = by_storage.get(tensor.untyped_storage().data_ptr())
                if make is None:
                    return tensor
                offset = int(tensor.storage_offset())
                return _MadeAgain(make, tensor.size(), tensor.stride(), offset)

            with saved_tensors_hooks(pack, _unpack):
                return self._forward(*args, **named)

    @contextmanager
    def _made(self) -> Iterator[dict[int, MakeWeight]]:
        """The weights in their places, by where their elements are."""
        by_storage: dict[int, MakeWeight] = {}
        placeholders: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for name, make in self._weights.items():
                path, _, leaf = name.rpartition(".")
                module = self._layer.get_submodule(path)
                placeholder = module.get_parameter(leaf)
                weight = nn.Parameter(make(), requires_grad=False)
                weight.__dict__.update(placeholder.__dict__)
                placeholders.append((module, leaf, placeholder))
                module._parameters[leaf] = weight
                by_storage[weight.untyped_storage().data_ptr()] = make
            yield by_storage
        finally:
            for module, leaf, placeholder in placeholders:
                module._parameters[leaf] = placeholder


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _MadeAgain):
        tensor: Tensor = saved
        return tensor
    return saved.make().as_strided(saved.size, saved.stride, saved.offset)


def make_in_passes(decoder: Decoder, weights: Mapping[str, MakeWeight]) -> None:
    """Keep nothing of some weights of a decoder's layers, and make them for each pass.

    Their parameters keep shape, dtype and device, and take no memory.
    """
    by_layer: dict[str, dict[str, MakeWeight]] = {}
    for name, make in weights.items():
        old = decoder.get_parameter(name)
        path, _, leaf = name.rpartition(".")
        size, kind, device = old.shape, old.dtype, decoder.groups.device
        placeholder = nn.Parameter(
            torch.zeros((), dtype=kind, device=device).expand(size), requires_grad=False
        )
        placeholder.__dict__.update(old.__dict__)
        decoder.get_submodule(path)._parameters[leaf] = placeholder
        number, _, within = name.removeprefix("decoder.layers.").partition(".")
        by_layer.setdefault(number, {})[within] = make
    for number, makers in by_layer.items():
        layer = decoder.decoder.layers[number]
        layer.forward = UnpackedForward(layer, makers)
    decoder.__dict__[_ATTRIBUTE] = dict(weights)


def made_weights(decoder: nn.Module) -> Mapping[str, MakeWeight]:
    """The weights of a decoder that are made for each pass, by name."""
    makers: Mapping[str, MakeWeight] = decoder.__dict__.get(_ATTRIBUTE, {})
    return makers
