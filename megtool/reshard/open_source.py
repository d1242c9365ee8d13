"""A checkpoint opened for a command: its catalogue, its model, its canonical tensors."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.digest import SIDECAR, Sidecar, read_sidecar
from megtool.checkpoint.formats import WITH_HF_FOLDER, open_checkpoint
from megtool.checkpoint.megatron_metadata import args_of
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.config import ModelConfig
from megtool.convert.dialects import CanonicalView, detect_dialect, is_optimizer_state, read_side
from megtool.convert.families import Family, detect_family, family
from megtool.convert.gguf import config_from_gguf, factors_read
from megtool.convert.megatron import is_encoder_decoder
from megtool.convert.megatron_args import config_from_args
from megtool.convert.pre_core_names import core_args
from megtool.errors import (
    FormatError,
    MappingError,
    UnknownFamilyError,
    UnknownTensorsError,
    UsageError,
)
from megtool.number_formats.small_floats import single
from megtool.reshard.megatron.master_weight_check import check_masters
from megtool.reshard.megatron.model_space import in_model_space
from megtool.reshard.megatron.nemo_config import foreign_args
from megtool.tensors.placement import Placement

_LOG = logging.getLogger(__name__)
_CARRIED = "hf/"
_STATE_OF_RANK = re.compile(r"[^/]+/(distrib_optim|model_optim_rng/optimizer)/")
_LIKE = "--like FOLDER takes it from the config.json of a Hugging Face folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a checkpoint is a checkpoint of.

    `family` is None for a Megatron checkpoint that names none; `hf_config` is the config.json the
    configuration was read from, if it was one. `assumed` are keys of a config.json that nothing
    says, and for which the family's defaults stand: forward passes alone depend on them.
    """

    family: Family | None
    config: ModelConfig
    hf_config: Mapping[str, Any] | None = None
    assumed: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class CheckpointSource:
    """An open checkpoint. `reason` says why no model is known, where `model` is None.

    `left_out` counts the stored tensors that were not selected, `optimizer_bytes` those of
    optimizer state that was not asked for. `edited` are small files whose contents are no longer
    those on disk. Canonical tensors that are stored once but stand twice in the model have the name
    under which they are read in `repeats`.
    """

    path: Path
    catalogue: Catalogue
    model: Model | None
    reason: MappingError | None
    side: CanonicalView
    sidecar: Sidecar | None
    like: Path | None
    left_out: int = 0
    optimizer_bytes: int = 0
    edited: Mapping[str, bytes] = field(default_factory=dict)
    repeats: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_canonical(self) -> bool:
        """Tensors are known by canonical names, not by their own."""
        return self.side.dialect != "identity"

    @property
    def family_name(self) -> str | None:
        """The model's family, where it has one."""
        return self.model.family.name if self.model and self.model.family else None

    def placement_of(self, name: str) -> Placement:
        """Where a canonical tensor is read from; one that repeats another has no place itself."""
        return self.side.placements[self.repeats.get(name, name)]

    def attachments(self) -> dict[str, Path]:
        """Small files of the model's Hugging Face folder, by their path inside it."""
        if self.like is not None:
            return _attachments(self.like)
        found = self.catalogue.attachments
        carried = {n.removeprefix(_CARRIED): p for n, p in found.items() if n.startswith(_CARRIED)}
        return carried if self.catalogue.format in WITH_HF_FOLDER else dict(found)


def unknown_model(opened: CheckpointSource, needs: str) -> MappingError:
    """What to raise where a model has to be known and is not; `needs` says what for."""
    reason = opened.reason
    return MappingError(
        f"{needs}: {reason.message if reason else 'nothing says which it is'}",
        file=opened.path,
        hint=(reason.hint if reason else None) or "--family NAME and --like HF_FOLDER supply it",
    )


def open_model(
    path: Path,
    *,
    iteration: str | None = None,
    family_name: str | None = None,
    like: Path | None = None,
    keep: Callable[[str], bool] | None = None,
    aside: Callable[[str], bool] | None = None,
    model: Model | None = None,
    lenient: bool = False,
    optimizer: bool = True,
    prove_all: bool = False,
    for_format: str | None = None,
) -> CheckpointSource:
    """Open a checkpoint and find its model, from headers and small files alone.

    State in buckets and files per rank are read as tensors of the model; `optimizer` false leaves
    all optimizer state out, `prove_all` compares every master weight with its weight. `keep`
    selects tensors by name; those `aside` names are no part of the model. `model` is used where
    the checkpoint says nothing of its own. `for_format` is the format to be written: a state dict
    of several parts keeps its names where that is its own. With `lenient`, tensors that do not fit
    the model keep their own names and `reason` says why.

    Raises:
        FormatError: no checkpoint, or a broken one.
        MappingError: its tensors do not fit its model.
    """
    catalogue = open_checkpoint(path, iteration=_iteration(iteration))
    sidecar = _sidecar(catalogue)
    if aside is not None and any(aside(t.name) for t in catalogue.tensors):
        catalogue = catalogue.select(lambda name: not aside(name))
    stored, unread = len(catalogue.tensors), 0
    if not optimizer:
        unread = sum(t.num_bytes for t in catalogue.tensors if _is_state(t.name))
        catalogue = catalogue.select(lambda name: not _is_state(name))
    reason: MappingError | None = None
    try:
        model = _model(catalogue, family_name, like) or model
    except MappingError as e:
        if family_name or like:
            raise
        reason = e
    config = model.config if model else None
    before = len(catalogue.tensors)
    catalogue = in_model_space(catalogue, config, whole=prove_all, lenient=lenient)
    stored += len(catalogue.tensors) - before
    if keep is not None:
        catalogue = catalogue.select(keep)
        if not catalogue.tensors:
            raise UsageError("no tensor is selected", hint="`megtool inspect` lists the names")
    names = [t.name for t in catalogue.tensors]
    dialect = detect_dialect(names)
    if model is None or (model.family is None and dialect != "megatron"):
        dialect = "identity"
    if dialect == "megatron" and is_encoder_decoder(names):
        dialect = "identity"  # carried under Megatron's own names
    if for_format == catalogue.format == "dcp" and _is_compound(names, catalogue):
        dialect = "identity"  # what saved it will ask for all of it, by these names
    try:
        side = read_side(
            catalogue.tensors,
            dialect=dialect,
            family=model.family if model else None,
            config=model.config if model else None,
            partial=keep is not None,
        )
    except MappingError as e:
        by_args = model.config if model is not None and model.family is None else None
        if isinstance(e, UnknownTensorsError) and by_args is not None:
            # Args name no family, and some have tensors of their own: all keep their names.
            reason = e
            side = read_side(catalogue.tensors, dialect="identity", config=by_args)
        elif lenient:
            reason, model = e, None
            side = read_side(catalogue.tensors, dialect="identity")
        else:
            raise
    if prove_all and "registration_order" not in catalogue.metadata:  # else it is proved already
        check_masters(catalogue, side, whole=True)
    if model is not None and side.config is not None:
        model = replace(model, config=side.config)
    for warning in catalogue.warnings:
        _LOG.warning("%s", warning)
    return CheckpointSource(
        path=path,
        catalogue=catalogue,
        model=model,
        reason=reason,
        side=side,
        sidecar=sidecar,
        like=like,
        left_out=stored - len(catalogue.tensors),
        optimizer_bytes=unread,
    )


_PARTS = ("model.model.", "model.module.", "model.lm_head.", "module.", "app.")


def _is_compound(names: Sequence[str], catalogue: Catalogue) -> bool:
    """A state dict holds more than the weights of one model, or these under a name for them all."""
    return bool(catalogue.objects) or any(
        n.startswith(_PARTS) or is_optimizer_state(n) for n in names
    )


def _is_state(name: str) -> bool:
    """A stored tensor of optimizer state, in model space or not yet."""
    return is_optimizer_state(name) or _STATE_OF_RANK.match(name) is not None


def _iteration(text: str | None) -> int | str | None:
    if text is None or text == "latest":
        return None
    if text == "release":
        return text
    if not text.isdigit():
        raise UsageError(f"iteration {text!r}", hint="a number, `latest` or `release`")
    return int(text)


def _sidecar(catalogue: Catalogue) -> Sidecar | None:
    return read_sidecar(catalogue.root / SIDECAR) if catalogue.root.is_dir() else None


def _model(catalogue: Catalogue, family_name: str | None, like: Path | None) -> Model | None:
    """The model by what was given, then by what the checkpoint says; None if nothing does.

    What others wrote may hold values of any type: what arithmetic on them raises is their fault.
    """
    try:
        found = _described(catalogue, family_name, like)
    except UnknownFamilyError:
        raise
    except (MappingError, TypeError, ValueError, ArithmeticError, AttributeError) as e:
        said = e if isinstance(e, MappingError) else None
        raise MappingError(
            f"the model's configuration cannot be used: {said.message if said else e}",
            file=(said and said.file) or _says_it(catalogue, like),
            hint=(said and said.hint) or _LIKE,
        ) from e
    if found is None and family_name:
        raise MappingError(
            f"family {family_name!r} is given, but nothing holds the model's configuration",
            file=catalogue.root,
            hint=_LIKE,
        )
    return found


def _described(catalogue: Catalogue, family_name: str | None, like: Path | None) -> Model | None:
    named = family(family_name) if family_name else None
    hf_config = read_config(like) if like is not None else _own_config(catalogue)
    if hf_config is not None:
        chosen = named or detect_family(hf_config)
        config = chosen.read_config(hf_config)
        _check_vocabulary(catalogue, config)
        return Model(family=chosen, config=config, hf_config=hf_config)
    if "gguf" in catalogue.metadata:
        facts = catalogue.metadata["gguf"]
        chosen = named or detect_family(facts)
        factors = _values(catalogue, factors_read(facts, catalogue.tensors))
        made = config_from_gguf(facts, chosen, catalogue.tensors, factors)
        return Model(family=chosen, config=made)
    args = catalogue.metadata.get("args")
    if not isinstance(args, dict) and (foreign := foreign_args(catalogue)) is not None:
        args = catalogue.metadata["args"] = foreign
    if isinstance(args, dict) and args.get("num_attention_heads") is not None:
        if catalogue.format == "deepspeed":
            args = core_args(args)
        config, assumed = config_from_args(args), tuple[str, ...]()
        if named is not None:
            config, assumed = named.completed(config)
        return Model(family=named, config=config, assumed=assumed)
    return None


def _values(catalogue: Catalogue, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """The elements of small tensors."""
    if not names:
        return {}
    with Reader(catalogue, Files()) as reader:
        views = {n: reader.stored(n) for n in names}
        return {n: single(v.read(), v.dtype.name) for n, v in views.items()}


def _check_vocabulary(catalogue: Catalogue, config: ModelConfig) -> None:
    """Refuse a configuration whose vocabulary would cut off tokens that the checkpoint's args know.

    `padded_vocab_size` is not held against it: its last rows may be no tokens.
    """
    true = args_of(catalogue).get("vocab_size")
    if isinstance(true, int) and not isinstance(true, bool) and true > config.vocab_size:
        raise MappingError(
            f"config.json has a vocabulary of {config.vocab_size}, and the checkpoint's own args "
            f"one of {true}: {true - config.vocab_size} tokens would be lost",
            hint=f"set vocab_size to {true} in the config.json, or give the one of this model",
        )


def _says_it(catalogue: Catalogue, like: Path | None) -> Path:
    """The file that holds the model's configuration; the checkpoint where it is no file's alone."""
    if like is not None:
        return like / "config.json"
    if isinstance(catalogue.metadata.get("config"), dict):
        own = catalogue.root / "config.json"
        return own if own.is_file() else catalogue.root
    return catalogue.attachments.get(_CARRIED + "config.json", catalogue.root)


_FOLDER = "--like FOLDER needs a Hugging Face folder with the model's config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder.

    Raises:
        FormatError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise FormatError(f"cannot read: {e.strerror}", file=path, hint=_FOLDER) from e
    except ValueError as e:
        raise FormatError(f"no JSON: {e}", file=path, hint=_FOLDER) from e
    if not isinstance(value, dict):
        raise FormatError("no JSON object", file=path, hint=_FOLDER)
    return value


def _own_config(catalogue: Catalogue) -> dict[str, Any] | None:
    if isinstance(config := catalogue.metadata.get("config"), dict):
        return config
    carried = catalogue.attachments.get(_CARRIED + "config.json")
    return read_config(carried.parent) if carried is not None else None


def _attachments(folder: Path) -> dict[str, Path]:
    from megtool.checkpoint.formats.auxiliary_files import find_attachments

    warnings: list[str] = []
    found = find_attachments(folder, warnings)
    for warning in warnings:
        _LOG.warning("%s", warning)
    return found


def selector(select: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool] | None:
    """Whether a name matches one of `select` (or there are none) and none of `exclude` (globs)."""
    if not select and not exclude:
        return None

    def keep(name: str) -> bool:
        wanted = not select or any(fnmatchcase(name, g) for g in select)
        return wanted and not any(fnmatchcase(name, g) for g in exclude)

    return keep
