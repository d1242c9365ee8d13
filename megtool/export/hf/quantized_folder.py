"""Export a quantized Hugging Face folder to another form, without quantizing again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool import __version__
from megtool.console import Progress, silent
from megtool.digests.crc32c import SIDECAR, read_sidecar
from megtool.errors import MappingError, UnknownTensorsError, listed
from megtool.export.hf.read_quantized import is_compressed, read_passthrough, read_quantized_modules
from megtool.export.hf.tensor_specs import FolderForm, ModuleTensors, transforms_of
from megtool.export.hf.write_compressed import CompressedForm, PassthroughForm
from megtool.export.hf.write_fp8_blocks import Fp8BlocksForm
from megtool.export.hf.write_modelopt import ModelOptForm
from megtool.export.preflight import check_engine_rules
from megtool.export.quantized_module import QuantizedModules
from megtool.export.repack import WeightSlice, plan_repack
from megtool.export.repack_region import find_source_part
from megtool.export.report import ExportReport
from megtool.export.small_tensors import SmallTensorReader, reciprocal
from megtool.export.staged_export import PlannedExport
from megtool.formats.safetensors.quantization_config import QUANT_FILE, quantization_config
from megtool.formats.safetensors.reader import (
    DEFAULT_SHARD_BYTES,
    INDEX,
    open_as_stored,
    plan_safetensors_layout,
)
from megtool.lint.folder_view import plan_folder
from megtool.number_formats.decode import LOW_RANK
from megtool.number_formats.small_floats import single
from megtool.options.execution import ExecutionOptions
from megtool.options.groups import SourceOptions
from megtool.options.sizes import parse_size
from megtool.plan.copies import DroppedItem, PlanSource, ReshardPlan
from megtool.plan.planner import build_plan
from megtool.quant.recipes.engine_support import EngineVersion, parse_engine
from megtool.source.open import open_source
from megtool.storage.files import Files, read_file
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import TensorFeed
from megtool.transport.constant_feed import ConstantFeed, round_to_dtype

_RENAMED = "its value is stored under another name"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFolder:
    """What the folder is: `to` is its form, `compressed-tensors` or `fp8-blocks`, and anything else
    is ModelOpt's; `target` is the engine, or ENGINE@VERSION, that has to load it."""

    to: str
    target: str | None = None
    max_shard_size: str | None = None

    @property
    def max_shard_bytes(self) -> int:
        """The most bytes of a file."""
        size = self.max_shard_size
        return parse_size(size, "max shard size") if size else DEFAULT_SHARD_BYTES


def export_folder(
    source: Path,
    destination: Path,
    written: EngineFolder,
    *,
    family: str | None = None,
    execution: ExecutionOptions,
    files: Files | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write a quantized Hugging Face folder in ModelOpt's form, DeepSeek's or compressed-tensors'.

    Codes and scales keep their values: if both forms pack them alike their bytes are copied,
    otherwise they are repacked; nothing is rounded again. A compressed-tensors folder that stays
    one keeps its whole configuration. The plan is checked against the rules of the loader of
    `target` before anything is staged.

    Raises:
        FormatError: the source is not quantized, or incomplete.
        MappingError: tensors of the model (of `family`, else the one its config names) are missing,
            the form cannot hold something (which modules, and what to do), scales are wrong, or the
            engine cannot load the result.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    start = time.monotonic()
    to, target, shard_bytes = written.to, written.target, written.max_shard_bytes
    engine = parse_engine(target) if target else None
    form, folder = _read(source, to)
    form.check(folder)
    if engine is not None and isinstance(form, ModelOptForm):
        _check_algos(folder, engine)
    _check_complete(source, family)
    system = files or Files()
    with SmallTensorReader(folder.catalogue, system) as values:
        tensors = _plan_tensors(folder, form, values)
        plan = _plan(folder, form, tensors, shard_bytes)
        notes = [*folder.notes, *form.notes(folder)]
        if folder.has_untied_head:
            notes.append("lm_head is quantized: tie_word_embeddings becomes false")
        planned = plan_folder(
            destination,
            plan.target.catalogue,
            plan.target.iter_small_files(),
            tensors.tile_reader(values),
        )
        notes += check_engine_rules(planned, target)
    is_named = to in ("compressed-tensors", "fp8-blocks", "unified")
    report = ExportReport(
        source=str(source),
        to=to if is_named else f"unified ({to})",
        engine=engine.name if engine else "",
        algo=" and ".join(_formats(folder)),
        kv_algo=folder.kv_algo,
        source_bytes=folder.catalogue.num_bytes,
        exact=len(folder.modules) + len(folder.passed_through),
        plain=len(folder.unquantized),
        notes=tuple(notes),
        warnings=tuple(folder.catalogue.warnings),
    )
    export = PlannedExport(
        plan=plan,
        report=report,
        sources=[folder.catalogue.root],
        start=start,
        rotation=_read_rotation(folder),
    )
    return export.write(destination, execution, system, progress)


def _read_rotation(folder: QuantizedModules) -> Mapping[str, Any] | None:
    """The record of the rotation that is in the weights, if there is one."""
    root = folder.catalogue.root
    if not transforms_of(folder) or not root.is_dir():
        return None
    sidecar = read_sidecar(root / SIDECAR)
    return sidecar.rotation if sidecar else None


def _check_algos(folder: QuantizedModules, engine: EngineVersion) -> None:
    """Refuse formats that no version of an engine's loader has, before any work."""
    if not folder.modules:
        raise MappingError(
            f"{engine.name} loads no folder in which nothing but the KV cache is quantized",
            file=folder.catalogue.root,
            hint="quantize weights too, or give the engine the model it was made from and let it "
            "choose the cache; --to unified and --to compressed-tensors keep the scales",
            error_id="unsupported-by-engine",
        )
    loads = {a for line in engine.supported("linear") for a in line.algos}
    for algo in dict.fromkeys(m.algo for m in folder.modules):
        if algo not in loads:
            names = [m.name for m in folder.modules if m.algo == algo]
            raise MappingError(
                f"{engine.name} does not load {algo}, the format of {listed(names)}",
                file=folder.catalogue.root,
                tensor=names[0],
                hint=f"it loads {', '.join(sorted(loads))}; `megtool recipe list` names recipes",
                error_id="unsupported-by-engine",
            )


def _check_complete(source: Path, family: str | None) -> None:
    """All tensors of the model are there, where it is one that is known.

    Raises:
        MappingError: some are missing, or have other shapes.
    """
    try:
        open_source(source, SourceOptions(family=family))
    except UnknownTensorsError:
        return  # parts that no table knows: they are carried as they are


def _read(source: Path, to: str) -> tuple[FolderForm, QuantizedModules]:
    """The folder, and the form it is to have."""
    if to == "fp8-blocks":
        folder = read_quantized_modules(source)
        return Fp8BlocksForm.of(folder), folder
    if to != "compressed-tensors":
        return ModelOptForm(), read_quantized_modules(source)
    config = quantization_config(open_as_stored(source).metadata)
    if config is not None and is_compressed(config):
        return PassthroughForm(), read_passthrough(source)
    return CompressedForm(), read_quantized_modules(source)


def _formats(folder: QuantizedModules) -> list[str]:
    """What modules are in, in the words of the form."""
    if not folder.passed_through:
        return sorted({m.algo for m in folder.modules})
    config = quantization_config(folder.catalogue.metadata) or {}
    groups = config.get("config_groups")
    formats = [g.get("format") for g in groups.values()] if isinstance(groups, dict) else []
    return sorted({str(f) for f in formats if f} or {str(config.get("format"))})


@dataclass(slots=True, kw_only=True)
class _TensorPlan:
    """What the target holds, and what fills it."""

    tensors: list[GlobalTensor] = field(default_factory=list)
    feeds: list[TensorFeed] = field(default_factory=list)
    source: dict[str, Placement] = field(default_factory=dict)
    target: dict[str, Placement] = field(default_factory=dict)
    dropped: list[DroppedItem] = field(default_factory=list)
    scales: dict[str, tuple[str, bool]] = field(default_factory=dict)
    given_values: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def tile_reader(
        self, values: SmallTensorReader
    ) -> Callable[[str], Iterator[NDArray[np.float32]]]:
        """Numbers of the target's small tensors by name: of `known` ones, of `scales` that are a
        stored tensor (or its reciprocal), and of those that are copied."""

        def read_tiles(name: str) -> Iterator[NDArray[np.float32]]:
            if name in self.given_values:
                yield self.given_values[name].reshape(-1)
                return
            stored, divides = self.scales.get(name, (name, False))
            for tile in values.read_tiles(stored):
                yield reciprocal(tile) if divides else tile

        return read_tiles


def _plan_tensors(
    folder: QuantizedModules, form: FolderForm, values: SmallTensorReader
) -> _TensorPlan:
    """Tensors in the order of the source's files, each module's where its codes were."""
    out = _TensorPlan()
    by_codes = {m.parts[0][1]: form.plan_module(m) for m in folder.modules}
    # SVDQuant's matrices are copied under the names that they have.
    part_names = {n for m in folder.modules for p, n in m.parts if p.role not in LOW_RANK}
    constants: list[tuple[GlobalTensor, NDArray[Any]]] = []
    renamed = {m.input_scale for m in folder.modules if m.input_scale}
    for tensor in folder.catalogue.tensors:
        written = by_codes.get(tensor.name)
        if written is not None:
            out.tensors += written.tensors
            can_copy = _has_equal_codes(written)
            if can_copy:
                out.source[tensor.name] = Placement.identity(tensor.name, tensor.shape)
                codes = written.parts[0][1]
                out.target[tensor.name] = Placement.identity(codes.name, codes.shape)
            out.feeds += plan_repack(
                [WeightSlice.of_module(written.module)],
                written.packing,
                written.parts,
                moves_codes=not can_copy,
            )
            constants += [*written.values, *_input_scale(written, values)]
            for part, scale in written.parts[1:]:
                if (source_part := find_source_part(written.module, part.role)) is not None:
                    out.scales[scale.name] = source_part[1], source_part[0].role != part.role
    for scale, name in form.plan_kv_cache(folder):
        renamed.add(name)
        if folder.catalogue[name].numel != scale.numel:
            raise MappingError(
                f"{folder.catalogue[name].numel} scales of one KV cache: {form.name} has one",
                file=folder.catalogue.root,
                tensor=name,
                hint="quantize with fp8_kv_fp8, or leave the cache as it is",
            )
        out.tensors.append(scale)
        constants.append(
            (scale, round_to_dtype(values.read(name).reshape(scale.shape), scale.dtype))
        )
    for tensor in folder.catalogue.tensors:
        is_redundant = folder.modules and _is_redundant(tensor.name)
        if tensor.name in renamed or (tensor.name not in part_names and is_redundant):
            out.dropped.append(DroppedItem(name=tensor.name, reason=_RENAMED, is_lost=False))
        elif tensor.name not in part_names:
            place = Placement.identity(tensor.name, tensor.shape)
            out.source[tensor.name] = out.target[tensor.name] = place
            out.tensors.append(tensor)
    read = {p.stored for f in out.feeds for p in f.reads}
    for name in sorted(read):
        out.source[name] = Placement.identity(name, folder.catalogue[name].shape)
    for name in sorted(part_names - out.source.keys()):
        out.dropped.append(DroppedItem(name=name, reason=_RENAMED, is_lost=False))
    if constants:
        out.feeds.append(ConstantFeed(values=tuple(constants)))
        out.given_values = {t.name: single(v, t.dtype.name) for t, v in constants}
    out.tensors = _sort_tensors(out.tensors, folder)
    return out


def _has_equal_codes(written: ModuleTensors) -> bool:
    """The bytes of codes are the same in both forms, in the same order."""
    have, codes = written.module.parts[0][0], written.parts[0][0]
    packings = written.module.packing.partition(":")[0], written.packing.partition(":")[0]
    has_same_layout = (have.dtype, have.shape, have.spans) == (
        codes.dtype,
        codes.shape,
        codes.spans,
    )
    return has_same_layout and packings[0] == packings[1]


def _sort_tensors(tensors: Sequence[GlobalTensor], folder: QuantizedModules) -> list[GlobalTensor]:
    """Kept tensors where they were in the source, a module's where its codes were."""
    order = {t.name: i for i, t in enumerate(folder.catalogue.tensors)}
    stems: dict[str, int] = {}
    for name, i in order.items():
        stems.setdefault(name.rpartition(".")[0], i)
    last = len(order)
    return sorted(
        tensors, key=lambda t: order.get(t.name, stems.get(t.name.rpartition(".")[0], last))
    )


def _is_redundant(name: str) -> bool:
    """A tensor of a form's own that says what codes and config say already."""
    return name.endswith((".weight_shape", ".input_zero_point", ".k_zero_point", ".v_zero_point"))


def _input_scale(
    written: ModuleTensors, values: SmallTensorReader
) -> list[tuple[GlobalTensor, NDArray[Any]]]:
    """The scale of a module's inputs, with its value."""
    if written.input_scale is None:
        return []
    module = written.module
    scale = values.read(module.input_scale).reshape(written.input_scale.shape)
    if module.input_divides != written.divides:
        scale = reciprocal(scale)
    return [(written.input_scale, np.asarray(scale, np.float32))]


def _plan(
    folder: QuantizedModules, form: FolderForm, tensors: _TensorPlan, max_shard_bytes: int
) -> ReshardPlan:
    """Everything laid out, and the copies and feeds that fill it."""
    catalogue = folder.catalogue
    files = {
        n: read_file(p)
        for n, p in catalogue.auxiliary_files.items()
        if n not in (INDEX, SIDECAR, QUANT_FILE)
    }
    small: Mapping[str, bytes] = form.edit_files(folder, files)
    return build_plan(
        [PlanSource(catalogue=catalogue, placements=tensors.source)],
        plan_safetensors_layout(
            tensors.tensors, max_shard_bytes=max_shard_bytes, small_files=small
        ),
        tensors.target,
        dropped=tensors.dropped,
        feeds=tensors.feeds,
        options=repr((__version__, form.name)),
    )
