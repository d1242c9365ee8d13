"""How much each layer changes the states of tokens: what a model can do without has little.

The score of a layer is the mean over tokens of `1 - cos(x, y)` of the residuals x and y before and
behind it, ShortGPT's block influence (Men et al., 2024, arXiv:2403.03853, eq. 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.model.forward_context import ForwardContext
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.context_parallel import own_tokens


class LayerInfluence:
    """The scores of a stage's layers over all passes within `measured`; padding does not count."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure passes."""
        with self._decoder.decoder.hooked(self._decoder.stage.layers, self._add):
            yield

    def _add(
        self, number: int, _layer: nn.Module, inputs: tuple[Tensor, ForwardContext], out_TH: Tensor
    ) -> None:
        x_TH, frame = inputs
        changes_T = 1 - F.cosine_similarity(x_TH.float(), out_TH.float())
        count = float(changes_T.numel())
        if frame.real_BS is not None:
            real_T = own_tokens(frame.real_BS, frame.cp).flatten()
            changes_T, count = changes_T * real_T, float(real_T.sum())
        self._sums[number][0] += float(changes_T.double().sum())
        self._sums[number][1] += count

    def scores(self) -> tuple[float, ...]:
        """The scores of all layers, those of other stages and other tokens too, on every rank."""
        parts = [{number: (a, b) for number, (a, b) in self._sums.items()}]
        if self._decoder.groups.world.size > 1:
            world = self._decoder.groups.world
            gathered: list[dict[int, tuple[float, float]]] = [{}] * world.size
            dist.all_gather_object(gathered, parts[0], world.handle)
            parts = gathered
        totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for part in parts:  # ranks of tensor parallelism have the same: shares stay what they are
            for number, (total, count) in part.items():
                totals[number][0] += total
                totals[number][1] += count
        return tuple(
            total / count if count else 0.0 for _, (total, count) in sorted(totals.items())
        )
