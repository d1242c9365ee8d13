"""An open checkpoint: its tensors, its model, and the small files that belong to the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.convert.canonical_view import CanonicalView, FalseCopy
from megtool.convert.families.family import Family
from megtool.digests.crc32c import Sidecar
from megtool.dtypes import DType
from megtool.errors import FormatError, MappingError, MissingPackageError
from megtool.formats import HF_SUBFOLDER_FORMATS
from megtool.formats.auxiliary_files import find_auxiliary_files
from megtool.formats.safetensors.quantization_config import (
    METHOD_FILES,
    QUANT_FILE,
    QUANT_KEYS,
    TRANSFORMS_KEY,
)
from megtool.source.held_settings import check_held, check_said
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import read_file
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer

HF_FOLDER = "hf/"
"""Where a Megatron checkpoint carries the small files of a Hugging Face folder."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Which model a checkpoint holds.

    `family` is None for a Megatron checkpoint that names none; `hf_config` is the config.json the
    configuration was read from, if any. `assumed` are keys of a config.json that nothing in the
    checkpoint states, so that the family's defaults are used: only forward passes depend on them.
    `dropped` are settings that the user has asked to leave out, with what they were: fields, or
    other keys.
    `unsupported` names settings that change the model and that `config` does not have: Megatron's
    formats keep them, and whatever else is made of the model computes something else.
    """

    family: Family | None
    config: ModelConfig
    hf_config: Mapping[str, Any] | None = None
    assumed: tuple[str, ...] = ()
    unsupported: MappingError | None = None
    dropped: Mapping[str, Any] = field(default_factory=dict)

    def describe_dropped(self) -> str:
        """Say which settings the user has left out."""
        names = ", ".join(f"{n}={v!r:.40}" for n, v in self.dropped.items())
        return f"without settings that the model computes by, as --drop-setting says: {names}"

    @property
    def dropped_record(self) -> dict[str, Any] | None:
        """The dropped settings as plain data; None if there are none."""
        if not self.dropped:
            return None
        plain: dict[str, Any] = json.loads(json.dumps(dict(self.dropped), default=str))
        return plain


@dataclass(slots=True, kw_only=True)
class CheckpointSource:
    """An open checkpoint. Where `model` is None, `reason` says why the model is not known.

    `left_out` counts the stored tensors that were not selected, some of which may be the model's
    with `is_partial`; `optimizer_bytes` is the size of
    optimizer state that was not asked for. `edited` maps small files to contents that replace those
    on disk. `repeats` maps canonical tensors that the model has twice, and the checkpoint once, to
    the name under which they are read. `false_copies` are stored tensors that a table takes for
    copies and that are none, and have no place in the model. `pruning` records what was left out of
    the whole model (see `width_subset`). `rotation` has the `settings` of the rotations that its
    weights are multiplied by, and the `transform_config` of compressed-tensors that describes them;
    this alone if only config.json says that they are. `adapters` are merged into its weights.
    """

    path: Path
    catalogue: Catalogue
    model: ModelIdentity | None
    reason: MappingError | None
    view: CanonicalView
    sidecar: Sidecar | None
    like: Path | None
    left_out: int = 0
    optimizer_bytes: int = 0
    edited: Mapping[str, bytes] = field(default_factory=dict)
    repeats: Mapping[str, str] = field(default_factory=dict)
    false_copies: tuple[FalseCopy, ...] = ()
    is_partial: bool = False
    pruning: Mapping[str, Any] | None = None
    rotation: Mapping[str, Any] | None = None
    adapters: tuple[Path, ...] = ()

    @property
    def is_canonical(self) -> bool:
        """Whether tensors have canonical names instead of their stored ones."""
        return self.view.dialect != "identity"

    @property
    def format(self) -> str:
        """The checkpoint's format."""
        return self.catalogue.format

    @property
    def family_name(self) -> str | None:
        """The name of the model's family, None where it has none."""
        return self.model.family.name if self.model and self.model.family else None

    @property
    def known_config(self) -> ModelConfig | None:
        """The model's configuration, None where the model is not known."""
        return self.view.config or (self.model.config if self.model else None)

    @property
    def config(self) -> ModelConfig:
        """The model's configuration.

        Raises:
            MappingError: the model is not known.
        """
        config = self.known_config
        if config is None:
            raise unknown_model(self, "the model's configuration is needed")
        return config

    @property
    def num_bytes(self) -> int:
        """Bytes of the selected tensors as they are stored."""
        return sum(t.num_bytes for t in self.view.canonical.values())

    @property
    def paths(self) -> list[Path]:
        """Files and folders, which a destination must neither contain nor be inside."""
        catalogue = self.catalogue
        if self.path.is_dir():
            return [self.path, catalogue.root, *self.adapters]
        files = (catalogue.path(i) for i in range(len(catalogue.files)))
        return [self.path, *self.adapters, *files]

    def placement_of(self, name: str) -> Placement:
        """Where a canonical tensor is read from."""
        return self.view.placements[self.repeats.get(name, name)]

    def check_config(self, stored: Mapping[str, Any] | None = None) -> None:
        """Refuse a config.json that the model's family reads as another model.

        Without `stored`, its keys, they are those of the source, or what the family makes of the
        model.

        Raises:
            MappingError: it does not hold a setting; the hint names families that do.
        """
        model = self.model
        if model is None or model.family is None or not self.is_canonical:
            return
        if stored is None:
            stored = model.hf_config or model.family.write_config(self.config)
        check_held(
            model.family,
            self.view,
            self.config,
            stored,
            dropped=model.dropped,
            is_partial=self.is_partial,
        )

    def check_said(
        self, family: Family, describe: Callable[[ModelConfig], object], place: str
    ) -> None:
        """Refuse a file that would be the same without a setting of the model.

        `describe` makes what the file says of a configuration of `family`; `place` names it.

        Raises:
            MappingError: it does not hold a setting.
        """
        dropped = self.model.dropped if self.model else {}
        check_said(family, self.config, describe, place=place, dropped=dropped)

    def attachments(self) -> dict[str, Path]:
        """Small files of the model's Hugging Face folder, by their path inside it."""
        if self.like is not None:
            return _find_attachments(self.like)
        files = self.catalogue.auxiliary_files
        if self.catalogue.format not in HF_SUBFOLDER_FORMATS:
            return dict(files)
        return {n.removeprefix(HF_FOLDER): p for n, p in files.items() if n.startswith(HF_FOLDER)}

    def tokenizer(self, folder: str | Path | None = None) -> Tokenizer:
        """The checkpoint's own tokenizer, or the one in `folder`.

        Raises:
            FormatError: there is no tokenizer.
            MappingError: it has tokens that the model does not know.
        """
        from megtool.data.tokenizer import Tokenizer

        if folder is not None:
            tokenizer = Tokenizer.from_folder(folder)
        else:
            files = _collect_files(self, None) | collect_saved_tokenizer(self)
            try:
                tokenizer = Tokenizer.load(files)
            except FormatError as e:
                raise FormatError(
                    e.message, file=e.file or self.path, hint=e.hint, error_id=e.error_id
                ) from e
        tokenizer.check_vocabulary(self.config.embedding.vocab_size)
        return tokenizer


def require_model(source: CheckpointSource, purpose: str) -> tuple[ModelIdentity, ModelConfig]:
    """The model of a checkpoint whose tensors have canonical names, and its configuration.

    Raises:
        MappingError: it is not known.
    """
    if source.model is None or not source.is_canonical:
        raise source.reason or MappingError(
            f"{purpose} needs the model's family and configuration",
            file=source.path,
            hint="--family NAME and --like HF_FOLDER supply them",
            error_id="no-model-config",
        )
    return source.model, source.config


def unknown_model(source: CheckpointSource, purpose: str) -> MappingError:
    """The error for a model that is not known, although `purpose` needs it."""
    reason = source.reason
    return MappingError(
        f"{purpose}: {reason.message if reason else 'the checkpoint does not name its model'}",
        file=source.path,
        hint=(reason.hint if reason else None) or "--family NAME and --like HF_FOLDER supply it",
    )


def _find_attachments(folder: Path) -> dict[str, Path]:
    warnings: list[str] = []
    files = find_auxiliary_files(folder, warnings)
    for warning in warnings:
        _LOG.warning("%s", warning)
    return files


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


def collect_hf_files(source: CheckpointSource, dtype: DType | None) -> dict[str, bytes]:
    """The small files of the model's Hugging Face folder, with `dtype` in its config.json.

    Raises:
        MappingError: its config.json does not hold a setting of the model.
    """
    files, model = _collect_files(source, dtype), source.model
    if model is not None and model.family is not None:
        source.check_config(json.loads(files["config.json"]))
    return files


def _collect_files(source: CheckpointSource, dtype: DType | None) -> dict[str, bytes]:
    files = _without_quantization(
        {
            name: source.edited[name] if name in source.edited else read_file(path)
            for name, path in source.attachments().items()
        },
        source.rotation,
    )
    model = source.model
    if model is None or model.family is None:
        return files
    if "gguf" in source.catalogue.metadata and source.like is None:
        files |= _make_tokenizer_files(source)
    if "config.json" not in files or model.dropped:
        config = {"config.json": _make_config(model, dtype)}
        files |= _without_quantization(config, source.rotation)
    elif dtype is not None:
        files["config.json"] = _set_dtype(files["config.json"], dtype)
    return files


def collect_saved_tokenizer(source: CheckpointSource) -> dict[str, bytes]:
    """The Hugging Face tokenizer that Megatron saved in `tokenizer/`, unless `hf/` has one."""
    hf_files = source.attachments()
    if any(name.startswith("tokenizer") for name in hf_files):
        return {}
    files = source.catalogue.auxiliary_files
    return {
        name: read_file(files[_TOKENIZER + name])
        for name in _TOKENIZER_FILES
        if _TOKENIZER + name in files and name not in hf_files
    }


def _without_quantization(
    files: dict[str, bytes], rotation: Mapping[str, Any] | None
) -> dict[str, bytes]:
    """The files without their quantization settings: what is written is not quantized.

    Of rotations they have what `rotation` says.
    """
    out = {name: data for name, data in files.items() if name not in (QUANT_FILE, *METHOD_FILES)}
    if "config.json" not in out:
        return out
    try:
        value = json.loads(out["config.json"])
    except (ValueError, RecursionError):
        return out
    text = value.get("text_config") if isinstance(value, dict) else None
    num_removed = 0
    for section in (value, text):
        for key in QUANT_KEYS:
            num_removed += isinstance(section, dict) and section.pop(key, None) is not None
        if num_removed and isinstance(section, dict):
            section.pop("expert_dtype", None)  # DeepSeek-V4's experts are in FP4
    if num_removed and not {"dtype", "torch_dtype"} & {*value, *(text or ())}:
        value["dtype"] = "bfloat16"
    transforms = (rotation or {}).get(TRANSFORMS_KEY)
    is_described = not isinstance(value, dict) or value.get(TRANSFORMS_KEY) == transforms
    if not is_described:  # --like may be of another rotation
        value.pop(TRANSFORMS_KEY, None)
        value |= {TRANSFORMS_KEY: transforms} if transforms else {}
    if num_removed or not is_described:
        out["config.json"] = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    return out


def _make_tokenizer_files(source: CheckpointSource) -> dict[str, bytes]:
    from megtool.formats.gguf.tokenizer import convert_gguf_tokenizer

    warnings: list[str] = []
    if "tokenizer.ggml.tokens" not in source.catalogue.metadata["gguf"]:
        _LOG.warning("the file has no tokenizer: --like FOLDER supplies one")
        return {}
    try:
        files = convert_gguf_tokenizer(source.path, warnings=warnings)
    except MissingPackageError as e:
        warnings.append(f"the tokenizer is not written: {e.message} ({e.hint})")
        files = {}
    for warning in warnings:
        _LOG.warning("%s", warning)
    return files


def _make_config(model: ModelIdentity, dtype: DType | None) -> bytes:
    if model.family is None:
        raise ValueError("a config.json needs a family")
    config = model.family.write_config(model.config, dtype=dtype.name if dtype else None)
    return (json.dumps(config, indent=2) + "\n").encode()


def _set_dtype(config: bytes, dtype: DType) -> bytes:
    value = json.loads(config)
    key = "dtype" if "dtype" in value else "torch_dtype"
    value[key] = dtype.name
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def collect_small_files(
    source: CheckpointSource, dtype: DType | None, left_out: tuple[str, ...] = ()
) -> dict[str, bytes]:
    """The small files of a Megatron checkpoint: Hugging Face's under `hf/`, and the others.

    Files of the folders in `left_out` are not among them.
    """
    out = {HF_FOLDER + n: data for n, data in collect_hf_files(source, dtype).items()}
    if source.catalogue.format in HF_SUBFOLDER_FORMATS:
        for name, path in source.catalogue.auxiliary_files.items():
            if not name.startswith((HF_FOLDER, *left_out)):
                edited = source.edited.get(name)
                out[name] = read_file(path) if edited is None else edited
    return out
