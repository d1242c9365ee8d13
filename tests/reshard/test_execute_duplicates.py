"""What is left out as a copy of another tensor is compared with it; one that differs is a loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megtool import reshard
from megtool.errors import CoverageError
from tests.support.models import tiny_llama

safetensors = pytest.importorskip("safetensors.torch")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tied(folder: Path, *places: tuple[int, int], rows: int = 101, head: str = "bfloat16") -> Path:
    """A tied Llama that stores its head all the same, with other numbers in some places."""
    tiny_llama.save(folder, tie_word_embeddings=True, hidden_size=256, head_dim=64)
    held = safetensors.load_file(folder / "model.safetensors")
    copy = held[EMBEDDING].clone()[:rows]
    for place in places:
        copy[place] += 1
    held[HEAD] = copy.to(getattr(torch, head))
    safetensors.save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("head", ["bfloat16", "float32"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_true_copy_is_no_loss(tmp_path: Path, head: str, whole: bool) -> None:
    source = tied(tmp_path / "hf", head=head)
    report = reshard(
        source, tmp_path / "out", to="torch_dist", strict=True, verify_master_weights=whole
    )
    assert [(d.name, d.is_lost) for d in report.dropped] == [(HEAD, False)]


@pytest.mark.parametrize("place", [(0, 3), (50, 100), (100, 255)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_head_of_its_own_is_a_loss(tmp_path: Path, place: tuple[int, int], whole: bool) -> None:
    source = tied(tmp_path / "hf", place)
    with pytest.raises(CoverageError, match=HEAD):
        reshard(source, tmp_path / "no", to="torch_dist", strict=True, verify_master_weights=whole)
    (lost,) = reshard(
        source, tmp_path / "out", to="torch_dist", verify_master_weights=whole
    ).dropped
    assert lost.is_lost
    assert EMBEDDING in lost.reason
    assert str(list(place)) in lost.reason


def test_all_of_it_is_compared_when_asked(tmp_path: Path) -> None:
    source = tied(tmp_path / "hf", (77, 200))
    reshard(source, tmp_path / "out", to="torch_dist", strict=True)
    with pytest.raises(CoverageError, match=HEAD):
        reshard(source, tmp_path / "no", to="torch_dist", strict=True, verify_master_weights=True)


def test_a_head_of_another_shape_is_a_loss(tmp_path: Path) -> None:
    (lost,) = reshard(tied(tmp_path / "hf", rows=90), tmp_path / "out", to="torch_dist").dropped
    assert lost.is_lost
    assert "[90, 256]" in lost.reason


def test_nothing_is_compared_with_what_was_not_selected(tmp_path: Path) -> None:
    source = tied(tmp_path / "hf", (0, 0))
    reshard(source, tmp_path / "out", to="torch_dist", strict=True, exclude=[EMBEDDING])
