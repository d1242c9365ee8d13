"""Runs a decoder one layer at a time over many micro-batches, with weights loaded on demand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megtool.inference.layer_streaming import find_streamer
from megtool.kernels.graphs import cuda_graphs
from megtool.model.batch import Batch
from megtool.model.forward_context import ForwardContext
from megtool.model.stacks.decoder import Decoder
from megtool.quant.calibration.graphed_layer import GraphedLayer, GraphUse
from megtool.quant.calibration.micro_batches import MicroBatch, move_to_device
from megtool.quant.calibration.recorder import ActivationRecorder
from megtool.spec import layer_sets

MAX_PREFETCH_BYTES = 256 << 20
"""Weights of a unit are prefetched up to this size. Larger units are not: they compute for longer
than reading takes, and two of them in memory are too many."""


class LayerRunner:
    """Runs the layers of a stage."""

    def __init__(self, decoder: Decoder, micro_batches: Sequence[MicroBatch]) -> None:
        self.decoder, self.device = decoder, decoder.groups.device
        self.micro_batches = [move_to_device(p, self.device) for p in micro_batches]
        self.graph_use = GraphUse()
        self._frames: dict[tuple[int, ...], ForwardContext] = {}
        self._keeps_frames = layer_sets.has_side_inputs(decoder.config)
        self._pool: object = None
        self._streamer = find_streamer(decoder)
        if self._streamer is not None:
            weights = decoder.state_dict()
            sizes = [
                sum(weights[n].numel() * weights[n].element_size() for n in names)
                for names in self._streamer.units.values()
            ]
            self._streamer.reads_ahead = (
                max(sizes) <= MAX_PREFETCH_BYTES or self.device.type == "cuda"
            )

    @torch.no_grad()
    def embed(self) -> Iterator[Tensor]:
        """Yield the input of the first layer, by micro-batch."""
        self._frames.clear()
        for number, micro_batch in enumerate(self.micro_batches):
            yield self.decoder.embed(micro_batch.batch, self._frame(number))
        self.release()

    @torch.no_grad()
    def run(self, layer: int, number: int, x_TH: Tensor) -> Tensor:
        """Run a layer on a micro-batch."""
        out: Tensor = self.decoder.decoder.layers[str(layer)](x_TH, self._frame(number))
        return out

    @torch.no_grad()
    def finish(self, x_TH: Tensor) -> Tensor:
        """Compute the input of the head, with only the final norm loaded."""
        return self.decoder.finish(x_TH)

    @contextlib.contextmanager
    def only_final_norm(self) -> Iterator[None]:
        """Load only the final norm for `finish`, and what reads residuals for it, not the head."""
        if self._streamer is None:
            yield
            return
        prefixes = (f"decoder.{self.decoder.decoder.norm_name}.", "decoder.hc_head_")
        names = [n for n in self._streamer.units["head"] if n.startswith(prefixes)]
        with self._streamer.holding(names):
            yield

    def load(self, layer: int) -> None:
        """Load the weights of a layer, if they are loaded on demand."""
        if self._streamer is not None:
            self._streamer.enter(f"decoder.layers.{layer}")

    def release(self) -> None:
        """Release weights that are loaded on demand."""
        if self._streamer is not None:
            self._streamer.release()

    def close(self) -> None:
        """Release everything."""
        self._frames.clear()
        if self._streamer is not None:
            self._streamer.close()

    def start_layer(
        self, layer: int, recorder: ActivationRecorder | None
    ) -> Callable[[int, Tensor], Tensor]:
        """Return what runs a layer on a micro-batch, observed by a recorder started for it.

        On a CUDA device these are replays of graphs, wherever they can be (see `GraphedLayer`);
        collectives of a tp group are parts of the graphs, which its ranks replay together.
        """
        if not cuda_graphs.CudaGraphs.can_capture(self.device):
            return partial(self.run, layer)
        graphed = GraphedLayer(
            self.decoder,
            layer,
            [p.batch for p in self.micro_batches],
            run=partial(self.run, layer),
            frame=self._frame,
            recorder=recorder,
            pool=self._pool,
            use=self.graph_use,
        )
        self._pool = graphed.pool
        return graphed

    def shares_frame(self, micro_batch: MicroBatch) -> bool:
        """Return whether positions and masks are those of every plain micro-batch of its shape;
        not where routers choose experts by the tokens themselves."""
        return micro_batch.is_plain and not self.decoder.config.router.num_hash_layers

    def _frame(self, number: int) -> ForwardContext:
        """Positions and masks of a micro-batch; cached by shape where they are shared.

        Each micro-batch has its own, which is kept, where layers read more than the residual.
        """
        micro_batch = self.micro_batches[number]
        if not (self.shares_frame(micro_batch) or self._keeps_frames):
            return self.decoder.frame(micro_batch.batch)
        key = (number,) if self._keeps_frames else micro_batch.batch.shape
        if key not in self._frames:
            self._frames[key] = self.decoder.frame(micro_batch.batch)
        return self._frames[key]


def mask_uncounted(micro_batch: MicroBatch) -> Batch:
    """The batch to observe; all tokens are masked if the micro-batch is not counted."""
    if micro_batch.is_counted:
        return micro_batch.batch
    return Batch(tokens_BS=micro_batch.batch.tokens_BS, valid_BS=micro_batch.valid_BS)
