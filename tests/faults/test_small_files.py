"""Hostile small files (options, recipes, configurations, names): one typed error, no memory."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from megtool import explain_recipe, inspect, reshard, show_recipe, verify
from megtool.commands.options.finetune import FinetuneOptions
from megtool.errors import FormatError, MegtoolError, RecipeError, UsageError
from megtool.options.config_file import read_options
from megtool.storage.files import MAX_WHOLE_BYTES, read_file, read_limited
from megtool.storage.stores.json_size import MAX_PARSED_BYTES
from tests.support.checkpoints.damage import SMALL
from tests.support.errors import raises
from tests.support.models import tiny_llama
from tests.support.paths import ROOT

HEX = "0x" + "f" * 9000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("small") / "hf", **SMALL)


OPTIONS = {
    "a huge number": "lr: 1" + "0" * 400,
    "a huge integer": f"train-iters: {HEX}",
    "digits": "train-iters: " + "9" * 5000,
    "aliases": "a: &a [1, 1]\nb: &b [*a, *a]\ndata: *b",
    "nested": "[" * 60_000,
    "a tag of Python": "lr: !!python/object/apply:os.system ['id']",
    "a tag that does not fit": "'x': !!timestamp x",
    "a truth value that does not fit": "lr: !!bool x",
    "an empty integer": "lr: !!int ''",
    "a key that is a list": "? [a]\n: 1",
    "several documents": "--- 1\n--- 2",
    "many bytes": "#" * 200_000,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_files_of_options(tmp_path: Path, name: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(OPTIONS[name])
    with pytest.raises((FormatError, UsageError)) as caught:
        read_options(FinetuneOptions, path)
    assert caught.value.file == str(path)
    assert len(str(caught.value)) < 1000


def test_an_alias_of_one_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("lr: &rate 2e-5\nmin-lr: *rate\n")
    assert read_options(FinetuneOptions, path) == {"lr": 2e-5, "min_lr": 2e-5}


RECIPES = {
    "an unknown format": ("algo: FP8", "algo: INT4"),
    "a format that is a mapping": ("algo: FP8", "algo: {a: b}"),
    "a huge format": ("algo: FP8", f"algo: {HEX}"),
    "a huge rule": ("format: keep", f"format: {HEX}"),
    "a huge flag": ("optional: true", f"optional: {HEX}"),
    "a tag that does not fit": ("optional: true", "optional: !!bool x"),
    "an empty integer": ("optional: true", "optional: !!int ''"),
}
"""Changes of a shipped recipe."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(tmp_path: Path, source: Path, name: str) -> None:
    path = tmp_path / "recipe.yaml"
    text = (ROOT / "quant_recipes" / "fp8.yaml").read_text()
    assert RECIPES[name][0] in text
    path.write_text(text.replace(*RECIPES[name]))
    with pytest.raises(RecipeError) as caught:
        show_recipe(path)
    assert len(str(caught.value)) < 2000
    with pytest.raises(RecipeError):
        explain_recipe(source, recipe=str(path))


def rename_layer(folder: Path, name: str) -> None:
    """Give a layer of the only safetensors file another name."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].replace(
        b"model.layers.0.mlp", f"model.layers.{name}.mlp".encode()
    )
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def test_a_name_of_thousands_of_digits(tmp_path: Path, source: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    rename_layer(folder, "9" * 5000)
    for verb in (inspect, verify, lambda path: reshard(path, tmp_path / "out")):
        with pytest.raises(FormatError) as caught:
            verb(folder)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_in_a_loop(tmp_path: Path, source: Path, name: str) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)
    with pytest.raises(MegtoolError) as caught:
        inspect(folder)
    assert name in str(caught.value)


def test_files_that_are_too_large_are_not_read(tmp_path: Path, source: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    with raises(FormatError, "bytes", file=sparse):
        read_file(sparse)
    with raises(FormatError, "more than", file=sparse):
        read_limited(sparse, 1000)
    assert MAX_WHOLE_BYTES < 1 << 30


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_of_many_values_is_not_parsed(tmp_path: Path, source: Path, name: str) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    values = b"[]," * (MAX_PARSED_BYTES // 88 + 1)
    (folder / name).write_bytes(b'{"weight_map": [' + values + b"[]]}")
    with raises(FormatError, "values", file=folder / name):
        inspect(folder)
