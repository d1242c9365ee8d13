"""Folders with `pytorch_model.bin`, as transformers wrote them before safetensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megtool import reshard, verify
from megtool.errors import FormatError
from megtool.formats import open_checkpoint
from megtool.source.unread_files import find_unread_files
from tests.support.errors import raises
from tests.support.folders import torch_tensors
from tests.support.models import tiny_llama

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("hf") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def weights(original: Path) -> Tensors:
    return load_file(original / "model.safetensors")


def make(folder: Path, original: Path) -> Path:
    """A folder with everything but the weights."""
    return shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.safetensors"))


def save_shards(
    folder: Path, weights: Tensors, stem: str = "pytorch_model", index: str = ""
) -> None:
    names = list(weights)
    where = {}
    for number, half in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-{number:05d}-of-00002.bin"
        torch.save({n: weights[n] for n in half}, folder / file)
        where |= dict.fromkeys(half, file)
    if index:
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def assert_same(folder: Path, original: Path, weights: Tensors, out: Path) -> None:
    assert verify(folder, original).verdict == "equal"
    reshard(folder, out, to="hf", fsync=False)
    written = torch_tensors(out)
    assert written.keys() == weights.keys()
    assert all(torch.equal(t, written[n]) for n, t in weights.items())
    assert (out / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.fp16.bin"])
def test_one_file(
    tmp_path: Path, original: Path, weights: Tensors, name: str, is_zip: bool
) -> None:
    folder = make(tmp_path / "in", original)
    torch.save(weights, folder / name, _use_new_zipfile_serialization=is_zip)
    assert_same(folder, original, weights, tmp_path / "out")


@pytest.mark.parametrize(
    ("stem", "index"),
    [
        ("pytorch_model", "pytorch_model.bin.index.json"),
        ("pytorch_model.fp16", "pytorch_model.bin.index.fp16.json"),
        ("pytorch_model", ""),
    ],
)
def test_shards(tmp_path: Path, original: Path, weights: Tensors, stem: str, index: str) -> None:
    folder = make(tmp_path / "in", original)
    save_shards(folder, weights, stem, index)
    assert_same(folder, original, weights, tmp_path / "out")


def test_an_index_can_be_named(tmp_path: Path, original: Path, weights: Tensors) -> None:
    folder = make(tmp_path / "in", original)
    torch.save({n: t + 1 for n, t in weights.items()}, folder / "pytorch_model.bin")
    save_shards(folder, weights, "pytorch_model", "pytorch_model.bin.index.json")
    opened = open_checkpoint(folder)
    assert [f.path for f in opened.files] == ["pytorch_model.bin"]
    assert any("pytorch_model-00001-of-00002.bin" in w for w in opened.warnings)
    assert verify(folder / "pytorch_model.bin.index.json", original).verdict == "equal"


def test_safetensors_come_first_and_that_is_said(
    tmp_path: Path, original: Path, weights: Tensors
) -> None:
    folder = shutil.copytree(original, tmp_path / "in")
    torch.save({n: t + 1 for n, t in weights.items()}, folder / "pytorch_model.bin")
    opened = open_checkpoint(folder)
    assert [f.path for f in opened.files] == ["model.safetensors"]
    assert any("pytorch_model.bin" in w and "safetensors" in w for w in opened.warnings)
    assert verify(folder, original).verdict == "equal"


def test_several_variants_are_refused(tmp_path: Path, original: Path, weights: Tensors) -> None:
    folder = make(tmp_path / "in", original)
    for variant in ("fp16", "bf16"):
        torch.save(weights, folder / f"pytorch_model.{variant}.bin")
    with raises(FormatError, "variants", file=folder, hint="pytorch_model.bf16.bin"):
        open_checkpoint(folder)
    assert verify(folder / "pytorch_model.fp16.bin", original, like=original).verdict == "equal"


def test_missing_shards_are_named(tmp_path: Path, original: Path, weights: Tensors) -> None:
    folder = make(tmp_path / "in", original)
    save_shards(folder, weights, "pytorch_model", "pytorch_model.bin.index.json")
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    with raises(FormatError, hint=True):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin.index.json").unlink()
    with raises(FormatError, "pytorch_model-00001-of-00002.bin", id="missing-shard"):
        open_checkpoint(folder)


def test_a_stale_shard_is_refused(tmp_path: Path, original: Path, weights: Tensors) -> None:
    folder = make(tmp_path / "in", original)
    save_shards(folder, weights, "pytorch_model", "pytorch_model.bin.index.json")
    torch.save({}, folder / "pytorch_model-00001-of-00002.bin")
    with raises(FormatError, hint=True):
        open_checkpoint(folder)
    first, second = (folder / f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2))
    shutil.copy(second, first)
    with raises(FormatError, "pytorch_model-00001-of-00002.bin", hint=True):
        open_checkpoint(folder)


def test_an_index_does_not_leave_its_folder(tmp_path: Path, original: Path) -> None:
    folder = make(tmp_path / "in", original)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with raises(FormatError, id="unsafe-path"):
        open_checkpoint(folder)


def test_the_full_state_dict_of_accelerate(
    tmp_path: Path, original: Path, weights: Tensors
) -> None:
    folder = tmp_path / "checkpoint_0"
    folder.mkdir()
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    report = verify(folder, original, like=original)
    assert {p.part: p.verdict for p in report.parts}["tensors"] == "equal"
    assert [d.tensor for d in report.differences] == ["optimizer.bin"]
    assert "optimizer.bin" in {f.name for f in find_unread_files(open_checkpoint(folder))}


def test_other_files_are_named_where_there_are_no_weights(tmp_path: Path, original: Path) -> None:
    folder = make(tmp_path / "in", original)
    torch.save({"a": torch.zeros(2)}, folder / "lit_model.pth")
    with raises(FormatError, "lit_model.pth", hint=str(folder / "lit_model.pth")):
        open_checkpoint(folder)
