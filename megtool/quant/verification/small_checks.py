"""Small checks: the files beside the tensors are the model's own, but for what is said of codes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megtool.checkpoint.formats.quantized import QUANT_FILE, QUANT_KEYS
from megtool.checkpoint.formats.safetensors import INDEX
from megtool.quant.verification.findings import Finding, error
from megtool.quant.verification.stored_folder import Folder

_MISSING = object()


def check_small(folder: Folder, small: Mapping[str, bytes]) -> Iterator[Finding]:
    """Files that are not those of the unquantized model: config.json by what it says, without what
    it says of quantization, others byte for byte."""
    for name, data in small.items():
        if name in (INDEX, QUANT_FILE):
            continue  # they are about the tensors, and checked with these
        if name == "config.json":
            yield from _config(folder, data)
            continue
        try:
            found = (folder.path / name).read_bytes()
        except OSError:
            yield error("file", name, "is not there, and the source has it", _meaning(name))
            continue
        if found != data:
            text = f"is not the source's: {len(found):,} bytes, there {len(data):,}"
            yield error("file", name, text, _meaning(name))


def _meaning(name: str) -> str:
    if "token" in name or name in ("vocab.json", "merges.txt", "chat_template.jinja"):
        return "texts become other tokens, or engines cannot start"
    return "engines compute or stop otherwise than with the source"


def _config(folder: Folder, data: bytes) -> Iterator[Finding]:
    if folder.config is None:
        return  # told with the folder's faults
    due, found = _plain(json.loads(data)), _plain(folder.config)
    for key in sorted(due.keys() | found.keys()):
        wanted, held = due.get(key, _MISSING), found.get(key, _MISSING)
        if wanted != held or type(wanted) is not type(held):
            yield error(
                "config",
                "config.json",
                f"{key} is {_shown(held)}, in the source {_shown(wanted)}",
                "engines compute another model, or load it in another type",
            )


def _plain(value: Any) -> dict[str, Any]:
    """What a config says of the model itself."""
    return (
        {k: v for k, v in value.items() if k not in QUANT_KEYS} if isinstance(value, dict) else {}
    )


def _shown(value: object) -> str:
    return "not there" if value is _MISSING else json.dumps(value)[:80]
