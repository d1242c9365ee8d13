"""Sound checkpoints, and copies of them to be damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megtool.plan import work_units
from tests.support.checkpoints.damage import save_formats


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound checkpoint of every format, of the same model; those in folders have digests."""
    return save_formats(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def copied(sound: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a sound checkpoint, to be damaged."""

    def copy(kind: str) -> Path:
        target = tmp_path / sound[kind].name
        if sound[kind].is_dir():
            shutil.copytree(sound[kind], target)
        else:
            shutil.copy2(sound[kind], target)
        return target

    return copy


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units in few bytes."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 1000)
