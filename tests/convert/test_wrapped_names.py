"""State dicts whose names have more, or less, in front than those of the family's class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import reshard, verify
from megtool.errors import MappingError
from tests.support.errors import raises
from tests.support.folders import torch_tensors
from tests.support.models import tiny_llama


def save_body(folder: Path, original: Path) -> dict[str, torch.Tensor]:
    """What AutoModel saves: no head, and no `model.` in front."""
    folder.mkdir()
    body = {
        n.removeprefix("model."): t
        for n, t in load_file(original / "model.safetensors").items()
        if n.startswith("model.")
    }
    save_file(body, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    return body


def test_the_body_of_a_tied_model_is_all_of_it(tmp_path: Path) -> None:
    original = tiny_llama.save(tmp_path / "hf", num_hidden_layers=2, tie_word_embeddings=True)
    save_body(tmp_path / "body", original)
    assert verify(tmp_path / "body", original, parts="tensors").verdict == "equal"


def test_a_body_without_its_head_is_carried_if_asked(tmp_path: Path) -> None:
    original = tiny_llama.save(tmp_path / "hf", num_hidden_layers=2)
    body = save_body(tmp_path / "body", original)
    with raises(MappingError, "head.weight", hint="--select", id="missing-tensors"):
        reshard(tmp_path / "body", tmp_path / "out", to="hf")
    reshard(tmp_path / "body", tmp_path / "out", to="hf", select=["*"], fsync=False)
    out = torch_tensors(tmp_path / "out")
    assert out.keys() == {f"model.{n}" for n in body}
    assert all(torch.equal(t, out[f"model.{n}"]) for n, t in body.items())


def test_a_gap_in_the_body_is_no_missing_head(tmp_path: Path) -> None:
    original = tiny_llama.save(tmp_path / "hf", num_hidden_layers=2)
    body = save_body(tmp_path / "body", original)
    del body["layers.1.mlp.up_proj.weight"]
    save_file(body, tmp_path / "body/model.safetensors", metadata={"format": "pt"})
    with raises(MappingError, id="missing-tensors") as e:
        reshard(tmp_path / "body", tmp_path / "out", to="hf")
    assert "--select" not in (e.value.hint or "")


def test_an_encoder_as_sentence_transformers_stores_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        vocab_size=50,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "st")
    reshard(tmp_path / "st", tmp_path / "out", to="hf", select=["*"], fsync=False)
    again = transformers.AutoModel.from_pretrained(tmp_path / "out").state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(t, again[n]) for n, t in model.state_dict().items())
