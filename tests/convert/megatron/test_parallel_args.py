"""Layouts in Megatron's args: written, read back, and read from what Megatron itself pickles."""

from __future__ import annotations

import pickle
from argparse import Namespace
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.convert.megatron.args import args_from_config
from megtool.convert.megatron.parallel_args import (
    layout_args,
    layout_fields,
    merged_layout,
    parallel_from_args,
)
from megtool.errors import LayoutError
from megtool.options.layout import LayoutOptions, ParallelConfig, pipeline_chunks
from megtool.parallel.pipeline_split import splits
from megtool.pickles.reader import decode, to_plain
from megtool.spec.model_config import ModelConfig

DEEPSEEK = "Et*3|(tt|)*29m|L"
PARALLEL = ParallelConfig(
    tp=8, pp=16, ep=64, etp=1, cp=2, dp=8, first_stage_layers=3, last_stage_layers=2
)


@given(st.integers(1, 70), *[st.integers(1, 4)] * 6, st.integers(0, 9))
def test_args_return_the_layout(
    layers: int, tp: int, pp: int, vpp: int, ep: int, etp: int, cp: int, which: int
) -> None:
    ways = splits(layers, pp, vpp if pp > 1 else 1)
    if not ways:
        return
    way = ways[which % len(ways)]
    parallel = ParallelConfig(
        tp=tp,
        pp=pp,
        vpp=way.vpp,
        ep=ep,
        etp=etp,
        cp=cp,
        first_stage_layers=way.first,
        last_stage_layers=way.last,
        account_for_embedding=way.embedding_counts,
        account_for_loss=way.loss_counts,
        pipeline_layout=way.layout if pp > 1 else None,
    )
    args = layout_args(parallel, layers)
    found = asdict(parallel_from_args(args))
    expected = asdict(parallel)
    if pp == 1:  # how one stage is split says nothing
        expected |= {"account_for_embedding": False, "account_for_loss": False}
    assert found == expected
    # Megatron takes one of the three ways of naming virtual stages, and computes them again.
    by_layers = args["num_layers_per_virtual_pipeline_stage"]
    by_count = args["num_virtual_stages_per_pipeline_rank"]
    assert (by_layers, by_count, args["pipeline_model_parallel_layout"]).count(None) >= 2
    if by_layers is not None:
        counted = layers + parallel.account_for_embedding + parallel.account_for_loss
        assert counted // pp // by_layers == parallel.vpp
        assert parallel.first_stage_layers is None
        assert parallel.last_stage_layers is None


def test_args_of_a_model_hold_the_whole_layout() -> None:
    config = ModelConfig.from_fields(
        num_layers=61,
        hidden_size=64,
        ffn_hidden_size=64,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        vocab_size=128,
        num_experts=64,
        moe_ffn_hidden_size=8,
    )
    old = {"pipeline_model_parallel_layout": DEEPSEEK, "num_layers_per_virtual_pipeline_stage": 2}
    args = args_from_config(config, PARALLEL, base_args=old)
    assert parallel_from_args(args) == PARALLEL
    assert args["decoder_first_pipeline_num_layers"] == 3
    assert args["decoder_last_pipeline_num_layers"] == 2
    assert args["pipeline_model_parallel_layout"] is None
    assert args["num_layers_per_virtual_pipeline_stage"] is None
    assert args["expert_tensor_parallel_size"] == 1
    assert args["context_parallel_size"] == 2
    assert args["world_size"] == 8 * 2 * 8 * 16


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({}, {}),
        ({"tensor_model_parallel_size": 2, "data_parallel_size": None}, {"tp": 2}),
        ({"tensor_model_parallel_size": "2", "context_parallel_size": True}, {}),
        ({"pipeline_model_parallel_size": 1, "decoder_first_pipeline_num_layers": 3}, {"pp": 1}),
        (
            {"pipeline_model_parallel_size": 2, "account_for_loss_in_pipeline_split": True},
            {"pp": 2, "account_for_loss": True},
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": ""},
            {"pp": 2},
        ),
    ],
)
def test_args_say_what_they_say(args: dict[str, Any], fields: dict[str, Any]) -> None:
    assert layout_fields(args) == fields


@pytest.mark.parametrize(
    "value", [7, ["E", "t"], {"a": 1}, [["encoder"]], [["embedding", 9]], object()]
)
def test_a_layout_nobody_can_read_is_refused_where_it_counts(value: Any) -> None:
    args = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": value}
    with pytest.raises(LayoutError, match="pipeline_layout"):
        parallel_from_args(args)
    assert merged_layout(layout_fields(args), LayoutOptions(pp=4)) == ParallelConfig(pp=4)


@pytest.mark.peers
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", ["text", "lists", "layer types", "object", "object of lists"])
def test_layouts_as_megatron_pickles_them(kind: str, protocol: int) -> None:
    core = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    read = core.PipelineParallelLayerLayout
    types = read.parse_str_to_list(DEEPSEEK)
    names = [[layer.name for layer in row] for row in types]
    value = {
        "text": DEEPSEEK,
        "lists": names,
        "layer types": types,
        "object": read(DEEPSEEK, 16),
        "object of lists": read(types, 16),
    }[kind]
    args = Namespace(pipeline_model_parallel_size=16, pipeline_model_parallel_layout=value)
    shown = to_plain(decode(pickle.dumps(args, protocol=protocol), file="args"))
    found = parallel_from_args(shown)
    assert found.vpp == 2
    assert pipeline_chunks(found.pipeline_layout or "") == pipeline_chunks(DEEPSEEK)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {}),
        ({"tp": None, "account_for_loss": False}, {}),
        ({"tp": 4}, {"tp": 4}),
        ({"pp": 16}, {}),
        ({"pp": 8}, {"pp": 8, "first_stage_layers": None, "last_stage_layers": None}),
        (
            {"pp": 8, "first_stage_layers": 5},
            {"pp": 8, "last_stage_layers": None, "first_stage_layers": 5},
        ),
        (
            {"account_for_loss": True},
            {"first_stage_layers": None, "last_stage_layers": None, "account_for_loss": True},
        ),
        ({"cp": 1, "etp": 2, "ep": 8}, {"cp": 1, "etp": 2, "ep": 8}),
    ],
)
def test_what_is_not_asked_for_stays(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    known = layout_fields(layout_args(PARALLEL, 61))
    fields = {**{k: v for k, v in asdict(PARALLEL).items() if k != "dp"}, **expected}
    assert merged_layout(known, LayoutOptions(**asked)) == ParallelConfig(**fields)


def test_experts_follow_tp_where_they_did() -> None:
    known = layout_fields(layout_args(ParallelConfig(tp=8, ep=4)))
    assert merged_layout(known, LayoutOptions(tp=2)).etp == 2
    apart = layout_fields(layout_args(ParallelConfig(tp=8, ep=4, etp=1)))
    assert merged_layout(apart, LayoutOptions(tp=2)).etp == 1
