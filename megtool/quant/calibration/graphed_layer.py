"""One layer of a calibration, captured once per shape of micro-batch and then replayed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megtool.errors import GraphRuleError
from megtool.kernels.graphs import cuda_graphs
from megtool.model.attention.shared_kv import kv_source, kv_sources
from megtool.model.batch import Batch
from megtool.model.forward_context import ForwardContext
from megtool.model.moe.experts import MoeMlp
from megtool.model.stacks.decoder import Decoder
from megtool.quant.calibration.recorder import ActivationRecorder, Observation
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

_LOG = logging.getLogger(__name__)

MIN_GRAPH_REPEATS = 8
"""Capturing a CUDA graph (two runs of the layer) pays off from this many micro-batches on."""

CAPTURE_RUNS = 2
"""Runs of a layer that a capture takes: one that compiles its kernels, and one that is captured."""

_LAYER_INPUT, _KEY, _VALUE = range(3)
_SIDE_INPUTS = 3  # what a layer reads beside the residual: `side_inputs_of`

Signature = tuple[Any, ...]


@dataclass(slots=True, kw_only=True)
class GraphUse:
    """How the layers of a calibration ran on a device that has CUDA graphs."""

    num_replays: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Runs of a layer without a replay, by their reason."""

    @property
    def num_runs(self) -> int:
        """All runs of layers."""
        return self.num_replays + self.reasons.total()

    def lines(self) -> list[str]:
        """Describe the runs, a line for all and one for each reason; nothing if there were none."""
        if not self.num_runs:
            return []
        lines = [
            f"CUDA graphs: {self.num_replays:,} of {self.num_runs:,} layer runs were replays"
            f" ({self.num_replays / self.num_runs:.0%})"
        ]
        return lines + [f"{num:,} without: {why}" for why, num in self.reasons.most_common()]


def find_obstacle(decoder: Decoder, layer: int) -> str | None:
    """Return why a layer cannot be captured on any data, or None."""
    groups = decoder.groups
    if groups.cp.size > 1:
        return "context parallelism (--cp): ranks wait for each other's keys and values in turn"
    module = decoder.decoder.layers[str(layer)]
    mixtures = [m for m in module.modules() if isinstance(m, MoeMlp)]
    if not all(m.is_in_place for m in mixtures):
        return (
            "experts on other ranks (--ep, or --etp other than --tp): the host sends each as many "
            "tokens as the router says, and a graph has fixed shapes"
        )
    if not all(m.is_graphable for m in mixtures):
        return (
            f"experts in {str(decoder.dtype).removeprefix('torch.')} are multiplied one by one on "
            "this device, with counts that the host reads; --dtype bfloat16 has grouped products "
            "on compute capability 9 and 10"
        )
    return None


def signature_of(batch: Batch) -> Signature:
    """Return what decides whether two batches can be replays of one graph."""
    facts = (batch.positions_BS, batch.valid_BS, batch.documents_BS, batch.run_starts_BM)
    return batch.shape, *(None if x is None else x.shape for x in facts)


class GraphedLayer:
    """One layer, replayed where a graph of it can be captured and pays off, and run eagerly where
    not; `use` counts both, with reasons.

    Positions and masks of a micro-batch are computed within the graph, from its tokens, positions,
    padding and documents, so that packed and padded rows are replayed too. Keys and values, or
    embeddings, that a layer reads beside the residual are inputs of the graph, and those that later
    layers read are outputs. What `recorder` cannot add without the host (rows of experts, samples)
    is an output, and added after the replay.

    Args:
        decoder: the model.
        layer: the number of the layer.
        batches: the micro-batches, on the device.
        run: runs the layer eagerly on a micro-batch.
        frame: returns the context of a micro-batch; only for models with side inputs.
        recorder: observes the layer, started for it; None for none.
        pool: memory that graphs of several layers share.
        use: counts the runs.
    """

    def __init__(
        self,
        decoder: Decoder,
        layer: int,
        batches: Sequence[Batch],
        *,
        run: Callable[[int, Tensor], Tensor],
        frame: Callable[[int], ForwardContext],
        recorder: ActivationRecorder | None,
        pool: object,
        use: GraphUse,
    ) -> None:
        self._decoder, self._layer, self._batches = decoder, layer, batches
        self._run, self._frame, self._recorder, self._use = run, frame, recorder, use
        self._module = decoder.decoder.layers[str(layer)]
        self._signatures = [signature_of(b) for b in batches]
        self._obstacles: dict[Signature, str] = {}
        obstacle = find_obstacle(decoder, layer)
        for signature, num in Counter(self._signatures).items():
            if obstacle is not None:
                self._obstacles[signature] = obstacle
            elif num < MIN_GRAPH_REPEATS:
                self._obstacles[signature] = (
                    f"fewer than {MIN_GRAPH_REPEATS} micro-batches of the same shape"
                )
        self._observations: dict[Signature, list[Observation]] = {}
        self._has_side_inputs = layer_sets.has_side_inputs(decoder.config)
        self._graphs = cuda_graphs.CudaGraphs(
            self._pass,
            pool=pool,
            warmups=CAPTURE_RUNS - 1,
            state=() if recorder is None else recorder.state,
            copies=False,
        )
        self.pool = self._graphs.pool

    def __call__(self, number: int, x_TH: Tensor) -> Tensor:
        """Run the layer on a micro-batch, and let the recorder add what it observes."""
        signature = self._signatures[number]
        obstacle = self._obstacles.get(signature)
        if obstacle is not None:
            self._use.reasons[obstacle] += 1
            return self._run(number, x_TH)
        captured = len(self._graphs.captured)
        try:
            with torch.no_grad():
                y_TH, lent, tensors = self._graphs(x_TH, *self._inputs(number))
        except GraphRuleError as error:
            if len(self._graphs.captured) > captured:
                raise  # a failed replay could give wrong results
            self._obstacles[signature] = obstacle = error.message
            self._use.reasons[obstacle] += CAPTURE_RUNS + 1
            _LOG.debug("layer %d runs without CUDA graphs: %s", self._layer, obstacle)
            return self._run(number, x_TH)
        self._use.num_replays += 1
        if len(self._graphs.captured) > captured:
            self._use.reasons["runs to capture the graphs"] += CAPTURE_RUNS
        if lent is not None:  # the graph's own memory: the next replay overwrites it
            self._frame(number).shared_kv[self._layer] = lent[0].clone(), lent[1].clone()
        if self._recorder is not None:
            for observation, parts in zip(self._observations[signature], tensors, strict=True):
                self._recorder.add_observation(observation, tuple(parts))
        out_TH: Tensor = y_TH.clone()
        return out_TH

    def _inputs(self, number: int) -> list[Tensor | None]:
        batch = self._batches[number]
        side: Sequence[Tensor | None] = (None,) * _SIDE_INPUTS
        if self._has_side_inputs:
            side = side_inputs_of(self._decoder.config, self._layer, self._frame(number))
        facts = (
            *(batch.tokens_BS, batch.positions_BS, batch.valid_BS, batch.documents_BS),
            batch.run_starts_BM,
        )
        return [*facts, *side]

    def _pass(
        self,
        x_TH: Tensor,
        tokens_BS: Tensor,
        positions_BS: Tensor | None,
        valid_BS: Tensor | None,
        documents_BS: Tensor | None,
        run_starts_BM: Tensor | None,
        *side: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None, list[tuple[Tensor, ...]]]:
        """The pass to capture: the residual behind the layer, keys and values that it lends to
        others, and the tensors of each observation to add; nothing else of it stays referenced."""
        decoder, layer = self._decoder, self._layer
        batch = Batch(
            tokens_BS=tokens_BS,
            positions_BS=positions_BS,
            valid_BS=valid_BS,
            documents_BS=documents_BS,
            run_starts_BM=run_starts_BM,
        )
        frame = decoder.frame(batch)
        layer_input, key, value = side[_LAYER_INPUT], side[_KEY], side[_VALUE]
        if layer_input is not None:
            frame.layer_inputs = (layer_input,) * (layer + 1)
        if key is not None and value is not None:
            frame.shared_kv[kv_source(decoder.config, layer)] = key, value
        tensors: list[tuple[Tensor, ...]] = []
        if self._recorder is None:
            y_TH = self._module(x_TH, frame)
        else:
            with self._recorder.postponing() as postponed:
                y_TH = self._module(x_TH, frame)
            self._observations[signature_of(batch)] = [o for o, _ in postponed]
            tensors = [parts for _, parts in postponed]
        decoder.rotary.forget()
        lends = self._has_side_inputs and layer in kv_sources(decoder.config)
        return y_TH, frame.shared_kv[layer] if lends else None, tensors


def side_inputs_of(
    config: ModelConfig, layer: int, frame: ForwardContext
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return what a layer reads beside the residual: an embedding of its own, and keys and values
    of another layer."""
    layer_input = frame.layer_inputs[layer] if config.residual.layer_input_size else None
    if layer not in layer_sets.shared_kv_layers(config):
        return layer_input, None, None
    return layer_input, *frame.shared_kv[kv_source(config, layer)]
