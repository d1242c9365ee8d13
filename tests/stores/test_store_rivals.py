"""Two processes that write one destination in a bucket, one of them killed: one whole result."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megtool import clean, reshard
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.paths import ROOT
from tests.support.stores.s3_bucket import S3Bucket

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("made") / "source", num_hidden_layers=8)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_earlier", [False, True], ids=["new", "overwrite"])
def test_a_killed_writer_and_its_rival(
    source: Path, tmp_path: Path, s3_bucket: S3Bucket, seed: int, has_earlier: bool
) -> None:
    rng = random.Random(seed)
    url = s3_bucket.url("run")
    reshard(source, tmp_path / "out", to="torch_dist", tp=2)
    if has_earlier:
        reshard(source, url, to="torch_dist", tp=2)
    whole = contents(tmp_path / "out")
    more = ["--overwrite"] if has_earlier else []
    command = [sys.executable, "-m", "megtool", "reshard", str(source), url, "--to=torch_dist"]
    environment = os.environ | s3_bucket.environment
    children = [
        subprocess.Popen(
            [*command, "--tp=2", "-q", *more],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    time.sleep(rng.uniform(1.0, 6.0))
    children[0].kill()
    children[0].communicate()
    _, text = children[1].communicate(timeout=300)
    assert children[1].returncode in (0, 2), text
    assert "Traceback" not in text
    if children[1].returncode == 0 or has_earlier:
        assert s3_bucket.contents("run/") == whole
    else:
        assert sum(line.startswith("error:") for line in text.splitlines()) == 1
    reshard(source, url, to="torch_dist", tp=2, overwrite=True)
    assert s3_bucket.contents("run/") == whole
    clean(url, yes=True)
    assert [key for key in s3_bucket.keys("") if ".megtool" in key] == []
    assert s3_bucket.uploads() == {}
