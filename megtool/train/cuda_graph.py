"""Forward and backward passes of micro batches as one CUDA graph, which is replayed for each.

A graph covers the forward pass, the loss and the backward pass, and adds gradients to the
optimizer's sums, which never move in memory. Gradients are reduced after the last pass; the
optimizer's step, evaluations and checkpoints are outside of graphs. Losses and gradients have the
same bits as without graphs if the device's kernels are deterministic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megtool.errors import UsageError
from megtool.kernels.graphs import cuda_graphs, graphed_passes
from megtool.kernels.graphs.graphed_passes import GraphedPass
from megtool.model.batch import Batch
from megtool.model.layers.dropout import draw_seed, seeded_by
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule, StageLink
from megtool.optim.optimizer import Optimizer
from megtool.optim.scaler import DynamicGradScaler
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.train.options.config import TrainConfig

_FACTS = ("positions_BS", "valid_BS", "documents_BS", "counted_BS", "run_starts_BM")
"""What a batch has beside its tokens."""

_LOG = logging.getLogger(__name__)


class GraphedSchedule(PipelineSchedule):
    """A `PipelineSchedule` of one stage that replays micro batches of `shape` (rows, tokens).

    There is a graph for each set of tensors in a batch: packed rows have positions and documents,
    padded rows have `counted_BS`. Dropout is seeded for each pass by a tensor, with the number that
    the pass would draw without a graph. A batch of another shape runs without a graph, and so do
    all batches until `is_steady` is true. Between `Optimizer.zero_grad` and `Optimizer.finish` all
    micro batches have the same set of tensors: a graph is captured before gradients are summed.

    Raises (by `step`):
        GraphRuleError: the passes cannot be captured.
    """

    def __init__(
        self,
        stages: Sequence[Decoder],
        optimizer: Optimizer,
        *,
        num_microbatches: int,
        shape: tuple[int, int],
        is_steady: Callable[[], bool] = lambda: True,
        forget_passes: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(stages, num_microbatches=num_microbatches, scale=optimizer.scale_loss)
        optimizer.sum_in_place()
        self._optimizer, self._shape, self._is_settled = optimizer, shape, is_steady
        device = self.groups.device
        is_scaled = isinstance(optimizer.scaler, DynamicGradScaler) or optimizer.loss_scale != 1.0
        # A tensor, since a graph would repeat a number that it was captured with.
        self._factor = torch.ones((), device=device) if is_scaled else None
        drops = any(stage.dropout.hidden for stage in self.stages)
        self._seed = torch.zeros((), dtype=torch.int64, device=device) if drops else None

        def undo() -> None:
            optimizer.zero_grad()
            forget_passes()

        self._graphs = cuda_graphs.CudaGraphs(self._forward_backward, undo=undo)
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return len(self._graphs.captured)

    def _pass(self, part: Batch, labels_BS: Tensor) -> None:
        """Do the passes of one micro batch, and record its loss."""
        if part.shape != self._shape or not self._is_settled():
            super()._pass(part, labels_BS)
            return
        if self._factor is not None:
            self._factor.fill_(self._optimizer.loss_scale)
        if self._seed is not None:
            self._seed.fill_(draw_seed())
        facts = (getattr(part, name) for name in _FACTS)
        before = self.num_graphs
        loss: Tensor = self._graphs(part.tokens_BS, labels_BS, self._factor, self._seed, *facts)
        if self.num_graphs > before and self.groups.rank == 0:
            _LOG.info("micro batches of %d x %d tokens run as a CUDA graph", *self._shape)
        self.num_replays += 1
        self._losses.append(loss)

    def _forward_backward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        factor: Tensor | None,
        seed: Tensor | None,
        *facts: Tensor | None,
    ) -> Tensor:
        """The passes to capture, of a batch with `_FACTS`; they leave no tensor behind in the
        model."""
        (decoder,) = self.stages
        batch = Batch(tokens_BS=tokens_BS, **dict(zip(_FACTS, facts, strict=True)))
        with seeded_by(seed):
            loss, _ = decoder.loss(batch, labels_BS)
        (loss if factor is None else loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class GraphedPipeline(PipelineSchedule):
    """A `PipelineSchedule` of several stages whose passes of micro batches of `shape` (rows,
    tokens) are CUDA graphs: each chunk of this rank has pairs of them, one for every micro batch
    that is under way at once.

    The order of passes, what stages send to each other, and the loss stay outside. Otherwise as
    `GraphedSchedule`.

    Raises (by `step`):
        GraphRuleError: see `GraphedSchedule`.
    """

    def __init__(
        self,
        stages: Sequence[Decoder],
        optimizer: Optimizer,
        *,
        num_microbatches: int,
        shape: tuple[int, int],
        is_steady: Callable[[], bool] = lambda: True,
        forget_passes: Callable[[], None] = lambda: None,
        overlap_p2p: bool | None = None,
    ) -> None:
        super().__init__(
            stages,
            num_microbatches=num_microbatches,
            scale=optimizer.scale_loss,
            overlap_p2p=overlap_p2p,
        )
        optimizer.sum_in_place()
        pp = self.groups.pp

        def undo() -> None:
            optimizer.zero_grad()
            forget_passes()

        # As many as 1F1B has under way; of several chunks all of a round.
        most = pp.size - pp.rank if len(self.stages) == 1 else len(self.stages) * pp.size
        self.links = [
            GraphedLink(
                decoder,
                shape=shape,
                num_pairs=min(num_microbatches, most),
                is_steady=is_steady,
                undo=undo,
            )
            for decoder in self.stages
        ]
        self._links = list(self.links)

    @property
    def num_replays(self) -> int:
        """Forward passes that were a graph's."""
        return sum(link.num_replays for link in self.links)


class GraphedLink(StageLink):
    """A chunk of a rank whose passes are replayed as pairs of graphs, as many as are under way.

    All pairs for a set of tensors and their shapes are captured in the first forward pass with it,
    when no gradient of the step is summed yet.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        shape: tuple[int, int],
        num_pairs: int,
        is_steady: Callable[[], bool],
        undo: Callable[[], None],
    ) -> None:
        super().__init__(decoder)
        self._shape, self._num_pairs = shape, num_pairs
        self._is_steady, self._undo = is_steady, undo
        self._pairs: dict[tuple[Any, ...], list[GraphedPass]] = {}
        self.num_replays = 0

    def forward(self, *rows: Tensor, **facts: Tensor) -> Tensor | tuple[Tensor, ...]:
        tokens_BS = facts["tokens_BS"]
        is_trained = torch.is_grad_enabled() and self._is_steady()
        if not is_trained or tuple(tokens_BS.shape) != self._shape:
            return super().forward(*rows, **facts)
        names = tuple(sorted(facts))
        seed = None
        if self.decoder.dropout.hidden:
            seed = torch.full((), draw_seed(), dtype=torch.int64, device=tokens_BS.device)
        inputs: list[Tensor | None] = [*rows, *(facts[name] for name in names), seed]
        key = tuple((name, facts[name].shape) for name in names)
        if key not in self._pairs:
            self._pairs[key] = self._capture(names, len(rows), inputs)
        pair = next((p for p in self._pairs[key] if p.is_free), None)
        if pair is None:  # more under way than foreseen
            with seeded_by(seed):
                return super().forward(*rows, **facts)
        self.num_replays += 1
        # The first stage's inputs have no gradient, and its outputs have one.
        anchor = torch.zeros((), device=tokens_BS.device, requires_grad=True)
        replayed: Any = _Replay.apply
        out: tuple[Tensor, ...] = replayed(pair, anchor, *inputs)
        return out if len(out) > 1 else out[0]

    def _capture(
        self, names: tuple[str, ...], num_rows: int, inputs: Sequence[Tensor | None]
    ) -> list[GraphedPass]:
        decoder = self.decoder

        def run(*values: Tensor | None) -> tuple[Tensor, ...]:
            rows = [x for x in values[:num_rows] if x is not None]
            facts: dict[str, Any] = dict(zip(names, values[num_rows:-1], strict=True))
            batch = Batch(**facts)
            with seeded_by(values[-1]):
                out = decoder.advance(batch, decoder.frame(batch), *rows)
            decoder.rotary.forget()
            return out

        pairs = [
            graphed_passes.GraphedPass(run, inputs, undo=self._undo) for _ in range(self._num_pairs)
        ]
        if decoder.groups.rank == 0:
            _LOG.info("micro batches of %d x %d tokens run as CUDA graphs", *self._shape)
        return pairs


class _Replay(torch.autograd.Function):
    """A forward pass by a graph, whose backward pass is that of the same pair."""

    @staticmethod
    def forward(
        ctx: Any, pair: GraphedPass, anchor: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.pair = pair
        return pair.forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, torch.zeros((), device=grads[0].device), *ctx.pair.backward(grads)


def check_graphs(settings: TrainConfig, config: ModelConfig) -> None:
    """Check that the passes of the model on the device can be graphs.

    Raises:
        UsageError: the model has experts, or layers of multi-token prediction that are trained, or
            the device is not a GPU.
    """
    if settings.cuda_graph_impl == "none":
        return
    layout = settings.layout
    if layer_sets.moe_layers(config) and (layout.ep > 1 or (layout.etp or layout.tp) != layout.tp):
        raise UsageError(
            "--cuda-graph-impl local of experts on other ranks: the host sends each of them as "
            "many tokens as the router says, and a graph has fixed shapes",
            hint="without --cuda-graph-impl, or with --ep 1 and --etp as --tp",
        )
    if config.mtp.num_mtp_layers and settings.losses.mtp_loss_scaling_factor:
        raise UsageError(
            "--cuda-graph-impl local of a model whose layers of multi-token prediction are "
            "trained: the sums of their losses are kept outside of the graph",
            hint="--mtp-loss-scaling-factor 0 leaves these layers as they are",
        )
    if not torch.cuda.is_available() or (settings.device or "cuda").startswith("cpu"):
        raise UsageError(
            f"--cuda-graph-impl local on {settings.device or 'cpu'}: it needs a CUDA device",
            hint="without --cuda-graph-impl",
        )
