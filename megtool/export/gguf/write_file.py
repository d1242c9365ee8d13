"""Export to GGUF: any checkpoint as the one file that llama.cpp reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megtool import __version__
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.parallel_scan import usual_threads
from megtool.checkpoint.plan import Dropped, Plan, Source
from megtool.checkpoint.planner import build
from megtool.checkpoint.storage.files import Files
from megtool.config import ModelConfig
from megtool.console import Progress, silent
from megtool.convert.families import Family
from megtool.errors import FormatError, MappingError, UsageError
from megtool.export.gguf.architectures import architecture_of, oddities_of
from megtool.export.gguf.header import lay_out
from megtool.export.gguf.layout import Contents, contents
from megtool.export.gguf.metadata_keys import model_keys
from megtool.export.gguf.rope_scaling import factor_tensors
from megtool.export.gguf.tensor_types import kind_of
from megtool.export.gguf.tokenizer import tokenizer_keys
from megtool.export.report import ExportReport
from megtool.reshard.execute import expected_digests, peak_rss_bytes, places_of
from megtool.reshard.open_source import CheckpointSource, open_model, unknown_model
from megtool.reshard.parse_size import parse_size
from megtool.reshard.source import saved_tokenizer
from megtool.reshard.staged_write import write_staged
from megtool.reshard.target import no_copies

_LOG = logging.getLogger(__name__)
_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def export_gguf(
    source: str | Path,
    destination: str | Path,
    *,
    kind: str = "bf16",
    name: str | None = None,
    split: str | None = None,
    iteration: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    threads: int | None = None,
    memory: str = "256MiB",
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    files: Files | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write the model of `source`, in any format and layout, quantized or not, as one GGUF file.

    `kind` is what most weights become: f32, f16, bf16, or a block format that the installed gguf
    package encodes (q8_0, q4_0, ...); see `export.gguf.kinds` for the rest. Weights whose rows are
    no whole blocks become f16, as llama.cpp's own tools do, and a note says so. `name` is the
    model's name in the file (the destination's, without it); `split` is llama.cpp's name for the
    way the tokenizer cuts text, where it cannot be told from tokenizer.json. Optimizer state is
    left out.

    Raises:
        UsageError: the kind is not known, or is for experts and there are none.
        MappingError: llama.cpp has no such architecture, or would compute something else.
        FormatError: there is no tokenizer; a weight to be quantized holds NaN or infinity, or one
            that becomes f16 a number too large for it.
        MissingPackageError: the gguf package is not installed.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    began = time.monotonic()
    wanted, place = kind_of(kind), Path(destination)
    memory_bytes = parse_size(memory, "memory")
    opened = open_model(
        Path(source),
        iteration=iteration,
        family_name=family,
        like=None if like is None else Path(like),
        optimizer=False,
    )
    plan, notes = _planned(opened, place, wanted, name or place.stem, split)
    stage = Stage(
        place,
        files=files or Files(),
        fingerprint=plan.fingerprint,
        overwrite=overwrite,
        is_file=True,
        sources=places_of(opened),
    )
    report = ExportReport(
        source=str(source),
        destination=str(destination),
        to="gguf",
        engine="llama.cpp",
        algo="" if wanted in ("F32", "F16", "BF16") else wanted,
        tensors=len(plan.target.catalogue.tensors),
        num_bytes=plan.target.catalogue.num_bytes,
        source_bytes=opened.catalogue.num_bytes,
        decoded=len(opened.catalogue.packed),
        files=(place.name,),
        notes=tuple(notes),
        is_dry=dry_run,
    )
    if dry_run:
        stage.check()
        return report
    write_staged(
        plan,
        stage,
        what="export",
        threads=usual_threads(threads),
        memory_bytes=memory_bytes,
        digest=DigestMode.BUFFERED,
        fsync=fsync,
        progress=progress,
        expected=expected_digests(opened),
        wider="--kind bf16 or f32 holds them",
    )
    return replace(
        report,
        warnings=tuple(stage.messages),
        seconds=time.monotonic() - began,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _planned(
    opened: CheckpointSource, place: Path, kind: str, name: str, split: str | None
) -> tuple[Plan, list[str]]:
    """The plan, and what is to be said about it."""
    family, config = _model_of(opened)
    architecture = architecture_of(family, config)
    if kind == "MXFP4" and not config.num_experts:
        raise UsageError(
            "kind 'mxfp4' is for the weights of experts, and the model has none",
            hint="q4_0 or q8_0",
        )
    keys = model_keys(config, architecture, name=name, kind=kind)
    keys |= _tokenizer(opened, config.vocab_size, split)
    tensors = {t.name: t for t in opened.catalogue.tensors}
    found = contents(
        opened.side.canonical,
        {n: opened.placement_of(n) for n in opened.side.canonical},
        {n: t.dtype for n, t in tensors.items()},
        config,
        family,
        architecture,
        kind=kind,
        factors=factor_tensors(config),
    )
    laid_out = lay_out(found.tensors, keys, architecture=architecture.name, file=place.name)
    plan = build(
        [Source(catalogue=opened.catalogue, placements=dict(opened.side.placements))],
        laid_out,
        found.placements,
        dropped=_dropped(opened),
        copies={n: held for n, held in opened.repeats.items() if n in found.placements},
        feeds=found.feeds,
        options=repr((__version__, kind)),
    )
    notes = [*oddities_of(architecture, config), *_said(found, kind)]
    return plan, notes


def _said(found: Contents, kind: str) -> list[str]:
    """Which weights are of another type than the one asked for."""
    others: dict[str, list[str]] = {}
    for t in found.tensors:
        if t.kind not in (kind, "F32") and t.name not in found.fallen_back:
            others.setdefault(t.kind, []).append(t.name)
    notes = [
        f"{len(names)} of {len(found.tensors)} tensors are {other}: {_first(names)}"
        for other, names in others.items()
    ]
    if found.fallen_back:
        notes.append(
            f"{len(found.fallen_back)} tensors are F16, for their rows are no whole blocks of "
            f"{kind}: {_first(found.fallen_back)}"
        )
    return notes


def _first(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _model_of(opened: CheckpointSource) -> tuple[Family, ModelConfig]:
    """The family and the configuration, which have to be known.

    Raises:
        MappingError: it is not.
    """
    model = opened.model
    if model is None or model.family is None or not opened.is_canonical:
        raise unknown_model(opened, "writing GGUF needs the model's family and configuration")
    return model.family, model.config


def _tokenizer(opened: CheckpointSource, vocab_size: int, split: str | None) -> Mapping[str, Any]:
    """The keys of the tokenizer: a GGUF source's own, else those of its tokenizer.json."""
    own = opened.catalogue.metadata.get("gguf", {})
    if "tokenizer.ggml.tokens" in own and opened.like is None:
        return {k: v for k, v in own.items() if k.startswith("tokenizer.") and v != []}
    there = opened.attachments()
    files = {n: there[n].read_bytes() for n in _FILES if n in there}
    if "tokenizer.json" not in files:
        files = saved_tokenizer(opened) | files
    try:
        return tokenizer_keys(files, vocab_size, split=split)
    except (FormatError, MappingError) as e:
        raise type(e)(e.message, file=opened.like or opened.path, hint=e.hint) from e


def _dropped(opened: CheckpointSource) -> list[Dropped]:
    """Stored tensors that mean nothing to the model; copies are compared with what they repeat."""
    differ = no_copies(opened, whole=False)
    for name, reason in differ.items():
        _LOG.warning("%s is left out: %s", name, reason)
    catalogue = opened.catalogue
    out = [
        Dropped(name=n, reason=reason, num_bytes=catalogue[n].num_bytes)
        for n, reason in opened.side.dropped
    ]
    return out + [
        Dropped(name=s.name, reason=s.reason, num_bytes=s.num_bytes) for s in catalogue.set_aside
    ]
