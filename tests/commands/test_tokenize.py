"""Tokenize: what is written, that nothing half is, and the command line."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from megtool import reshard, tokenize
from megtool.cli.app import main
from megtool.data import chunk_encoder
from megtool.data.indexed import IndexedDataset
from megtool.errors import DestinationError, FormatError, StorageError, UsageError
from tests.support.errors import raises
from tests.support.models import tiny_llama, tiny_tokenizer
from tests.support.threads import kill_threads, refuse_threads

WORDS = tiny_tokenizer.WORDS.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.save(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of very different lengths, some without text."""
    rng = np.random.default_rng(0)
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        for i in range(900):
            text = " ".join(rng.choice(WORDS, int(rng.integers(0, 40)) if i % 7 else 0))
            file.write(json.dumps({"text": text, "id": i}) + "\n")
    return path


def names(place: Path) -> set[str]:
    return {p.name for p in place.iterdir()}


def test_documents_are_the_tokenizers_tokens_in_order(
    corpus: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    peer = AutoTokenizer.from_pretrained(str(folder))
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    wanted = [[*peer.encode(t), 1] for t in texts if t]
    monkeypatch.setattr(chunk_encoder, "_CHUNK_BYTES", 1000)
    written = set()
    for workers in (1, 3):
        seen: list[tuple[int, int]] = []
        report = tokenize(
            corpus,
            tmp_path / f"out{workers}",
            tokenizer=folder,
            append_eos=True,
            workers=workers,
            progress=lambda stage, n, total, seen=seen: seen.append((n, total)),
        )
        data = IndexedDataset(tmp_path / f"out{workers}")
        assert [d.tolist() for d in data.documents()] == wanted
        assert (report.documents, report.tokens) == (len(wanted), sum(map(len, wanted)))
        assert report.empty == len(texts) - len(wanted) > 100
        assert report.text_bytes == sum(map(len, texts))
        assert report.written_bytes == data.data_file.stat().st_size + (
            data.index_file.stat().st_size
        )
        assert sum(n for n, _ in seen) == corpus.stat().st_size == report.source_bytes
        assert {total for _, total in seen} == {corpus.stat().st_size}
        written.add(data.data_file.read_bytes() + data.index_file.read_bytes())
    assert len(written) == 1
    assert data.dtype == np.uint16
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    files = [f"out{workers}.{suffix}" for workers in (1, 3) for suffix in ("bin", "idx")]
    assert names(tmp_path) == {"corpus.jsonl", *files}


def test_a_checkpoint_of_any_format_brings_its_tokenizer(
    folder: Path, corpus: Path, tmp_path: Path
) -> None:
    tiny_llama.save(tmp_path / "hf", vocab_size=300)
    for path in folder.iterdir():
        (tmp_path / "hf" / path.name).write_bytes(path.read_bytes())
    reshard(tmp_path / "hf", tmp_path / "dist", to="torch_dist", tp=2)
    one = tokenize(corpus, tmp_path / "one", tokenizer=folder)
    two = tokenize(corpus, tmp_path / "two", tokenizer=tmp_path / "dist")
    assert one.tokens == two.tokens
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.bin").read_bytes()
    tiny_llama.save(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink(missing_ok=True)
    with raises(FormatError, id="no-tokenizer"):
        tokenize(corpus, tmp_path / "three", tokenizer=tmp_path / "bare")


def test_conversations_are_written_as_the_template_says(folder: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "the text"}, {"role": "assistant", "content": "reads"}]
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"text": "the"}) + "\n")
    tokenize(source, tmp_path / "out", tokenizer=folder)
    one, two = IndexedDataset(tmp_path / "out").documents()
    assert one.tolist()[0] == 2
    assert one.tolist().count(3) == 2
    assert two.tolist() == tokenize_one("the", folder, tmp_path)


def tokenize_one(text: str, folder: Path, place: Path) -> list[int]:
    (place / "one.txt").write_text(text)
    tokenize(place / "one.txt", place / "one", tokenizer=folder)
    return IndexedDataset(place / "one")[0].tolist()


def test_a_place_that_is_taken(corpus: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out.idx").write_text("mine")
    with raises(DestinationError, id="destination-exists"):
        tokenize(corpus, tmp_path / "out", tokenizer=folder)
    assert (tmp_path / "out.idx").read_text() == "mine"
    tokenize(corpus, tmp_path / "out.bin", tokenizer=folder, overwrite=True)
    assert IndexedDataset(tmp_path / "out").num_documents > 0
    (tmp_path / "dir.bin").mkdir()
    with pytest.raises(DestinationError, match="is a folder"):
        tokenize(corpus, tmp_path / "dir", tokenizer=folder, overwrite=True)


def test_a_failure_leaves_what_was_there(corpus: Path, folder: Path, tmp_path: Path) -> None:
    tokenize(corpus, tmp_path / "out", tokenizer=folder)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with corpus.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(FormatError, match="line 901"):
        tokenize(corpus, tmp_path / "out", tokenizer=folder, overwrite=True)
    with pytest.raises(FormatError, match="line 901"):
        tokenize(corpus, tmp_path / "new" / "out", tokenizer=folder)
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p != corpus} == {
        p: data for p, data in before.items() if p != corpus
    }


def test_an_interrupted_run_leaves_nothing(corpus: Path, folder: Path, tmp_path: Path) -> None:
    def interrupt(stage: str, num_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(corpus, tmp_path / "out", tokenizer=folder, progress=interrupt)
    assert names(tmp_path) == {"corpus.jsonl"}
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_nothing_to_write(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UsageError, match="no document with any text"):
        tokenize(tmp_path / "a.txt", tmp_path / "out", tokenizer=folder)
    with pytest.raises(UsageError, match="SRC is missing"):
        tokenize([], tmp_path / "out", tokenizer=folder)
    with pytest.raises(UsageError, match="no such file"):
        tokenize(tmp_path / "b.txt", tmp_path / "out", tokenizer=folder)
    with pytest.raises(UsageError, match="--workers is 0"):
        tokenize(tmp_path / "a.txt", tmp_path / "out", tokenizer=folder, workers=0)
    assert names(tmp_path) == {"a.txt"}


def test_a_file_that_may_not_grow_is_an_error(tmp_path: Path) -> None:
    from megtool.data.indexed import IndexedWriter

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            _fill(IndexedWriter(tmp_path / "a", np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _fill(writer: Any) -> None:
    with writer:
        for _ in range(3):
            writer.add(np.zeros(1 << 20, np.uint16))
        writer.end_document()


@pytest.mark.slow
def test_a_killed_run_leaves_no_data_set_and_does_not_stop_the_next(
    folder: Path, tmp_path: Path
) -> None:
    fifo = tmp_path / "feed.jsonl"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "megtool", "tokenize", str(fifo), "out", "--tokenizer"]
    run = subprocess.Popen([*command, str(folder)], cwd=tmp_path, env=_environment())
    with fifo.open("w") as feed:
        for _ in range(300):
            feed.write(json.dumps({"text": " ".join(WORDS * 100)}) + "\n")
        feed.flush()
        staged = tmp_path / ".out.bin.megtool" / "out.bin"
        for _ in range(200):
            if staged.exists():
                break
            time.sleep(0.05)
        second = subprocess.run(
            [sys.executable, "-m", "megtool", "tokenize", __file__, "out", "--tokenizer", folder],
            cwd=tmp_path,
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert second.returncode == 2
    assert "is writing this destination" in second.stderr
    assert names(tmp_path) == {"feed.jsonl", ".out.bin.megtool"}
    fifo.unlink()
    report = tokenize(__file__, tmp_path / "out", tokenizer=folder)
    assert report.documents == 1
    assert names(tmp_path) == {"out.bin", "out.idx"}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_the_command_line(
    corpus: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the model reads")
    arguments = ["tokenize", str(corpus), str(other), str(tmp_path / "out")]
    arguments += ["--tokenizer", str(folder)]
    assert main([*arguments, "--dry-run"]) == 0
    assert "sample" in capsys.readouterr().out
    assert names(tmp_path) == {"corpus.jsonl", "other.txt"}
    assert main([*arguments, "--json", "--workers", "2", "--no-fsync"]) == 0
    said = json.loads(capsys.readouterr().out)
    data = IndexedDataset(tmp_path / "out")
    assert said["documents"] == len(data)
    assert said["tokens"] == data.num_tokens
    assert said["sources"] == [str(corpus), str(other)]
    assert main(arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--field", "nope"]) == 3
    assert "one of: id, text" in capsys.readouterr().err
    assert main(arguments[:-2]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_threads_that_die_or_cannot_start_leave_nothing(
    corpus: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_encoder, "_CHUNK_BYTES", 1000)
    with monkeypatch.context() as patch:
        kill_threads(patch, {1, 2, 3})
        with pytest.raises(MemoryError):
            tokenize(corpus, tmp_path / "out", tokenizer=folder, workers=3)
    with monkeypatch.context() as patch:
        refuse_threads(patch, after=1)
        with raises(StorageError, "thread", hint="ulimit -u"):
            tokenize(corpus, tmp_path / "out", tokenizer=folder, workers=3)
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert not {n for n in names(tmp_path) if n.startswith("out")}
