"""Sound checkpoints, and copies of them to be damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megtool import reshard
from megtool.checkpoint.transport import kernel_copy, work_units
from tests.support.checkpoints.damage import FORMATS, SMALL, save_gguf
from tests.support.models import tiny_llama


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound checkpoint of every format, of the same model; those in folders have digests."""
    root = tmp_path_factory.mktemp("sound")
    original = tiny_llama.save(root / "original", dtype="float16", **SMALL)
    out = {}
    for name, options in FORMATS.items():
        out[name] = root / (f"{name}.safetensors" if name == "safetensors" else name)
        reshard(original, out[name], digest="all", **options)
    out["gguf"] = root / "model.gguf"
    save_gguf(out["gguf"], original)
    return out


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
    monkeypatch.setattr(kernel_copy, "UNIT_BYTES", 1000)
