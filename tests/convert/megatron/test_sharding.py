"""Cutting Megatron's tensors: boxes, owners, balance, and layouts that do not divide."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.convert.megatron.sharding import check_layout, shard
from megtool.dtypes import dtype
from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.parallel.mesh import Mesh
from megtool.spec.model_config import ModelConfig
from megtool.tensors.box import cover_fault
from megtool.tensors.sharded import GlobalTensor, Shards
from tests.support.errors import raises
from tests.support.limits import is_within

BF16, F32 = dtype("bfloat16"), dtype("float32")


def dense(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 512,
    }
    return ModelConfig.from_fields(**{**sizes, **changes})


def stacked(layers: int = 8) -> list[GlobalTensor]:
    shapes = {
        "embedding.word_embeddings.weight": (512, 64),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (layers, 64),
        "decoder.layers.self_attention.linear_qkv.weight": (layers, 96, 64),
        "decoder.layers.self_attention.linear_qkv.bias": (layers, 96),
        "decoder.layers.self_attention.linear_proj.weight": (layers, 64, 64),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (layers, 64),
        "decoder.layers.mlp.linear_fc1.weight": (layers, 192, 64),
        "decoder.layers.mlp.linear_fc1.bias": (layers, 192),
        "decoder.layers.mlp.linear_fc2.weight": (layers, 64, 96),
        "decoder.final_layernorm.weight": (64,),
        "output_layer.weight": (512, 64),
    }
    return [GlobalTensor(name=n, shape=s, dtype=BF16) for n, s in shapes.items()]


def rows_of(tensors: list[GlobalTensor], shards: Shards, name: str) -> list[tuple[Any, Any, int]]:
    at = next(i for i, t in enumerate(tensors) if t.name == name)
    nd, rows = len(tensors[at].shape), shards.of(at)
    return list(
        zip(
            shards.boxes.lo[rows, :nd].tolist(),
            shards.boxes.shape[rows, :nd].tolist(),
            shards.owner[rows].tolist(),
            strict=True,
        )
    )


def check_cover(tensors: list[GlobalTensor], shards: Shards) -> None:
    """Every element of every tensor is in exactly one shard."""
    for i, t in enumerate(tensors):
        boxes = shards.boxes[shards.of(i)]
        n = len(t.shape)
        cut = type(boxes)(boxes.lo[:, :n], boxes.hi[:, :n])
        fault = cover_fault(cut, np.array([t.shape], np.int64))
        assert fault is None, (t.name, fault)


def test_each_key_is_cut_as_megatron_cuts_it() -> None:
    tensors = stacked()
    parallel = ParallelConfig(tp=2, pp=2, vpp=2)
    shards = shard(tensors, parallel, config=dense())
    check_cover(tensors, shards)
    qkv = rows_of(tensors, shards, "decoder.layers.self_attention.linear_qkv.weight")
    assert qkv[:3] == [
        ([0, 0, 0], [1, 48, 64], 0),
        ([0, 48, 0], [1, 48, 64], 1),
        ([1, 0, 0], [1, 48, 64], 0),
    ]
    # Virtual stages: layers 0-1 and 4-5 are stage 0, the others stage 1 (ranks 2 and 3).
    assert [owner for _, _, owner in qkv[::2]] == [0, 0, 2, 2, 0, 0, 2, 2]
    fc1 = rows_of(tensors, shards, "decoder.layers.mlp.linear_fc1.weight")
    assert [(lo[1], owner) for lo, _, owner in fc1[:4]] == [(0, 0), (48, 1), (96, 0), (144, 1)]
    bias = rows_of(tensors, shards, "decoder.layers.mlp.linear_fc1.bias")
    assert [(lo[1], owner) for lo, _, owner in bias[:4]] == [(0, 0), (48, 1), (96, 0), (144, 1)]
    fc2 = rows_of(tensors, shards, "decoder.layers.mlp.linear_fc2.weight")
    assert fc2[:2] == [([0, 0, 0], [1, 64, 48], 0), ([0, 0, 48], [1, 64, 48], 1)]
    assert rows_of(tensors, shards, "embedding.word_embeddings.weight") == [
        ([0, 0], [256, 64], 0),
        ([256, 0], [256, 64], 1),
    ]
    assert rows_of(tensors, shards, "decoder.final_layernorm.weight") == [([0], [64], 2)]
    assert [o for _, _, o in rows_of(tensors, shards, "output_layer.weight")] == [2, 3]
    norm = rows_of(tensors, shards, "decoder.layers.mlp.linear_fc1.layer_norm_weight")
    assert [owner for _, _, owner in norm] == [0, 0, 2, 2, 0, 0, 2, 2]


def test_per_layer_keys_and_states_are_cut_alike() -> None:
    tensors = stacked()
    single = []
    for prefix, kind in (("", BF16), ("optimizer.state.exp_avg.", F32)):
        for t in tensors:
            if t.name.startswith("decoder.layers."):
                single += [
                    GlobalTensor(
                        name=prefix + t.name.replace("layers.", f"layers.{i}."),
                        shape=t.shape[1:],
                        dtype=kind,
                    )
                    for i in range(8)
                ]
    parallel = ParallelConfig(tp=2, pp=4)
    one, many = shard(tensors, parallel), shard(single, parallel)
    check_cover(single, many)
    for t in tensors:
        if not t.name.startswith("decoder.layers."):
            continue
        expected = rows_of(tensors, one, t.name)
        for prefix in ("", "optimizer.state.exp_avg."):
            found = [
                ([i, *lo], [1, *size], owner)
                for i in range(8)
                for lo, size, owner in rows_of(
                    single, many, prefix + t.name.replace("layers.", f"layers.{i}.")
                )
            ]
            assert found == expected


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_replicas_share_the_bytes(tp: int, pp: int, cp: int, dp: int) -> None:
    tensors = stacked()
    parallel = ParallelConfig(tp=tp, pp=pp, cp=cp, dp=dp)
    shards = shard(tensors, parallel)
    check_cover(tensors, shards)
    size = shards.boxes.volume() * 2
    at = Mesh(parallel).position(shards.owner)
    for t in range(tp):
        for p in range(pp):
            here = (at["tp"] == t) & (at["pp"] == p)
            replica = at["dp"][here] * cp + at["cp"][here]
            load = np.bincount(replica, weights=size[here], minlength=dp * cp)
            assert load.max() - load.min() <= 2 * size[here].max()


@pytest.mark.parametrize("per_expert", [False, True])
def test_experts_go_to_their_ranks(per_expert: bool) -> None:
    base = "decoder.layers.1.mlp.experts.experts."
    names = [f"{base}{e}." for e in range(8)] if per_expert else [base]
    lead = () if per_expert else (8,)
    tensors = [
        GlobalTensor(name=n + k, shape=(*lead, *s), dtype=BF16)
        for n in names
        for k, s in (("linear_fc1.weight", (32, 64)), ("linear_fc2.weight", (64, 16)))
    ]
    router = GlobalTensor(name="decoder.layers.1.mlp.router.weight", shape=(8, 64), dtype=BF16)
    tensors.append(router)
    parallel = ParallelConfig(tp=2, ep=4, etp=2, pp=2)
    shards = shard(tensors, parallel)
    check_cover(tensors, shards)
    position = Mesh(parallel).position(shards.owner)
    assert (position["pp"] == 1).all()
    boxes, of = shards.boxes, shards.tensor
    for i in range(len(shards)):
        t = tensors[of[i]]
        if t is router:
            assert position["tp"][i] == 0
            continue
        expert = int(t.name.split(".")[6]) if per_expert else int(boxes.lo[i, 0])
        assert position["ep"][i] == expert // 2
        dim = len(lead) + (0 if "fc1" in t.name else 1)
        assert position["etp"][i] == boxes.lo[i, dim] // 8 % 2


def test_key_value_heads_may_be_cut() -> None:
    tensors = stacked()
    shards = shard(tensors, ParallelConfig(tp=8), config=dense())
    check_cover(tensors, shards)
    qkv = rows_of(tensors, shards, "decoder.layers.self_attention.linear_qkv.weight")
    assert {tuple(size) for _, size, _ in qkv} == {(1, 12, 64)}


@pytest.mark.parametrize(
    ("changes", "sizes", "said", "hint"),
    [
        ({}, {"tp": 3}, "tp=3 does not divide num_heads=8", "1, 2, 4, 8"),
        ({"num_heads": 12, "num_kv_heads": 4}, {"tp": 6}, "num_kv_heads=4", "1, 2, 4"),
        ({"ffn_hidden_size": 36}, {"tp": 8}, "ffn_hidden_size=36", "1, 2, 4"),
        ({}, {"pp": 3}, "pp=3 does not divide num_layers=8", "1, 2, 4, 8"),
        (
            {},
            {"pp": 4, "vpp": 4},
            "vpp=4 does not divide the 2 layers of each of pp=4 stages",
            "1, 2",
        ),
        (
            {"num_layers": 61},
            {"pp": 8},
            "pp=8 does not divide num_layers=61",
            "--first-stage-layers 7 --last-stage-layers 6",
        ),
        (
            {"num_layers": 61},
            {"pp": 8, "first_stage_layers": 7, "last_stage_layers": 5},
            "leaves 49 of 61 layers for 6 stages of pp=8",
            "--first-stage-layers 5",
        ),
        ({}, {"pp": 2, "pipeline_layout": "Ettt|ttL"}, "5 layers .t., and the model 8", "t*4L"),
        (
            {"ffn_hidden_size": 98, "num_heads": 7, "num_kv_heads": 7},
            {"tp": 2},
            "tp=2 does not divide num_heads=7",
            "1, 7",
        ),
        ({}, {"ep": 2}, "no experts", "omit --ep"),
        (
            {"num_experts": 6, "moe_ffn_hidden_size": 8},
            {"ep": 4},
            "ep=4 does not divide num_experts=6",
            "1, 2, 3, 6",
        ),
        (
            {"num_experts": 6, "moe_ffn_hidden_size": 9},
            {"tp": 2},
            "etp=2 does not divide moe_ffn_hidden_size=9",
            "1, 3, 9",
        ),
    ],
)
def test_impossible_layouts_name_possible_ones(
    changes: dict[str, Any], sizes: dict[str, int], said: str, hint: str
) -> None:
    with pytest.raises(LayoutError, match=said) as error:
        check_layout(dense(**changes), ParallelConfig(**sizes))
    assert hint in str(error.value.hint)


def test_impossible_layouts_are_found_without_a_configuration() -> None:
    with raises(
        LayoutError,
        match="does not divide 96 of dimension 2",
        tensor="decoder.layers.mlp.linear_fc2.weight",
    ):
        shard(
            [
                GlobalTensor(
                    name="decoder.layers.mlp.linear_fc2.weight", shape=(2, 4, 96), dtype=BF16
                )
            ],
            ParallelConfig(tp=5),
        )
    with pytest.raises(LayoutError, match="need Megatron's names"):
        shard([GlobalTensor(name="w", shape=(4,), dtype=BF16)], ParallelConfig(tp=2))
    whole = shard([GlobalTensor(name="w", shape=(), dtype=BF16)], ParallelConfig())
    assert len(whole) == 1


def stages_of_names(tensors: list[GlobalTensor], parallel: ParallelConfig) -> dict[str, list[int]]:
    """The pipeline stage of every shard, by tensor."""
    shards = shard(tensors, parallel)
    check_cover(tensors, shards)
    stage = Mesh(parallel).position(shards.owner)["pp"]
    return {t.name: stage[shards.of(i)].tolist() for i, t in enumerate(tensors)}


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({"first_stage_layers": 2}, [0, 0, 1, 1, 1, 2, 2, 2]),
        ({"last_stage_layers": 4}, [0, 0, 1, 1, 2, 2, 2, 2]),
        ({"first_stage_layers": 1, "last_stage_layers": 5}, [0, 1, 1, 2, 2, 2, 2, 2]),
        ({"account_for_embedding": True}, [0, 0, 1, 1, 1, 2, 2, 2]),
        ({"account_for_loss": True}, [0, 0, 0, 1, 1, 1, 2, 2]),
        ({"pipeline_layout": "E|t*5|t*3L"}, [1, 1, 1, 1, 1, 2, 2, 2]),
        ({"pipeline_layout": "Et|t|tt|t|t|ttL"}, [0, 1, 2, 2, 0, 1, 2, 2]),
        ({"pipeline_layout": "E|t|t|tt|t*4|L"}, [1, 2, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_layers_go_to_the_stages_of_the_split(split: dict[str, Any], expected: list[int]) -> None:
    found = stages_of_names(stacked(), ParallelConfig(pp=3, **split))
    assert found["decoder.layers.mlp.linear_fc1.layer_norm_weight"] == expected
    assert found["embedding.word_embeddings.weight"] == [0]
    assert found["decoder.final_layernorm.weight"] == [2]
    assert found["output_layer.weight"] == [2]


@pytest.mark.parametrize(
    ("layout", "norm", "mtp"),
    [(None, 2, 2), ("Et*4|ttm|L", 1, 1), ("Ettt|ttt|mL", 1, 2), ("Ettt|t|t|t|m|L", 0, 1)],
)
def test_multi_token_prediction_and_the_norm_before_it(
    layout: str | None, norm: int, mtp: int
) -> None:
    tensors = [
        *stacked(6),
        GlobalTensor(name="mtp.layers.0.eh_proj.weight", shape=(64, 128), dtype=BF16),
        GlobalTensor(
            name="mtp.layers.0.transformer_layer.mlp.linear_fc2.weight", shape=(64, 96), dtype=BF16
        ),
    ]
    found = stages_of_names(tensors, ParallelConfig(pp=3, tp=2, pipeline_layout=layout))
    assert found["decoder.final_layernorm.weight"] == [norm]
    assert found["mtp.layers.0.eh_proj.weight"] == [mtp] * 2
    assert found["mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"] == [mtp] * 2
    assert found["output_layer.weight"] == [2, 2]
    if layout is not None:
        with raises(LayoutError, "1 layers", "0"):
            shard(stacked(6), ParallelConfig(pp=3, pipeline_layout=layout))


def test_a_selection_of_layers_keeps_its_stages() -> None:
    shape = (64,)
    one = GlobalTensor(name="decoder.layers.0.input_layernorm.weight", shape=shape, dtype=BF16)
    five = GlobalTensor(name="decoder.layers.5.input_layernorm.weight", shape=shape, dtype=BF16)
    shards = shard([one, five], ParallelConfig(pp=2, first_stage_layers=6), config=dense())
    assert shards.owner.tolist() == [0, 0]


def test_a_million_shards_take_seconds() -> None:
    layers, experts, hidden, ffn = 61, 256, 7168, 2048
    tensors = []
    for state, kind in (("", BF16), *((f"optimizer.state.{s}.", F32) for s in "abc")):
        for i in range(3, layers):
            mlp = f"{state}decoder.layers.{i}.mlp.experts.experts.linear_"
            shapes = {
                "fc1.weight": (experts, 2 * ffn, hidden),
                "fc2.weight": (experts, hidden, ffn),
            }
            tensors += [GlobalTensor(name=mlp + n, shape=s, dtype=kind) for n, s in shapes.items()]
    tensors += [
        GlobalTensor(name=f"decoder.layers.{i}.input_layernorm.weight", shape=(hidden,), dtype=BF16)
        for i in range(64)
    ]
    start = time.process_time()
    shards = shard(tensors, ParallelConfig(tp=8, etp=4, pp=16, ep=64))
    assert len(shards) == 58 * experts * 3 * 4 * 4 + 64
    assert is_within(time.process_time() - start, 10)
