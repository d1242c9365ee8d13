"""A 671B-parameter mixture of experts as torch_dist headers alone: about 10^6 chunks, no data.

Usage: python examples/benchmarks/bench/moe_metadata.py FOLDER [--layers 61] [--experts 256]

Writes `FOLDER/iter_0000001/` with `.metadata`, `metadata.json`, `common.pt` and data files that
are holes (`truncate`), in the shape Megatron saves at TP=8, PP=16, EP=64 with fp32 main parameters
and two moments: per-layer keys, experts stacked on a leading axis, one chunk per expert and
gate/up half. 61 layers go to the stages by an explicit layout with two virtual stages: the loss
alone on the last one, three dense layers on the first. Planning benchmarks open it; nothing in it
can be read as tensors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megtool.dtypes import dtype
from megtool.formats.torch_dist.layout import plan_torch_dist_layout
from megtool.options.layout import ParallelConfig
from megtool.parallel.pipeline_split import Pipeline, even_text
from megtool.pickles.writer import make_namespace
from megtool.tensors.box import Boxes, split
from megtool.tensors.sharded import GlobalTensor, Shards

HIDDEN, FFN, MOE_FFN, VOCAB, HEADS = 7168, 18432, 2048, 129280, 128
Q_RANK, KV_RANK, ROPE, NOPE, V_HEAD = 1536, 512, 64, 128, 128
TP, PP, EP, WORLD = 8, 16, 64, 1024
LAYOUTS = {61: "Et*3|(tt|)*29|L"}
STATES = ("", "optimizer.state.param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter: its shape, and how it is cut: along `dim` into `parts`, or by expert."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    parts: int = TP
    by_expert: bool = False


def pipeline(layers: int) -> Pipeline:
    """How the layers go to the stages: as in `LAYOUTS`, else as evenly as they can."""
    text = LAYOUTS.get(layers) or even_text(layers, Pipeline(pp=PP))
    return Pipeline.of(ParallelConfig(pp=PP, pipeline_layout=text))


def parameters(layers: int, dense: int, experts: int) -> Iterator[tuple[int, Cut]]:
    """Every parameter with its pipeline stage."""
    stages = pipeline(layers).stage_of_layer(layers).tolist()
    yield 0, Cut("embedding.word_embeddings.weight", (VOCAB, HIDDEN), 0)
    for layer in range(layers):
        stage, at = stages[layer], f"decoder.layers.{layer}."
        attention = at + "self_attention."
        yield stage, Cut(at + "input_layernorm.weight", (HIDDEN,))
        yield stage, Cut(attention + "linear_q_down_proj.weight", (Q_RANK, HIDDEN))
        yield stage, Cut(attention + "linear_q_up_proj.layer_norm_weight", (Q_RANK,))
        up = (HEADS * (NOPE + ROPE), Q_RANK)
        yield stage, Cut(attention + "linear_q_up_proj.weight", up, 0)
        yield stage, Cut(attention + "linear_kv_down_proj.weight", (KV_RANK + ROPE, HIDDEN))
        yield stage, Cut(attention + "linear_kv_up_proj.layer_norm_weight", (KV_RANK,))
        up = (HEADS * (NOPE + V_HEAD), KV_RANK)
        yield stage, Cut(attention + "linear_kv_up_proj.weight", up, 0)
        yield stage, Cut(attention + "linear_proj.weight", (HIDDEN, HEADS * V_HEAD), 1)
        mlp = at + "mlp."
        if layer < dense:
            yield stage, Cut(mlp + "linear_fc1.layer_norm_weight", (HIDDEN,))
            yield stage, Cut(mlp + "linear_fc1.weight", (2 * FFN, HIDDEN), 0, 2 * TP)
            yield stage, Cut(mlp + "linear_fc2.weight", (HIDDEN, FFN), 1)
            continue
        yield stage, Cut(at + "pre_mlp_layernorm.weight", (HIDDEN,))
        yield stage, Cut(mlp + "router.weight", (experts, HIDDEN))
        yield stage, Cut(mlp + "router.expert_bias", (experts,))
        yield stage, Cut(mlp + "shared_experts.linear_fc1.weight", (2 * MOE_FFN, HIDDEN), 0, 2 * TP)
        yield stage, Cut(mlp + "shared_experts.linear_fc2.weight", (HIDDEN, MOE_FFN), 1)
        expert = mlp + "experts.experts."
        fc1 = (experts, 2 * MOE_FFN, HIDDEN)
        yield stage, Cut(expert + "linear_fc1.weight", fc1, 1, 2 * ETP, by_expert=True)
        fc2 = (experts, HIDDEN, MOE_FFN)
        yield stage, Cut(expert + "linear_fc2.weight", fc2, 2, ETP, by_expert=True)
    yield PP - 1, Cut("decoder.final_layernorm.weight", (HIDDEN,))
    yield PP - 1, Cut("output_layer.weight", (VOCAB, HIDDEN), 0)


ETP = 6
"""Cuts of each expert: enough of them for a million chunks in all."""


def chunks(cut: Cut, stage: int, turn: int) -> Iterator[tuple[list[int], list[int], int]]:
    """Boxes of a parameter, `(lo, hi, owner rank)`."""
    width = WORLD // PP
    heads = range(cut.shape[0]) if cut.by_expert else [None]
    dim = 0 if cut.dim is None else cut.dim
    cuts = [(0, cut.shape[dim])] if cut.dim is None else split(cut.shape[dim], cut.parts)
    for head in heads:
        for part, (first, last) in enumerate(cuts):
            lo, hi = [0] * len(cut.shape), list(cut.shape)
            lo[dim], hi[dim] = first, last
            if head is None:
                owner = part % TP + TP * (turn % (width // TP))
            else:
                lo[0], hi[0] = head, head + 1
                owner = head * EP // cut.shape[0] % width
            yield lo, hi, stage * width + owner


def build(layers: int, experts: int) -> tuple[list[GlobalTensor], Shards]:
    """All tensors, model in bf16 and optimizer state in fp32, and their shards."""
    tensors: list[GlobalTensor] = []
    table: list[tuple[int, list[int], list[int], int]] = []
    for turn, state in enumerate(STATES):
        kind = dtype("float32" if state else "bfloat16")
        for stage, cut in parameters(layers, 3, experts):
            table += [(len(tensors), *row) for row in chunks(cut, stage, turn)]
            tensors.append(GlobalTensor(name=state + cut.name, shape=cut.shape, dtype=kind))
    lo = np.zeros((len(table), 3), np.int64)
    hi = np.ones((len(table), 3), np.int64)
    for row, (_, first, last, _) in enumerate(table):
        lo[row, : len(first)], hi[row, : len(last)] = first, last
    tensor = np.array([r[0] for r in table], np.int32)
    return tensors, Shards(tensor, Boxes(lo, hi), np.array([r[3] for r in table], np.int32))


def write(folder: Path, layers: int, experts: int) -> None:
    """Write the headers, and data files of the right size without data."""
    start = time.perf_counter()
    tensors, shards = build(layers, experts)
    print(f"{len(tensors)} tensors, {len(shards)} chunks: {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    sizes = {
        "tensor_model_parallel_size": TP,
        "pipeline_model_parallel_size": PP,
        "virtual_pipeline_model_parallel_size": pipeline(layers).vpp,
        "pipeline_model_parallel_layout": pipeline(layers).layout,
        "expert_model_parallel_size": EP,
        "num_layers": layers,
        "num_experts": experts,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
    }
    common = {"iteration": 1, "checkpoint_version": 3.0, "args": make_namespace(dict(sizes))}
    laid = plan_torch_dist_layout(
        tensors, shards, num_files=WORLD, common=common, iteration=1, megatron=True
    )
    print(f"laid out in {time.perf_counter() - start:.1f} s")
    for file in laid.catalogue.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as f:
            f.truncate(file.size)
    for name, data in laid.iter_small_files():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=256)
    given = parser.parse_args()
    write(given.folder, given.layers, given.experts)
