"""Windows, by what transformers' configuration classes make of the same keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megtool.convert.families.detection import family
from megtool.convert.families.read_back import find_lost_in_class
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 64}
SIZES |= {"num_key_value_heads": 4}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"


def read(name: str, **keys: Any) -> ModelConfig:
    sizes = SIZES | {"intermediate_size": 64, "model_type": family(name).model_types[0]}
    return family(name).read_config(sizes | keys)


def windowed(config: ModelConfig) -> list[bool]:
    return [config.window.has_window(n) for n in range(config.num_layers)]


@pytest.mark.parametrize("number", [None, 0, 1, 4])
@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_moe"])
def test_layers_of_a_number(name: str, switch: bool, number: int | None) -> None:
    """Without `layer_types`; where the number is not there, either, it is 28."""
    keys = {"use_sliding_window": switch, "sliding_window": 8}
    keys |= {} if number is None else {"max_window_layers": number}
    kinds = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe"}
    made = getattr(transformers, f"{kinds[name]}Config")(**SIZES, **keys)
    assert windowed(read(name, **EXPERTS, **keys)) == [k == SLIDING for k in made.layer_types]


def test_a_switch_that_is_off_beside_windows_is_refused() -> None:
    with pytest.raises(MappingError, match="use_sliding_window"):
        read("qwen2_moe", **EXPERTS, layer_types=[SLIDING, FULL] * 3, sliding_window=8)


@pytest.mark.parametrize("kinds", [None, [SLIDING, FULL] * 3])
@pytest.mark.parametrize("switch", [True, False])
def test_windows_of_layers_that_do_not_turn(switch: bool, kinds: list[str] | None) -> None:
    keys = {"use_sliding_window": switch, "sliding_window": 8, "layer_types": kinds}
    made = transformers.SmolLM3Config(**SIZES, **keys)
    assert windowed(read("smollm3", **keys)) == [k == SLIDING for k in made.layer_types]


@pytest.mark.parametrize("layers", [5, 6])
@pytest.mark.parametrize("kinds", [None, [FULL, SLIDING], [SLIDING]])
def test_the_last_layer_of_gemma4_sees_all(layers: int, kinds: list[str] | None) -> None:
    """Whatever `layer_types` says; nothing can be written of a model in which it has a window."""
    keys = {"sliding_window": 8, "head_dim": 16, "global_head_dim": 16}
    keys |= {"num_hidden_layers": layers, "hidden_size_per_layer_input": 0}
    listed = {} if kinds is None else {"layer_types": (kinds * layers)[:layers]}
    made = transformers.Gemma4TextConfig(**SIZES | keys, **copy.deepcopy(listed))
    config = read("gemma4", **keys, **listed)
    assert windowed(config) == [k == SLIDING for k in made.layer_types]
    assert windowed(config)[-1] is False
    changed = config.with_fields(window_skip_freq=(0, *(1,) * (layers - 1)), extra={})
    written = family("gemma4").write_config(changed)
    lost = find_lost_in_class(changed, family("gemma4"), written)
    assert [s.field for s in lost] == ["window_skip_freq"]


def test_a_window_is_mistrals_alone() -> None:
    """A LlamaForCausalLM ignores it; a model with one is written as a Mistral."""
    assert read("llama", sliding_window=8).window.window_size == 0
    config = read("llama").with_fields(window_size=8, extra={})
    written = family("llama").write_config(config)
    assert written["model_type"] == "mistral"
    assert written["architectures"] == ["MistralForCausalLM"]
    assert family("llama").read_config(written).window.window_size == 8


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"no_rope_layers": [1, 1, 0, 1, 1, 0]},
        {"no_rope_layers": []},
        {"layer_types": [FULL, CHUNKED] * 3},
        {"layer_types": [FULL] * 6, "no_rope_layers": [1, 0] * 3},
    ],
    ids=str,
)
def test_chunks_are_those_of_layer_types(keys: dict[str, Any]) -> None:
    made = transformers.Llama4TextConfig(**SIZES, intermediate_size_mlp=64, **keys)
    more = {"intermediate_size_mlp": 64, "num_local_experts": 2}
    config = read("llama4", **more, **keys)
    still = config.positions.no_rope_layers or (0,) * 6
    assert [1 - s for s in still] == made.no_rope_layers
    flags = config.window.chunk_layers or tuple(1 - s for s in still)
    assert list(flags) == [int(k == CHUNKED) for k in made.layer_types]
    again = family("llama4").read_config(family("llama4").write_config(config))
    assert again.window == config.window
