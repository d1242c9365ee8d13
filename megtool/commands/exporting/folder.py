"""Export to a quantised Hugging Face folder: codes and scales as another form has them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool import __version__
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.digest import SIDECAR, DigestMode
from megtool.checkpoint.feed import Feed
from megtool.checkpoint.formats.quantised import QUANT_FILE
from megtool.checkpoint.formats.safetensors import DEFAULT_SHARD_BYTES, INDEX, lay_out
from megtool.checkpoint.plan import Dropped, Plan, Source
from megtool.checkpoint.planner import build
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.sweep import usual_threads
from megtool.commands.exporting.carry_out import carry_out
from megtool.commands.exporting.report import ExportReport
from megtool.commands.job import peak_rss_bytes
from megtool.commands.lint import lint
from megtool.commands.sizes import parse_size
from megtool.errors import MappingError
from megtool.export.coded import CodedFolder
from megtool.export.folders.write_compressed import CompressedForm
from megtool.export.folders.write_modelopt import ModelOptForm
from megtool.export.folders.written import Form, Written, listed
from megtool.export.read import read_coded
from megtool.export.repack import Slice, repacked
from megtool.export.values import Values, reciprocal
from megtool.log import Progress, silent
from megtool.quant.recipes.targets import Target, read_target
from megtool.quant.writing.given import Given
from megtool.quant.writing.stored import in_dtype
from megtool.tensors.relation import Placement
from megtool.tensors.sharded import GlobalTensor

_LOG = logging.getLogger(__name__)

_ANEW = "its value is stored under another name"


def export_folder(
    source: str | Path,
    destination: str | Path,
    *,
    to: str,
    target: str | None = None,
    max_shard_size: str | None = None,
    threads: int | None = None,
    memory: str = "256MiB",
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    files: Files | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write a quantised Hugging Face folder in ModelOpt's form or that of compressed-tensors.

    Codes and scales keep their values: where the two pack them alike their bytes are copied, else
    put elsewhere; nothing is rounded again. `target` is an engine that has to load the result: its
    loader's rules are held against it before it appears.

    Raises:
        FormatError: the source is not quantised, or not whole.
        MappingError: the form has no place for something (which modules, and what to do), or the
            engine cannot load the result.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    began = time.monotonic()
    engine = read_target(target) if target else None
    form: Form = CompressedForm() if to == "compressed-tensors" else ModelOptForm()
    folder = read_coded(Path(source))
    form.check(folder)
    if engine is not None and isinstance(form, ModelOptForm):
        _check_algos(folder, engine)
    system, place = files or Files(), Path(destination)
    with Values(folder.catalogue, system) as values:
        job = _job(folder, form, values)
    plan = _plan(
        folder,
        form,
        job,
        parse_size(max_shard_size, "max shard size") if max_shard_size else DEFAULT_SHARD_BYTES,
    )
    stage = Stage(
        place,
        files=system,
        fingerprint=plan.fingerprint,
        overwrite=overwrite,
        sources=[folder.catalogue.root],
    )
    algos = sorted({m.algo for m in folder.modules})
    report = ExportReport(
        source=str(source),
        destination=str(destination),
        to=to if to in ("compressed-tensors", "unified") else f"unified ({to})",
        engine=engine.name if engine else "",
        algo=" and ".join(algos),
        kv_algo=folder.kv_algo,
        tensors=len(plan.target.catalogue.tensors),
        num_bytes=plan.target.catalogue.num_bytes,
        source_bytes=folder.catalogue.num_bytes,
        exact=len(folder.modules),
        plain=len(folder.kept),
        files=tuple(
            sorted(
                [f.path for f in plan.target.catalogue.files]
                + [name for name, _ in plan.target.all_small()]
            )
        ),
        notes=folder.notes,
        warnings=tuple(folder.catalogue.warnings),
        is_dry=dry_run,
    )
    if dry_run:
        stage.check()
        return report
    notes: list[str] = []
    carry_out(
        plan,
        stage,
        threads=usual_threads(threads),
        memory_bytes=parse_size(memory, "memory"),
        fsync=fsync,
        progress=progress,
        digest=DigestMode.NONE,
        before_commit=None if target is None else _linted(target, notes),
    )
    return replace(
        report,
        notes=(*report.notes, *notes),
        warnings=(*report.warnings, *stage.messages),
        seconds=time.monotonic() - began,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _check_algos(folder: CodedFolder, engine: Target) -> None:
    """Refuse formats that no version of an engine's loader has, before any work."""
    loads = {a for line in engine.lines("linear") for a in line.algos}
    for algo in dict.fromkeys(m.algo for m in folder.modules):
        if algo not in loads:
            names = [m.name for m in folder.modules if m.algo == algo]
            raise MappingError(
                f"{engine.name} does not load {algo}, the format of {listed(names)}",
                file=folder.catalogue.root,
                tensor=names[0],
                hint=f"it loads {', '.join(sorted(loads))}; `megtool recipe list` names recipes",
            )


def _linted(target: str, notes: list[str]) -> Callable[[Path], None]:
    """Hold an engine's rules against the staged folder; warnings become notes."""

    def check(folder: Path) -> None:
        found = lint(folder, target=target).findings
        errors = [f for f in found if f.severity == "error"]
        if errors:
            more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
            raise MappingError(
                f"{target} cannot load what was made: {errors[0].message}{more}",
                tensor=errors[0].module or None,
                hint=f"{errors[0].hint or 'see its rule'} ({errors[0].source})",
            )
        notes.extend(f"{target}: {f.message}" for f in found)

    return check


@dataclass(slots=True, kw_only=True)
class _Job:
    """What the target holds, and what fills it."""

    tensors: list[GlobalTensor] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    source: dict[str, Placement] = field(default_factory=dict)
    target: dict[str, Placement] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)


def _job(folder: CodedFolder, form: Form, values: Values) -> _Job:
    """Tensors in the order of the source's files, each module's where its codes were."""
    out = _Job()
    becomes = {m.parts[0][1]: form.written(m) for m in folder.modules}
    taken = {n for m in folder.modules for _, n in m.parts}
    given: list[tuple[GlobalTensor, NDArray[Any]]] = []
    anew = {m.input_scale for m in folder.modules if m.input_scale}
    for tensor in folder.catalogue.tensors:
        written = becomes.get(tensor.name)
        if written is not None:
            out.tensors += written.tensors
            alike = _lie_alike(written)
            if alike:
                out.source[tensor.name] = Placement.identity(tensor.name, tensor.shape)
                codes = written.held[0][1]
                out.target[tensor.name] = Placement.identity(codes.name, codes.shape)
            out.feeds += repacked(
                [Slice.whole(written.coded)],
                written.packing,
                written.held,
                moves_codes=not alike,
            )
            given += [*written.values, *_inputs(written, values)]
    for made, name in form.caches(folder):
        anew.add(name)
        out.tensors.append(made)
        given.append((made, in_dtype(values.of(name).reshape(made.shape), made.dtype)))
    for tensor in folder.catalogue.tensors:
        if tensor.name in anew or (tensor.name not in taken and _is_said_anew(tensor.name)):
            out.dropped.append(Dropped(name=tensor.name, reason=_ANEW, is_lost=False))
        elif tensor.name not in taken:
            place = Placement.identity(tensor.name, tensor.shape)
            out.source[tensor.name] = out.target[tensor.name] = place
            out.tensors.append(tensor)
    read = {p.stored for f in out.feeds for p in f.reads}
    for name in sorted(read):
        out.source[name] = Placement.identity(name, folder.catalogue[name].shape)
    for name in sorted(taken - out.source.keys()):
        out.dropped.append(Dropped(name=name, reason=_ANEW, is_lost=False))
    if given:
        out.feeds.append(Given(values=tuple(given)))
    out.tensors = _in_order(out.tensors, folder)
    return out


def _lie_alike(written: Written) -> bool:
    """The bytes of codes are the same in both forms, in the same order."""
    have, codes = written.coded.parts[0][0], written.held[0][0]
    packings = written.coded.packing.partition(":")[0], written.packing.partition(":")[0]
    same = (have.dtype, have.shape, have.spans) == (codes.dtype, codes.shape, codes.spans)
    return same and packings[0] == packings[1]


def _in_order(tensors: Sequence[GlobalTensor], folder: CodedFolder) -> list[GlobalTensor]:
    """Kept tensors where they were in the source, a module's where its codes were."""
    order = {t.name: i for i, t in enumerate(folder.catalogue.tensors)}
    stems: dict[str, int] = {}
    for name, i in order.items():
        stems.setdefault(name.rpartition(".")[0], i)
    last = len(order)
    return sorted(
        tensors, key=lambda t: order.get(t.name, stems.get(t.name.rpartition(".")[0], last))
    )


def _is_said_anew(name: str) -> bool:
    """A tensor of a form's own that says what codes and config say already."""
    return name.endswith((".weight_shape", ".input_zero_point"))


def _inputs(written: Written, values: Values) -> list[tuple[GlobalTensor, NDArray[Any]]]:
    """The scale of a module's inputs, with its value."""
    if written.inputs is None:
        return []
    coded = written.coded
    scale = values.of(coded.input_scale).reshape(written.inputs.shape)
    if coded.input_divides != written.divides:
        scale = reciprocal(scale)
    return [(written.inputs, np.asarray(scale, np.float32))]


def _plan(folder: CodedFolder, form: Form, job: _Job, max_shard_bytes: int) -> Plan:
    """Everything laid out, and the copies and feeds that fill it."""
    catalogue = folder.catalogue
    files = {
        n: p.read_bytes()
        for n, p in catalogue.attachments.items()
        if n not in (INDEX, SIDECAR, QUANT_FILE)
    }
    small: Mapping[str, bytes] = form.small(folder, files)
    return build(
        [Source(catalogue=catalogue, placements=job.source)],
        lay_out(job.tensors, max_shard_bytes=max_shard_bytes, small=small),
        job.target,
        dropped=job.dropped,
        feeds=job.feeds,
        options=repr((__version__, form.name)),
    )
