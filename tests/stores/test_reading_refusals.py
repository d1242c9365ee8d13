"""Locations that cannot be read: one sentence each, with the place and a way out."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import megtool
from megtool.errors import MegtoolError, MissingPackageError, UsageError
from megtool.storage.stores import connect
from tests.support.models import tiny_llama
from tests.support.stores.read_counts import CountingStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    made = CountingStore("memory://refusals")
    made.forget()
    made.upload(tiny_llama.save(tmp_path / "hf"), "run/hf")
    made.put("run/notes.md", b"text")
    made.put("empty/", b"")
    yield made
    made.forget()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nothing", "the path does not exist"),
        ("run/hf/nothing", "the path does not exist"),
        ("ru", "the path does not exist"),
        ("empty", "the path does not exist"),
        ("run", "it is not a checkpoint"),
        ("run/notes.md", "it is not a checkpoint"),
    ],
)
def test_a_place_without_a_checkpoint(store: CountingStore, place: str, message: str) -> None:
    with pytest.raises(MegtoolError, match=message) as e:
        megtool.inspect(f"{store.url}/{place}")
    assert e.value.file == f"{store.url}/{place}"
    assert e.value.hint


def test_a_shard_that_is_missing(store: CountingStore, tmp_path: Path) -> None:
    megtool.reshard(f"{store.url}/run/hf", tmp_path / "tp", to="torch_dist", tp=2, fsync=False)
    store.upload(tmp_path / "tp", "tp")
    (file,) = [key for key in store._objects if key.endswith("__1_0.distcp")]
    store.delete([file])
    with pytest.raises(MegtoolError, match="1 of 2 data files are missing") as e:
        megtool.inspect(f"{store.url}/tp")
    assert str(e.value.file).startswith(f"{store.url}/tp")


@pytest.mark.parametrize(
    "use",
    [
        lambda at, out: megtool.quantize(f"{at}/run/hf", out, f"{at}/recipe.yaml"),
        lambda at, out: megtool.tokenize(f"{at}/text.jsonl", out, tokenizer=f"{at}/run/hf"),
        lambda at, out: megtool.tokenize(f"{at}/run/notes.md", out, tokenizer=f"{at}/nothing"),
        lambda at, out: megtool.reshard(f"{at}/run/hf", out, to="hf", like=f"{at}/nothing"),
        lambda at, out: megtool.generate(f"{at}/run/hf", prompts=f"{at}/prompts.txt"),
        lambda at, out: megtool.lint(f"{at}/nothing"),
    ],
)
def test_another_file_that_is_missing(
    store: CountingStore, tmp_path: Path, use: Callable[[str, Path], Any]
) -> None:
    with pytest.raises(MegtoolError) as e:
        use(store.url, tmp_path / "out")
    assert "memory://refusals/" in f"{e.value.message} {e.value.file}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://bucket/run", "boto3", "stores"),
        ("az://container/run", "azure", "azure"),
        ("hf://org/name", "huggingface_hub", "hub"),
    ],
)
def test_a_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name.partition(".")[0] in (package, "obstore"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **more)

    monkeypatch.setattr(connect, "_STORES", {})
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingPackageError) as e:
        megtool.inspect(url)
    assert f"megtool[{extra}]" in (e.value.hint or "")


@pytest.mark.parametrize("url", ["nowhere://bucket/run", "s3://", "s3://user:secret@bucket/run"])
def test_a_url_of_no_store(url: str) -> None:
    with pytest.raises(UsageError) as e:
        megtool.inspect(url)
    assert e.value.hint
    assert "secret" not in f"{e.value} {e.value.hint}"
