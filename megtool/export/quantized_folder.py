"""Export to a quantized Hugging Face folder: codes and scales as another form has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool import __version__
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.computed_tensors import Feed
from megtool.checkpoint.digest import SIDECAR, DigestMode
from megtool.checkpoint.formats.quantized import QUANT_FILE, quantization
from megtool.checkpoint.formats.safetensors import (
    DEFAULT_SHARD_BYTES,
    INDEX,
    lay_out,
    open_as_stored,
)
from megtool.checkpoint.parallel_scan import usual_threads
from megtool.checkpoint.plan import Dropped, Plan, Source
from megtool.checkpoint.planner import build
from megtool.checkpoint.storage.files import Files
from megtool.console import Progress, silent
from megtool.errors import MappingError, UnknownTensorsError, listed
from megtool.export.folders.passthrough import WholeForm
from megtool.export.folders.tensor_specs import Form, Written
from megtool.export.folders.write_compressed import CompressedForm
from megtool.export.folders.write_modelopt import ModelOptForm
from megtool.export.preflight import check_rules
from megtool.export.quantized_module import CodedFolder
from megtool.export.read_quantized import is_compressed, read_coded, read_whole
from megtool.export.repack import Slice, repacked
from megtool.export.repack_region import source_of
from megtool.export.report import ExportReport
from megtool.export.small_tensors import Values, reciprocal
from megtool.lint.planned_folder import planned_folder
from megtool.number_formats.small_floats import single
from megtool.quant.packed_tensors.modelopt_tensors import in_dtype
from megtool.quant.recipes.engine_support import Target, read_target
from megtool.reshard.constant_feed import Given
from megtool.reshard.execute import peak_rss_bytes
from megtool.reshard.open_source import open_model
from megtool.reshard.parse_size import parse_size
from megtool.reshard.staged_write import write_staged, written_files
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

_ANEW = "its value is stored under another name"


def export_folder(
    source: str | Path,
    destination: str | Path,
    *,
    to: str,
    target: str | None = None,
    family: str | None = None,
    max_shard_size: str | None = None,
    threads: int | None = None,
    memory: str = "256MiB",
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    files: Files | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write a quantized Hugging Face folder in ModelOpt's form or that of compressed-tensors.

    Codes and scales keep their values: where the two pack them alike their bytes are copied, else
    put elsewhere; nothing is rounded again. What is compressed-tensors and stays so keeps all that
    it says. `target` is an engine that has to load the result: its loader's rules are held against
    what is planned, before anything is staged.

    Raises:
        FormatError: the source is not quantized, or not whole.
        MappingError: tensors of the model (of `family`, else the one its config names) are missing,
            the form has no place for something (which modules, and what to do), scales are wrong,
            or the engine cannot load the result.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    began = time.monotonic()
    engine = read_target(target) if target else None
    form, folder = _read(Path(source), to)
    form.check(folder)
    if engine is not None and isinstance(form, ModelOptForm):
        _check_algos(folder, engine)
    _check_whole(Path(source), family)
    system, place = files or Files(), Path(destination)
    shard_bytes = parse_size(max_shard_size, "max shard size") if max_shard_size else None
    with Values(folder.catalogue, system) as values:
        job = _job(folder, form, values)
        plan = _plan(folder, form, job, shard_bytes or DEFAULT_SHARD_BYTES)
        notes = [*folder.notes, *form.notes(folder)]
        if folder.has_untied_head:
            notes.append("lm_head is quantized: tie_word_embeddings becomes false")
        laid_out = plan.target.catalogue
        planned = planned_folder(place, laid_out, plan.target.all_small(), job.elements(values))
        notes += check_rules(planned, target)
    stage = Stage(
        place,
        files=system,
        fingerprint=plan.fingerprint,
        overwrite=overwrite,
        sources=[folder.catalogue.root],
    )
    report = ExportReport(
        source=str(source),
        destination=str(destination),
        to=to if to in ("compressed-tensors", "unified") else f"unified ({to})",
        engine=engine.name if engine else "",
        algo=" and ".join(_formats(folder)),
        kv_algo=folder.kv_algo,
        tensors=len(plan.target.catalogue.tensors),
        num_bytes=plan.target.catalogue.num_bytes,
        source_bytes=folder.catalogue.num_bytes,
        exact=len(folder.modules) + len(folder.carried),
        plain=len(folder.kept),
        files=written_files(plan),
        notes=tuple(notes),
        warnings=tuple(folder.catalogue.warnings),
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
        memory_bytes=parse_size(memory, "memory"),
        digest=DigestMode.NONE,
        fsync=fsync,
        progress=progress,
    )
    return replace(
        report,
        warnings=(*report.warnings, *stage.messages),
        seconds=time.monotonic() - began,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _check_algos(folder: CodedFolder, engine: Target) -> None:
    """Refuse formats that no version of an engine's loader has, before any work."""
    if not folder.modules:
        raise MappingError(
            f"{engine.name} loads no folder in which nothing but the KV cache is quantized",
            file=folder.catalogue.root,
            hint="quantize weights too, or give the engine the model it was made from and let it "
            "choose the cache; --to unified and --to compressed-tensors keep the scales",
        )
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


def _check_whole(source: Path, family: str | None) -> None:
    """All tensors of the model are there, where it is one that is known.

    Raises:
        MappingError: some are missing, or have other shapes.
    """
    try:
        open_model(source, family_name=family)
    except UnknownTensorsError:
        return  # parts that no table knows: they are carried as they are


def _read(source: Path, to: str) -> tuple[Form, CodedFolder]:
    """The folder, and the form it is to have."""
    if to != "compressed-tensors":
        return ModelOptForm(), read_coded(source)
    config = quantization(open_as_stored(source).metadata)
    if config is not None and is_compressed(config):
        return WholeForm(), read_whole(source)
    return CompressedForm(), read_coded(source)


def _formats(folder: CodedFolder) -> list[str]:
    """What modules are in, in the words of the form."""
    if not folder.carried:
        return sorted({m.algo for m in folder.modules})
    config = quantization(folder.catalogue.metadata) or {}
    groups = config.get("config_groups")
    said = [g.get("format") for g in groups.values()] if isinstance(groups, dict) else []
    return sorted({str(f) for f in said if f} or {str(config.get("format"))})


@dataclass(slots=True, kw_only=True)
class _Job:
    """What the target holds, and what fills it."""

    tensors: list[GlobalTensor] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    source: dict[str, Placement] = field(default_factory=dict)
    target: dict[str, Placement] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    scales: dict[str, tuple[str, bool]] = field(default_factory=dict)
    known: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def elements(self, values: Values) -> Callable[[str], Iterator[NDArray[np.float32]]]:
        """Numbers of the target's small tensors by name: of `known` ones, of `scales` that are a
        stored tensor (or its reciprocal), and of those that are copied."""

        def found(name: str) -> Iterator[NDArray[np.float32]]:
            if name in self.known:
                yield self.known[name].reshape(-1)
                return
            stored, divides = self.scales.get(name, (name, False))
            for tile in values.tiles(stored):
                yield reciprocal(tile) if divides else tile

        return found


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
            for part, scale in written.held[1:]:
                if (held := source_of(written.coded, part.role)) is not None:
                    out.scales[scale.name] = held[1], held[0].role != part.role
    for made, name in form.caches(folder):
        anew.add(name)
        if folder.catalogue[name].numel != made.numel:
            raise MappingError(
                f"{folder.catalogue[name].numel} scales of one KV cache: {form.name} has one",
                file=folder.catalogue.root,
                tensor=name,
                hint="quantize with kv_fp8, or leave the cache as it is",
            )
        out.tensors.append(made)
        given.append((made, in_dtype(values.of(name).reshape(made.shape), made.dtype)))
    for tensor in folder.catalogue.tensors:
        said = folder.modules and _is_said_anew(tensor.name)
        if tensor.name in anew or (tensor.name not in taken and said):
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
        out.known = {t.name: single(v, t.dtype.name) for t, v in given}
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
    return name.endswith((".weight_shape", ".input_zero_point", ".k_zero_point", ".v_zero_point"))


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
