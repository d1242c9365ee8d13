"""Verbs against a real server, also in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megtool import reshard
from tests.support.attack import specimens
from tests.support.stores.s3_bucket import S3Bucket

pytest.importorskip("boto3")

NAMES = ("torch_dist", "ocdbt", "gguf")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return specimens.shared_specimens(tmp_path_factory)


def megtool(*words: object, launcher: tuple[str, ...] = ()) -> dict[str, object]:
    """The report of a command in a process of its own."""
    program = [*launcher, "-m", "megtool"] if launcher else [sys.executable, "-m", "megtool"]
    done = subprocess.run(
        [*program, *map(str, words), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, object] = json.loads(done.stdout[done.stdout.index("{") :])
    return report


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_read_by_a_process(
    local: Path, s3_bucket: S3Bucket, tmp_path: Path, name: str
) -> None:
    path = specimens.path_of(local, name)
    url = s3_bucket.upload(path, path.name)
    megtool("reshard", url, tmp_path / "hf", "--to=hf", "--no-fsync", "--dtype=float32")
    reshard(path, tmp_path / "expected", to="hf", fsync=False, dtype="float32")
    for file in sorted((tmp_path / "expected").iterdir()):
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes()


def test_a_model_is_run_and_calibrated_from_a_bucket(
    local: Path, s3_bucket: S3Bucket, tmp_path: Path
) -> None:
    url = s3_bucket.upload(local / "torch_dist", "run")
    data = s3_bucket.upload(local / "text.jsonl", "text.jsonl")
    text = megtool("generate", url, "--prompt=the model", "--max-new-tokens=3")
    assert text["answers"]
    scored = megtool("evaluate", url, f"--data={data}", "--max-tokens=100")
    assert scored["tokens"]
    calibrate = ("--recipe=fp8", f"--data={data}", "--samples=2", "--seq-length=32", "--no-fsync")
    megtool("quantize", url, tmp_path / "fp8", *calibrate)
    megtool("tokenize", data, tmp_path / "tokens", f"--tokenizer={url}")
    assert (tmp_path / "tokens.idx").is_file()


@pytest.mark.slow
def test_ranks_read_a_bucket(local: Path, s3_bucket: S3Bucket, tmp_path: Path) -> None:
    url = s3_bucket.upload(local / "torch_dist", "run")
    data = s3_bucket.upload(local / "text.jsonl", "text.jsonl")
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=2")
    words = ("evaluate", url, f"--data={data}", "--max-tokens=100", "--tp=2", "--threads=1")
    report = megtool(*words, launcher=torchrun)
    alone = megtool("evaluate", local / "torch_dist", *words[2:4], "--threads=1")
    assert report["loss"] == pytest.approx(alone["loss"], rel=1e-3)
