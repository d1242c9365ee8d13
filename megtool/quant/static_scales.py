"""Derive: a calibration file of what FP8 training, or ModelOpt, already knows about inputs.

Delayed scaling keeps the largest input of every step, so static scales need no data at all. What a
module of Megatron's saw is what the modules fused in it see: one amax for queries, keys and values,
one for gate and up, one for each expert.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megtool.checkpoint.containers.te_extra_state import ExtraState
from megtool.convert.dialects import CanonicalView
from megtool.errors import CalibrationError, DestinationError, MappingError
from megtool.number_formats.delayed_scaling import INPUT
from megtool.quant.static_scales_report import Derived, DeriveReport
from megtool.reshard.fp8_state.checks import fits
from megtool.reshard.fp8_state.collect import Scaling, require, require_told, scaling_of
from megtool.reshard.fp8_state.modelopt_amax import Buffer, is_buffer
from megtool.reshard.fp8_state.weight_amax import WEIGHT, sites_of
from megtool.reshard.megatron.extra_state_names import Site
from megtool.reshard.open_source import TensorFilter, open_source
from megtool.reshard.source import CheckpointSource, SourceOptions
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    from megtool.quant.calibration.activation_sites import Point
    from megtool.quant.calibration.statistics import Statistics

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ATTENTION = ".self_attention.core_attention"
_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is known about the inputs of modules: amaxes, and why there is none, by module.

    `caches` are the amaxes of keys and of values, by layer.
    """

    amax: dict[Site, float]
    broken: dict[Site, str]
    caches: dict[int, tuple[float, float]]


def derive_amax(
    source: str | Path,
    destination: str | Path,
    *,
    iteration: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> DeriveReport:
    """Write the calibration file `destination` from the FP8 scaling of the checkpoint `source`.

    `megtool quantize --calibration` takes it for recipes whose inputs have one static scale. Points
    of modules that trained without FP8 are left out of it: a recipe that needs them is refused.

    Raises:
        UsageError: the checkpoint holds no such state.
        CalibrationError: a history is empty or broken, or of experts that cannot be told apart;
            says of which modules.
        MappingError: the model is not known.
        DestinationError: there is a file already.
    """
    from megtool.quant.calibration.activation_sites import list_points
    from megtool.quant.recipes.modules import list_modules

    path, target = Path(source), Path(destination)
    _check_destination(target, overwrite)
    options = SourceOptions(
        iteration=iteration, family=family, like=None if like is None else Path(like)
    )
    scaling_source = open_source(path, options, lenient=True, optimizer=False)
    scaling = scaling_of(scaling_source)
    require_told(scaling, scaling_source)
    require(scaling, scaling_source)
    model = open_source(path, options, tensors=TensorFilter(ignore=is_buffer), optimizer=False)
    modules = list_modules(model.side)
    config = model.side.config
    if config is None:
        raise MappingError("nothing says what model this is", hint="--like HF_FOLDER")
    activation_sites = list_points(modules.modules, config)
    inputs = inputs_of(scaling)
    sites = modules_of(model.side, model.catalogue.tensors)
    _check_complete(inputs, set(sites.values()), path)
    statistics, derived = _statistics(activation_sites, inputs, sites)
    if not statistics:
        raise CalibrationError(
            "none of the modules that have FP8 scaling is one of the model's",
            file=path,
            hint="--like FOLDER with the config.json of this model",
        )
    _check_experts(activation_sites, statistics, path)
    if not dry_run:
        _save(model, inputs, statistics, target)
    return DeriveReport(
        source=str(source),
        destination=str(destination),
        format=model.catalogue.format,
        origin=_origin(scaling),
        derived=tuple(derived),
        without=tuple(
            p.name for p in activation_sites if p.what == "input" and p.name not in statistics
            and not _is_rarely_quantized(p)
        ),
        dry_run=dry_run,
    )  # fmt: skip


def inputs_of(scaling: Scaling) -> Inputs:
    """What states and buffers say about inputs, ModelOpt's first where there are both."""
    amax: dict[Site, float] = {}
    broken: dict[Site, str] = {}
    for state in scaling.states:
        if state.site is None or not fits(state.state):
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
    return Inputs(
        amax={site: a for site, a in amax.items() if site not in broken},
        broken=broken,
        caches={n: (c["k"], c["v"]) for n, c in caches.items() if c.keys() >= {"k", "v"}},
    )


def input_amax(state: ExtraState) -> tuple[float, str]:
    """The largest input that a state of one product knows of; why there is none, or nothing.

    It is that of the whole history, whatever the recipe takes of it. Histories of one step are
    empty between steps, and their scale says what was seen.
    """
    history, scale = (state.tensors.get(f"{n}_fwd") for n in ("amax_history", "scale"))
    if history is None or not len(history):
        return 0.0, "no history of inputs"
    column = history[:, INPUT]
    if not np.isfinite(column).all() or (column < 0).any():
        defect = (
            "NaN" if np.isnan(column).any() else "infinity" if (column > 0).any() else "negative"
        )
        return 0.0, f"{defect} in the history of inputs"
    largest = float(column.max())
    if largest > 0:
        return largest, ""
    if len(history) > 1 or scale is None:
        return 0.0, "nothing but zeros in the history of inputs"
    rule, value = state.rule, float(scale[INPUT])
    if not (math.isfinite(value) and value > 0) or value == 1:
        return 0.0, "a history of one step, which is empty, and a scale that says nothing"
    return rule.max_fwd / value / 2.0**rule.margin, ""


def _buffer_amax(buffer: Buffer) -> tuple[float, str]:
    if not (math.isfinite(buffer.top) and np.isfinite(buffer.values).all()):
        return 0.0, f"{buffer.quantizer} holds NaN or infinity"
    if (buffer.values < 0).any() or buffer.top <= 0:
        return 0.0, f"{buffer.quantizer} holds no magnitude"
    return buffer.top, ""


def modules_of(side: CanonicalView, tensors: Iterable[GlobalTensor]) -> dict[str, Site]:
    """Megatron's module (and expert) that holds each canonical module's weight."""
    stored_sites: dict[str, list[Site]] = {t.name: list(sites_of(t, WEIGHT)) for t in tensors}
    out: dict[str, Site] = {}
    for name, place in side.placements.items():
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
    activation_sites: Iterable[Point], inputs: Inputs, sites: Mapping[str, Site]
) -> tuple[dict[str, Statistics], list[Derived]]:
    """What is known at each point, and of which modules it is."""
    from megtool.quant.calibration.expert_coverage import ENOUGH
    from megtool.quant.calibration.statistics import Statistics

    out: dict[str, Statistics] = {}
    derived: list[Derived] = []
    for site in activation_sites:
        width = site.width
        if site.what == "kv_cache":
            pair = inputs.caches.get(-1 if site.layer is None else site.layer)
            if pair is None:
                continue
            amax = np.repeat(np.array(pair, np.float32), [width // 2, width - width // 2])
            source = "core_attention"
        else:
            fp8_sites = {sites[m] for m in site.modules if m in sites and sites[m] in inputs.amax}
            if not fp8_sites:
                continue
            amax = np.full(width, max(inputs.amax[s] for s in fp8_sites), np.float32)
            source = ", ".join(sorted(s.module for s in fp8_sites))
        out[site.name] = Statistics.of_tensor(amax, num_tokens=ENOUGH)
        derived.append(Derived(point=site.name, module=source, amax=float(amax.max())))
    return out, derived


def _check_complete(inputs: Inputs, model_sites: set[Site], path: Path) -> None:
    """Refuse where a module has a state that says nothing about its inputs."""
    broken = {s: error for s, error in inputs.broken.items() if s in model_sites}
    if not broken:
        return
    first = [f"{_label(s)} ({error})" for s, error in list(broken.items())[:_SHOWN]]
    more = f", and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
    raise CalibrationError(
        f"{len(broken):,} of {len(broken) + len(inputs.amax):,} modules have a scaling that says "
        f"nothing about their inputs: {'; '.join(first)}{more}",
        file=path,
        hint="`megtool amax inspect` lists them; train some steps with FP8 and save within them, "
        "or calibrate with data: megtool quantize --data",
    )


def _check_experts(
    activation_sites: Iterable[Point], statistics: Mapping[str, Statistics], path: Path
) -> None:
    """Refuse where some experts of a layer are known and others are not."""
    layers: dict[str, list[tuple[str, bool]]] = {}
    for p in activation_sites:
        if p.expert is not None:
            before, _, behind = p.name.partition(".experts.")
            key = f"{before}/{behind.partition('.')[2]}"
            layers.setdefault(key, []).append((p.name, p.name in statistics))
    for experts in layers.values():
        missing = [name for name, is_measured in experts if not is_measured]
        if missing and len(missing) < len(experts):
            raise CalibrationError(
                f"{len(missing)} of {len(experts)} experts have no FP8 scaling, though others of "
                "their layer have",
                file=path,
                tensor=missing[0],
                hint="the checkpoint is incomplete; or calibrate with data",
            )


def _save(
    model: CheckpointSource, inputs: Inputs, statistics: dict[str, Statistics], target: Path
) -> None:
    from megtool.quant.calibration.calibration_file import Artefact
    from megtool.quant.calibration.fingerprint import Fingerprint, of_model

    amaxes = {name: float(s.amax.max()) for name, s in statistics.items()}
    description = json.dumps(["derived", amaxes, sorted(inputs.caches.items())], sort_keys=True)
    Artefact(
        fingerprint=Fingerprint(
            model=of_model(model.catalogue, model.side),
            recipe="",
            data=hashlib.sha256(description.encode()).hexdigest(),
        ),
        num_samples=0,
        num_tokens=0,
        statistics=statistics,
        needs_settling=True,
    ).save(target)


def _check_destination(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise DestinationError("a folder stands where a file is to be written", file=target)
    if target.exists() and not overwrite:
        raise DestinationError(
            "the file exists", file=target, hint="name another, or --overwrite replaces it"
        )
    if not target.parent.is_dir():
        raise DestinationError(
            f"there is no folder {str(target.parent)!r} to write it to",
            file=target,
            hint="make the folder first, or name another file",
        )


def _origin(scaling: Scaling) -> str:
    states = [s.state for s in scaling.states if s.state.is_delayed]
    origins = []
    if states:
        steps = max(s.history_length for s in states)
        origins.append(f"delayed scaling of up to {steps:,} steps")
    if any(b.quantizer == "input_quantizer" for b in scaling.buffers):
        origins.append("ModelOpt's quantizers")
    return " and ".join(origins) or "weights alone"


def _is_rarely_quantized(point: Point) -> bool:
    """No recipe asks for it by default: the head and routers."""
    return point.name == "head" or point.name.endswith(".router")


def _label(site: Site) -> str:
    return site.module if site.expert is None else f"{site.module} of expert {site.expert}"
