"""Export any checkpoint to the single GGUF file that llama.cpp reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool import __version__
from megtool.console import Progress, several, silent
from megtool.convert.families.family import Family
from megtool.dtypes import dtype
from megtool.errors import DestinationError, FormatError, MappingError, UsageError
from megtool.export.gguf.architecture import Architecture
from megtool.export.gguf.architectures import (
    find_architecture,
    find_text_family,
    list_oddities,
)
from megtool.export.gguf.block_encoder import Change
from megtool.export.gguf.carried_blocks import NVFP4, open_parts
from megtool.export.gguf.file_types import FileType, parse_file_type
from megtool.export.gguf.header import INTEGER, plan_gguf_file
from megtool.export.gguf.importance import ImportanceMatrix, open_importance, write_imatrix
from megtool.export.gguf.latent_split import split_latent
from megtool.export.gguf.layout import GgufContents, plan_gguf_tensors
from megtool.export.gguf.metadata_keys import build_model_keys
from megtool.export.gguf.tokenizer import build_tokenizer_keys
from megtool.export.report import ExportReport
from megtool.export.staged_export import PlannedExport
from megtool.number_formats.kquants import K_QUANTS, WEIGHED
from megtool.options.execution import ExecutionOptions
from megtool.options.gguf import GgufForm
from megtool.options.groups import SourceOptions
from megtool.plan.copies import DroppedItem, PlanSource, ReshardPlan
from megtool.plan.planner import build_plan
from megtool.reshard.execute import expected_digests
from megtool.source.checkpoint import CheckpointSource, collect_saved_tokenizer, unknown_model
from megtool.source.open import open_source
from megtool.source.repeated_tensors import refuse_false_copies
from megtool.spec.model_config import ModelConfig
from megtool.staging.destination.check import check_file
from megtool.storage.files import Files, read_file
from megtool.storage.location.path import resolve_links
from megtool.tensors.placement import Placement
from megtool.transport.reading.reader import CheckpointReader

_LOG = logging.getLogger(__name__)
_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def export_gguf(
    source: Path,
    destination: Path,
    options: GgufForm,
    *,
    model: SourceOptions,
    execution: ExecutionOptions,
    files: Files | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write the model of `source`, in any format and layout, quantized or not, as one GGUF file.

    Weights whose rows are not whole blocks are of another type, as llama.cpp's own tools do, and a
    note says so. The model's name in the file is that of the file. Optimizer state is left out, and
    so are towers, and multi-token prediction where llama.cpp has none, each with a note.

    Args:
        source: A checkpoint of any format.
        destination: The file.
        options: The types of weights, and what else the file is to be.
        model: What the user says about the source.
        execution: How the file is written.
        files: The file system.
        progress: Is called with bytes written and their total.

    Raises:
        UsageError: the type is unknown, is for experts and there are none, or has no use for an
            importance matrix.
        CalibrationError: the importance matrix is of another model, or damaged.
        MappingError: llama.cpp has no such architecture, or would compute something else.
        FormatError: there is no tokenizer; a weight to be quantized holds NaN or infinity, or one
            that becomes f16 a number too large for it.
        MissingPackageError: the gguf package is not installed.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    start = time.monotonic()
    file_type = parse_file_type(
        options.outtype or "bf16", has_importance=options.imatrix is not None
    )
    _check_importance(options, file_type)
    _check_saved(options.save_imatrix, destination)
    opened = open_source(source, model, optimizer=False, as_class=True)
    refuse_false_copies(opened)
    planned = _plan(opened, destination, file_type, options)
    report = ExportReport(
        source=str(source),
        to="gguf",
        engine="llama.cpp",
        algo="" if file_type.is_plain else file_type.name,
        source_bytes=opened.catalogue.num_bytes,
        decoded=len(opened.catalogue.packed),
        notes=tuple(planned.notes),
        warnings=tuple(opened.catalogue.warnings),
    )
    export = PlannedExport(
        plan=planned.plan,
        report=report,
        sources=opened.paths,
        dropped_settings=opened.model.dropped_record if opened.model else None,
        expected=expected_digests(opened),
        overflow_hint="--outtype bf16 or f32 holds them",
        is_file=True,
        start=start,
    )
    written = export.write(destination, execution, files or Files(), progress)
    is_there = written.worker is None or written.worker.is_committed
    if planned.importance is not None and options.save_imatrix and not written.is_dry and is_there:
        write_imatrix(options.save_imatrix, planned.importance, planned.named)
    return written


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedFile:
    """A plan, the notes of its report, and what columns weigh, by where weights lie."""

    plan: ReshardPlan
    notes: list[str]
    importance: ImportanceMatrix | None
    named: list[Placement]


def _check_importance(options: GgufForm, file_type: FileType) -> None:
    """Refuse an importance matrix that no weight of such a file heeds.

    Raises:
        UsageError: there is no use for it, or nothing to write as one.
    """
    if options.imatrix is None and options.save_imatrix is not None:
        raise UsageError(
            "--save-imatrix has nothing to write",
            hint="--imatrix FILE: a calibration file (megtool quantize --calibrate-only makes it)",
        )
    heeds = file_type.base in (*K_QUANTS, *WEIGHED)
    if options.imatrix is not None and not heeds and options.save_imatrix is None:
        raise UsageError(
            f"--imatrix has no effect with --outtype {options.outtype}",
            hint="K-quants, q4_0, q4_1, q5_0 and q5_1 weigh errors by it",
        )


def _check_saved(path: Path | None, destination: Path) -> None:
    """Refuse a place where no importance matrix can be written.

    Raises:
        DestinationError: it is no file, or the destination.
        StorageError: the store refused.
    """
    if path is None:
        return
    if resolve_links(path) == resolve_links(destination):
        raise DestinationError(
            "DST and --save-imatrix are the same path", file=path, hint="choose different paths"
        )
    check_file(path, destination.parent)


def _plan(
    opened: CheckpointSource, path: Path, file_type: FileType, options: GgufForm
) -> _PlannedFile:
    family, config = _require_model(opened)
    architecture = find_architecture(family, config)
    left_out = _find_left_out(opened, config, architecture)
    lists, listed = _read_lists(opened, config, architecture)
    left_out.append(_LeftOut(names=listed, reason="numbers that the file's metadata has", note=""))
    gone = {n for part in left_out for n in part.names}
    canonical = {n: t for n, t in opened.view.canonical.items() if n not in gone}
    if not architecture.has_mtp:
        config = config.with_fields(num_mtp_layers=0, mtp_kind="", mtp_hidden_first=False)
    if file_type.base == "MXFP4" and not config.moe.num_experts:
        raise UsageError(
            "kind 'mxfp4' is for the weights of experts, and the model has none",
            hint="q4_0 or q8_0",
        )
    keys = build_model_keys(config, architecture, name=path.stem, file_type=file_type.name)
    opened.check_config()
    opened.check_said(
        find_text_family(family, config),
        lambda c: _describe(family, c),
        f"a GGUF file of architecture {architecture.name!r}",
    )
    keys |= lists | dict(_tokenizer(opened, config.embedding.vocab_size, options.pre_tokenizer))
    places, sources = {n: opened.placement_of(n) for n in canonical}, dict(opened.view.placements)
    if architecture.is_latent:
        whole, (canonical, places) = canonical, split_latent(canonical, places, config)
        halves = {n: places[n] for n in canonical if n not in whole}
        sources = {n: p for n, p in sources.items() if n not in whole or n in canonical} | halves
    importance = None
    if options.imatrix is not None:
        importance = open_importance(options.imatrix, opened, config)
    contents = plan_gguf_tensors(
        canonical,
        places,
        opened.catalogue,
        config,
        find_text_family(family, config),
        architecture,
        file_type=file_type,
        importance=importance,
    )
    if file_type.base == NVFP4 and not contents.carried:
        raise UsageError(
            f"--outtype {options.outtype} keeps weights that are NVFP4 in SRC, and none is",
            hint="`megtool quantize SRC DIR --recipe nvfp4` writes such a folder; DIR becomes SRC",
        )
    source = PlanSource(catalogue=opened.catalogue, placements=sources)
    if contents.carried:
        source = open_parts(opened.catalogue, sources, contents.carried.values())
    laid_out = plan_gguf_file(
        contents.tensors, keys, architecture=architecture.name, file=path.name
    )
    plan = build_plan(
        [source],
        laid_out,
        contents.placements,
        dropped=[*_list_dropped(opened), *_list_stored(opened, left_out)],
        copies={n: original for n, original in opened.repeats.items() if n in contents.placements},
        feeds=contents.feeds,
        options=repr((__version__, file_type.name, importance.digest if importance else "")),
    )
    notes = [*list_oddities(architecture, config), *_note_other_types(contents, file_type)]
    if opened.model is not None and opened.model.dropped:
        notes.insert(0, opened.model.describe_dropped())
    if importance is not None:
        notes.append(_note_importance(contents))
    notes += [part.note for part in left_out if part.note]
    return _PlannedFile(plan=plan, notes=notes, importance=importance, named=contents.named)


def _describe(
    family: Family, config: ModelConfig
) -> tuple[str, Mapping[str, Any], Mapping[str, Change]]:
    """What a file's metadata says of a configuration, and what becomes of its tensors' numbers."""
    architecture = find_architecture(family, config)
    keys = build_model_keys(config, architecture, name="", file_type="F32")
    return architecture.name, keys, architecture.changes(config) if architecture.changes else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeftOut:
    """Canonical tensors that a file has no place for, why, and what the report says of them, if
    anything."""

    names: tuple[str, ...]
    reason: str
    note: str


def _find_left_out(
    opened: CheckpointSource, config: ModelConfig, architecture: Architecture
) -> list[_LeftOut]:
    """Towers, and multi-token prediction where the architecture has none."""
    out = []
    if towers := tuple(opened.view.towers()):
        out.append(
            _LeftOut(
                names=towers,
                reason="not of the text model, which is all that the file holds",
                note="only the text model is written, without "
                f"{several(len(towers), 'tensor')} of other parts, which llama.cpp reads from a "
                "file of their own: its convert_hf_to_gguf.py --mmproj writes that",
            )
        )
    further = tuple(n for n in opened.view.canonical if n.startswith("mtp."))
    if further and not architecture.has_mtp:
        out.append(
            _LeftOut(
                names=further,
                reason="multi-token prediction, which llama.cpp's architecture has not",
                note="multi-token prediction is left out "
                f"({several(config.mtp.num_mtp_layers, 'layer')}, "
                f"{several(len(further), 'tensor')}): "
                f"llama.cpp's {architecture.name!r} has none",
            )
        )
    return out


def _read_lists(
    opened: CheckpointSource, config: ModelConfig, architecture: Architecture
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Metadata that is made of the numbers of small tensors, and these tensors."""
    if not architecture.lists:
        return {}, ()
    kind = dtype("float32")
    of = {
        key: [pattern.format(l=i) for i in range(config.num_layers)]
        for key, pattern in architecture.lists
    }
    with CheckpointReader(opened.catalogue, Files()) as reader:
        lists = {
            key: [
                float(reader.open_canonical(opened.placement_of(n), kind).read().reshape(()))
                for n in names
            ]
            for key, names in of.items()
        }
    return lists, tuple(n for names in of.values() for n in names)


def _list_stored(opened: CheckpointSource, left_out: Sequence[_LeftOut]) -> list[DroppedItem]:
    """What is stored of the tensors that are left out."""
    reasons = {opened.placement_of(n).stored: p.reason for p in left_out for n in p.names}
    return [
        DroppedItem(name=n, reason=reason, num_bytes=opened.catalogue[n].num_bytes)
        for n, reason in sorted(reasons.items())
    ]


def _note_other_types(contents: GgufContents, file_type: FileType) -> list[str]:
    """Which weights are of another type than most."""
    by_type: dict[str, list[str]] = {}
    for t in contents.tensors:
        if t.kind not in (file_type.base, "F32", INTEGER) and t.name not in contents.fallen_back:
            by_type.setdefault(t.kind, []).append(t.name)
    notes = [
        f"{len(names)} of {len(contents.tensors)} tensors are {type_name}: {_first(names)}"
        for type_name, names in by_type.items()
    ]
    for kind in sorted(set(contents.fallen_back.values())):
        names = [n for n, fallback in contents.fallen_back.items() if fallback == kind]
        notes.append(
            f"{len(names)} tensors are {kind}, for their rows are no whole blocks of their "
            f"type in a {file_type.name} file: {_first(names)}"
        )
    return notes


def _note_importance(contents: GgufContents) -> str:
    """How many weights are encoded by the importance matrix."""
    encoded = [t.name for t in contents.tensors if t.kind in (*K_QUANTS, *WEIGHED)]
    return f"the importance matrix weighs {contents.weighed} of {len(encoded)} encoded weights"


def _first(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _require_model(opened: CheckpointSource) -> tuple[Family, ModelConfig]:
    """The family and the configuration, which have to be known.

    Raises:
        MappingError: it is not.
    """
    model = opened.model
    if model is None or model.family is None or not opened.is_canonical:
        raise unknown_model(opened, "writing GGUF needs the model's family and configuration")
    return model.family, model.config


def _tokenizer(
    opened: CheckpointSource, vocab_size: int, pre_tokenizer: str | None
) -> Mapping[str, Any]:
    """The keys of the tokenizer: a GGUF source's own, else those of its tokenizer.json."""
    stored = opened.catalogue.metadata.get("gguf", {})
    if "tokenizer.ggml.tokens" in stored and opened.like is None:
        return {k: v for k, v in stored.items() if k.startswith("tokenizer.") and v != []}
    attachments = opened.attachments()
    files = {n: read_file(attachments[n]) for n in _FILES if n in attachments}
    if "tokenizer.json" not in files:
        files = collect_saved_tokenizer(opened) | files
    try:
        return build_tokenizer_keys(files, vocab_size, pre_tokenizer=pre_tokenizer)
    except (FormatError, MappingError) as e:
        raise type(e)(e.message, file=opened.like or opened.path, hint=e.hint) from e


def _list_dropped(opened: CheckpointSource) -> list[DroppedItem]:
    """Stored tensors that mean nothing to the model."""
    catalogue = opened.catalogue
    out = [
        DroppedItem(name=n, reason=reason, num_bytes=catalogue[n].num_bytes)
        for n, reason in opened.view.dropped
    ]
    return out + [
        DroppedItem(name=s.name, reason=s.reason, num_bytes=s.num_bytes) for s in catalogue.ignored
    ]
