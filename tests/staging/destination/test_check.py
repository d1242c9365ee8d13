"""Destinations that must not be written are refused before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megtool.errors import DestinationError
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files


def refuse(words: str, destination: Path, *sources: Path, **options: bool) -> DestinationError:
    stage = open_stage(destination, files=Files(), fingerprint="f", sources=sources, **options)
    with pytest.raises(DestinationError, match=words) as caught:
        stage.check()
    with pytest.raises(DestinationError, match=words), stage:
        pass
    return caught.value


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "source" / "model.safetensors").write_text("x")
    yield tmp_path / "source"
    assert os.listdir(tmp_path / "source" / "inner") == []
    assert sorted(os.listdir(tmp_path / "source")) == ["inner", "model.safetensors"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_source_and_destination_lie_apart(source: Path, overwrite: bool) -> None:
    file = source / "model.safetensors"
    link = source.parent / "link"
    link.symlink_to(source)
    for destination, origin in [
        (source, source),
        (source / "out", source),
        (source / "inner", source),
        (source.parent, source),
        (source, file),
        (link / "out", source),
        (source / "out", link),
        (source / "inner" / ".." / "out", source),
    ]:
        refuse("inside the other", destination, origin, overwrite=overwrite)
    refuse("inside the other", file, file, is_file=True, overwrite=overwrite)
    stage = open_stage(source / "inner" / "out", files=Files(), fingerprint="f", sources=[file])
    stage.check()


def test_a_source_in_the_staging_folder(tmp_path: Path) -> None:
    source = tmp_path / ".out.megtool" / "tree"
    source.mkdir(parents=True)
    refuse("staging folder", tmp_path / "out", source)


def test_what_exists_is_kept_unless_told(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").touch()
    (tmp_path / "file").touch()
    error = refuse("exists", tmp_path / "out")
    assert "--overwrite" in (error.hint or "")
    refuse("exists", tmp_path / "file", is_file=True)
    refuse("is a file", tmp_path / "file", overwrite=True)
    refuse("is a folder", tmp_path / "out", is_file=True, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["file", "out"]


def test_an_empty_folder_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with open_stage(tmp_path / "out", files=Files(), fingerprint="f") as stage:
        stage.write("a", b"a")
        stage.commit()
    assert os.listdir(tmp_path / "out") == ["a"]


def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "below")
    refuse("current folder", Path("."))
    refuse("current folder", Path(".."), overwrite=True)


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refuse("cannot be a destination", Path("/"))
    refuse("is a file", tmp_path / "file" / "below" / "out")
    if Path("/dev/shm").is_mount():
        refuse("mount point|inside|exists", Path("/dev/shm"), overwrite=True)
    (tmp_path / ".out.megtool").symlink_to(tmp_path)
    refuse("in the way", tmp_path / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    refuse("cannot be written", tmp_path / "closed" / "out")
