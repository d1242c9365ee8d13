"""Small files beside the tensors: config, tokenizer, and where they lie in each format."""

from __future__ import annotations

import json
import logging

from megtool.checkpoint.formats import WITH_HF_FOLDER
from megtool.checkpoint.formats.quantized import QUANT_FILE, QUANT_KEYS
from megtool.dtypes import DType
from megtool.errors import MissingPackageError
from megtool.reshard.open_source import CheckpointSource, Model

_LOG = logging.getLogger(__name__)


_TOKENIZER = "tokenizer/"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)


def hugging_face_files(source: CheckpointSource, dtype: DType | None) -> dict[str, bytes]:
    """The small files of the model's Hugging Face folder, its config.json telling the dtype."""
    files = _plain(
        {
            name: source.edited[name] if name in source.edited else path.read_bytes()
            for name, path in source.attachments().items()
        }
    )
    model = source.model
    if model is None or model.family is None:
        return files
    if "gguf" in source.catalogue.metadata and source.like is None:
        files |= _tokenizer_files(source)
    if "config.json" not in files:
        files["config.json"] = _new_config(model, dtype)
    elif dtype is not None:
        files["config.json"] = _with_dtype(files["config.json"], dtype)
    return files


def saved_tokenizer(source: CheckpointSource) -> dict[str, bytes]:
    """The tokenizer of Hugging Face that Megatron saved beside its data, unless `hf/` has one."""
    own = source.attachments()
    if any(name.startswith("tokenizer") for name in own):
        return {}
    found = source.catalogue.attachments
    return {
        name: found[_TOKENIZER + name].read_bytes()
        for name in _TOKENIZER_FILES
        if _TOKENIZER + name in found and name not in own
    }


def _plain(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files without what they say about quantization: what is written is not quantized."""
    out = {name: data for name, data in files.items() if name != QUANT_FILE}
    if "config.json" not in out:
        return out
    try:
        value = json.loads(out["config.json"])
    except ValueError:
        return out
    text = value.get("text_config") if isinstance(value, dict) else None
    found = 0
    for place in (value, text):
        for key in QUANT_KEYS:
            found += isinstance(place, dict) and place.pop(key, None) is not None
    if found:
        if not {"dtype", "torch_dtype"} & {*value, *(text or ())}:
            value["dtype"] = "bfloat16"
        out["config.json"] = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    return out


def _tokenizer_files(source: CheckpointSource) -> dict[str, bytes]:
    from megtool.checkpoint.formats.gguf_tokenizer import tokenizer_files

    warnings: list[str] = []
    if "tokenizer.ggml.tokens" not in source.catalogue.metadata["gguf"]:
        _LOG.warning("the file holds no tokenizer: --like FOLDER takes one from elsewhere")
        return {}
    try:
        found = tokenizer_files(source.path, warnings=warnings)
    except MissingPackageError as e:
        warnings.append(f"the tokenizer is not written: {e.message} ({e.hint})")
        found = {}
    for warning in warnings:
        _LOG.warning("%s", warning)
    return found


def _new_config(model: Model, dtype: DType | None) -> bytes:
    if model.family is None:
        raise ValueError("a config.json needs a family")
    config = model.family.write_config(model.config, dtype=dtype.name if dtype else None)
    return (json.dumps(config, indent=2) + "\n").encode()


def _with_dtype(config: bytes, dtype: DType) -> bytes:
    value = json.loads(config)
    key = "dtype" if "dtype" in value else "torch_dtype"
    value[key] = dtype.name
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def files_beside_ranks(
    source: CheckpointSource, dtype: DType | None, left_out: tuple[str, ...] = ()
) -> dict[str, bytes]:
    """Hugging Face files under `hf/`, and what else lies beside a Megatron checkpoint's data.

    Files of folders named in `left_out` stay behind.
    """
    out = {f"hf/{n}": data for n, data in hugging_face_files(source, dtype).items()}
    if source.catalogue.format in WITH_HF_FOLDER:
        for name, path in source.catalogue.attachments.items():
            if not name.startswith(("hf/", *left_out)):
                edited = source.edited.get(name)
                out[name] = path.read_bytes() if edited is None else edited
    return out
