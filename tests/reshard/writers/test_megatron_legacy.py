"""Rank files of layouts whose ranks hold a tensor unequally often, or one that Megatron ignores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megtool import reshard, verify
from tests.support.folders import read_config, torch_tensors, write_folder
from tests.support.models import mtp_models, tiny_models

OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
UNEVEN = [
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "ep": 3, "etp": 1, "dp": 3},
    {"tp": 2, "ep": 6, "etp": 1, "dp": 3},
]


@pytest.mark.parametrize("layout", UNEVEN, ids=lambda x: f"ep={x['ep']}")
def test_experts_on_fewer_tensor_ranks(layout: dict[str, int], tmp_path: Path) -> None:
    """Megatron saves a folder for each (tp, ep) that a rank has: with ep=3 tp 0 has two, 1 one."""
    tiny_models.sparse(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "ranks", to="megatron", fsync=False, **layout)
    folders = {p.name for p in (tmp_path / "ranks" / "release").glob("mp_rank_*")}
    assert folders == {f"mp_rank_{n % 2:02d}_{n:03d}" for n in range(layout["ep"])}
    if layout["ep"] == 3:
        words = [
            torch.load(
                tmp_path / "ranks/release" / folder / "model_optim_rng.pt", weights_only=False
            )["model"][EMBEDDING]
            for folder in sorted(folders)
        ]
        assert torch.equal(words[0], words[1])  # mp_rank_00_000 and mp_rank_00_002
        source = torch_tensors(tmp_path / "hf")["model.embed_tokens.weight"]
        assert torch.equal(torch.cat([words[0], words[2]])[: len(source)], source)
    reshard(tmp_path / "ranks", tmp_path / "back", to="hf", fsync=False)
    assert verify(tmp_path / "hf", tmp_path / "back").verdict == "equal"


def test_an_output_layer_that_megatron_does_not_use(tmp_path: Path) -> None:
    """Beside MTP's embedding a tied model has one of any values: they are no part of the model."""
    mtp_models.mimo(tmp_path / "hf")
    tied = read_config(tmp_path / "hf") | {"tie_word_embeddings": True}
    tensors = torch_tensors(tmp_path / "hf")
    del tensors["lm_head.weight"]
    write_folder(tmp_path / "tied", tied, tensors)
    reshard(tmp_path / "tied", tmp_path / "ranks", to="megatron", pp=2, fsync=False)
    file = tmp_path / "ranks/release/mp_rank_00_001/model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    assert torch.equal(tree["model"][OUTPUT], tree["model"][EMBEDDING])
    tree["model"][OUTPUT] = torch.randn_like(tree["model"][OUTPUT])
    torch.save(tree, file)
    for sidecar in (tmp_path / "ranks").rglob("megtool.json"):
        sidecar.unlink()
    reshard(tmp_path / "ranks", tmp_path / "back", to="hf", fsync=False)
    back = torch_tensors(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(t, tensors[n]) for n, t in back.items())
