"""Layers of unequal sizes: lists of blocks, both ways, and the cuts that all layers allow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megtool.convert.config.blocks import BLOCKS as ARG
from megtool.convert.dialects import DialectNaming, read_side, write_side
from megtool.convert.families.detection import family
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel
from megtool.convert.layer_subset import edited_config, of_layers
from megtool.convert.megatron.args import args_from_config, config_from_args, megatron_limits
from megtool.convert.megatron.sharding import check_layout
from megtool.dtypes import dtype
from megtool.errors import LayoutError, MappingError
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor
from tests.support.errors import raises
from tests.support.models.tiny_model import SIZES
from tests.support.models.unequal_layers import BLOCKS, block

FAMILY = family("nemotron_nas")
STORED = SIZES | {"num_hidden_layers": 4, "block_configs": BLOCKS}


def config(**keys: Any) -> ModelConfig:
    return FAMILY.read_config(STORED | keys)


def test_blocks_say_branches_and_sizes() -> None:
    found = config()
    assert found.layer_kinds == ("*-", "-", "*", "*-")
    assert found.layer_sizes == {
        "num_kv_heads": (2, 4, 1, 4),
        "ffn_hidden_size": (512, 256, 512, 256),
    }
    assert (found.attention.num_kv_heads, found.mlp.ffn_hidden_size) == (4, 512)
    assert [found.at_layer(n).attention.num_kv_heads for n in range(4)] == [2, 4, 1, 4]
    assert not layer_sets.is_homogeneous(found)
    names = {n for p in VOCABULARY for n in CanonicalModel(found).names(p)}
    assert not any(n.startswith("layers.1.attn") for n in names)
    assert not any(n.startswith("layers.2.mlp") for n in names)


def test_args_hold_the_list_that_megatron_reads() -> None:
    args = args_from_config(config())
    assert args["heterogeneous_layers_config_path"] is not None
    blocks = json.loads(args[ARG])["block_configs"]
    assert [b["attention"]["no_op"] for b in blocks] == [False, True, False, False]
    assert [b["ffn"]["ffn_hidden_size"] for b in blocks] == [512, 256, None, 256]
    said = config_from_args(args)
    assert said.layer_kinds == config().layer_kinds
    assert said.layer_sizes == config().layer_sizes
    # What a checkpoint's own args say the same way stays as it is.
    own = json.dumps({"block_configs": BLOCKS})
    assert args_from_config(said, base_args=args | {ARG: own})[ARG] == own
    fewer = of_layers(said, (0, 3))
    new = args_from_config(fewer, base_args=args | {ARG: own})
    assert config_from_args(new).layer_sizes == fewer.layer_sizes


def test_what_megatrons_training_script_refuses_is_told() -> None:
    """It compares the list with its own args, which have one number of query groups."""
    told = megatron_limits(config(), FAMILY)
    assert "layers have 1, 2, 4 query groups" in " ".join(told)
    assert "Llama 3's rotary scaling" in " ".join(told)
    alike = [dict(b, attention=BLOCKS[0]["attention"]) for b in BLOCKS]
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert megatron_limits(config(block_configs=alike, rope_scaling=scaling), FAMILY) == []


def test_a_configuration_without_the_list_is_written_as_factors() -> None:
    said = config().with_fields(extra={})
    written = FAMILY.write_config(said)
    assert [b["ffn"]["ffn_mult"] for b in written["block_configs"]] == [24.0, 12.0, None, 12.0]
    again = FAMILY.read_config(written)
    assert again.layer_kinds == said.layer_kinds
    assert again.layer_sizes == said.layer_sizes
    sizes = {"num_kv_heads": (2,) * 4, "ffn_hidden_size": (300,) * 4}
    with raises(MappingError, "300 wide", "multiple of 256"):
        FAMILY.write_config(said.with_fields(layer_sizes=sizes))


def test_some_of_the_layers() -> None:
    few = of_layers(config(), (3, 1))
    assert few.layer_kinds == ("*-", "-")
    assert few.layer_sizes == {"num_kv_heads": (4, 4), "ffn_hidden_size": (256, 256)}
    assert few.extra["block_configs"] == [BLOCKS[3], BLOCKS[1]]
    assert FAMILY.read_config(edited_config(STORED, FAMILY, config(), few)).layer_kinds == (
        few.layer_kinds
    )


def test_a_layout_has_to_divide_every_layer() -> None:
    check_layout(config(), ParallelConfig(tp=4))
    odd = config(block_configs=[*BLOCKS[:3], block(2, 1.0) | {"ffn": {"intermediate_size": 258}}])
    with raises(LayoutError, "tp=4", "ffn_hidden_size=258 of layer 3"):
        check_layout(odd, ParallelConfig(tp=4))
    check_layout(odd, ParallelConfig(tp=2))


def test_hybrid_models_have_no_such_layers() -> None:
    held = [
        GlobalTensor(name=n, shape=model.at(i).shape(p), dtype=dtype("float32"))
        for model in [CanonicalModel(config())]
        for p in VOCABULARY
        if VOCABULARY[p].flag is None
        for n, i in model.indexed_names(p)
    ]
    stored = {t.name: t for t in held}
    written = write_side(read_side(hf(stored), family=FAMILY, config=config()), dialect="megatron")
    assert "decoder.final_layernorm.weight" in {t.name for t in written.tensors}
    side = read_side(hf(stored), family=FAMILY, config=config())
    with raises(MappingError, "sizes vary by layer", "--model-class"):
        write_side(side, dialect="megatron", options=DialectNaming(model_class="hybrid"))


def hf(canonical: dict[str, GlobalTensor]) -> list[GlobalTensor]:
    """Canonical tensors under the names of a Hugging Face folder."""
    from megtool.convert.language.binding import Binding

    return Binding(FAMILY.hf, CanonicalModel(config())).write(canonical).tensors


def _with(half: str, **keys: Any) -> list[Any]:
    first = {name: dict(part) for name, part in BLOCKS[0].items()}
    first[half] |= keys
    return [first, *BLOCKS[1:]]


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (None, "block_configs is None"),
        (BLOCKS[:3], "4 blocks"),
        ("****", "block_configs is"),
        ([*BLOCKS[:3], {}], "block 3"),
        ([*BLOCKS[:3], 7], "block 3"),
        (_with("attention", n_heads_in_group=3), "n_heads_in_group of block 0 is 3"),
        (_with("attention", n_heads_in_group=True), "n_heads_in_group of block 0 is True"),
        (_with("attention", num_query_groups=3), "3 key and value heads"),
        (_with("attention", replace_with_linear=True), "replace_with_linear=True"),
        (_with("attention", window_length=8), "window_length=8"),
        (_with("ffn", replace_with_linear=True), "replace_with_linear=True"),
        (_with("ffn", moe={"num_local_experts": 2}), "moe="),
        (_with("ffn", ffn_mult=None), "the MLP of block 0"),
        (_with("ffn", ffn_mult=float("inf")), "the MLP of block 0"),
    ],
)
def test_blocks_that_are_not_known_are_refused(blocks: Any, said: str) -> None:
    with raises(MappingError, said):
        config(block_configs=blocks)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"vocab_size": (8,) * 4}, "layer_sizes is"),
        ({"num_kv_heads": (2, 2)}, "num_kv_heads of layer_sizes"),
        ({"num_kv_heads": (2, 2, 2, 0)}, "num_kv_heads of a layer is 0"),
        ({"ffn_hidden_size": (513,) * 4}, "ffn_hidden_size=513"),
    ],
)
def test_sizes_are_checked(sizes: Any, said: str) -> None:
    with raises(MappingError, said):
        config().with_fields(layer_sizes=sizes)
    with raises(MappingError, "multi-token prediction"):
        config().with_fields(num_mtp_layers=1)


def test_args_that_are_no_list_are_refused() -> None:
    args = args_from_config(config())
    with raises(MappingError, "is no JSON"):
        config_from_args(args | {ARG: "{"})
    with raises(MappingError, "block_configs is None"):
        config_from_args(args | {ARG: "{}"})
