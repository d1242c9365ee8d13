"""Retro projects: what is written is read, and damaged ones are refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megtool.data.indexed import IndexedDataset, IndexedWriter
from megtool.data.retro.chunk_writer import write_chunk_database
from megtool.data.retro.neighbors import write_neighbors
from megtool.data.retro.project import RetroProject
from megtool.data.retro.settings import RetroSettings
from megtool.errors import (
    DestinationError,
    FormatError,
    MegtoolError,
    MissingPackageError,
    UsageError,
)
from tests.support.errors import raises
from tests.support.retro_data import END_OF_DOCUMENT, write_data_sets

h5py = pytest.importorskip("h5py")

SETTINGS = RetroSettings(
    chunk_length=8,
    sequence_length=32,
    data=((3.0, "a"), (1.0, "more/b")),
    split="80,20,0",
    block_size=24,
)
NUM_SAMPLES = 14  # 56 chunks: blocks of 24, 24 and 8


def build(project: Path) -> Path:
    write_data_sets(project)
    infos = write_chunk_database(project, SETTINGS, end_of_document=END_OF_DOCUMENT)
    count = sum(info.n_chunks_train for info in infos)
    neighbors = np.random.default_rng(5).integers(0, count, (4 * NUM_SAMPLES, 3))
    neighbors[5] = [7, -1, -1]
    write_neighbors(project, "train", neighbors)
    return project


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built") / "project")


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "project"))


def read_all(project: Path) -> None:
    opened = RetroProject(project, end_of_document=END_OF_DOCUMENT)
    samples = opened.samples("train", num_neighbors=3)
    for i in range(len(samples)):
        samples[i]
    database = opened.database("train")
    database.tokens(range(len(database)))


def test_chunks_are_whole_documents_in_order(project: Path) -> None:
    opened = RetroProject(project, end_of_document=END_OF_DOCUMENT)
    database = opened.database("train")
    documents: dict[tuple[int, int], list[int]] = {}
    for number, (dataset, document, begin, end, length) in enumerate(
        database.chunks(range(len(database))).tolist()
    ):
        assert length == end - begin
        tokens = database.tokens(number).tolist()
        assert tokens[end - begin :] == [END_OF_DOCUMENT] * (8 - end + begin)
        documents.setdefault((dataset, document), []).extend(tokens[: end - begin])
    for number, prefix in enumerate(("a", "more/b")):
        data = IndexedDataset(project / "data" / prefix)
        for i in range(int(0.8 * len(data))):
            assert documents.pop((number, i)) == data[i][:-1].tolist()
    assert documents == {}
    counts = {part: len(opened.database(part)) for part in ("train", "valid", "sampled")}
    assert counts["sampled"] == counts["train"] > counts["valid"] > 0


def test_neighbors_come_with_the_chunks_after_them(project: Path) -> None:
    opened = RetroProject(project, end_of_document=END_OF_DOCUMENT)
    samples, database = opened.samples("train", num_neighbors=2), opened.database()
    assert len(samples) == NUM_SAMPLES
    retrieved = samples[1]  # chunks 4 to 8
    assert retrieved.numbers.shape == (4, 2, 2)
    assert retrieved.numbers[1].tolist() == [[7, 8], [len(database) - 1, 0]]
    assert retrieved.tokens.shape == (4, 2, 16)
    assert retrieved.tokens[1, 0].tolist() == database.tokens([7, 8]).reshape(-1).tolist()
    across = opened.neighbors("train").rows(20, 52)
    assert across.shape == (32, 3)
    assert opened.samples("train", num_retrieved_chunks=1)[0].tokens.shape == (4, 2, 8)
    with pytest.raises(IndexError):
        samples[NUM_SAMPLES]


def test_config_is_kept_and_completed(project: Path) -> None:
    config = json.loads((project / "config.json").read_text())
    assert config["retro_neighbor_dirs"] == {"train": "train", "valid": None, "test": None}
    config["retro_gpt_train_samples"] = 14
    (project / "config.json").write_text(json.dumps(config))
    write_neighbors(project, "valid", np.zeros((4, 1), np.int32), folder="valid_0")
    config["retro_neighbor_dirs"]["valid"] = "valid_0"
    assert json.loads((project / "config.json").read_text()) == config
    assert sorted(f.name for f in project.rglob(".*")) == []


def test_what_is_there_is_replaced_only_on_request(project: Path) -> None:
    how = {"end_of_document": END_OF_DOCUMENT}
    numbers = np.zeros((4, 1), np.int32)
    for folder, write in (
        ("db", lambda **more: write_chunk_database(project, SETTINGS, **how, **more)),
        ("query/train", lambda **more: write_neighbors(project, "train", numbers, **more)),
    ):
        place = project / folder
        with raises(DestinationError, id="destination-exists", file=place, hint="overwrite=True"):
            write()
        write(overwrite=True)
    opened = RetroProject(project, **how)
    assert len(opened.samples("train", num_neighbors=1)) == 1
    assert sorted(f.name for f in project.rglob(".*")) == []


def test_a_new_database_has_no_neighbors(project: Path) -> None:
    """Those of another one would name other chunks."""
    longer = replace(SETTINGS, chunk_length=16)
    write_chunk_database(project, longer, end_of_document=END_OF_DOCUMENT, overwrite=True)
    assert RetroSettings.read(project).neighbor_folders == {}


def rewrite(file: str, name: str, change: Callable[[np.ndarray], np.ndarray]) -> object:
    """Damage that replaces an array."""

    def damage(project: Path) -> None:
        with h5py.File(project / file, "r+") as opened:
            values = change(opened[name][:])
            del opened[name]
            opened[name] = values

    return damage


def set_config(key: str, value: object) -> object:
    def damage(project: Path) -> None:
        config = json.loads((project / "config.json").read_text())
        (project / "config.json").write_text(json.dumps(config | {key: value}))

    return damage


def put(place: tuple[int, int], value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[place] = value
        return values

    return change


def cut(file: str) -> object:
    return lambda project: (project / file).write_bytes((project / file).read_bytes()[:-100])


def link(project: Path) -> None:
    file = project / TRAIN
    file.rename(project / "elsewhere.hdf5")
    with h5py.File(file, "w") as opened:
        opened["chunks"] = h5py.ExternalLink(str(project / "elsewhere.hdf5"), "chunks")


def grow_data(project: Path) -> None:
    with IndexedWriter(project / "data" / "a", np.uint16) as writer:
        for _ in range(23):
            writer.add([1, 2])
            writer.end_document()


def drop_document(project: Path) -> None:
    with IndexedWriter(project / "data" / "a", np.uint16) as writer:
        writer.add([1, 2])
        writer.end_document()


def rename_count(file: Path) -> None:
    infos = json.loads(file.read_text())
    infos[0]["n_chunks_train"] = "many"
    file.write_text(json.dumps(infos))


TRAIN, BLOCKS = "db/merged/train.hdf5", "query/train"
DAMAGES = {
    "no config": (lambda p: (p / "config.json").unlink(), ".", "source-not-found"),
    "another config": (lambda p: (p / "config.json").write_text("{}"), "config.json", "format"),
    "chunks that do not fill": (set_config("retro_gpt_chunk_length", 7), "config.json", "format"),
    "neighbors outside": (
        set_config("retro_neighbor_dirs", {"train": "../.."}),
        "config.json",
        "unsafe-path",
    ),
    "another chunk length": (set_config("retro_gpt_chunk_length", 4), TRAIN, "format"),
    "another block size": (
        set_config("retro_block_size", 12),
        f"{BLOCKS}/000-024.hdf5",
        "format",
    ),
    "no database": (
        lambda p: (p / "db/indexed_dataset_infos.json").unlink(),
        "db/indexed_dataset_infos.json",
        "source-not-found",
    ),
    "counts that are none": (
        lambda p: rename_count(p / "db/indexed_dataset_infos.json"),
        "db/indexed_dataset_infos.json",
        "format",
    ),
    "truncated database": (cut(TRAIN), TRAIN, "truncated-file"),
    "empty file": (lambda p: (p / TRAIN).write_bytes(b""), TRAIN, "format"),
    "unfinished database": (
        rewrite(TRAIN, "n_written", lambda values: values - 1),
        TRAIN,
        "truncated-file",
    ),
    "shorter database": (rewrite(TRAIN, "chunks", lambda values: values[:-1]), TRAIN, None),
    "columns": (rewrite(TRAIN, "chunks", lambda values: values[:, :4]), TRAIN, "format"),
    "floats": (rewrite(TRAIN, "chunks", lambda values: values.astype("f4")), TRAIN, "format"),
    "a link out": (link, TRAIN, "format"),
    "an unknown document": (rewrite(TRAIN, "chunks", put((9, 1), 999)), TRAIN, "format"),
    "an unknown data set": (rewrite(TRAIN, "chunks", put((9, 0), 2)), TRAIN, "format"),
    "other documents": (grow_data, TRAIN, "format"),
    "fewer documents": (drop_document, "data/a.idx", "format"),
    "no data": (lambda p: (p / "data/a.idx").unlink(), "data/a.idx", "storage"),
    "no neighbors": (
        lambda p: (p / BLOCKS).rename(p / "query/other"),
        BLOCKS,
        "source-not-found",
    ),
    "a missing block": (
        lambda p: (p / BLOCKS / "024-048.hdf5").unlink(),
        BLOCKS,
        "missing-shard",
    ),
    "a missing last sample": (
        lambda p: (p / BLOCKS / "048-056.hdf5").rename(p / BLOCKS / "048-055.hdf5"),
        BLOCKS,
        "missing-shard",
    ),
    "overlapping blocks": (
        lambda p: (p / BLOCKS / "024-048.hdf5").rename(p / BLOCKS / "020-048.hdf5"),
        f"{BLOCKS}/020-048.hdf5",
        "format",
    ),
    "a truncated block": (
        cut(f"{BLOCKS}/024-048.hdf5"),
        f"{BLOCKS}/024-048.hdf5",
        "truncated-file",
    ),
    "a short block": (
        rewrite(f"{BLOCKS}/024-048.hdf5", "neighbors", lambda values: values[:-1]),
        f"{BLOCKS}/024-048.hdf5",
        "format",
    ),
    "an unknown neighbor": (
        rewrite(f"{BLOCKS}/024-048.hdf5", "neighbors", put((3, 0), 999)),
        f"{BLOCKS}/024-048.hdf5",
        "format",
    ),
    "another table": (
        lambda p: (p / BLOCKS / "000-024.hdf5").write_bytes((p / TRAIN).read_bytes()),
        f"{BLOCKS}/000-024.hdf5",
        "format",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_project_is_refused(project: Path, name: str) -> None:
    damage, file, error_id = DAMAGES[name]
    damage(project)  # type: ignore[operator]
    with pytest.raises(MegtoolError) as caught:
        read_all(project)
    assert isinstance(caught.value, FormatError) or error_id == "storage"
    assert Path(str(caught.value.file)) == project / file
    assert error_id in (None, caught.value.id)
    assert caught.value.hint


@pytest.mark.parametrize("file", [TRAIN, f"{BLOCKS}/000-024.hdf5"])
def test_damaged_headers_are_refused_or_without_effect(project: Path, file: str) -> None:
    path, errors = project / file, set()
    sound = path.read_bytes()
    for position in range(0, min(len(sound), 2048), 7):
        path.write_bytes(sound[:position] + b"\xff" + sound[position + 1 :])
        try:
            read_all(project)
        except MegtoolError as e:
            errors.add(type(e))
    assert errors == {FormatError}


def test_numbers_outside_the_database(project: Path) -> None:
    opened = RetroProject(project, end_of_document=END_OF_DOCUMENT)
    with raises(UsageError, "chunk 999", file=project / TRAIN):
        opened.database().tokens([1, 999])
    with raises(UsageError, "neighbor 999"):
        write_neighbors(project, "valid", np.array([[0], [1], [999], [3]]))
    with raises(UsageError, "no whole samples"):
        write_neighbors(project, "valid", np.zeros((5, 1), int))
    with raises(UsageError, "4 neighbors", file=project / BLOCKS):
        opened.samples("train", num_neighbors=4)
    with raises(UsageError, "'test'"):
        opened.samples("test")
    with raises(UsageError, "config.json names none"):
        opened.queries("train")
    with raises(FormatError, "not in the cache", file=project):
        opened.queries("train", data_cache=project)


def test_nothing_is_replaced(project: Path) -> None:
    with pytest.raises(DestinationError):
        write_neighbors(project, "train", np.zeros((4, 1), int))
    with pytest.raises(DestinationError):
        write_chunk_database(project, SETTINGS, end_of_document=END_OF_DOCUMENT)
    read_all(project)


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    for changes in ({"split": "969,30,1"}, {"block_size": 0}, {"data": ((1.0, "/a"),)}):
        with pytest.raises(UsageError):
            replace(SETTINGS, **changes)
    write_data_sets(tmp_path)
    with raises(UsageError, "are to be sampled"):
        write_chunk_database(tmp_path, SETTINGS, end_of_document=END_OF_DOCUMENT, num_sampled=10**6)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["data"]
    with IndexedWriter(tmp_path / "data" / "a", np.uint16) as writer:
        writer.add([1])
        writer.add([2])
        writer.end_document()
    with raises(FormatError, "2 sequences", file=tmp_path / "data" / "a.idx"):
        write_chunk_database(tmp_path, SETTINGS, end_of_document=END_OF_DOCUMENT)


def test_the_guides_example_runs(
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    guide = (checkout / "docs/guides/tokenize.md").read_text()
    (code,) = re.findall(r"^```python[^\n]*\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    write_data_sets(tmp_path / "project")
    for suffix in (".bin", ".idx"):
        data = tmp_path / "project" / "data"
        (data / f"a{suffix}").rename(data / f"corpus{suffix}")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "retro.py", "exec"), {})
    assert capsys.readouterr().out == "(32, 2, 128)\n"


def test_the_missing_package_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with raises(MissingPackageError, hint="pip install 'megtool[retro]'"):
        RetroProject(project, end_of_document=END_OF_DOCUMENT).database()
