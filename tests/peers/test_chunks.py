"""Every stage and chunk of real megatron-core models has the parameters that we say it has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megtool.convert.config.hybrid import needs_hybrid, to_hybrid
from megtool.convert.language.binding import Binding
from megtool.convert.language.canonical import CanonicalModel
from megtool.convert.megatron.names import PER_LAYER
from megtool.convert.megatron.parallel_args import layout_args
from megtool.convert.megatron.rank_parameters import Parameter, RankPlace, rank_parameters
from megtool.convert.megatron.sharding import layers_of_stage
from megtool.dtypes import dtype
from megtool.megatron_state.local_names import to_local
from megtool.options.layout import ParallelConfig
from megtool.spec.model_config import ModelConfig
from megtool.tensors.registration_order import Order, registered
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.trained import canonical_tensors
from tests.support.peers.forked_worlds import run_forked
from tests.support.peers.stage_words import WORDS

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

SPLITS: list[tuple[int, int, dict[str, Any]]] = [
    (4, 0, {"pp": 1}),
    (4, 0, {"pp": 2}),
    (6, 0, {"pp": 3}),
    (8, 0, {"pp": 2, "vpp": 2}),
    (8, 0, {"pp": 4, "vpp": 2}),
    (7, 0, {"pp": 3, "first_stage_layers": 1}),
    (7, 0, {"pp": 3, "last_stage_layers": 1}),
    (5, 0, {"pp": 3, "account_for_embedding": True}),
    (2, 0, {"pp": 4, "account_for_embedding": True, "account_for_loss": True}),
    (5, 0, {"pp": 3, "pipeline_layout": "Et|t*4|L"}),
    (6, 0, {"pp": 2, "pipeline_layout": "E|ttt|tt|tL"}),
    (4, 1, {"pp": 1}),
    (4, 1, {"pp": 2}),
    (4, 2, {"pp": 2}),
    (8, 1, {"pp": 2, "vpp": 2}),
    (8, 2, {"pp": 4, "vpp": 2}),
    (7, 1, {"pp": 3, "first_stage_layers": 1}),
    (4, 1, {"pp": 2, "pipeline_layout": "Etttt|mL"}),
    (4, 1, {"pp": 3, "pipeline_layout": "Ett|ttm|L"}),
    (4, 1, {"pp": 4, "pipeline_layout": "Ett|tt|m|L"}),
    (4, 2, {"pp": 4, "pipeline_layout": "Ett|tt|mm|L"}),
    (6, 1, {"pp": 3, "pipeline_layout": "Ettt|t|t|t|m|L"}),
    (4, 1, {"pp": 2, "pipeline_layout": "E|tt|t|tmL"}),
    (4, 1, {"pp": 2, "pipeline_layout": "Et|tt|t|mL"}),
    (6, 2, {"pp": 2, "pipeline_layout": "E|ttt|ttt|mmL"}),
]
GPT = [
    {"layers": layers, "mtp": mtp, "fields": fields, "tied": tied, "positions": positions}
    for layers, mtp, fields in SPLITS
    for tied in (False, True)
    for positions in ((False, True) if fields["pp"] in (1, 3) else (False,))
]
HYBRID = [
    {"pattern": pattern, "fields": fields, "tied": tied}
    for pattern, fields in (
        ("M-M*M-M*", {"pp": 1}),
        ("M-M*M-M*", {"pp": 2}),
        ("M*-M*-", {"pp": 3}),
        ("MMMM*-M-", {"pp": 4}),
        ("-M*M-M*", {"pp": 3, "first_stage_layers": 1}),
        ("M*-M*-M", {"pp": 3, "last_stage_layers": 1}),
    )
    for tied in (False, True)
]


def split_words(parallel: ParallelConfig, layers: int) -> dict[str, Any]:
    args = layout_args(parallel, layers)
    words = {field: args[name] for field, name in WORDS.items()}
    return {"layers": layers, "pp": parallel.pp, "vpp": parallel.vpp, **words}


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """The parameters of every stage and chunk of all models."""
    asked = [
        {
            "kind": "gpt",
            **split_words(ParallelConfig(**m["fields"]), m["layers"]),
            **{n: m[n] for n in ("mtp", "tied", "positions")},
        }
        for m in GPT
    ] + [
        {
            "kind": "hybrid",
            **split_words(ParallelConfig(**m["fields"]), len(m["pattern"])),
            **{n: m[n] for n in ("pattern", "tied")},
        }
        for m in HYBRID
    ]
    out: list[Any] = json.loads(run_forked("chunk_world.py", json.dumps(asked)))
    assert len(out) >= 60
    return out


def stored(model: ModelConfig) -> list[GlobalTensor]:
    kind = dtype("float32")
    canonical = {
        n: GlobalTensor(name=n, shape=s, dtype=kind) for n, s in canonical_tensors(model).items()
    }
    written = Binding(PER_LAYER, CanonicalModel(model)).write(canonical).tensors
    name = to_hybrid(model) if needs_hybrid(model) else str
    return [replace(t, name=name(t.name)) for t in written]


def small(**more: Any) -> ModelConfig:
    sizes = {"hidden_size": 8, "ffn_hidden_size": 32, "num_heads": 2, "num_kv_heads": 2}
    rest = {"head_dim": 4, "vocab_size": 16, "max_positions": 4}
    return ModelConfig.from_fields(**sizes | rest | more)


def of_chunks(model: ModelConfig, parallel: ParallelConfig) -> dict[tuple[int, int], Any]:
    """The parameters of every stage and chunk, in registration order."""
    ranks = rank_parameters(stored(model), model, parallel)
    order = Order(fused_norms=False, grouped_experts=True)
    out = {}
    for stage in range(parallel.pp):
        for chunk in range(parallel.vpp):
            members: list[Parameter] = ranks.get(RankPlace(stage, chunk, 0, 0), [])
            positions = registered([(p.module_key, p.expert) for p in members], order)
            out[stage, chunk] = [members[i] for i in positions]
    return out


@pytest.mark.parametrize("number", range(len(GPT)))
def test_a_chunk_of_a_gpt_has_its_parameters(found: list[Any], number: int) -> None:
    """Names, in the order of the optimizer's buckets, and which have a bucket of their own."""
    asked = GPT[number]
    parallel = ParallelConfig(**asked["fields"])
    positions = {"position_embedding": "learned"} if asked["positions"] else {}
    model = small(
        num_layers=asked["layers"],
        num_mtp_layers=asked["mtp"],
        tied_embeddings=asked["tied"],
        **positions,
    )
    ours = of_chunks(model, parallel)
    for stage, chunk, rows in found[number]:
        first = layers_of_stage(model, parallel, stage, chunk).start
        named = [
            [
                to_local(p, first_layer=first, first_expert=0, fused=False, grouped=True),
                p.is_shared,
                p.is_unused,
            ]
            for p in ours[stage, chunk]
        ]
        assert named == rows, (stage, chunk)


@pytest.mark.parametrize("number", range(len(HYBRID)))
def test_a_stage_of_a_hybrid_has_its_layers(found: list[Any], number: int) -> None:
    asked = HYBRID[number]
    parallel = ParallelConfig(**asked["fields"])
    pattern = asked["pattern"]
    model = small(
        num_layers=len(pattern),
        layer_kinds=tuple(pattern),
        tied_embeddings=asked["tied"],
        mamba_num_heads=2,
        mamba_head_dim=4,
        mamba_state_dim=4,
        mamba_num_groups=1,
    )
    ours = of_chunks(model, parallel)
    for stage, chunk, rows in found[len(GPT) + number]:
        first = layers_of_stage(model, parallel, stage, chunk).start
        named: dict[str, bool] = {}
        for p in ours[stage, chunk]:
            local = to_local(p, first_layer=first, first_expert=0, fused=False, grouped=True)
            parts = local.split(".")
            is_layer = local.startswith("decoder.layers.")
            named[".".join([*parts[:3], "weight"]) if is_layer else local] = p.is_shared
        assert named == {name: is_shared for name, is_shared, _ in rows}, (stage, chunk)
