"""TensorRT-LLM's own checkpoints of releases up to 1.x, which are written and not read."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from megtool.errors import UsageError

FIRST = "rank0.safetensors"


def refuse_legacy(folder: Path, present: Collection[str]) -> None:
    """Say what the folder is, if it is one of these; `present` are its files.

    Files of several ranks call their tensors alike, so that it would look like several checkpoints.

    Raises:
        UsageError: it is.
    """
    if FIRST not in present:
        return
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    if not isinstance(config, dict) or not isinstance(config.get("mapping"), dict):
        return
    raise UsageError(
        "this is a legacy TensorRT-LLM checkpoint (a file a rank), which megtool writes and does "
        "not read",
        file=folder,
        hint="trtllm-build reads it; give the folder it was exported from, or one of its files "
        f"({FIRST})",
    )
