"""Mistral Large 3 as it ships, under Mistral's own names, against transformers' Mistral 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from megtool import reshard, verify
from megtool.errors import MappingError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.folders import read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models.mistral_native import save_large_3
from tests.support.runs.loading import source_of


def test_mistral_large_3_is_read_as_it_ships(tmp_path: Path) -> None:
    """Mistral's names and params.json; what is written is what transformers has of the model."""
    model, want = save_large_3(tmp_path / "large", tmp_path / "twin")
    native = stored(tmp_path / "large")
    logits = load(source_of(tmp_path / "large"), dtype="float32")
    reshard(tmp_path / "large", tmp_path / "meg", to="torch_dist", tp=2, ep=2, pp=2, fsync=False)
    back = reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    assert [d for d in back.dropped if d.is_lost] == []
    written = {
        n: t for f in (tmp_path / "back").glob("*.safetensors") for n, t in load_file(f).items()
    }
    assert verify(tmp_path / "large", tmp_path / "back").verdict == "equal"
    towers = {n for n in native if n.startswith(("vision_", "patch_"))}
    assert written.keys() == want.keys() | towers
    assert all(torch.equal(written[n], t) for n, t in want.items())
    assert {n: stored(tmp_path / "back")[n] for n in towers} == {n: native[n] for n in towers}
    assert read_config(tmp_path / "back")["vision_encoder"] == {"hidden_size": 8}
    assert not (tmp_path / "back" / "params.json").exists()
    theirs, twin = (
        type(model).from_pretrained(tmp_path / folder, dtype=torch.float32).eval()
        for folder in ("back", "twin")
    )
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        ours, expected = logits(Batch(tokens_BS=tokens)), theirs(tokens).logits
        assert torch.equal(expected, twin(tokens).logits)
    assert float((ours - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("key", ["quantization_config", "quantization"])
def test_fp8_blocks_of_mistral_large_3_are_decoded(tmp_path: Path, key: str) -> None:
    """As compressed-tensors writes them: `weight_scale` beside each weight, one for 128 x 128."""
    save_large_3(tmp_path / "large", tmp_path / "twin")
    file, held, want = tmp_path / "large" / "consolidated.safetensors", {}, {}
    ends = ("wq_b.weight", "wkv_b.weight", "wo.weight", "w1.weight", "w2.weight", "w3.weight")
    for name, tensor in load_file(file).items():
        held[name] = want[name] = tensor
        if name.endswith(ends):
            scale = (tensor.float().abs().max() / 448).bfloat16().view(1, 1)
            held[name] = (tensor.float() / scale.float()).to(torch.float8_e4m3fn)
            held[f"{name}_scale"] = scale
            want[name] = (held[name].float() * scale.float()).bfloat16()
    save_file(held, file, metadata={"format": "pt"})
    params = json.loads((tmp_path / "large" / "params.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    group = {"targets": ["Linear"], "format": "float-quantized", "weights": weights}
    params[key] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"FP8_BLOCK": group},
        "ignore": ["model.embed_tokens", "re:.*q_a_proj$", "re:.*gate$", "lm_head"],
    }
    (tmp_path / "large" / "params.json").write_text(json.dumps(params))
    reshard(tmp_path / "large", tmp_path / "out", to="hf", fsync=False)
    save_file(want, file, metadata={"format": "pt"})
    (tmp_path / "large" / "params.json").write_text(
        json.dumps({k: v for k, v in params.items() if k != key})
    )
    reshard(tmp_path / "large", tmp_path / "plain", to="hf", fsync=False)
    assert stored(tmp_path / "out") == stored(tmp_path / "plain")
    assert "quantization_config" not in read_config(tmp_path / "out")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"moe": {"route_every_n": 2}}, "moe.route_every_n is 2"),
        ({"moe": {"use_load_balancing_bias": True}}, "moe.use_load_balancing_bias is True"),
        ({"moe": {"jitter": 1}}, "moe.jitter is 1"),
        ({"sliding_window": 4}, "sliding_window is 4"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization is {'qformat_weight'"),
        ({"llama_4_scaling": {"original_max_position_embeddings": 5}}, "llama_4_scaling.orig"),
    ],
)
def test_what_is_not_known_of_mistrals_params_is_refused(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_large_3(tmp_path / "large", tmp_path / "twin")
    file = tmp_path / "large" / "params.json"
    params = json.loads(file.read_text())
    for key, value in keys.items():
        params[key] = params.get(key, {}) | value if isinstance(value, dict) else value
    file.write_text(json.dumps(params))
    with raises(MappingError, said, file=file, id="unsupported-model"):
        open_source(tmp_path / "large")
