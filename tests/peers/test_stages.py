"""Real megatron-core models under every kind of split: their ranks hold what we say they do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from megtool.convert.megatron.parallel_args import layout_args
from megtool.convert.megatron.sharding import shard
from megtool.dtypes import dtype
from megtool.options.layout import ParallelConfig
from megtool.parallel.mesh import Mesh
from megtool.parallel.pipeline_split import Pipeline
from megtool.tensors.sharded import GlobalTensor
from tests.support.peers.forked_worlds import run_forked
from tests.support.peers.stage_words import WORDS

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

MODELS: list[tuple[int, int, dict[str, Any]]] = [
    (6, 0, {"pp": 3}),
    (8, 0, {"pp": 2, "vpp": 2}),
    (7, 0, {"pp": 3, "first_stage_layers": 1}),
    (7, 0, {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 2}),
    (8, 0, {"pp": 3, "vpp": 2, "last_stage_layers": 4}),
    (5, 0, {"pp": 3, "account_for_embedding": True}),
    (6, 0, {"pp": 2, "vpp": 2, "account_for_embedding": True, "account_for_loss": True}),
    (2, 0, {"pp": 4, "account_for_embedding": True, "account_for_loss": True}),
    (5, 0, {"pp": 3, "pipeline_layout": "Et|t*4|L"}),
    (6, 0, {"pp": 2, "pipeline_layout": "E|ttt|tt|tL"}),
    (4, 1, {"pp": 2}),
    (4, 2, {"pp": 2, "vpp": 2}),
    (6, 1, {"pp": 3, "pipeline_layout": "Ettt|ttt|mL"}),
    (6, 1, {"pp": 3, "pipeline_layout": "Ettt|t|t|t|m|L"}),
    (6, 1, {"pp": 3, "pipeline_layout": "E|ttt|tt|t|m|L"}),
]


@pytest.fixture(scope="module")
def held() -> list[dict[str, Any]]:
    """What megatron-core's ranks hold of every model, configured by the args we write."""
    asked = []
    for layers, mtp, fields in MODELS:
        parallel = ParallelConfig(**fields)
        args = layout_args(parallel, layers)
        split = {field: args[name] for field, name in WORDS.items()}
        sizes = {"layers": layers, "pp": parallel.pp, "vpp": parallel.vpp, "mtp": mtp}
        asked.append({**sizes, **split})
    said = run_forked("megatron_stages.py", json.dumps(asked))
    found: list[dict[str, Any]] = json.loads(said)
    return found


@pytest.mark.parametrize("number", range(len(MODELS)))
def test_ranks_hold_what_the_split_says(held: list[dict[str, Any]], number: int) -> None:
    layers, _, fields = MODELS[number]
    found, parallel = held[number], ParallelConfig(**fields)
    kind = dtype("float32")
    tensors = [GlobalTensor(name=n, shape=tuple(s), dtype=kind) for n, s in found["shapes"].items()]
    shards = shard(tensors, parallel, gated=False)
    stage = Mesh(parallel).position(shards.owner)["pp"]
    ours = {
        (tensors[t].name, int(stage[i]), int(shards.boxes.lo[i, 0]))
        for i, t in enumerate(shards.tensor.tolist())
    }
    assert ours == {(key, s, layer) for key, s, _, layer in found["rows"]}
    pipeline = Pipeline.of(parallel)
    chunk_of_layer = pipeline.chunk_of_layer(layers)
    homes = {
        "embedding.": pipeline.embedding,
        "mtp.": pipeline.mtp,
        "output_layer.": pipeline.loss,
        "decoder.final_": pipeline.norm(layers, has_mtp=any("mtp." in t.name for t in tensors)),
    }
    assert np.bincount(pipeline.stage_of_layer(layers)).sum() == layers
    for key, s, chunk, layer in found["rows"]:
        if key.startswith("decoder.layers."):
            assert chunk == chunk_of_layer[layer], key
        else:
            assert (s, chunk) == next(h for k, h in homes.items() if key.startswith(k)), key
