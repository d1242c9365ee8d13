"""Forward and backward passes of micro batches as one CUDA graph, which is replayed for each.

A graph covers the forward pass, the loss and the backward pass, and adds gradients to the
optimizer's sums, which never move in memory. Gradients are reduced after the last pass; the
optimizer's step, evaluations and checkpoints are outside of graphs. Losses and gradients have the
same bits as without graphs if the device's kernels are deterministic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.kernels.graph_rule_checker import graphed
from megtool.model.batch import Batch
from megtool.model.decoder import Decoder
from megtool.model.pipeline import PipelineSchedule
from megtool.model_config import ModelConfig
from megtool.optim.optimizer import Optimizer
from megtool.optim.scaler import DynamicGradScaler
from megtool.train.config import TrainConfig

_LOG = logging.getLogger(__name__)


class GraphedSchedule(PipelineSchedule):
    """A `PipelineSchedule` of one stage that replays micro batches of `shape` (rows, tokens).

    There is a graph for each set of tensors in a batch: packed rows have positions and documents,
    padded rows have `counted_BS`. A batch of another shape runs without a graph, and so do all
    batches until `is_steady` is true. Between `Optimizer.zero_grad` and `Optimizer.finish` all
    micro batches have the same set of tensors: a graph is captured before gradients are summed. On
    a CPU the rules of graphs are checked by emulation, for tests.

    Raises (by `step`):
        GraphRuleError: the passes cannot be captured; the emulation names the operation.
    """

    def __init__(
        self,
        stages: Sequence[Decoder],
        optimizer: Optimizer,
        *,
        num_microbatches: int,
        shape: tuple[int, int],
        is_steady: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(stages, num_microbatches=num_microbatches, scale=optimizer.scale_loss)
        optimizer.sum_in_place()
        self._optimizer, self._shape, self._is_settled = optimizer, shape, is_steady
        device = self.groups.device
        is_scaled = isinstance(optimizer.scaler, DynamicGradScaler) or optimizer.loss_scale != 1.0
        # A tensor, since a graph would repeat a number that it was captured with.
        self._factor = torch.ones((), device=device) if is_scaled else None
        self._graphs = graphed(self._forward_backward, device, undo=optimizer.zero_grad)
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
        facts = (part.positions_BS, part.valid_BS, part.documents_BS, part.counted_BS)
        before = self.num_graphs
        loss: Tensor = self._graphs(part.tokens_BS, labels_BS, self._factor, *facts)
        if self.num_graphs > before and self.groups.rank == 0:
            _LOG.info("micro batches of %d x %d tokens run as a CUDA graph", *self._shape)
        self.num_replays += 1
        self._losses.append(loss)

    def _forward_backward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        factor: Tensor | None,
        positions_BS: Tensor | None,
        valid_BS: Tensor | None,
        documents_BS: Tensor | None,
        counted_BS: Tensor | None,
    ) -> Tensor:
        """The passes to capture; they leave no tensor behind in the model."""
        (decoder,) = self.stages
        batch = Batch(
            tokens_BS=tokens_BS,
            positions_BS=positions_BS,
            valid_BS=valid_BS,
            documents_BS=documents_BS,
            counted_BS=counted_BS,
        )
        loss, _ = decoder.loss(batch, labels_BS)
        (loss if factor is None else loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def check_graphs(settings: TrainConfig, config: ModelConfig) -> None:
    """Check that the passes of the model on the device can be graphs.

    Raises:
        UsageError: the model has experts, or layers of multi-token prediction that are trained, or
            the device is not a GPU.
    """
    if settings.cuda_graph_impl == "none":
        return
    if config.moe_layers:
        raise UsageError(
            "--cuda-graph-impl local of a model with experts: routers decide the shapes of their "
            "products, and a graph has fixed shapes",
            hint="without --cuda-graph-impl",
        )
    if config.num_mtp_layers and settings.mtp_loss_scaling_factor:
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
