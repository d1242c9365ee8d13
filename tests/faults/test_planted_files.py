"""Links and FIFOs planted under the names that verbs use while they write: refused, not followed.

`tests/staging/test_stage_planted.py` has those in the staging folder of a checkpoint.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import quantize, reshard, tokenize
from megtool.data.dataset_writer import DatasetFiles
from megtool.data.indexed import IndexedDataset, IndexedWriter
from megtool.data.token_cache import TokenCache
from megtool.errors import DestinationError, FormatError, MegtoolError
from megtool.formats.save_folder import TRACKER
from megtool.options.config_file import build_options
from megtool.quant.calibration import calibration_file_io
from megtool.quant.calibration.activations import Activations
from megtool.staging.destination.check import check_file
from megtool.storage.files import Files
from megtool.train.checkpointing.retention import read_tracker
from megtool.train.checkpointing.staged_iteration import StagedIteration, remove_unfinished
from megtool.train.options.config import TrainConfig
from megtool.train.resume_point import find_checkpoint
from megtool.train.run_identity import FRESH_RUN_FILE, RUN_FILE, RunIdentity
from megtool.train.run_log import LOG_FILE, RunLog, read_log
from tests.support.errors import raises
from tests.support.models import tiny_llama

VICTIM = b"somebody's own data"
PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, victim: path.symlink_to(victim / "file"),
    "link to a folder": lambda path, victim: path.symlink_to(victim),
    "hard link": lambda path, victim: path.hardlink_to(victim / "file"),
    "FIFO": lambda path, _: os.mkfifo(path),
}


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A FIFO that is opened blocks for ever."""

    def expire(*_: object) -> None:
        raise TimeoutError("a planted file was opened")

    former = signal.signal(signal.SIGALRM, expire)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user with a file, which no verb may touch."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "file").write_bytes(VICTIM)
    yield folder
    assert os.listdir(folder) == ["file"]
    assert (folder / "file").read_bytes() == VICTIM


def iteration(folder: Path) -> StagedIteration:
    return StagedIteration(Files(), folder, 1, number=0, rank=0, size=1, fsync=False, timeout_s=1.0)


def save_iteration(folder: Path) -> None:
    save = iteration(folder)
    save.begin()
    save.write("deep/data.bin", 3, [(0, b"abc")], ())
    save.mark_done()
    save.commit({"metadata.json": b"{}"})


def write_identity(folder: Path) -> None:
    RunIdentity(model={}, data={}).write(folder)


def find_run(folder: Path) -> None:
    find_checkpoint(folder, build_options(TrainConfig, {"data": ("x.txt",)}))


def write_data_set(folder: Path) -> None:
    with DatasetFiles(folder / "data", Files()) as target:
        with IndexedWriter(target.staged, np.dtype("<u2")) as writer:
            writer.add([1, 2])
            writer.end_document()
        target.commit(fsync=False)


def write_calibration(folder: Path) -> None:
    calibration_file_io.write(folder / "c.safetensors", {"a": np.zeros(1, "<f4")}, {"x": 1})


WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "save folder's staging": (save_iteration, ".megtool"),
    "staged iteration": (save_iteration, ".megtool/iter_0000001.0"),
    "tree of an iteration": (save_iteration, ".megtool/iter_0000001.0/tree"),
    "mark of a rank": (save_iteration, ".megtool/iter_0000001.0/rank_0.busy"),
    "file of an iteration": (save_iteration, ".megtool/iter_0000001.0/tree/deep/data.bin"),
    "staged tracker": (save_iteration, f".megtool/iter_0000001.0/{TRACKER}"),
    "lock of finetune": (lambda folder: remove_unfinished(Files(), folder), ".megtool"),
    "identity of a run": (write_identity, FRESH_RUN_FILE),
    "tokens of a run": (find_run, "data"),
    "cached tokens of a run": (find_run, "data/tokens-0"),
    "log of a run": (lambda folder: RunLog(folder).close(), f".{LOG_FILE}.new"),
    "staged data set": (write_data_set, ".data.bin.megtool"),
    "lock of a data set": (write_data_set, ".data.bin.megtool/lock"),
    "calibration file": (write_calibration, f".c.safetensors.{os.getpid()}.tmp"),
}


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", WRITERS)
def test_a_plant_is_refused(tmp_path: Path, victim: Path, name: str, kind: str) -> None:
    write, place = WRITERS[name]
    folder = tmp_path / "dst"
    (folder / place).parent.mkdir(parents=True)
    if ".bin.megtool" in place:
        (folder / place).parent.chmod(0o700)
    PLANTS[kind](folder / place, victim)
    with raises(DestinationError, file=folder / place, hint=True):
        write(folder)


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", ["data.bin", "data.idx"])
def test_staged_files_of_a_data_set_are_removed_first(
    tmp_path: Path, victim: Path, name: str, kind: str
) -> None:
    staging = tmp_path / "dst" / ".data.bin.megtool"
    staging.mkdir(parents=True, mode=0o700)
    PLANTS[kind](staging / name, victim)
    write_data_set(tmp_path / "dst")
    assert IndexedDataset(tmp_path / "dst" / "data")[0].tolist() == [1, 2]
    assert sorted(os.listdir(tmp_path / "dst")) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("kind", PLANTS)
def test_a_writer_of_data_sets_follows_no_link(tmp_path: Path, victim: Path, kind: str) -> None:
    for suffix in (".bin", ".idx"):
        PLANTS[kind](tmp_path / f"data{suffix}", victim)
    with IndexedWriter(tmp_path / "data", np.dtype("<u2")) as writer:
        writer.add([1])
        writer.end_document()
    assert len(IndexedDataset(tmp_path / "data")) == 1


def test_activations_are_spilled_to_a_regular_file(tmp_path: Path, victim: Path) -> None:
    import torch

    path = tmp_path / "into-00000-0000.bin"
    for kind, plant in PLANTS.items():
        place = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        plant(place, victim)
        activations = Activations(
            [2], 4, dtype=torch.float32, device=torch.device("cpu"), spilled=True
        )
        with raises(DestinationError, file=place):
            activations.begin(path)
        place.unlink()
        assert kind


@pytest.mark.parametrize("name", ["data.bin", "data.idx"])
def test_overwriting_a_data_set_replaces_no_fifo(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "text.txt").write_text("some text")
    source = tiny_llama.save(tmp_path / "hf")
    with raises(DestinationError, "FIFO", file=tmp_path / name):
        tokenize([tmp_path / "text.txt"], tmp_path / "data", tokenizer=source, overwrite=True)


@pytest.mark.parametrize("kind", ["FIFO", "link to a folder"])
def test_a_calibration_file_replaces_no_fifo(tmp_path: Path, victim: Path, kind: str) -> None:
    PLANTS[kind](tmp_path / "c.safetensors", victim)
    with raises(DestinationError, file=tmp_path / "c.safetensors", hint=True):
        check_file(tmp_path / "c.safetensors")


@pytest.mark.parametrize("kind", PLANTS)
def test_the_folder_of_an_interrupted_calibration(tmp_path: Path, victim: Path, kind: str) -> None:
    source = tiny_llama.save(tmp_path / "hf", num_hidden_layers=1)
    PLANTS[kind](tmp_path / ".out.calibration", victim)
    with raises(DestinationError, file=tmp_path / ".out.calibration", hint=True):
        quantize(source, tmp_path / "out", recipe="fp8", synthetic=True, samples=1, seq_length=16)


READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "log": (lambda folder: read_log(folder / LOG_FILE), LOG_FILE),
    "identity": (RunIdentity.read, RUN_FILE),
    "tracker": (read_tracker, TRACKER),
    "facts of a cache": (TokenCache, "facts.json"),
    "lengths of a cache": (TokenCache, "lengths.npy"),
}


@pytest.mark.parametrize("name", READERS)
def test_what_a_run_reads_back_is_no_fifo(tmp_path: Path, name: str) -> None:
    read, file = READERS[name]
    if file == "lengths.npy":
        (tmp_path / "facts.json").write_text("{}")
    os.mkfifo(tmp_path / file)
    with raises(FormatError, "FIFO", file=tmp_path / file, hint=True):
        read(tmp_path)


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", ["lock", "journal", "old", ""])
def test_a_whole_reshard(tmp_path: Path, victim: Path, name: str, kind: str) -> None:
    """As it was found: the lock's target was overwritten, and the journal never opened."""
    source = tiny_llama.save(tmp_path / "hf", num_hidden_layers=1)
    staging = tmp_path / ".out.megtool"
    if name:
        staging.mkdir(mode=0o700)
    PLANTS[kind](staging / name if name else staging, victim)
    with pytest.raises(MegtoolError) as caught:
        reshard(source, tmp_path / "out", to="dcp", fsync=False)
    assert isinstance(caught.value, DestinationError)
    assert str(staging) in str(caught.value.file)
