"""Retro's chunk database and neighbors: built and read by megatron-core, and by megtool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool.data.retro.chunk_writer import write_chunk_database
from megtool.data.retro.neighbors import write_neighbors
from megtool.data.retro.project import RetroProject
from tests.support.paths import PEERS
from tests.support.peers.release import install_release
from tests.support.retro_data import END_OF_DOCUMENT, UNKNOWN, write_data_sets

h5py = pytest.importorskip("h5py")
pytestmark = [pytest.mark.peers, pytest.mark.slow]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last release that has Retro."""
    return install_release("megatron-core==0.15.3", tmp_path_factory.mktemp("core"))


def run_world(core: Path, action: str, project: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PEERS / "retro_data_world.py"), action, str(project)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(core)},
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def peer(core: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that megatron-core built."""
    project = tmp_path_factory.mktemp("peer") / "project"
    write_data_sets(project)
    run_world(core, "build", project)
    return project


def compare_samples(project: Path) -> None:
    """Each split is read here as megatron-core's RetroDataset read it."""
    ours = RetroProject(project, end_of_document=END_OF_DOCUMENT)
    for split in ("train", "valid"):
        read: Any = np.load(project / f"{split}.npz")
        samples, queries = ours.samples(split, num_neighbors=3), ours.queries(split)
        assert len(samples) == len(read["text"]) <= len(queries)
        for i in range(len(samples)):
            assert (samples[i].numbers == read["neighbor_chunks"][i]).all()
            assert (samples[i].tokens == read["neighbor_tokens"][i]).all()
            assert (queries[i].text == read["text"][i]).all()
            assert queries[i].dataset == read["dataset_id"][i]
        documents = [queries[i].documents for i in range(len(samples))]
        assert (np.concatenate(documents) == read["document_ids"]).all()


def test_what_megatron_built_is_read(peer: Path) -> None:
    compare_samples(peer)


def test_the_database_is_megatrons(peer: Path, tmp_path: Path) -> None:
    """Every array of every file is the same."""
    shutil.copytree(peer / "data", tmp_path / "data")
    theirs = RetroProject(peer, end_of_document=END_OF_DOCUMENT)
    infos = write_chunk_database(
        tmp_path,
        theirs.settings,
        end_of_document=END_OF_DOCUMENT,
        num_sampled=12,
        bert_length=lambda tokens: int((tokens > UNKNOWN).sum()),
        document_block_size=5,
    )
    assert infos == theirs.infos
    assert sum(info.n_chunks_invalid for info in infos) > 0
    files = [sorted(f.relative_to(p) for f in (p / "db").rglob("*")) for p in (peer, tmp_path)]
    assert files[0] == files[1]
    for file in files[0]:
        if file.suffix == ".json":
            assert (peer / file).read_bytes() == (tmp_path / file).read_bytes()
        elif file.suffix == ".hdf5":
            with h5py.File(peer / file) as a, h5py.File(tmp_path / file) as b:
                assert sorted(a) == sorted(b)
                for name in a:
                    assert a[name].dtype == b[name].dtype
                    assert np.array_equal(a[name], b[name])


def test_megatron_reads_what_is_written(core: Path, peer: Path, tmp_path: Path) -> None:
    """Neighbors of another index, some missing, in a database with every chunk."""
    shutil.copytree(peer / "data", tmp_path / "data")
    theirs = RetroProject(peer, end_of_document=END_OF_DOCUMENT)
    settings = replace(
        theirs.settings, data_cache=str(tmp_path / "cache"), neighbor_folders={}, block_size=16
    )
    infos = write_chunk_database(tmp_path, settings, end_of_document=END_OF_DOCUMENT)
    num_chunks, rng = sum(info.n_chunks_train for info in infos), np.random.default_rng(5)
    for split in ("train", "valid"):
        shape = (len(theirs.neighbors(split)), 5)
        write_neighbors(tmp_path, split, rng.integers(-1, num_chunks, shape))
    run_world(core, "read", tmp_path)
    # The cache that names the order of samples is there now; so are the names that Megatron uses.
    for split in ("train", "valid"):
        (file,) = (tmp_path / "cache").glob(f"*-BlendedDataset-{split}-description.txt")
        name = f"{split}_{file.name.partition('-')[0]}"
        (tmp_path / "query" / split).rename(tmp_path / "query" / name)
        settings = replace(settings, neighbor_folders={**settings.neighbor_folders, split: name})
    settings.write(tmp_path)
    compare_samples(tmp_path)
