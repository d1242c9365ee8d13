"""Inspect adapters of other programs, and convert them into one another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megtool.adapters.adapter_files import (
    AdapterFile,
    plan_megatron_files,
    plan_peft_files,
    write_files,
)
from megtool.adapters.bridge import CONFIG_FILE
from megtool.adapters.bridge_writer import make_bridge_adapter
from megtool.adapters.modelopt_writer import make_modelopt_adapter
from megtool.adapters.peft_writer import PeftNames, make_peft_adapter
from megtool.adapters.read import read_adapter
from megtool.adapters.stored_adapter import AdaptedWeight, StoredAdapter
from megtool.commands.options.adapter import ConvertAdapterOptions, InspectAdapterOptions
from megtool.console import format_bytes, several
from megtool.errors import UnknownFamilyError, listed
from megtool.megatron_state.bridge_files import edit_model, make_bridge_files
from megtool.options.layout import ParallelConfig
from megtool.quant.modelopt.quantizers import make_mode_files
from megtool.report.sections import Report, Row, Section, Table
from megtool.reshard.staged_write import make_stage
from megtool.source.checkpoint import CheckpointSource, require_model
from megtool.source.open import WITHOUT_QUANTIZERS, open_source, parse_iteration
from megtool.storage.files import Files, read_file
from megtool.transport.weight_update import WeightUpdate

_PROGRAMS = {"peft": "PEFT", "bridge": "Megatron-Bridge", "modelopt": "ModelOpt"}
_ITERATION = 0
"""That of an adapter which no training of Megatron's has saved, as of imported weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedWeightLine:
    """A weight that an adapter changes, or those of several layers that are alike in it.

    `shape` is the weight's, outputs first, without the dimension of experts.
    """

    name: str
    count: int
    rank: int
    scale: float
    shape: tuple[int, int]
    num_experts: int | None
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectAdapterReport(Report):
    """What an adapter changes. `weights` are single ones only where that was asked for."""

    path: str
    form: str
    settings: Mapping[str, Any]
    parameters: int
    num_bytes: int
    num_weights: int
    weights: tuple[AdaptedWeightLine, ...]

    def to_json(self) -> dict[str, Any]:
        out = {n: getattr(self, n) for n in self.__dataclass_fields__}
        out |= {"settings": dict(self.settings), "weights": [asdict(w) for w in self.weights]}
        return self.add_remarks(out)

    def title(self) -> str:
        return f"{self.path} ({_PROGRAMS[self.form]})"

    def rows(self) -> Iterator[Row]:
        yield "weights", f"{self.num_weights:,}, {self.parameters:,} parameters of their own"
        yield "bytes", format_bytes(self.num_bytes)
        for name, value in self.settings.items():
            if value not in (None, [], 0.0):
                text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                yield name.replace("_", " "), text

    def sections(self) -> Iterator[Section]:
        rows = [
            (
                line.name,
                f"{line.count:,}",
                str(line.rank),
                f"{line.scale:g}",
                " x ".join(map(str, (*filter(None, [line.num_experts]), *line.shape))),
                line.dtype,
            )
            for line in self.weights
        ]
        header = ("weight", "number", "rank", "scale", "shape", "dtype")
        yield Section(table=Table(header=header, rows=rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertAdapterReport(Report):
    """An adapter that was written in another format.

    `ranks` counts the weights of each rank before and after; `rounded` are modules of which
    elements were rounded, because scales that differ by no power of two became one.
    """

    source: str
    destination: str
    form: str
    to: str
    num_weights: int
    num_tensors: int
    num_bytes: int
    ranks: Mapping[str, Sequence[int]]
    rounded: tuple[str, ...]
    files: tuple[str, ...]
    is_dry: bool

    def to_json(self) -> dict[str, Any]:
        out = {n: getattr(self, n) for n in self.__dataclass_fields__}
        return self.add_remarks(out | {"ranks": {k: list(v) for k, v in self.ranks.items()}})

    def title(self) -> str:
        plan = " (dry run)" if self.is_dry else ""
        source, target = _PROGRAMS[self.form], _PROGRAMS[self.to]
        return f"{self.source} ({source}) -> {self.destination} ({target}){plan}"

    def rows(self) -> Iterator[Row]:
        yield "weights", f"{self.num_weights:,} of the model"
        yield "tensors", f"{self.num_tensors:,}, {format_bytes(self.num_bytes)}"
        before, after = (", ".join(map(str, self.ranks[k])) for k in ("source", "destination"))
        yield "rank", after if before == after else f"{before} -> {after}"
        yield "files", listed(self.files, 6)
        if self.rounded:
            yield "rounded", f"{several(len(self.rounded), 'module')}: {listed(self.rounded)}"


def inspect_adapter(options: InspectAdapterOptions) -> InspectAdapterReport:
    """Show which weights an adapter changes, from headers and small files alone.

    Raises:
        FormatError: there is no adapter, or a damaged one.
        MappingError: it is more than a low-rank update of each weight.
    """
    adapter = read_adapter(options.source, iteration=parse_iteration(options.iteration))
    lines = [_line(weight) for weight in adapter.weights]
    return InspectAdapterReport(
        path=str(options.source),
        form=adapter.form,
        settings=adapter.settings,
        parameters=adapter.num_elements,
        num_bytes=adapter.num_bytes,
        num_weights=len(lines),
        weights=tuple(lines if options.modules else _fold(lines)),
    )


def convert_adapter(options: ConvertAdapterOptions) -> ConvertAdapterReport:
    """Write an adapter as `to`'s program loads it; `base` says the model it belongs to.

    Raises:
        FormatError: there is no adapter, or a damaged one, or one with NaN or Inf.
        MappingError: it is more than a low-rank update of each weight, of another model, or has
            no place in the other format.
        DestinationError: the destination exists, or cannot be written.
    """
    adapter = read_adapter(options.source, iteration=parse_iteration(options.reading.iteration))
    base = open_source(
        options.base,
        replace(options.reading, iteration=None),
        optimizer=False,
        tensors=WITHOUT_QUANTIZERS,  # weights are not read, so they may be smoothed
    )
    model, config = require_model(base, "an adapter")
    updates = adapter.updates(config, model.family)
    for update in updates.values():
        update.check_finite()
    if options.to == "peft":
        planned, ranks, rounded = _plan_peft(adapter, updates, base, str(options.base))
    elif options.to == "bridge":
        planned, ranks, rounded = _plan_bridge(adapter, updates, base, options.base)
    else:
        out = make_modelopt_adapter(updates, config, model.family)
        small = make_mode_files("peft", out.mode)
        planned = plan_megatron_files(out.tensors, small, _ITERATION)
        ranks, rounded = [out.rank], out.rounded
    stage = make_stage(
        options.execution,
        options.destination,
        files=Files(),
        fingerprint="",  # an adapter is small: nothing of an interrupted run is used
        sources=[options.source, options.base],
    )
    report = ConvertAdapterReport(
        source=str(options.source),
        destination=str(options.destination),
        form=adapter.form,
        to=options.to,
        num_weights=len(updates),
        num_tensors=sum(not isinstance(d, bytes) for f in planned for _, d in f.parts),
        num_bytes=sum(f.num_bytes for f in planned),
        ranks={"source": sorted({w.rank for w in adapter.weights}), "destination": ranks},
        rounded=rounded,
        files=tuple(f.name for f in planned),
        is_dry=options.execution.dry_run,
    )
    if options.execution.dry_run:
        stage.check()
        return report
    with stage:
        write_files(stage, planned)
        stage.commit(fsync=options.execution.fsync)
    return replace(report, warnings=(*report.warnings, *stage.messages))


_Planned = tuple[list[AdapterFile], list[int], tuple[str, ...]]
"""Files, the ranks in them, and the modules of which elements were rounded."""


def _plan_peft(
    adapter: StoredAdapter,
    updates: Mapping[str, WeightUpdate],
    base: CheckpointSource,
    path: str,
) -> _Planned:
    model, config = require_model(base, "an adapter")
    if model.family is None:
        raise UnknownFamilyError(
            "PEFT's names are those of a family, and the base checkpoint names none",
            file=base.path,
            hint="--family NAME, or --like HF_FOLDER",
        )
    names = PeftNames(config, model.family)
    out = make_peft_adapter(updates, names, base=path, dropout=adapter.settings["dropout"])
    ranks = {out.config["r"], *out.config["rank_pattern"].values()}
    return plan_peft_files(out), sorted(ranks), out.rounded


def _plan_bridge(
    adapter: StoredAdapter,
    updates: Mapping[str, WeightUpdate],
    base: CheckpointSource,
    path: Path,
) -> _Planned:
    model, config = require_model(base, "an adapter")
    out = make_bridge_adapter(updates, config, model.family, dropout=adapter.settings["dropout"])
    kind = str(next(iter(out.tensors.values())).dtype).removeprefix("torch.")
    existing = {
        name: read_file(file)
        for name, file in base.catalogue.auxiliary_files.items()
        if name == CONFIG_FILE
    }
    small = make_bridge_files(
        config, ParallelConfig(), dtype=kind, iteration=_ITERATION, existing=existing
    )
    run_config = edit_model(small[CONFIG_FILE], out.model)
    small[CONFIG_FILE] = _with_adapter(run_config, out.section, str(path))
    planned = plan_megatron_files(out.tensors, small, _ITERATION)
    return planned, [out.section["dim"]], out.rounded


def _with_adapter(run_config: bytes, section: Mapping[str, Any], base: str) -> bytes:
    """A run_config.yaml with the adapter's section, and the base as its pretrained checkpoint."""
    text = run_config.decode("utf-8", "surrogateescape")
    text = re.sub(r"(?m)^peft:[^\n]*\n(?:[ #][^\n]*\n)*", "", text)
    text = re.sub(r"(?m)^  pretrained_checkpoint:[^\n]*\n", "", text)
    pretrained = f"  pretrained_checkpoint: {json.dumps(base)}\n"
    text = re.sub(r"(?m)^checkpoint:[^\n]*\n", lambda m: m[0] + pretrained, text, count=1)
    lines = [f"  {name}: {json.dumps(value)}\n" for name, value in section.items()]
    return (text.rstrip("\n") + "\npeft:\n" + "".join(lines)).encode("utf-8", "surrogateescape")


def _line(weight: AdaptedWeight) -> AdaptedWeightLine:
    experts = max((m.shape[0] for m in (weight.down, weight.up) if len(m.shape) == 3), default=None)
    name = weight.name if weight.part is None else f"{weight.name} ({weight.part})"
    return AdaptedWeightLine(
        name=name,
        count=1,
        rank=weight.rank,
        scale=weight.scale,
        shape=(weight.up.shape[-2], weight.down.shape[-1]),
        num_experts=experts,
        dtype=str(weight.down.dtype).removeprefix("torch."),
    )


def _fold(lines: Sequence[AdaptedWeightLine]) -> list[AdaptedWeightLine]:
    """Weights that differ in the number of their layer only, as one line with a star."""
    folds: dict[AdaptedWeightLine, int] = {}
    for line in lines:
        key = replace(line, name=re.sub(r"\.\d+\.", ".*.", line.name))
        folds[key] = folds.get(key, 0) + 1
    return [replace(key, count=count) for key, count in folds.items()]
