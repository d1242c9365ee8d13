"""Comparison of the small files of two models: tokenizer, chat template, generation settings, code.

JSON is compared by value, everything else by its bytes. What no program reads (README, licenses,
the recipe of a quantization) is told and is no difference.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megtool.commands.reports.verify import Difference, PartCheck
from megtool.formats.safetensors.quantization_config import QUANT_FILE
from megtool.source.checkpoint import CheckpointSource, collect_saved_tokenizer
from megtool.storage.files import Files, opened, read_file

PART: Final = "files"

_CONFIG = "config.json"
_TEMPLATE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
_READ = re.compile(
    r"tokenizer.*|.*\.tiktoken|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|"
    r"chat_template.*|additional_chat_templates/.*|generation_config\.json|spiece\.model|"
    r".*processor_config\.json|.*\.(py|model|spm)"
)
"""Files that change what a model is given, or what is made of its logits."""
_BOOKKEEPING = frozenset(
    {"transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "_from_model_config"}
)
"""Keys that say who wrote a file."""
_NOT_OF_MODEL = re.compile(
    r"(modelopt_state|context)/.*|run_config\.yaml|train_state\.pt|trainer_state\.json|"
    r"metadata\.json|config\.json|" + re.escape(QUANT_FILE)
)
_GGUF_PREFIX = "tokenizer."
_CHUNK_BYTES = 4 << 20
_SHOWN_KEYS = 6


def compare_files(a: CheckpointSource, b: CheckpointSource) -> tuple[PartCheck, list[Difference]]:
    """Compare the files beside the tensors of two checkpoints by name.

    Raises:
        StorageError: a file cannot be read.
    """
    differences: list[Difference] = []
    compared: list[str] = []
    uncompared: dict[str, str] = {}
    files_a, files_b = read_attached_files(a), read_attached_files(b)
    for path, files in ((a.path, files_a), (b.path, files_b)):
        if not files and (files_a or files_b):
            names = files_a or files_b
            uncompared |= dict.fromkeys(names, f"{path} holds no files beside its tensors")
    both_hold = files_a and files_b
    for name in (*files_a, *(n for n in files_b if n not in files_a)) if both_hold else ():
        is_read = _READ.fullmatch(name) is not None
        if name not in files_a or name not in files_b:
            has, lacks = (a.path, b.path) if name in files_a else (b.path, a.path)
            if is_read:
                differences.append(_difference(name, f"is in {has}, and not in {lacks}"))
            else:
                uncompared[name] = f"{has} alone has it, and no program reads it"
        elif (text := _compare(files_a[name], files_b[name])) is None:
            compared.append(name)
        elif is_read:
            compared.append(name)
            differences.append(_difference(name, text))
        else:
            uncompared[name] = f"{text}, and no program reads it"
    if not compared and not uncompared and not differences:
        uncompared = {PART: "neither of the two holds any beside its tensors"}
    return PartCheck.of(PART, compared, uncompared, differences), differences


def read_attached_files(source: CheckpointSource) -> dict[str, Any]:
    """Return the files of a model by name: JSON as values, others as bytes.

    A chat template is one file, wherever it stands. A GGUF file has its tokenizer's entries.

    Raises:
        StorageError: a file cannot be read.
    """
    if (facts := source.catalogue.metadata.get("gguf")) is not None:
        return {k: v for k, v in facts.items() if k.startswith(_GGUF_PREFIX)}
    paths = source.attachments() if source.like is None else {}
    contents: dict[str, bytes] = {
        name: source.edited.get(name) or read_file(path)
        for name, path in paths.items()
        if not _NOT_OF_MODEL.fullmatch(name)
    }
    if source.like is None:
        contents |= collect_saved_tokenizer(source)
    out = {name: _value(name, data) for name, data in contents.items()}
    settings = out.get(_TOKENIZER_CONFIG)
    if isinstance(settings, dict) and isinstance(settings.get("chat_template"), str):
        template = settings.pop("chat_template")
        out.setdefault(_TEMPLATE, template.encode())
    return out


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file of any size.

    Raises:
        StorageError: it cannot be read.
    """
    files, digest, offset = Files(), hashlib.sha256(), 0
    buffer = bytearray(_CHUNK_BYTES)
    with opened(path) as fd:
        size = files.fstat(fd).st_size
        while offset < size:
            part = memoryview(buffer)[: min(_CHUNK_BYTES, size - offset)]
            files.pread_into(fd, part, offset)
            digest.update(part)
            offset += len(part)
    return digest.hexdigest()


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON file, None if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _value(name: str, data: bytes) -> Any:
    value = parse_json(data) if name.endswith(".json") else None
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if k not in _BOOKKEEPING}
    return data if value is None else value


def _compare(a: Any, b: Any) -> str | None:
    """Return how two files differ; None if they are equal."""
    if a == b:
        return None
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [str(k) for k in {**a, **b} if k not in a or k not in b or a[k] != b[k]]
        more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        return f"differs in {', '.join(keys[:_SHOWN_KEYS])}{more}"
    if isinstance(a, bytes) and isinstance(b, bytes):
        return f"its bytes differ ({len(a):,} and {len(b):,})"
    if isinstance(a, str | int | float) and isinstance(b, str | int | float):
        return f"{a!r:.80} and {b!r:.80}"
    return "differs"


def _difference(name: str, text: str) -> Difference:
    return Difference(tensor=name, stored=name, kind="file", text=text, part=PART)
