"""Layers loaded from the checkpoint when they are called, one ahead, and freed afterwards.

A decoder's weights are in units: the embedding, every layer, and what comes after the last. The
one that is called is in memory, and the one behind it is being read meanwhile; nothing else is.
What is let go is given back to the system at once, so a model larger than memory runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megtool.convert.megatron.names import EMBEDDING
from megtool.inference.rank_weights import Weights, group_of
from megtool.model.stacks.decoder import Decoder
from megtool.process.threads import BackgroundCall

_START, _END = "embedding", "head"


def units_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of a decoder's tensors by unit, in the order in which a forward pass asks for them."""
    out: dict[str, list[str]] = {_START: []}
    layers: dict[int, list[str]] = {}
    last: list[str] = []
    for name in names:
        parts = name.split(".")
        if parts[0] == "embedding":
            out[_START].append(name)
        elif group_of(name).startswith("decoder.layers."):
            layers.setdefault(int(parts[2]), []).append(name)
        else:
            last.append(name)
    for number in sorted(layers):
        out[f"decoder.layers.{number}"] = layers[number]
    out[_END] = last
    return {unit: members for unit, members in out.items() if members}


class LayerStreamer:
    """Keeps a decoder's weights on disk but for the unit in use and the one behind it.

    The decoder's parameters are on the device `meta` until a unit's first module is called. Tied
    embeddings are read again for the head. Not for training: what is let go has no gradient. A unit
    stays until another one is called, the head (or a stage's last layer) beyond the pass. With
    `reads_ahead` false nothing is read before its turn: half of the memory, where reading takes no
    time worth saving.
    """

    def __init__(
        self, decoder: Decoder, weights: Weights, device: torch.device | str = "cpu"
    ) -> None:
        self._decoder, self._weights = decoder, weights
        self._device = torch.device(device)
        self.units = units_of(weights.tensors)
        tied = decoder.config.embedding.tied_embeddings and decoder.stage.head
        if tied:  # the head multiplies by the embedding
            self.units[_END] = [*self.units[_END], EMBEDDING]
            if not decoder.stage.embedding:
                self.units[_START] = [n for n in self.units[_START] if n != EMBEDDING]
                self.units = {unit: names for unit, names in self.units.items() if names}
        self._order = list(self.units)
        self._empty = decoder.state_dict(keep_vars=True)
        self._resident = ""
        self._coming: tuple[str, BackgroundCall[dict[str, Tensor]]] | None = None
        self._lock = threading.RLock()
        self.reads_ahead = True
        self._is_fixed = False
        self._hook()
        decoder.__dict__["_megtool_streamer"] = self

    def _hook(self) -> None:
        """Have the first module of every unit ask for it."""
        decoder = self._decoder

        def ask(module: nn.Module, unit: str) -> None:
            module.register_forward_pre_hook(lambda *_: self.enter(unit))

        if decoder.embedding is not None and decoder.stage.embedding:
            ask(decoder.embedding.word_embeddings, _START)
        for number in decoder.stage.layers:
            ask(decoder.decoder.layers[str(number)], f"decoder.layers.{number}")
        if decoder.stage.head:
            for module in (decoder.decoder.norm, decoder.lm_head):
                if module is not None:
                    ask(module, _END)
            decoder.before_head = lambda: self.enter(_END)
            decoder.decoder.before_read = lambda: self.enter(_END)

    def enter(self, unit: str) -> None:
        """Have a unit's weights in memory, let go of the others, and begin to read what follows."""
        with self._lock:
            if unit == self._resident or self._is_fixed:
                return
            self.release()
            tensors = self._load_unit(unit)
            self._resident = unit
            for name in self.units[unit]:
                replaced(self._decoder, name, tensors.pop(name).to(self._device))
            place = self._order.index(unit) + 1
            if self.reads_ahead and place < len(self._order):
                following = self._order[place]
                self._coming = following, BackgroundCall(partial(self._read, following))

    @contextlib.contextmanager
    def holding(self, names: Sequence[str]) -> Iterator[None]:
        """Have these tensors in memory and nothing else, whatever is called within the `with`."""
        with self._lock:
            self.release()
            tensors = self._weights.load(names)
            for name in names:
                replaced(self._decoder, name, tensors.pop(name).to(self._device))
            self._is_fixed = True
        try:
            yield
        finally:
            for name in names:
                restored(self._decoder, name, self._empty[name])
            self._is_fixed = False

    def release(self) -> None:
        """Let go of the unit in memory."""
        with self._lock:
            for name in self.units.get(self._resident, ()):
                restored(self._decoder, name, self._empty[name])
            self._resident = ""

    def close(self) -> None:
        """Let go of everything, what is being read included."""
        self.release()
        with self._lock:
            coming, self._coming = self._coming, None
        if coming is not None:
            coming[1].wait()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by name, a unit at a time; none is kept."""
        visited = set[str]()
        for unit in self._order:
            tensors = self._read(unit)
            for name in self.units[unit]:
                tensor = tensors.pop(name)
                if name not in visited:
                    visited.add(name)
                    yield name, tensor

    def _load_unit(self, unit: str) -> dict[str, Tensor]:
        coming, self._coming = self._coming, None
        if coming is None:
            return self._read(unit)
        tensors = coming[1].result()  # one that is not wanted is not kept either
        if coming[0] == unit:
            return tensors
        del tensors, coming
        return self._read(unit)

    def _read(self, unit: str) -> dict[str, Tensor]:
        return self._weights.load(self.units[unit])


def find_streamer(decoder: nn.Module) -> LayerStreamer | None:
    """What keeps a decoder's weights on disk; None if they are all in memory."""
    streamer = decoder.__dict__.get("_megtool_streamer")
    return streamer if isinstance(streamer, LayerStreamer) else None


def replaced(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or a buffer; a parameter keeps its marks."""
    module, leaf = _holder(root, name)
    old = module._parameters.get(leaf)
    if old is None:
        module._buffers[leaf] = tensor
        return
    new = nn.Parameter(tensor, requires_grad=False)
    new.__dict__.update(old.__dict__)
    module._parameters[leaf] = new


def restored(root: nn.Module, name: str, old: Any) -> None:
    """Put back the very parameter or buffer that was there before."""
    module, leaf = _holder(root, name)
    tensors = module._parameters if leaf in module._parameters else module._buffers
    tensors[leaf] = old


def _holder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return root.get_submodule(path), leaf
