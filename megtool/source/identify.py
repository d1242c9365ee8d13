"""Identify a checkpoint's model: by options, its config.json, its metadata or its args."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.convert.families.detection import detect_family, family
from megtool.convert.families.family import INFERRED, Family
from megtool.convert.families.label_head import with_label_head
from megtool.convert.families.read_back import fields_called, without_keys, without_settings
from megtool.convert.gguf import config_from_gguf, factors_read
from megtool.convert.megatron.args import args_from_config, read_plain_args
from megtool.convert.megatron.pre_core import core_args, has_classic_args
from megtool.convert.megatron.reconcile import reconcile
from megtool.convert.megatron.settings import (
    describe_unknown,
    find_unknown,
    find_unsupported,
    plain_args,
    refusal,
)
from megtool.errors import FormatError, MappingError, UnknownFamilyError, listed
from megtool.formats import ARRAY_FORMATS
from megtool.formats.auxiliary_files import check_json_size
from megtool.megatron_state.nemo_config import read_foreign_args
from megtool.megatron_state.saved_objects import saved_args
from megtool.number_formats.small_floats import single
from megtool.source.checkpoint import HF_FOLDER, ModelIdentity
from megtool.spec.model_config import CONFIG_FIELDS, ModelConfig
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.reader import CheckpointReader

_LOG = logging.getLogger(__name__)
_LIKE = "--like FOLDER takes it from the config.json of a Hugging Face folder"
_MAMBA = ".mixer.in_proj."
_OTHER_MIXERS = ("falconh1_ratio", "experimental_attention_variant")
_FORMATS_WITH_ARGS = ("torch_dist", "megatron", *ARRAY_FORMATS)


def identify_model(
    catalogue: Catalogue,
    family_name: str | None,
    like: Path | None,
    drop_settings: Sequence[str] = (),
) -> ModelIdentity | None:
    """Return the model by the user's options, else by the checkpoint's own files; None without.

    It is without the settings of `drop_settings`. Foreign files may hold values of any type: errors
    of arithmetic on them are errors of the file.

    Raises:
        MappingError: the configuration cannot be used, or `family_name` is given without one.
    """
    try:
        model = _describe_model(catalogue, family_name, like, drop_settings)
    except UnknownFamilyError:
        raise
    except (MappingError, TypeError, ValueError, ArithmeticError, AttributeError) as e:
        known = e if isinstance(e, MappingError) else None
        raise MappingError(
            f"the model's configuration cannot be used: {known.message if known else e}",
            file=(known and known.file) or _config_file(catalogue, like),
            hint=(known and known.hint) or _LIKE,
            error_id=known.error_id if known else None,
        ) from e
    if model is None and family_name:
        raise MappingError(
            f"family {family_name!r} is given, but the checkpoint has no model configuration",
            file=catalogue.root,
            hint=_LIKE,
            error_id="no-model-config",
        )
    return model


def _describe_model(
    catalogue: Catalogue, family_name: str | None, like: Path | None, drop_settings: Sequence[str]
) -> ModelIdentity | None:
    named = family(family_name) if family_name else None
    hf_config = read_config(like) if like is not None else _read_own_config(catalogue)
    if hf_config is not None:
        chosen = with_label_head(named, hf_config) if named else detect_family(hf_config)
        stated, removed = without_keys(hf_config, drop_settings)
        config, unsupported, gone = _follow_args(
            catalogue, chosen.read_config(stated), drop_settings
        )
        removed |= gone
        config, dropped = without_settings(
            config, chosen, [n for n in drop_settings if n not in removed or fields_called(n)]
        )
        _check_vocabulary(catalogue, config)
        _tell_unknown_keys(_config_file(catalogue, like), chosen.unknown_keys(stated))
        return ModelIdentity(
            family=chosen,
            config=config,
            hf_config=stated,
            unsupported=unsupported,
            dropped=dropped | removed,
        )
    if "gguf" in catalogue.metadata:
        facts = catalogue.metadata["gguf"]
        chosen = named or detect_family(facts)
        factors = _values(catalogue, factors_read(facts, catalogue.tensors))
        config = config_from_gguf(facts, chosen, catalogue.tensors, factors)
        config, dropped = without_settings(config, chosen, drop_settings)
        return ModelIdentity(family=chosen, config=config, dropped=dropped)
    args = catalogue.metadata.get("args")
    if not isinstance(args, dict) and (foreign := read_foreign_args(catalogue)) is not None:
        args = catalogue.metadata["args"] = foreign
    if isinstance(args, dict) and args.get("num_attention_heads") is not None:
        return _describe_by_args(catalogue, args, named, drop_settings)
    return None


def _describe_by_args(
    catalogue: Catalogue,
    args: Mapping[str, Any],
    named: Family | None,
    drop_settings: Sequence[str],
) -> ModelIdentity:
    plain, removed = _plain_args(catalogue, args, drop_settings)
    if named is not None and named.traits.get("bidirectional"):
        plain["bidirectional"] = True
    if unknown := find_unknown(args):
        _LOG.warning("%s", describe_unknown(unknown))
    config, assumed = read_plain_args(plain), tuple[str, ...]()
    if named is not None:
        config, assumed = _complete(config, named)
    config, dropped = without_settings(
        config, named, [n for n in drop_settings if n not in removed or fields_called(n)]
    )
    if drop_settings:
        changed = args_from_config(config) if dropped else {}
        names = [n for n in changed if any(n == CONFIG_FIELDS[f].megatron for f in dropped)]
        others = {n: v for n, v in args.items() if n not in removed}
        catalogue.metadata["args"] = others | {n: changed[n] for n in names}
    return ModelIdentity(
        family=named,
        config=config,
        assumed=assumed,
        unsupported=_unsupported(plain),
        dropped=dropped | removed,
    )


def _complete(config: ModelConfig, family: Family) -> tuple[ModelConfig, tuple[str, ...]]:
    """Complete what args say with the family's word, and tell what that takes from Megatron's."""
    out, assumed = family.completed(config)
    for name in INFERRED:
        if (inferred := config.get(name)) != (chosen := out.get(name)):
            _LOG.warning(
                "%s is %r in Megatron, which has no arg for it, and %r in the class of %r: the "
                "model is read as the class's",
                name,
                inferred,
                chosen,
                family.name,
            )
    return out, assumed


def _plain_args(
    catalogue: Catalogue, args: Mapping[str, Any], drop_settings: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's args as plain values in megatron-core's spelling, without some.

    Also these, with what they were.
    """
    names = [name.removeprefix("--").replace("-", "_") for name in drop_settings]
    removed = {name: args[name] for name in names if name in args}
    if any(_MAMBA in t.name for t in catalogue.tensors):  # a pattern may be left to ratios
        is_hybrid = not any(map(args.get, _OTHER_MIXERS))
        args = {**args, "is_hybrid_model": args.get("is_hybrid_model") or is_hybrid}
    is_classic = has_classic_args(catalogue.format, catalogue.tensors)
    core = core_args(args) if is_classic else args
    return plain_args(core, removed), removed


def _unsupported(plain: Mapping[str, Any]) -> MappingError | None:
    settings = find_unsupported(plain)
    return refusal(settings) if settings else None


def _follow_args(
    catalogue: Catalogue, config: ModelConfig, drop_settings: Sequence[str]
) -> tuple[ModelConfig, MappingError | None, dict[str, Any]]:
    """Return the configuration of a config.json with what the checkpoint's own args say otherwise.

    Also the error that names the args that are not supported, and the args that are dropped.
    """
    args = saved_args(catalogue)
    if args.get("num_attention_heads") is None:
        return config, None, {}
    plain, removed = _plain_args(catalogue, args, drop_settings)
    if config.bidirectional:
        plain["bidirectional"] = True
    config, contradictions = reconcile(config, plain)
    if contradictions:
        _LOG.warning(
            "the checkpoint's own args contradict the config.json beside it, and are followed: %s",
            "; ".join(map(str, contradictions)),
        )
    return config, _unsupported(plain), removed


def refuse_lost(model: ModelIdentity, catalogue: Catalogue, for_format: str | None) -> None:
    """Refuse settings that are not supported, unless the format to write keeps them in args.

    Raises:
        MappingError: the model has such settings.
    """
    error = model.unsupported
    if error is None or for_format in (*_FORMATS_WITH_ARGS, catalogue.format):
        return
    error.file = error.file or str(catalogue.root)
    raise error


@cache  # a job may open one checkpoint several times
def _tell_unknown_keys(place: Path, keys: tuple[str, ...]) -> None:
    if not keys:
        return
    _LOG.warning(
        "%s has %s that megtool does not know (%s): kept as written, and not computed by",
        place,
        "a key" if len(keys) == 1 else "keys",
        listed([repr(k) for k in keys]),
    )


def _values(catalogue: Catalogue, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    if not names:
        return {}
    with CheckpointReader(catalogue, Files()) as reader:
        views = {n: reader.open_stored(n) for n in names}
        return {n: single(v.read(), v.dtype.name) for n, v in views.items()}


def _check_vocabulary(catalogue: Catalogue, config: ModelConfig) -> None:
    """Refuse a configuration whose vocabulary is smaller than the one in the checkpoint's args.

    `padded_vocab_size` is not compared: its last rows may be padding.

    Raises:
        MappingError: tokens would be lost.
    """
    true = saved_args(catalogue).get("vocab_size")
    if isinstance(true, int) and not isinstance(true, bool) and true > config.embedding.vocab_size:
        raise MappingError(
            f"config.json has a vocabulary of {config.embedding.vocab_size}, and the checkpoint's "
            f"args one of {true}: {true - config.embedding.vocab_size} tokens would be lost",
            hint=f"set vocab_size to {true} in the config.json, or give the one of this model",
        )


def _config_file(catalogue: Catalogue, like: Path | None) -> Path:
    """The file with the model's configuration, the checkpoint where no single file has it."""
    if like is not None:
        return like / "config.json"
    if isinstance(catalogue.metadata.get("config"), dict):
        path = catalogue.root / "config.json"
        return path if path.is_file() else catalogue.root
    return catalogue.auxiliary_files.get(HF_FOLDER + "config.json", catalogue.root)


_FOLDER = "--like FOLDER needs a Hugging Face folder with the model's config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder.

    Raises:
        FormatError: it is missing, or not a JSON object.
        StorageError: it cannot be read.
    """
    path = folder / "config.json"
    status = Files().stat(path)
    check_json_size(status.st_size if status else 0, path)
    data = Files().read_whole(path)
    if data is None:
        raise FormatError("the file does not exist", file=path, hint=_FOLDER)
    check_json_size(data, path)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"the JSON is invalid: {e}", file=path, hint=_FOLDER) from e
    if not isinstance(value, dict):
        raise FormatError("it is not a JSON object", file=path, hint=_FOLDER)
    return value


def _read_own_config(catalogue: Catalogue) -> dict[str, Any] | None:
    if isinstance(config := catalogue.metadata.get("config"), dict):
        return config
    path = catalogue.auxiliary_files.get(HF_FOLDER + "config.json")
    return read_config(path.parent) if path is not None else None
