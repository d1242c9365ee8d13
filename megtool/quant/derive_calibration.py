"""Derives a calibration file from the FP8 state of a checkpoint, without data.

Delayed scaling records the input amax of every step, and ModelOpt stores amaxes, so static scales
need no data. A Megatron module's amax applies to all modules fused in it: one for queries, keys and
values, one for gate and up, one for each expert.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

import numpy as np

from megtool.convert.dialects import CanonicalView
from megtool.errors import CalibrationError, DestinationError, MappingError
from megtool.fp8_state.checks import is_single_linear
from megtool.fp8_state.collect import (
    FP8ScalingState,
    collect_fp8_state,
    require_fp8_state,
    require_known_experts,
)
from megtool.fp8_state.modelopt_amax import AmaxBuffer
from megtool.fp8_state.weight_amax import WEIGHT, find_sites
from megtool.megatron_state.extra_states.names import Site, is_amax_buffer
from megtool.megatron_state.extra_states.te_state import ExtraState
from megtool.number_formats.delayed_scaling import INPUT
from megtool.options.groups import SourceOptions
from megtool.report.sections import Report, Row, Section, Table, fold_names
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import TensorFilter, open_source
from megtool.staging.destination.store_check import check_free, check_object
from megtool.storage.file_kinds import describe_kind
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    from megtool.quant.statistics.activation_sites import ActivationSite
    from megtool.quant.statistics.site_statistics import ActivationStatistics

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ATTENTION = ".self_attention.core_attention"
_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class InputAmaxes:
    """Input amaxes by module, and the reason for each missing one.

    `kv_caches` are the amaxes of keys and of values, by layer.
    """

    amax: dict[Site, float]
    errors: dict[Site, str]
    kv_caches: dict[int, tuple[float, float]]


def derive_amax(
    path: Path,
    destination: Path,
    options: SourceOptions,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
) -> DeriveReport:
    """Write the calibration file `destination` from the FP8 scaling of the checkpoint at `path`.

    `megtool quantize --calibration` accepts it for recipes with one static scale per input. Sites
    of modules that trained without FP8 are omitted: recipes that need them are rejected.

    Raises:
        UsageError: the checkpoint has no FP8 state.
        CalibrationError: an amax history is empty or invalid, or experts cannot be distinguished;
            names the modules.
        MappingError: the model is unknown.
        DestinationError: the destination exists.
    """
    from megtool.quant.recipes.modules import list_modules
    from megtool.quant.statistics.activation_sites import list_activation_sites

    _check_destination(destination, overwrite)
    scaling_source = open_source(path, options, lenient=True, optimizer=False)
    scaling = collect_fp8_state(scaling_source)
    require_known_experts(scaling, scaling_source)
    require_fp8_state(scaling, scaling_source)
    model = open_source(path, options, tensors=TensorFilter(ignore=is_amax_buffer), optimizer=False)
    modules = list_modules(model.view)
    config = model.view.config
    if config is None:
        raise MappingError(
            "the model is unknown: the checkpoint has no config",
            hint="--like HF_FOLDER",
            error_id="no-model-config",
        )
    activation_sites = list_activation_sites(modules.modules, config)
    inputs = read_input_amaxes(scaling)
    sites = map_modules(model.view, model.catalogue.tensors)
    _check_complete(inputs, set(sites.values()), path)
    statistics, derived = _statistics(activation_sites, inputs, sites)
    if not statistics:
        raise CalibrationError(
            "no module with FP8 state belongs to this model",
            file=path,
            hint="--like FOLDER with the config.json of this model",
        )
    _check_experts(activation_sites, statistics, path)
    if not dry_run:
        _save(model, inputs, statistics, destination)
    return DeriveReport(
        source=str(path),
        destination=str(destination),
        format=model.catalogue.format,
        origin=_origin(scaling),
        derived=tuple(derived),
        missing=tuple(
            p.name for p in activation_sites if p.kind == "input" and p.name not in statistics
            and not _is_rarely_quantized(p)
        ),
        dry_run=dry_run,
    )  # fmt: skip


def read_input_amaxes(scaling: FP8ScalingState) -> InputAmaxes:
    """Read input amaxes from FP8 states and ModelOpt buffers; ModelOpt's take precedence."""
    amax: dict[Site, float] = {}
    broken: dict[Site, str] = {}
    for state in scaling.states:
        if state.site is None or not is_single_linear(state.state):
            continue
        value, error = input_amax(state.state)
        if error:
            broken[state.site] = error
        else:
            amax[state.site] = value
    caches: dict[int, dict[str, float]] = {}
    for buffer in scaling.buffers:
        layer = buffer.site.layer
        if buffer.quantizer == "input_quantizer":
            value, error = _buffer_amax(buffer)
            broken.pop(buffer.site, None)
            if error:
                broken[buffer.site] = error
            else:
                amax[buffer.site] = value
        elif buffer.site.module.endswith(_ATTENTION) and layer is not None:
            value, error = _buffer_amax(buffer)
            if not error:
                caches.setdefault(layer, {})[buffer.quantizer[0]] = value
    return InputAmaxes(
        amax={site: a for site, a in amax.items() if site not in broken},
        errors=broken,
        kv_caches={n: (c["k"], c["v"]) for n, c in caches.items() if c.keys() >= {"k", "v"}},
    )


def input_amax(state: ExtraState) -> tuple[float, str]:
    """Return the largest input amax of a state, or 0 and the reason why there is none.

    Uses the whole history, whatever the FP8 recipe uses. Histories of one step are empty between
    steps; the amax then follows from the scale.
    """
    history, scale = (state.tensors.get(f"{n}_fwd") for n in ("amax_history", "scale"))
    if history is None or not len(history):
        return 0.0, "no amax history of inputs"
    column = history[:, INPUT]
    if not np.isfinite(column).all() or (column < 0).any():
        defect = "NaN" if np.isnan(column).any() else "Inf" if (column > 0).any() else "negative"
        return 0.0, f"{defect} in the amax history of inputs"
    largest = float(column.max())
    if largest > 0:
        return largest, ""
    if len(history) > 1 or scale is None:
        return 0.0, "only zeros in the amax history of inputs"
    rule, value = state.scaling_rule, float(scale[INPUT])
    if not (math.isfinite(value) and value > 0) or value == 1:
        return 0.0, "an empty amax history of one step, and no usable scale"
    return rule.max_fwd / value / 2.0**rule.margin, ""


def _buffer_amax(buffer: AmaxBuffer) -> tuple[float, str]:
    if not (math.isfinite(buffer.amax) and np.isfinite(buffer.values).all()):
        return 0.0, f"{buffer.quantizer} has NaN or Inf"
    if (buffer.values < 0).any() or buffer.amax <= 0:
        return 0.0, f"{buffer.quantizer} has no positive amax"
    return buffer.amax, ""


def map_modules(view: CanonicalView, tensors: Iterable[GlobalTensor]) -> dict[str, Site]:
    """Map each canonical module to the Megatron module (and expert) with its weight."""
    stored_sites: dict[str, list[Site]] = {t.name: list(find_sites(t, WEIGHT)) for t in tensors}
    out: dict[str, Site] = {}
    for name, place in view.placements.items():
        if ":" in name or not name.endswith(WEIGHT):
            continue
        layer, expert = _LAYER.match(name), _EXPERT.search(name)
        for site in stored_sites.get(place.stored, ()):
            same_layer = site.layer is None or (layer and int(layer[1]) == site.layer)
            same_expert = site.expert is None or (expert and int(expert[1]) == site.expert)
            if same_layer and same_expert:
                out[name.removesuffix(WEIGHT)] = site
                break
    return out


def _statistics(
    activation_sites: Iterable[ActivationSite], inputs: InputAmaxes, sites: Mapping[str, Site]
) -> tuple[dict[str, ActivationStatistics], list[DerivedAmax]]:
    """Make the statistics of each site, with the modules that they come from."""
    from megtool.quant.calibration.expert_coverage import MIN_EXPERT_TOKENS
    from megtool.quant.statistics.site_statistics import ActivationStatistics

    out: dict[str, ActivationStatistics] = {}
    derived: list[DerivedAmax] = []
    for site in activation_sites:
        width = site.width
        if site.kind == "kv_cache":
            pair = inputs.kv_caches.get(-1 if site.layer is None else site.layer)
            if pair is None:
                continue
            amax = np.zeros(width, np.float32)
            for columns, top in zip(site.keys_and_values, pair, strict=True):
                amax[columns] = np.maximum(amax[columns], top)
            source = "core_attention"
        else:
            fp8_sites = {sites[m] for m in site.modules if m in sites and sites[m] in inputs.amax}
            if not fp8_sites:
                continue
            amax = np.full(width, max(inputs.amax[s] for s in fp8_sites), np.float32)
            source = ", ".join(sorted(s.module for s in fp8_sites))
        out[site.name] = ActivationStatistics.from_amax(amax, num_tokens=MIN_EXPERT_TOKENS)
        derived.append(DerivedAmax(site=site.name, module=source, amax=float(amax.max())))
    return out, derived


def _check_complete(inputs: InputAmaxes, model_sites: set[Site], path: Path) -> None:
    """Reject FP8 states without a usable input amax."""
    broken = {s: error for s, error in inputs.errors.items() if s in model_sites}
    if not broken:
        return
    first = [f"{_label(s)} ({error})" for s, error in list(broken.items())[:_SHOWN]]
    more = f", and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
    raise CalibrationError(
        f"{len(broken):,} of {len(broken) + len(inputs.amax):,} modules have FP8 state without "
        f"a usable input amax: {'; '.join(first)}{more}",
        file=path,
        hint="`megtool amax inspect` lists them; train a few steps with FP8 and save, or calibrate "
        "with data: megtool quantize --data",
    )


def _check_experts(
    activation_sites: Iterable[ActivationSite],
    statistics: Mapping[str, ActivationStatistics],
    path: Path,
) -> None:
    """Reject layers in which only some experts have statistics."""
    layers: dict[str, list[tuple[str, bool]]] = {}
    for p in activation_sites:
        if p.expert is not None:
            before, _, suffix = p.name.partition(".experts.")
            key = f"{before}/{suffix.partition('.')[2]}"
            layers.setdefault(key, []).append((p.name, p.name in statistics))
    for experts in layers.values():
        missing = [name for name, is_measured in experts if not is_measured]
        if missing and len(missing) < len(experts):
            raise CalibrationError(
                f"{len(missing)} of {len(experts)} experts have no FP8 state, but others of "
                "their layer do",
                file=path,
                tensor=missing[0],
                hint="the checkpoint is incomplete; calibrate with data instead",
            )


def _save(
    model: CheckpointSource,
    inputs: InputAmaxes,
    statistics: dict[str, ActivationStatistics],
    target: Path,
) -> None:
    from megtool.quant.calibration.calibration_file import CalibrationFile
    from megtool.quant.calibration.fingerprint import Fingerprint, hash_model

    amaxes = {name: float(s.amax.max()) for name, s in statistics.items()}
    description = json.dumps(["derived", amaxes, sorted(inputs.kv_caches.items())], sort_keys=True)
    CalibrationFile(
        fingerprint=Fingerprint(
            model=hash_model(model.catalogue, model.view),
            recipe="",
            data=hashlib.sha256(description.encode()).hexdigest(),
        ),
        num_samples=0,
        num_tokens=0,
        statistics=statistics,
        needs_solving=True,
    ).save(target)


def _check_destination(target: Path, overwrite: bool) -> None:
    if isinstance(target, StorePath):
        check_free(target, is_file=True, overwrite=overwrite)
        check_object(target)
        return
    status = Files().stat(target)
    if status is not None and not S_ISREG(status.st_mode):
        raise DestinationError(
            f"the destination is {describe_kind(status.st_mode)}, not a file",
            file=target,
            hint="choose another name",
        )
    if status is not None and not overwrite:
        raise DestinationError(
            "the file exists",
            file=target,
            hint="choose another name, or use --overwrite",
            error_id="destination-exists",
        )
    if not target.parent.is_dir():
        raise DestinationError(
            f"the folder {str(target.parent)!r} does not exist",
            file=target,
            hint="create the folder first, or choose another file",
        )


def _origin(scaling: FP8ScalingState) -> str:
    states = [s.state for s in scaling.states if s.state.is_delayed]
    origins = []
    if states:
        steps = max(s.history_length for s in states)
        origins.append(f"delayed scaling of up to {steps:,} steps")
    if any(b.quantizer == "input_quantizer" for b in scaling.buffers):
        origins.append("ModelOpt's quantizers")
    return " and ".join(origins) or "weights alone"


def _is_rarely_quantized(site: ActivationSite) -> bool:
    """The head and routers, which shipped recipes do not quantize."""
    return site.name == "head" or site.name.endswith(".router")


def _label(site: Site) -> str:
    return site.module if site.expert is None else f"{site.module} of expert {site.expert}"


_MOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedAmax:
    """The amax of one activation site (for a KV cache the larger of keys and values), and the
    Megatron modules that it comes from."""

    site: str
    module: str
    amax: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeriveReport(Report):
    """Report of `amax derive`. `missing` are sites of modules that trained without FP8."""

    source: str
    destination: str
    format: str
    origin: str
    derived: tuple[DerivedAmax, ...]
    missing: tuple[str, ...]
    dry_run: bool

    def title(self) -> str:
        return f"{self.source} ({self.format}) -> {self.destination}"

    def rows(self) -> Iterator[Row]:
        yield "from", self.origin
        yield "derived", f"the amax of {len(self.derived):,} inputs, without data"
        if self.missing:
            named = ", ".join(n for n, _ in fold_names(self.missing)[:_MOST])
            yield "missing", f"{len(self.missing):,} trained without FP8: {named}"

    def sections(self) -> Iterator[Section]:
        groups: dict[str, list[DerivedAmax]] = {}
        for d in self.derived:
            key = "".join(c for c in d.site if not c.isdigit())
            groups.setdefault(key, []).append(d)
        rows = [
            (
                fold_names([d.site for d in members])[0][0],
                fold_names([d.module for d in members])[0][0],
                f"{min(d.amax for d in members):.4g}",
                f"{max(d.amax for d in members):.4g}",
            )
            for members in groups.values()
        ]
        yield Section(
            table=Table(header=("input of", "from", "smallest", "largest"), rows=rows, left=2)
        )
        usage = f"megtool quantize {self.source} DST --recipe fp8 --calibration {self.destination}"
        yield Section(texts=["dry run: nothing is written" if self.dry_run else usage])
