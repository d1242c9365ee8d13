"""Draft heads: what says that a folder is one, and tensors that do not fit its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megtool import evaluate, inspect, lint, reshard, verify
from megtool.convert.families.draft_heads import compare_head
from megtool.errors import MappingError
from tests.support.errors import raises

# As ModelOpt's llama_eagle_template_config, and as its export from Megatron.
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": 40,
    "draft_vocab_size": 20,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]},
}
SHAPES = {
    "fc.weight": (16, 32),
    "layers.0.self_attn.q_proj.weight": (32, 32),
    "layers.0.self_attn.k_proj.weight": (16, 32),
    "layers.0.self_attn.v_proj.weight": (16, 32),
    "layers.0.self_attn.o_proj.weight": (16, 32),
    "layers.0.mlp.gate_proj.weight": (24, 16),
    "layers.0.mlp.up_proj.weight": (24, 16),
    "layers.0.mlp.down_proj.weight": (16, 24),
    "layers.0.input_layernorm.weight": (16,),
    "layers.0.hidden_norm.weight": (16,),
    "layers.0.post_attention_layernorm.weight": (16,),
    "norm.weight": (16,),
    "lm_head.weight": (20, 16),
    "d2t": (20,),
}
MIDDLE = {name.replace("layers.0.", "midlayer."): shape for name, shape in SHAPES.items()}


def save(folder: Path, config: Any = CONFIG, shapes: Any = SHAPES) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: torch.zeros(s, dtype=torch.int64) for n, s in shapes.items() if n == "d2t"}
    tensors |= {n: torch.randn(s) for n, s in shapes.items() if n != "d2t"}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shapes", [SHAPES, MIDDLE], ids=["transformers", "megatron"])
def test_a_head_is_copied_and_checked_under_its_own_names(shapes: Any, tmp_path: Path) -> None:
    head = save(tmp_path / "head", shapes=shapes)
    assert lint(head).findings == ()
    assert any("EAGLE-3" in line for line in inspect(head).lines())
    reshard(head, tmp_path / "copy")
    assert verify(head, tmp_path / "copy").verdict == "equal"
    assert lint(tmp_path / "copy").findings == ()
    text = tmp_path / "text.txt"
    text.write_text("some text")
    with raises(MappingError, "draft head", "EAGLE-3"):
        evaluate(head, data=str(text))
    with raises(MappingError, "draft head"):
        reshard(head, tmp_path / "megatron", to="torch_dist")


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"d2t": None}, "tensors-missing"),
        ({"layers.0.hidden_norm.weight": None}, "tensors-missing"),
        ({"fc.weight": (16, 48)}, "sizes-said"),
        ({"lm_head.weight": (40, 16)}, "sizes-said"),
        ({"layers.0.self_attn.q_proj.weight": (32, 16)}, "sizes-said"),
        ({"layers.1.input_layernorm.weight": (16,)}, "tensors-unknown"),
    ],
)
def test_what_does_not_fit_the_config_is_found(change: Any, finding: str, tmp_path: Path) -> None:
    shapes = {n: s for n, s in (SHAPES | change).items() if s is not None}
    found = lint(save(tmp_path / "head", shapes=shapes)).findings
    assert {f.id for f in found} == {finding}
    assert all(next(iter(change)) in (f.module, f"{f.module}.weight") for f in found)


def test_heads_of_several_layers_and_with_biases() -> None:
    config = CONFIG | {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}
    config |= {"draft_vocab_size": None, "eagle_config": None, "target_hidden_size": 12}
    missing, wrong, unknown = compare_head(config, SHAPES) or ([], [], [])
    assert {n for n in missing if n.startswith("layers.0.")} == {
        f"layers.0.{m}_proj.bias"
        for m in (
            *(f"self_attn.{x}" for x in "qkvo"),
            *(f"mlp.{x}" for x in ("gate", "up", "down")),
        )
    }
    assert "layers.1.input_layernorm.weight" in missing
    assert "layers.1.hidden_norm.weight" not in missing
    assert {n for n, _ in wrong} == {"fc.weight", "lm_head.weight"}
    assert unknown == ["d2t"]
    assert compare_head(CONFIG | {"hidden_size": "16"}, SHAPES) is None
    assert compare_head({"architectures": ["LlamaForCausalLM"]}, SHAPES) is None
