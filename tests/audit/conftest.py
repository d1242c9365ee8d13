"""A healthy run of `finetune` with six saves, which tests copy and damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megtool import reshard
from tests.support.models import tiny_text
from tests.support.runs.finetune_runs import save_lines, tune

STEPS = (2, 4, 6, 8)


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    model = tiny_text.save(folder / "model")
    data = save_lines(folder)
    tune(model, folder / "run", data, save_interval=2, train_iters=STEPS[-1])
    return folder / "run"


@pytest.fixture(scope="session")
def on_ranks(healthy: Path) -> Path:
    """The same run at tp=2, in two files each."""
    run = healthy.parent / "ranks"
    for step in STEPS:
        name = f"iter_{step:07d}"
        reshard(healthy / name, healthy.parent / "one", to="torch_dist", tp=2, overwrite=True)
        (run / name).parent.mkdir(exist_ok=True)
        shutil.move(healthy.parent / "one" / name, run / name)
    (run / "latest_checkpointed_iteration.txt").write_text(f"{STEPS[-1]}")
    return run


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "run"))


@pytest.fixture
def ranked_run(on_ranks: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(on_ranks, tmp_path / "run"))


@pytest.fixture
def save_of(run: Path) -> Callable[[int], Path]:
    return lambda step: run / f"iter_{step:07d}"
