"""The states behind some layers of a model, of its last pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from megtool.model.stacks.decoder import Decoder


class LayerStates:
    """The states behind some layers of a model, of its last pass; use in `with`.

    They belong to the graph of gradients where the pass has one.
    """

    def __init__(self, decoder: Decoder, numbers: Sequence[int]) -> None:
        self._decoder, self._numbers = decoder, sorted(set(numbers))
        self._states: dict[int, Tensor] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the states of passes."""
        try:
            with self._decoder.decoder.hooked(self._numbers, self._keep):
                yield
        finally:
            self._states.clear()

    def _keep(self, number: int, _layer: nn.Module, _inputs: object, x_TH: Tensor) -> None:
        self._states[number] = x_TH  # again where the layer is recomputed: nobody takes those

    def take(self) -> dict[int, Tensor]:
        """The states of the last pass, x_TH by layer; they are not kept any longer."""
        states, self._states = self._states, {}
        return states
