"""Rotary settings mean what transformers' configuration classes make of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megtool.convert.families.detection import family
from megtool.errors import MappingError
from megtool.spec.positions import PositionPart

transformers = pytest.importorskip("transformers")

LINEAR, LENGTH = {"rope_type": "linear", "factor": 3.0}, "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, LENGTH: 16}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    LENGTH: 4096,
    "factor": 32.0,
}
SIZES = {"hidden_size": 256, "num_attention_heads": 2, "intermediate_size": 256}
SIZES |= {"num_key_value_heads": 2}


def read(name: str, **keys: Any) -> PositionPart:
    """The positions of a family's model of some settings."""
    kind = family(name).model_types[0]
    sizes = {"num_hidden_layers": 4, "vocab_size": 64, "head_dim": 128, "model_type": kind}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    return family(name).read_config(SIZES | sizes | experts | keys).positions


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": YARN, "rope_scaling": LINEAR},
        {"rope_parameters": YARN, "rope_scaling": LINEAR, "rope_theta": 300.0},
        {"rope_scaling": LINEAR, "rope_theta": 300.0},
        {"rope_parameters": YARN, "rope_scaling": {}},
        {"rope_parameters": YARN, LENGTH: 64},
        {"rope_scaling": {k: v for k, v in YARN.items() if k != LENGTH}, LENGTH: 64},
    ],
    ids=str,
)
def test_of_two_descriptions_the_one_wins_that_wins_in_transformers(keys: dict[str, Any]) -> None:
    made = transformers.LlamaConfig(**SIZES, **keys)
    made.standardize_rope_params()
    want = dict(made.rope_parameters)
    found = read("llama", **keys)
    assert found.rope_base == want.pop("rope_theta")
    assert found.rope_scaling == want


def test_an_outer_length_is_written_where_it_was() -> None:
    """Older releases of transformers refuse a LongRoPE table that has it."""
    llama = family("llama")
    keys = SIZES | {"num_hidden_layers": 1, "vocab_size": 64, LENGTH: 4096}
    scaling = {k: v for k, v in LONG.items() if k != LENGTH}
    config = llama.read_config(keys | {"rope_scaling": scaling})
    assert (config.positions.rope_scaling or {})[LENGTH] == 4096
    written = llama.write_config(config)
    assert written["rope_scaling"] == scaling
    assert written[LENGTH] == 4096


@pytest.mark.parametrize("outer", [{}, {LENGTH: 16}])
@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_which_length_wins_is_as_in_the_class(name: str, outer: dict[str, int]) -> None:
    """Phi-3's class has a length beside the tables also if a configuration does not say it."""
    scales = {"short_mscale": 1.0, "long_mscale": 1.0} if name == "phimoe" else {}
    table = LONG | scales | {LENGTH: 32}
    theirs = transformers.AutoConfig.for_model(
        name, **SIZES, **outer, rope_scaling=copy.deepcopy(table)
    )
    keys = SIZES | {"num_hidden_layers": 1, "vocab_size": 64, "hidden_act": "silu"} | outer
    if name == "phimoe":
        keys |= {"num_local_experts": 2, "num_experts_per_tok": 2}
    config = family(name).read_config(keys | {"rope_scaling": table})
    length = (config.positions.rope_scaling or {})[LENGTH]
    assert length == theirs.rope_parameters[LENGTH]
    written = family(name).write_config(config.with_fields(extra={}))
    found = family(name).read_config(written).positions.rope_scaling or {}
    assert found[LENGTH] == length


def test_scales_of_longrope_are_phimoes_alone() -> None:
    scales = {"short_mscale": 1.2, "long_mscale": 1.5}
    assert read("llama", rope_parameters=LONG | scales).rope_scaling == LONG
    assert read("phimoe", rope_parameters=LONG | scales).rope_scaling == LONG | scales


def test_a_part_of_heads_is_ignored_where_nothing_is_scaled() -> None:
    part = {"partial_rotary_factor": 0.5}
    assert read("llama", rope_parameters={"rope_type": "default", **part}).rotary_percent == 1
    with pytest.raises(MappingError, match=r"0\.5") as caught:
        read("llama", rope_parameters=YARN | part)
    assert caught.value.error_id == "unsupported-setting"
    assert read("glm", rope_parameters=YARN | part).rotary_percent == 0.5


def test_a_fixed_base_has_no_key() -> None:
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 64, "rotary_dim": 16}
    config = family("gptj").read_config(sizes | {"rope_theta": 300.0, "rope_scaling": LINEAR})
    assert config.positions.rope_base == 10000
    assert config.positions.rope_scaling is None
    assert config.positions.rotary_percent == 0.5
    assert family("gptj").write_config(config)["rotary_dim"] == 16
    with pytest.raises(MappingError, match="300"):
        family("gptj").write_config(config.with_fields(rope_base=300.0))


def test_two_kinds_of_layers_are_always_truncated() -> None:
    keys = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    yarn = YARN | {"truncate": False}
    tables = {"full_attention": yarn, "sliding_attention": {"rope_type": "default"}}
    assert "truncate" not in (read("gemma3", rope_parameters=tables, **keys).rope_scaling or {})
    assert (read("llama", rope_parameters=yarn).rope_scaling or {})["truncate"] is False


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 8.0}}),
        ("modernbert", {"rope_scaling": LINEAR}),
        ("gemma3", {"rope_parameters": {"sliding_attention": LINEAR, "full_attention": LINEAR}}),
    ],
)
def test_what_is_not_understood_is_refused(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(MappingError) as caught:
        read(name, **keys)
    assert caught.value.error_id == "unsupported-setting"


@pytest.mark.parametrize(
    "full",
    [
        {"rope_type": "default", "rope_theta": 3e4},
        {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.334},
        LINEAR | {"rope_theta": 3e4},
        LINEAR | {"rope_theta": 3e4, "partial_rotary_factor": 0.334},
    ],
    ids=str,
)
def test_a_part_that_no_table_says_is_that_of_the_class(full: dict[str, Any]) -> None:
    """MiMo's class turns .334 of a head, and the whole of it where rotation is scaled."""
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import (
        MiMoV2FlashRotaryEmbedding,
    )

    tables = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["full_attention", "sliding_attention"] * 2
    made = transformers.MiMoV2FlashConfig(
        **SIZES, num_hidden_layers=4, layer_types=kinds, rope_parameters=copy.deepcopy(tables)
    )
    module = MiMoV2FlashRotaryEmbedding(made)
    sizes = {2 * len(getattr(module, f"{kind}_inv_freq")) for kind in tables}
    keys = {"layer_types": kinds, "sliding_window": 8, "head_dim": 192, "v_head_dim": 128}
    keys |= {"moe_intermediate_size": 64, "n_routed_experts": 4, "rope_parameters": tables}
    keys |= {"swa_num_key_value_heads": 2}
    if len(sizes) > 1:
        with pytest.raises(MappingError, match=r"turns 1\.0 of each head"):
            read("mimo_v2_flash", **keys)
        return
    assert sizes == {int(192 * read("mimo_v2_flash", **keys).rotary_percent)}


def test_heads_turn_in_pairs() -> None:
    with pytest.raises(MappingError, match="pairs"):
        read("glm", head_dim=6, partial_rotary_factor=0.5)
