"""Any checkpoint under torchtitan's names and back; its own code is tested among the peers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp

import megtool
from megtool import reshard
from megtool.errors import MappingError
from tests.support.errors import raises
from tests.support.folders import stored_tensors
from tests.support.models import moe_cases
from tests.support.models.tiny_model import tiny_model

pytest.importorskip("transformers")

HEADS, KV = 4, 2
PLACES = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate.": "moe.router.gate.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
STACKS = {"gate": "w1_EFD", "up": "w3_EFD", "down": "w2_EDF"}


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of every head with rotary pairs side by side, as torchtitan's adapter turns them."""
    rows, columns = weight.shape
    turned = weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2)
    return turned.reshape(rows, columns)


def as_torchtitan(folder: Path, *, pairs: bool) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face folder as torchtitan's adapter makes them."""
    out: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if found := re.fullmatch(r"model\.(layers\.\d+)\.mlp\.experts\.(\d+)\.(\w+)_.*", name):
            layer, number, part = found.groups()
            stack = f"{layer}.moe.routed_experts.inner_experts.{STACKS[part]}"
            experts.setdefault(stack, {})[int(number)] = tensor
            continue
        if pairs and ".q_proj" in name:
            tensor = paired(tensor, HEADS)
        if pairs and ".k_proj" in name:
            tensor = paired(tensor, KV)
        for old, new in PLACES.items():
            name = name.replace(old, new)
        out[name] = tensor
    for name, parts in experts.items():
        out[name] = torch.stack([parts[n] for n in sorted(parts)])
    if "lm_head.weight" not in out:
        out["lm_head.weight"] = out["tok_embeddings.weight"]
    return out


KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": moe_cases.QWEN | {"head_dim": 16, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_names_and_values_are_torchtitans_there_and_back(family: str, tmp_path: Path) -> None:
    tiny_model(family, tmp_path / "hf", **KEYS[family])
    expected = as_torchtitan(tmp_path / "hf", pairs=family == "llama")
    view = megtool.open(tmp_path / "hf", framework="torch").as_("torchtitan")
    assert set(view) == set(expected)
    for name, tensor in view.read().items():
        assert torch.equal(tensor, expected[name]), name
    dcp.save(expected, checkpoint_id=tmp_path / "dcp")
    reshard(tmp_path / "dcp", tmp_path / "back", to="hf", like=tmp_path / "hf", fsync=False)
    assert stored_tensors(tmp_path / "back") == stored_tensors(tmp_path / "hf")


def test_layers_of_multi_token_prediction(tmp_path: Path) -> None:
    moe_cases.with_mtp(tmp_path)
    names = set(megtool.open(tmp_path).as_("torchtitan"))
    assert {n for n in names if re.fullmatch(r"mtp_layers\.0\.(\w+)\.weight", n)} == {
        f"mtp_layers.0.{n}.weight"
        for n in ("enorm", "hnorm", "eh_proj", "mtp_norm", "attention_norm", "ffn_norm")
    }
    assert "mtp_layers.0.moe.routed_experts.inner_experts.w1_EFD" in names


class Fused(nn.Module):
    """Two projections in one parameter, which are two tensors of the state dict, as torchtitan's
    fused queries, keys and values are three.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(2 * rows, columns))
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        w1, w3 = state.pop(f"{prefix}both").chunk(2)
        state[f"{prefix}w1.weight"], state[f"{prefix}w3.weight"] = w1.clone(), w3.clone()

    @staticmethod
    def join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        parts = [state.pop(f"{prefix}{n}.weight") for n in ("w1", "w3")]
        state[f"{prefix}both"] = torch.cat(parts)


def test_a_module_gets_what_its_state_dict_copies(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    expected = as_torchtitan(tmp_path, pairs=True)
    w1, w3 = (expected[f"layers.0.feed_forward.{n}.weight"] for n in ("w1", "w3"))
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict()])})
    layer = model["layers"][0]  # type: ignore[index]
    layer["feed_forward"] = Fused(*w1.shape)
    report = megtool.load_state_dict(model, tmp_path)
    assert report.naming == "torchtitan"
    assert torch.equal(layer["feed_forward"].both, torch.cat([w1, w3]))


def test_a_family_that_torchtitan_does_not_have(tmp_path: Path) -> None:
    tiny_model("gemma2", tmp_path)
    with raises(MappingError, "has no table for 'torchtitan' names"):
        megtool.open(tmp_path).as_("torchtitan")
