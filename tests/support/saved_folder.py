"""Saved folder: what a Hugging Face folder holds, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def stored(folder: Path) -> Stored:
    """Dtype, shape and bytes of every tensor in a folder."""
    return {
        name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
        for file in sorted(folder.glob("*.safetensors"))
        for name, t in safetensors.deserialize(file.read_bytes())
    }


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json."""
    loaded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return loaded
