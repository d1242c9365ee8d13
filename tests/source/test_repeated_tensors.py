"""Embeddings and heads of multi-token prediction: copies are written back, others kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megtool import reshard, verify
from megtool.errors import MappingError
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.folders import read_config, torch_tensors, write_folder
from tests.support.models import mtp_models

HEAD, EMBEDDING = "model.layers.{}.shared_head.head.weight", "model.layers.{}.embed_tokens.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM-4.5 with two layers of multi-token prediction, and neither heads nor embeddings."""
    folder = tmp_path_factory.mktemp("mtp") / "glm"
    mtp_models.glm4_moe(folder)
    return folder


def with_ends(plain: Path, folder: Path, *, factor: float = 1.0, place: int = -1) -> Path:
    """The folder with what published ones have, or with heads that are others."""
    tensors, config = torch_tensors(plain), read_config(plain)
    for layer in range(4, 4 + mtp_models.LAYERS):
        tensors[EMBEDDING.format(layer)] = tensors["model.embed_tokens.weight"].clone()
        head = tensors["lm_head.weight"] * factor
        if place >= 0 and layer == 5:
            head.view(-1)[place] += 1
        tensors[HEAD.format(layer)] = head.clone()
    return write_folder(folder, config, tensors)


def test_copies_are_written_back(plain: Path, tmp_path: Path) -> None:
    """Releases of vLLM before 0.16 draft from uninitialized memory without them."""
    source = with_ends(plain, tmp_path / "hf")
    report = reshard(source, tmp_path / "out", to="hf", strict=True, fsync=False)
    assert not report.dropped
    before, after = torch_tensors(source), torch_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[n]) for n, t in before.items())
    assert verify(tmp_path / "out").verdict == "ok"
    report = reshard(tmp_path / "out", tmp_path / "there", to="torch_dist", fsync=False)
    assert {d.name for d in report.dropped} == {n for n in before if n not in torch_tensors(plain)}
    assert verify(source, tmp_path / "there").verdict == "equal"


@pytest.mark.parametrize("change", [{"factor": 1.5}, {"place": 777}])
def test_heads_of_their_own_are_kept(plain: Path, tmp_path: Path, change: dict[str, float]) -> None:
    source = with_ends(plain, tmp_path / "hf", **change)  # type: ignore[arg-type]
    found = open_source(source)
    assert found.config.mtp.mtp_own_head
    assert not found.config.mtp.mtp_own_embedding
    assert not reshard(source, tmp_path / "out", to="hf", strict=True, fsync=False).dropped
    before, after = torch_tensors(source), torch_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[n]) for n, t in before.items())
    assert verify(source, tmp_path / "out").verdict == "equal"
    assert verify(source, with_ends(plain, tmp_path / "copies")).verdict == "different"


def test_megatron_has_no_place_for_them(plain: Path, tmp_path: Path) -> None:
    source = with_ends(plain, tmp_path / "hf", factor=1.5)
    with raises(MappingError, match="output layer of its own", hint="--exclude"):
        reshard(source, tmp_path / "no", to="torch_dist", fsync=False)
    reshard(
        source, tmp_path / "out", to="torch_dist", exclude=["*.shared_head.head.*"], fsync=False
    )
    assert verify(plain, tmp_path / "out").verdict == "equal"
