"""What is left out as a copy of another tensor is compared with it; one that differs is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megtool import reshard, verify
from megtool.errors import MappingError
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.folders import read_config, torch_tensors
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


@pytest.mark.parametrize("place", [(0, 3), (50, 100), (77, 200), (100, 255)])
@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_a_head_of_its_own_is_kept(tmp_path: Path, place: tuple[int, int], to: str) -> None:
    """All elements are compared, and what is written says that embeddings are not tied."""
    source = tied(tmp_path / "hf", place)
    report = reshard(source, tmp_path / "there", to=to, strict=True, fsync=False)
    assert not report.dropped
    reshard(tmp_path / "there", tmp_path / "out", to="hf", strict=True, fsync=False)
    assert read_config(tmp_path / "out")["tie_word_embeddings"] is False
    assert torch.equal(*(torch_tensors(tmp_path / f)[HEAD] for f in ("hf", "out")))
    assert verify(source, tmp_path / "out").verdict == "equal"


def test_megatron_args_say_that_a_kept_head_is_untied(tmp_path: Path) -> None:
    reshard(tied(tmp_path / "hf", (0, 0)), tmp_path / "out", to="torch_dist", fsync=False)
    found = open_source(tmp_path / "out")
    assert found.catalogue.metadata["args"]["untie_embeddings_and_output_weights"] is True
    assert {"head.weight", "embed.weight"} <= found.view.canonical.keys()


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    source = tied(tmp_path / "hf", rows=90)
    with raises(MappingError, match=r"\[90, 256\]", hint=HEAD) as caught:
        reshard(source, tmp_path / "out", to="torch_dist")
    assert caught.value.error_id == "false-copy"
    (dropped,) = reshard(source, tmp_path / "out", to="torch_dist", exclude=[HEAD]).dropped or [0]
    assert not dropped


def test_nothing_is_compared_with_what_was_not_selected(tmp_path: Path) -> None:
    source = tied(tmp_path / "hf", (0, 0))
    reshard(source, tmp_path / "out", to="torch_dist", strict=True, exclude=[EMBEDDING])


def test_verify_compares_a_false_copy(tmp_path: Path) -> None:
    a = tied(tmp_path / "a", rows=90)
    assert verify(a, tied(tmp_path / "same", rows=90)).verdict == "equal"
    for other in (tied(tmp_path / "b", (3, 4), rows=90), tied(tmp_path / "c")):
        for pair in ((a, other), (other, a)):
            report = verify(*pair)
            assert next((p.part, p.verdict) for p in report.parts) == ("tensors", "differs")
            assert [(d.tensor, d.kind) for d in report.differences] == [(HEAD, "values")]
    assert any(HEAD in note and "[90, 256]" in note for note in verify(a).notes)
