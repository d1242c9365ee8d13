"""Random state is told apart by its bytes."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megtool.audit.training_state import read_training_facts
from megtool.formats import open_checkpoint
from megtool.tensors.catalogue import StoredFile, StoredObject


def test_random_states_are_the_checksums_of_their_bytes(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "states").write_bytes(b"....first.second")
    catalogue = open_checkpoint(tmp_path)
    number = len(catalogue.files)
    catalogue.files.append(StoredFile.stat(tmp_path, "states"))
    for rank, extent in enumerate([(number, 4, 5), (number, 10, 6)]):
        name = f"rng_state/shard_0.{rank}_1.2"
        catalogue.objects[name] = StoredObject(name=name, kind="rng", extent=extent)
    found = read_training_facts(catalogue).rng
    assert sorted(found.values()) == sorted(map(zlib.crc32, (b"first", b"second")))


@pytest.mark.parametrize(("text", "step"), [("4", 4), ("4.0", 4), ("NaN", None), ("1e999", None)])
def test_steps_are_whole_numbers(tmp_path: Path, text: str, step: int | None) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text(f'{{"global_step": {text}}}')
    assert read_training_facts(open_checkpoint(tmp_path)).iteration == step
