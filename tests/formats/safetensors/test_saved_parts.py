"""Safetensors of which each file has a part of every tensor, as ranks save them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megtool import reshard
from megtool.errors import CoverageError, FormatError
from megtool.formats.safetensors.reader import open_checkpoint
from tests.support.errors import raises
from tests.support.folders import torch_tensors

WHOLE = {
    "model.embed_tokens.weight": torch.arange(80.0).view(10, 8),
    "model.norm.weight": torch.arange(8.0),
}


def save(folder: Path, ranks: int, *, offsets: dict[str, list[int]] | None = None) -> Path:
    """What `HuggingFaceStorageWriter` with `save_distributed` writes of `Shard(0)` tensors."""
    folder.mkdir()
    for rank in range(ranks):
        parts = {n: t.chunk(ranks)[rank].contiguous() for n, t in WHOLE.items()}
        starts = {
            n: [t.chunk(ranks)[0].shape[0] * rank, *[0] * (t.dim() - 1)] for n, t in WHOLE.items()
        }
        info = {n: {"saved_offsets": start} for n, start in (starts | (offsets or {})).items()}
        save_file(
            parts,
            folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(info), "format": "pt"},
        )
    return folder


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_joined(tmp_path: Path, ranks: int) -> None:
    source = save(tmp_path / "in", ranks)
    found = open_checkpoint(source)
    assert {t.name: t.shape for t in found.tensors} == {n: t.shape for n, t in WHOLE.items()}
    reshard(source, tmp_path / "out", to="hf", fsync=False)
    out = torch_tensors(tmp_path / "out")
    assert out.keys() == WHOLE.keys()
    assert all(torch.equal(t, out[n]) for n, t in WHOLE.items())


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_part_is_an_error(tmp_path: Path, missing: int) -> None:
    source = save(tmp_path / "in", 3)
    (source / f"shard-{missing:05d}-model-00001-of-00001.safetensors").unlink()
    with raises((FormatError, CoverageError), hint=True):
        open_checkpoint(source)


def test_one_part_alone_is_no_checkpoint(tmp_path: Path) -> None:
    source = save(tmp_path / "in", 2)
    (source / "shard-00002-model-00001-of-00001.safetensors").unlink()
    file = source / "shard-00001-model-00001-of-00001.safetensors"
    for path in (source, file):
        with raises(FormatError, match="nothing says that there are no others", hint="config.json"):
            open_checkpoint(path)


def test_whole_tensors_with_offsets_of_zero_are_whole(tmp_path: Path) -> None:
    """The same writer, without `save_distributed`, says of whole tensors where they begin."""
    info = {n: {"saved_offsets": [0] * t.dim()} for n, t in WHOLE.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(info)}
    save_file(WHOLE, tmp_path / "model.safetensors", metadata=metadata)
    found = open_checkpoint(tmp_path / "model.safetensors")
    assert {t.name: t.shape for t in found.tensors} == {n: t.shape for n, t in WHOLE.items()}


@pytest.mark.parametrize("start", [[-1, 0], [1], "0", [1 << 60, 0]], ids=str)
def test_damaged_descriptions_are_refused(tmp_path: Path, start: list[int]) -> None:
    source = save(tmp_path / "in", 2, offsets={"model.embed_tokens.weight": start})
    with raises((FormatError, CoverageError)):
        open_checkpoint(source)
