"""Open a checkpoint: read its headers, identify its model, bind names, prove optimizer state."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megtool.convert.canonical_view import FalseCopy
from megtool.convert.dialects import CanonicalView, detect_dialect, is_optimizer_state, read_side
from megtool.convert.families.class_form import are_other_forms, find_class_form
from megtool.convert.megatron.names import is_encoder_decoder, is_megatron, is_retro, split_state
from megtool.convert.megatron.parallel_args import parallel_from_args
from megtool.convert.megatron.sharding import is_known
from megtool.digests.crc32c import SIDECAR, Sidecar, read_sidecar
from megtool.errors import (
    MappingError,
    UnknownFamilyError,
    UnknownTensorsError,
    UsageError,
    listed,
)
from megtool.formats import ARRAY_FORMATS, STATE_DICT_FORMATS, open_checkpoint
from megtool.formats.safetensors.quantization_config import TRANSFORMS_KEY, transform_config
from megtool.megatron_state.extra_states.names import is_quantizer_buffer
from megtool.megatron_state.model_space import to_model_space
from megtool.megatron_state.optimizer.master_weight_check import check_masters
from megtool.megatron_state.saved_objects import saved_args
from megtool.options.groups import AdaptedSource, SourceOptions
from megtool.source.checkpoint import CheckpointSource, ModelIdentity
from megtool.source.edited_identity import changed_args, edit_identity, edit_metadata
from megtool.source.identify import identify_model, refuse_lost
from megtool.source.merge import add_adapters
from megtool.source.repeated_tensors import (
    find_false_copies,
    has_own_head,
    refuse_false_copies,
)
from megtool.source.unread_files import warn_unread_files
from megtool.spec.model_config import ModelConfig
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor

_LOG = logging.getLogger(__name__)
_STATE_OF_RANK = re.compile(r"[^/]+/(distrib_optim|model_optim_rng/optimizer)/")


NameFilter = Callable[[str], bool]

_ENCODERS = (
    "`megtool evaluate` and `finetune` take encoders, and also T5, as `generate` does; `megtool "
    "reshard` and `verify` take any model"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFilter:
    """Which stored tensors are opened, by name.

    Those that `ignore` matches are no part of the model; of the others, `select` chooses (None:
    all), and it may leave tensors of the model out.
    """

    select: NameFilter | None = None
    ignore: NameFilter | None = None


EVERYTHING = TensorFilter()
WITHOUT_QUANTIZERS = TensorFilter(ignore=is_quantizer_buffer)
"""All but the buffers of ModelOpt's quantizers, which the caller reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """A checkpoint of which the headers are read, before it is known whose model it is."""

    path: Path
    catalogue: Catalogue

    @classmethod
    def read(cls, path: Path, options: SourceOptions) -> Headers:
        """Those of the iteration that the options name.

        Raises:
            UsageError: the iteration is no number.
            FormatError: no checkpoint, or a damaged one.
        """
        iteration = parse_iteration(options.iteration)
        return cls(path=path, catalogue=open_checkpoint(path, iteration=iteration))


def open_source(
    path: Path | Headers,
    options: SourceOptions = SourceOptions(),  # noqa: B008
    *,
    tensors: TensorFilter = EVERYTHING,
    fallback: ModelIdentity | None = None,
    lenient: bool = False,
    optimizer: bool = True,
    verify_master_weights: bool = False,
    for_format: str | None = None,
    as_class: bool = False,
    may_lack: bool = False,
    compare_copies: bool = True,
) -> CheckpointSource:
    """Open a checkpoint and identify its model, from headers and small files alone.

    State in buckets and files per rank are read as tensors of the model. Adapters that the options
    name are merged into the weights as they are read.

    Args:
        path: The checkpoint: a folder, a save folder or a file; or its headers, if they are read.
        options: What the user says about it.
        tensors: Which stored tensors are opened.
        fallback: The model where the checkpoint does not say which it is.
        lenient: Tensors that do not fit the model keep their stored names, and `reason` says why.
        optimizer: False leaves all optimizer state out; it is left out with adapters, too.
        verify_master_weights: Compare every master weight with its weight, not some elements.
        for_format: The format to be written; a state dict of several parts keeps names in its own.
        as_class: Read a Megatron model in the form that its family's class has (`class_form`).
        may_lack: Settings that change the model and are not supported are no error.
        compare_copies: Compare all of what is stored twice, not some elements.

    Raises:
        FormatError: no checkpoint, or a damaged one.
        MappingError: its tensors do not fit its model, or an unsupported setting would be lost.
    """
    headers = path if isinstance(path, Headers) else Headers.read(path, options)
    catalogue = headers.catalogue
    adapters = options.adapter if isinstance(options, AdaptedSource) else ()
    optimizer = optimizer and not adapters
    sidecar = read_sidecar(catalogue.root / SIDECAR) if catalogue.root.is_dir() else None
    ignore = tensors.ignore
    if ignore is not None and any(ignore(t.name) for t in catalogue.tensors):
        catalogue = catalogue.select(lambda name: not ignore(name))
    num_stored, optimizer_bytes = len(catalogue.tensors), 0
    if not optimizer:
        optimizer_bytes = sum(t.num_bytes for t in catalogue.tensors if _is_state(t.name))
        catalogue = catalogue.select(lambda name: not _is_state(name))
    model, reason = _identify(catalogue, options, fallback)
    if model is not None and not (lenient or may_lack):
        refuse_lost(model, catalogue, for_format)
    rotation = _find_rotation(catalogue, sidecar, None if model is fallback else model, options)
    if model is not None and has_own_head(catalogue, model):
        _LOG.info("the output layer is not the embedding, though config.json ties them: both stay")
        model = replace(model, config=model.config.with_fields(tied_embeddings=False))
    if not lenient and model is not None and model.family is not None:
        catalogue = _without_quantizers(catalogue, for_format)
    before = len(catalogue.tensors)
    config = model.config if model else None
    catalogue = to_model_space(
        catalogue, config, verify_master_weights=verify_master_weights, lenient=lenient
    )
    num_stored += len(catalogue.tensors) - before
    if tensors.select is not None:
        catalogue = catalogue.select(tensors.select)
        if not catalogue.tensors:
            raise UsageError("no tensor is selected", hint="`megtool inspect` lists the names")
    model, reason, side = bind_names(
        catalogue,
        model,
        reason,
        is_partial=tensors.select is not None,
        lenient=lenient,
        for_format=for_format,
        as_class=as_class,
    )
    false_copies = find_false_copies(catalogue, side, is_whole=compare_copies)
    corrected, stated = {c.flag: c.value for c in false_copies if c.flag}, model
    if corrected and model is not None:
        for copy in (c for c in false_copies if c.flag):
            _LOG.warning("%s", _say_kept(copy))
        false_copies = tuple(c for c in false_copies if not c.flag)
        model, reason, side = bind_names(
            catalogue,
            replace(model, config=model.config.with_fields(**corrected)),
            reason,
            is_partial=tensors.select is not None,
            lenient=lenient,
            for_format=for_format,
            as_class=as_class,
        )
    has_form = model is not None and config is not None and are_other_forms(model.config, config)
    if for_format and reason and not (lenient or isinstance(reason, UnknownFamilyError)):
        _LOG.warning("%s; all tensors keep their names", reason.message)
    if verify_master_weights and "registration_order" not in catalogue.metadata:  # else proved
        check_masters(catalogue, side, verify_master_weights=True)
    for warning in catalogue.warnings:
        _LOG.warning("%s", warning)
    if tensors.select is None:
        _warn_missing_mtp(config, side)
    if optimizer:
        warn_unread_files(catalogue)
    source = CheckpointSource(
        path=headers.path,
        catalogue=catalogue,
        model=model,
        reason=reason,
        view=side,
        sidecar=None if has_form else sidecar,
        like=options.like,
        left_out=num_stored - len(catalogue.tensors),
        optimizer_bytes=optimizer_bytes,
        false_copies=false_copies,
        is_partial=tensors.select is not None,
        pruning=sidecar.pruning if sidecar else None,
        rotation=rotation,
    )
    if stated is not None and "tied_embeddings" in corrected:
        source = _with_changed_files(source, stated.config)
    return add_adapters(source, adapters) if adapters else source


def _identify(
    catalogue: Catalogue, options: SourceOptions, fallback: ModelIdentity | None
) -> tuple[ModelIdentity | None, MappingError | None]:
    """Return the model, and why it is not known where options do not have to say it."""
    model, reason = fallback, None
    known = options.family, options.like, options.drop_setting
    try:
        model = identify_model(catalogue, *known) or fallback
    except MappingError as e:
        if any(known):
            raise
        reason = e
    if model is not None and model.dropped:
        _LOG.warning("the model is taken to be without %s", ", ".join(model.dropped))
    return model, reason


def _say_kept(copy: FalseCopy) -> str:
    """Say that a tensor that should be a copy is kept, and what that changes."""
    what = (
        "embeddings are not tied, whatever the configuration says: the stored output layer is "
        "what computes, and what is written says so"
        if copy.flag == "tied_embeddings"
        else "it is kept as one of multi-token prediction's own"
    )
    return f"{copy.name} is {copy}; {what}"


def _with_changed_files(source: CheckpointSource, stated: ModelConfig) -> CheckpointSource:
    """The source with small files that say what its tensors show, not what was stated."""
    if source.model is None:
        return source
    config = source.model.config
    old = config.with_fields(tied_embeddings=stated.embedding.tied_embeddings)
    changed = changed_args(old, config)
    catalogue = source.catalogue
    catalogue.metadata = edit_metadata(catalogue, changed)
    model, edited = edit_identity(source, source.model, old, config, changed)
    return replace(source, model=model, edited=edited)


def _find_rotation(
    catalogue: Catalogue,
    sidecar: Sidecar | None,
    own: ModelIdentity | None,
    options: SourceOptions,
) -> Mapping[str, Any] | None:
    """The record of rotations in the weights, or what the checkpoint's config.json says of them."""
    if sidecar is not None and sidecar.rotation is not None:
        return sidecar.rotation
    transforms = transform_config(catalogue.metadata)
    if transforms is None and own is not None and options.like is None:
        transforms = transform_config({"config": own.hf_config})
    return None if transforms is None else {TRANSFORMS_KEY: transforms}


def _without_quantizers(catalogue: Catalogue, for_format: str | None) -> Catalogue:
    """The checkpoint without the buffers of ModelOpt's quantizers, which no model has.

    Raises:
        MappingError: weights mean something else without them, or they would be lost.
    """
    buffers = [t.name for t in catalogue.tensors if is_quantizer_buffer(t.name)]
    if not buffers:
        return catalogue
    smoothed = [n for n in buffers if n.endswith("_pre_quant_scale")]
    if smoothed:
        raise MappingError(
            f"{len(smoothed)} of its weights are multiplied by smoothing scales that ModelOpt "
            "divides inputs by",
            file=catalogue.root,
            tensor=smoothed[0],
            hint="`megtool export SRC DST --to unified` keeps the scales, `finetune --qat source` "
            "trains with them; ModelOpt restores them in Megatron",
            error_id="modelopt-quantizers",
        )
    if for_format not in (None, "hf", "safetensors"):
        raise MappingError(
            f"{len(buffers)} buffers of ModelOpt's quantizers belong to the modules of its layout",
            file=catalogue.root,
            tensor=buffers[0],
            hint="Megatron loads torch_dist at any layout as it is; `megtool quantize --to "
            "torch_dist --dst-tp N` writes another, and --to hf the plain weights",
            error_id="modelopt-quantizers",
        )
    _LOG.warning(
        "the %d buffers of ModelOpt's quantizers are left out: weights are read as they are, not "
        "rounded",
        len(buffers),
    )
    return catalogue.select(lambda name: not is_quantizer_buffer(name))


def _warn_missing_mtp(config: ModelConfig | None, side: CanonicalView) -> None:
    """Warn if a model lacks all layers of multi-token prediction that its config counts."""
    counted = config.mtp.num_mtp_layers if config else 0
    if counted and side.config is not None and not side.config.mtp.num_mtp_layers:
        _LOG.warning(
            "the configuration counts %d layers of multi-token prediction, and no tensor of them "
            "is stored: the model is taken to have none (transformers drops them when it saves)",
            counted,
        )


def open_decoder(
    path: Path,
    options: SourceOptions = SourceOptions(),  # noqa: B008
    *,
    encoders: bool = False,
    two_stacks: bool = False,
    labels: bool = False,
    tensors: TensorFilter = EVERYTHING,
) -> CheckpointSource:
    """Open the weights of a decoder that can run, from headers and small files alone.

    Models whose tokens attend both ways are taken where `encoders` is true, those of an encoder and
    a decoder where `two_stacks` is, and those that score labels where `labels` is.

    Raises:
        MegtoolError: it cannot be opened, its model is not known, or is no decoder.
    """
    source = open_source(path, options, optimizer=False, tensors=tensors)
    return require_decoder(source, encoders=encoders, two_stacks=two_stacks, labels=labels)


def require_decoder(
    source: CheckpointSource,
    *,
    encoders: bool = False,
    two_stacks: bool = False,
    labels: bool = False,
) -> CheckpointSource:
    """The source itself, if it holds a decoder of a known configuration (or, with `encoders`, an
    encoder, with `two_stacks` an encoder and a decoder, and with `labels` one that scores these).

    Raises:
        MappingError: the model is not known, or is no decoder; or a stored tensor that should be a
            copy is none.
    """
    refuse_false_copies(source)
    config = source.known_config
    if not source.is_canonical or config is None:
        why = f": {source.reason.message}" if source.reason else ""
        raise MappingError(
            f"it is no decoder of a known family{why}",
            file=source.path,
            hint="--family NAME and --like HF_FOLDER say which model it is; " + _ENCODERS,
        )
    if config.head.num_labels and not labels:
        count = "one label" if config.head.num_labels == 1 else f"{config.head.num_labels} labels"
        raise MappingError(
            f"it scores {count}, and predicts no tokens",
            file=source.path,
            hint="`megtool evaluate` scores texts with labels, and `finetune` trains on them",
        )
    if config.bidirectional and not encoders:
        what = "an encoder, which generates no text"
        raise MappingError(f"it is {what}", file=source.path, hint=_ENCODERS)
    if config.num_decoder_layers and not two_stacks:
        what = "an encoder and a decoder, and this takes a decoder alone"
        raise MappingError(f"it is {what}", file=source.path, hint=_ENCODERS)
    if towers := source.view.towers():
        parts = dict.fromkeys(name.partition(".")[0] for name in towers)
        _LOG.warning(
            "only the text model is run: the %d tensors of %s are not",
            len(towers),
            listed([*parts]),
        )
    if source.model is not None and source.model.assumed:
        _LOG.warning(
            "the checkpoint does not state %s: the family's defaults are used, which may not be "
            "this model's; --like HF_FOLDER states them",
            ", ".join(source.model.assumed),
        )
    return source


def bind_names(
    catalogue: Catalogue,
    model: ModelIdentity | None,
    reason: MappingError | None,
    *,
    is_partial: bool,
    lenient: bool,
    for_format: str | None,
    as_class: bool = False,
) -> tuple[ModelIdentity | None, MappingError | None, CanonicalView]:
    """The model as its tensors show it, why it is not known, and its tensors by canonical names.

    Raises:
        MappingError: the tensors do not fit the model, and not `lenient`.
    """
    names = [t.name for t in catalogue.tensors]
    dialect = _choose_dialect(catalogue, names, model, for_format)
    form = None
    if as_class and dialect == "megatron" and model is not None and model.family is not None:
        form = find_class_form(model.config, model.family)

    def read(tensors: Sequence[GlobalTensor]) -> CanonicalView:
        return read_side(
            tensors,
            dialect=dialect,
            family=model.family if model else None,
            config=form.config if form else model.config if model else None,
            partial=is_partial,
            blocks=tensor_blocks(catalogue),
            form=form,
        )

    try:
        side = read(catalogue.tensors)
    except MappingError as e:
        e.file = e.file or str(catalogue.root)
        config, has_family = None, model is not None and model.family is not None
        if model is not None and isinstance(e, UnknownTensorsError):
            # Of a model that is known, more tensors than a table has: all keep their names.
            carries = lenient or _keeps_names(catalogue.format, for_format)
            if not has_family or (carries and _is_read_without_unknown(read, catalogue)):
                config = model.config
        if config is None and not lenient:
            raise
        reason, model = e, None if has_family or config is None else model
        side = read_side(catalogue.tensors, dialect="identity", config=config)
    if model is not None and side.config is not None:
        model = replace(model, config=side.config)
    return model, reason, side


def _keeps_names(*formats: str | None) -> bool:
    """Whether formats have Megatron's names, and say where in a tensor each shard lies: then it
    makes no difference how Megatron cuts one over ranks.
    """
    return {*formats} <= {"torch_dist", *STATE_DICT_FORMATS, *ARRAY_FORMATS}


def _is_read_without_unknown(
    read: Callable[[Sequence[GlobalTensor]], CanonicalView], catalogue: Catalogue
) -> bool:
    """Whether the tensors are those of the model, but for some of which Megatron has none."""
    if not is_megatron(t.name for t in catalogue.tensors):
        return False
    try:
        read([t for t in catalogue.tensors if is_known(split_state(t.name)[2])])
    except MappingError:
        return False
    return True


def _choose_dialect(
    catalogue: Catalogue, names: Sequence[str], model: ModelIdentity | None, for_format: str | None
) -> str:
    """The dialect whose names become canonical ones; `identity` where names stay as stored."""
    dialect = detect_dialect(names)
    family = model.family if model else None
    if dialect == "hf" and family is not None and family.has_torchtitan_names(names):
        dialect = "torchtitan"
    if model is None or (model.family is None and dialect != "megatron"):
        return "identity"
    has_decoder = model.config is not None and bool(model.config.num_decoder_layers)
    is_other = is_retro(names) or (is_encoder_decoder(names) and not has_decoder)
    if dialect == "megatron" and is_other:
        return "identity"  # carried under Megatron's own names
    is_same = {for_format, catalogue.format} <= set(STATE_DICT_FORMATS)
    if is_same and _is_compound(names, catalogue):
        return "identity"  # the program that saved it loads all of it by these names
    return dialect


def tensor_blocks(catalogue: Catalogue) -> int:
    """How many ranks' rows lie one after the other in tensors that have several parts.

    Source: `make_fsdp_dtensor` in megatron-core 0.19.2's Megatron-FSDP. What it takes apart, gate
    and up rows, has names of its own.
    """
    args = saved_args(catalogue)
    if catalogue.format != "dcp" or args.get("ckpt_format") != "fsdp_dtensor":
        return 1
    return parallel_from_args(args).tp


_COMPOUND_PREFIXES = ("model.model.", "model.module.", "model.lm_head.", "module.", "app.")


def _is_compound(names: Sequence[str], catalogue: Catalogue) -> bool:
    """Whether a state dict holds more than one model's weights, or holds them under a prefix."""
    return bool(catalogue.objects) or any(
        n.startswith(_COMPOUND_PREFIXES) or is_optimizer_state(n) for n in names
    )


def _is_state(name: str) -> bool:
    """Whether a stored tensor is optimizer state, in model space or not yet."""
    return is_optimizer_state(name) or _STATE_OF_RANK.match(name) is not None


def parse_iteration(text: str | None) -> int | str | None:
    """What `--iteration` names: None for the latest.

    Raises:
        UsageError: it is no number.
    """
    if text is None or text == "latest":
        return None
    if text == "release":
        return text
    if not text.isdigit():
        raise UsageError(f"--iteration is {text!r}", hint="a number, `latest` or `release`")
    return int(text)


def name_filter(select: Sequence[str], exclude: Sequence[str]) -> NameFilter | None:
    """A filter by globs: names that match one of `select` (if any) and none of `exclude`."""
    if not select and not exclude:
        return None

    def matches(name: str) -> bool:
        is_selected = not select or any(fnmatchcase(name, glob) for glob in select)
        return is_selected and not any(fnmatchcase(name, glob) for glob in exclude)

    return matches
