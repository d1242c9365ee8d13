"""Checkpoints to upload."""

from __future__ import annotations

from pathlib import Path

import pytest

from megtool import reshard
from tests.support.checkpoints.damage import FORMATS, SMALL, save_gguf
from tests.support.models import tiny_llama


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model in every format, on the local disk, with digests where it is a folder."""
    root = tmp_path_factory.mktemp("checkpoints")
    original = tiny_llama.save(root / "original", dtype="float16", **SMALL)
    out = {}
    for name, options in FORMATS.items():
        out[name] = root / (f"{name}.safetensors" if name == "safetensors" else name)
        reshard(original, out[name], digest="all", **options)
    out["gguf"] = root / "model.gguf"
    save_gguf(out["gguf"], original)
    return out
