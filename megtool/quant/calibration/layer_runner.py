"""Runs a decoder one layer at a time over many micro-batches, with weights loaded on demand."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megtool.errors import GraphRuleError
from megtool.inference.layer_streaming import find_streamer
from megtool.kernels.graphs import cuda_graphs
from megtool.model.batch import Batch
from megtool.model.forward_context import ForwardContext
from megtool.model.moe.experts import MoeMlp
from megtool.model.stacks.decoder import Decoder
from megtool.quant.calibration.micro_batches import MicroBatch, move_to_device
from megtool.spec import layer_sets

_LOG = logging.getLogger(__name__)

MAX_PREFETCH_BYTES = 256 << 20
"""Weights of a unit are prefetched up to this size. Larger units are not: they compute for longer
than reading takes, and two of them in memory are too many."""

MIN_GRAPH_REPEATS = 8
"""Capturing a CUDA graph (four runs of the layer) pays off from this many micro-batches on."""


class LayerRunner:
    """Runs the layers of a stage."""

    def __init__(self, decoder: Decoder, micro_batches: Sequence[MicroBatch]) -> None:
        self.decoder, self.device = decoder, decoder.groups.device
        self.micro_batches = [move_to_device(p, self.device) for p in micro_batches]
        self.num_replays = 0
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

    def capture_layer(
        self, layer: int, state: Sequence[Tensor], *, graphable: bool
    ) -> GraphedLayer | None:
        """Capture the layer as CUDA graphs, one per shape with enough micro-batches.

        None if graphs cannot be used: on a CPU, or if a pass synchronizes with the host.
        Collectives of a tp group are parts of the graphs, which its ranks replay together.
        """
        if not graphable or self._keeps_frames:
            return None
        if not cuda_graphs.CudaGraphs.can_capture(self.device):
            return None
        if self.decoder.groups.cp.size > 1:  # ranks send each other keys and values in turn
            return None
        module = self.decoder.decoder.layers[str(layer)]
        if not all(m.is_graphable for m in module.modules() if isinstance(m, MoeMlp)):
            return None
        shapes: dict[tuple[int, int], int] = {}
        for p in self.micro_batches:
            if p.is_plain:
                shapes[p.batch.shape] = shapes.get(p.batch.shape, 0) + 1
        often = {s for s, n in shapes.items() if n >= MIN_GRAPH_REPEATS}
        return GraphedLayer(self, layer, often, state) if often else None

    def graphs(
        self, function: cuda_graphs.Function, state: Sequence[Tensor]
    ) -> cuda_graphs.CudaGraphs:
        """Make CUDA graphs of a function; all share one memory pool."""
        captured = cuda_graphs.CudaGraphs(function, pool=self._pool, state=state)
        self._pool = captured.pool
        return captured

    def _frame(self, number: int) -> ForwardContext:
        """Positions and masks of a micro-batch; cached by shape for plain ones.

        Each micro-batch has its own, which is kept, where layers read more than the residual.
        """
        micro_batch = self.micro_batches[number]
        if not (micro_batch.is_plain or self._keeps_frames):
            return self.decoder.frame(micro_batch.batch)
        key = (number,) if self._keeps_frames else micro_batch.batch.shape
        if key not in self._frames:
            self._frames[key] = self.decoder.frame(micro_batch.batch)
        return self._frames[key]


class GraphedLayer:
    """One layer, captured once per shape and replayed; runs eagerly after a failed capture."""

    def __init__(
        self,
        layers: LayerRunner,
        layer: int,
        shapes: set[tuple[int, int]],
        state: Sequence[Tensor],
    ) -> None:
        self._layers, self._layer, self._state = layers, layer, list(state)
        self._shapes = shapes
        self._graphs: dict[tuple[int, int], cuda_graphs.CudaGraphs] = {}

    def __call__(self, number: int, x_TH: Tensor) -> Tensor:
        """Run the layer on a micro-batch."""
        layers, micro_batch = self._layers, self._layers.micro_batches[number]
        shape = micro_batch.batch.shape
        if not micro_batch.is_plain or shape not in self._shapes:
            return layers.run(self._layer, number, x_TH)
        if shape not in self._graphs:

            def function(x: Tensor) -> Tensor:
                out = layers.run(self._layer, number, x)
                layers.decoder.rotary.forget()
                return out

            self._graphs[shape] = layers.graphs(function, self._state)
        graphs = self._graphs[shape]
        captured = len(graphs.captured)
        try:
            with torch.no_grad():
                out: Tensor = graphs(x_TH)
        except GraphRuleError as error:
            if len(graphs.captured) > captured:
                raise  # a failed replay could give wrong results
            _LOG.info("layer %d runs without CUDA graphs: %s", self._layer, error.message)
            self._shapes.discard(shape)
            return layers.run(self._layer, number, x_TH)
        layers.num_replays += 1
        return out


def mask_uncounted(micro_batch: MicroBatch) -> Batch:
    """The batch to observe; all tokens are masked if the micro-batch is not counted."""
    if micro_batch.is_counted:
        return micro_batch.batch
    return Batch(tokens_BS=micro_batch.batch.tokens_BS, valid_BS=micro_batch.valid_BS)
