"""Some of a model's layers: what is chosen, how names follow, and what configurations then say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.convert.families.detection import family
from megtool.convert.layer_subset import (
    edited_config,
    of_layers,
    parse_layers,
    renumbered,
    window_flags,
)
from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.errors import MappingError, UsageError
from megtool.spec import layer_sets

_HEADS = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
_SIZES = {"intermediate_size": 8, "vocab_size": 32, "rms_norm_eps": 1e-6}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
_W, _F = "sliding_attention", "full_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3_moe": _EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3": {"sliding_window": 4, "layer_types": [_W, _W, _F, _W, _W, _F]},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0, 1, 1]},
}


def stored(name: str) -> dict[str, Any]:
    known = family(name)
    base = {
        "architectures": [known.architectures[0]],
        "model_type": known.model_types[0],
        "num_hidden_layers": 6,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    return base | _HEADS | _SIZES | CONFIGS[name]


chosen = st.lists(st.integers(0, 5), min_size=1, max_size=8).map(tuple)


@pytest.mark.parametrize("name", CONFIGS)
@given(layers=chosen)
def test_a_config_says_the_layers_that_were_chosen(name: str, layers: tuple[int, ...]) -> None:
    known, before = family(name), stored(name)
    old = known.read_config(before)
    new = of_layers(old, layers)
    after = edited_config(before, known, old, new)
    found = known.read_config(after)
    assert found.num_layers == len(layers)
    assert [i in layer_sets.moe_layers(found) for i in range(len(layers))] == [
        i in layer_sets.moe_layers(old) for i in layers
    ]
    assert window_flags(found) == tuple(window_flags(old)[i] for i in layers)
    turns = old.positions.no_rope_layers or (0,) * 6
    assert (found.positions.no_rope_layers or (0,) * len(layers)) == tuple(turns[i] for i in layers)
    by_layer = ("num_hidden_layers", "layer_types", "no_rope_layers")
    by_layer += ("mlp_only_layers", "decoder_sparse_step")
    assert {k: v for k, v in after.items() if k not in by_layer} == {
        k: v for k, v in before.items() if k not in by_layer
    }


@pytest.mark.parametrize("name", CONFIGS)
@given(layers=chosen)
def test_args_say_them_too(name: str, layers: tuple[int, ...]) -> None:
    known = family(name)
    new = of_layers(known.read_config(stored(name)), layers)
    found = config_from_args(args_from_config(new))
    assert (found.num_layers, layer_sets.moe_layers(found)) == (
        new.num_layers,
        layer_sets.moe_layers(new),
    )
    assert window_flags(found) == window_flags(new)
    assert any(found.positions.no_rope_layers or ()) == any(new.positions.no_rope_layers or ())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
def test_lists_of_layers(ranges: list[tuple[int, int]]) -> None:
    parts = [(min(r), max(r)) for r in ranges]
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    assert parse_layers(text, 10) == tuple(i for a, b in parts for i in range(a, b + 1))


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-10", "-1", "1,,2", "0-", "1.5"])
def test_what_is_no_list_of_layers(text: str) -> None:
    with pytest.raises(UsageError):
        parse_layers(text, 10)


@given(layers=chosen)
def test_names_follow_in_every_state(layers: tuple[int, ...]) -> None:
    ends = ["embed.weight", "norm.weight"]
    names = [ends[0], *(f"layers.{i}.mlp.up.weight" for i in range(6)), ends[1]]
    names += [f"main:{n}" for n in names]
    found = renumbered(names, layers)
    for lift in ("", "main:"):
        of_state = {n: o for n, o in found.items() if n.startswith("main:") == bool(lift)}
        assert of_state == {f"{lift}{n}": f"{lift}{n}" for n in ends} | {
            f"{lift}layers.{new}.mlp.up.weight": f"{lift}layers.{old}.mlp.up.weight"
            for new, old in enumerate(layers)
        }


def test_what_is_like_the_last_layer_has_its_mixer() -> None:
    old = family("qwen3_5_text").read_config(
        stored("llama") | {"mtp_num_hidden_layers": 1, "full_attention_interval": 3}
    )
    chosen_layers = of_layers(old, (1, 2))
    assert chosen_layers.layer_kinds == ("G-", "*-")
    known = family("qwen3_5_text")
    before = known.write_config(old)
    after = edited_config(before, known, old, chosen_layers)
    assert after["layer_types"] == ["linear_attention", "full_attention"]
    with pytest.raises(MappingError, match="multi-token prediction is like layer 5"):
        of_layers(old, (2, 3))


def test_what_is_like_the_last_layer_stays_so() -> None:
    known = family("deepseek_v3")
    old = known.read_config(
        stored("llama")
        | {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
        | {"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 4, "n_shared_experts": 1, "kv_lora_rank": 4}
        | {"q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
    )
    assert layer_sets.moe_layers(of_layers(old, (0, 1, 5))) == {2}
    with pytest.raises(MappingError, match="multi-token"):
        of_layers(old, (2, 0))
