"""The tokenizer inside a GGUF file, as the files of a Hugging Face folder."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from megtool.errors import FormatError, MissingPackageError
from megtool.formats.gguf.header import read_header
from megtool.storage.local_copy import local_copy
from megtool.tensors.catalogue import StoredFile

_SAME_SPLIT = ("gpt2", "gpt-2", "default")
_DIGIT_SPLIT = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_ROLES = ("bos", "eos", "unknown", "padding")


def convert_gguf_tokenizer(path: Path, *, warnings: list[str] | None = None) -> dict[str, bytes]:
    """`tokenizer.json`, `tokenizer_config.json`, the chat template: file names to bytes.

    The conversion is transformers', with fixes for known losses: digits are split one by one for
    the models of `_DIGIT_SPLIT`, and the context length is the model's. Remaining doubts are
    appended to `warnings`.

    Raises:
        FormatError: the file has no tokenizer, or one that transformers cannot convert.
        MissingPackageError: transformers, torch or gguf is missing.
    """
    header = read_header(path, StoredFile.stat(path, "").size)
    values = header.values
    if "tokenizer.ggml.tokens" not in values:
        raise FormatError(
            "holds no tokenizer",
            file=path,
            hint="give one: --like HF_FOLDER",
            error_id="no-tokenizer",
        )
    with local_copy(path, head_bytes=header.start) as local:
        tokenizer = _load(local)
    _fix_tokenizer(tokenizer, values, [] if warnings is None else warnings)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}
    config = json.loads(files["tokenizer_config.json"])
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True)
    files["tokenizer_config.json"] = text.encode() + b"\n"
    return files


def _load(path: Path) -> Any:
    try:
        import gguf  # noqa: F401
        import torch  # noqa: F401
        from transformers import AutoTokenizer
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            f"converting a GGUF tokenizer needs the {e.name} package",
            hint="pip install 'megtool[gguf,hf]'; or give a tokenizer: --like HF_FOLDER",
        ) from e
    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except (KeyError, ValueError, NotImplementedError) as e:
        # Raised by transformers: a missing or unusable key, or an unknown model.
        raise FormatError(
            f"transformers cannot convert the tokenizer: {e}",
            file=path,
            hint="give one: --like HF_FOLDER",
        ) from e


def _fix_tokenizer(tokenizer: Any, values: dict[str, Any], warnings: list[str]) -> None:
    """Fix what transformers' conversion loses; warn about the rest."""
    architecture = values.get("general.architecture")
    context = values.get(f"{architecture}.context_length")
    if type(context) is int:
        tokenizer.model_max_length = context
    for role in _ROLES:
        number = values.get(f"tokenizer.ggml.{role}_token_id")
        short = {"unknown": "unk", "padding": "pad"}.get(role, role)
        if type(number) is int and getattr(tokenizer, f"{short}_token_id") != number:
            setattr(tokenizer, f"{short}_token", tokenizer.convert_ids_to_tokens(number))
    split = values.get("tokenizer.ggml.pre", "default")
    if values.get("tokenizer.ggml.model") != "gpt2" or split in _SAME_SPLIT:
        return
    if split not in _DIGIT_SPLIT:
        warnings.append(
            f"the tokenizer splits text as {split!r}, which the conversion may not follow: "
            "compare it with the original, or give that: --like HF_FOLDER"
        )
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
