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
from typing import TYPE_CHECKING, Any

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
from megtool.reshard.open_source import CheckpointSource, open_model
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
    _check_free(target, overwrite)
    named: dict[str, Any] = dict(
        iteration=iteration,
        family_name=family,
        like=None if like is None else Path(like),
        optimizer=False,
    )
    scaling_side = open_model(path, lenient=True, **named)
    scaling = scaling_of(scaling_side)
    require_told(scaling, scaling_side)
    require(scaling, scaling_side)
    opened = open_model(path, aside=is_buffer, **named)
    modules = list_modules(opened.side)
    config = opened.side.config
    if config is None:
        raise MappingError("nothing says what model this is", hint="--like HF_FOLDER")
    points = list_points(modules.modules, config)
    inputs = inputs_of(scaling)
    sites = modules_of(opened.side, opened.catalogue.tensors)
    _check_whole(inputs, set(sites.values()), path)
    statistics, derived = _statistics(points, inputs, sites)
    if not statistics:
        raise CalibrationError(
            "none of the modules that have FP8 scaling is one of the model's",
            file=path,
            hint="--like FOLDER with the config.json of this model",
        )
    _check_experts(points, statistics, path)
    if not dry_run:
        _save(opened, inputs, statistics, target)
    return DeriveReport(
        source=str(source),
        destination=str(destination),
        format=opened.catalogue.format,
        origin=_origin(scaling),
        derived=tuple(derived),
        without=tuple(
            p.name for p in points if p.what == "input" and p.name not in statistics
            and not _stays(p)
        ),
        dry_run=dry_run,
    )  # fmt: skip


def inputs_of(scaling: Scaling) -> Inputs:
    """What states and buffers say about inputs, ModelOpt's first where there are both."""
    amax: dict[Site, float] = {}
    broken: dict[Site, str] = {}
    for held in scaling.states:
        if held.site is None or not fits(held.state):
            continue
        found, why = input_amax(held.state)
        if why:
            broken[held.site] = why
        else:
            amax[held.site] = found
    caches: dict[int, dict[str, float]] = {}
    for buffer in scaling.buffers:
        layer = buffer.site.layer
        if buffer.quantizer == "input_quantizer":
            found, why = _of_buffer(buffer)
            broken.pop(buffer.site, None)
            if why:
                broken[buffer.site] = why
            else:
                amax[buffer.site] = found
        elif buffer.site.module.endswith(_ATTENTION) and layer is not None:
            found, why = _of_buffer(buffer)
            if not why:
                caches.setdefault(layer, {})[buffer.quantizer[0]] = found
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
        odd = "NaN" if np.isnan(column).any() else "infinity" if (column > 0).any() else "negative"
        return 0.0, f"{odd} in the history of inputs"
    top = float(column.max())
    if top > 0:
        return top, ""
    if len(history) > 1 or scale is None:
        return 0.0, "nothing but zeros in the history of inputs"
    rule, held = state.rule, float(scale[INPUT])
    if not (math.isfinite(held) and held > 0) or held == 1:
        return 0.0, "a history of one step, which is empty, and a scale that says nothing"
    return rule.max_fwd / held / 2.0**rule.margin, ""


def _of_buffer(buffer: Buffer) -> tuple[float, str]:
    if not (math.isfinite(buffer.top) and np.isfinite(buffer.values).all()):
        return 0.0, f"{buffer.quantizer} holds NaN or infinity"
    if (buffer.values < 0).any() or buffer.top <= 0:
        return 0.0, f"{buffer.quantizer} holds no magnitude"
    return buffer.top, ""


def modules_of(side: CanonicalView, tensors: Iterable[GlobalTensor]) -> dict[str, Site]:
    """Megatron's module (and expert) that holds each canonical module's weight."""
    held: dict[str, list[Site]] = {t.name: list(sites_of(t, WEIGHT)) for t in tensors}
    out: dict[str, Site] = {}
    for name, place in side.placements.items():
        if ":" in name or not name.endswith(WEIGHT):
            continue
        layer, expert = _LAYER.match(name), _EXPERT.search(name)
        for site in held.get(place.stored, ()):
            same_layer = site.layer is None or (layer and int(layer[1]) == site.layer)
            same_expert = site.expert is None or (expert and int(expert[1]) == site.expert)
            if same_layer and same_expert:
                out[name.removesuffix(WEIGHT)] = site
                break
    return out


def _statistics(
    points: Iterable[Point], inputs: Inputs, sites: Mapping[str, Site]
) -> tuple[dict[str, Statistics], list[Derived]]:
    """What is known at each point, and of which modules it is."""
    from megtool.quant.calibration.expert_coverage import ENOUGH
    from megtool.quant.calibration.statistics import Statistics

    out: dict[str, Statistics] = {}
    derived: list[Derived] = []
    for point in points:
        width = point.width
        if point.what == "kv_cache":
            pair = inputs.caches.get(-1 if point.layer is None else point.layer)
            if pair is None:
                continue
            amax = np.repeat(np.array(pair, np.float32), [width // 2, width - width // 2])
            source = "core_attention"
        else:
            own = {sites[m] for m in point.modules if m in sites and sites[m] in inputs.amax}
            if not own:
                continue
            amax = np.full(width, max(inputs.amax[s] for s in own), np.float32)
            source = ", ".join(sorted(s.module for s in own))
        out[point.name] = Statistics.of_tensor(amax, num_tokens=ENOUGH)
        derived.append(Derived(point=point.name, module=source, amax=float(amax.max())))
    return out, derived


def _check_whole(inputs: Inputs, known: set[Site], path: Path) -> None:
    """Refuse where a module has a state that says nothing about its inputs."""
    broken = {s: why for s, why in inputs.broken.items() if s in known}
    if not broken:
        return
    first = [f"{_label(s)} ({why})" for s, why in list(broken.items())[:_SHOWN]]
    more = f", and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
    raise CalibrationError(
        f"{len(broken):,} of {len(broken) + len(inputs.amax):,} modules have a scaling that says "
        f"nothing about their inputs: {'; '.join(first)}{more}",
        file=path,
        hint="`megtool amax inspect` lists them; train some steps with FP8 and save within them, "
        "or calibrate with data: megtool quantize --data",
    )


def _check_experts(
    points: Iterable[Point], statistics: Mapping[str, Statistics], path: Path
) -> None:
    """Refuse where some experts of a layer are known and others are not."""
    layers: dict[str, list[tuple[str, bool]]] = {}
    for p in points:
        if p.expert is not None:
            before, _, behind = p.name.partition(".experts.")
            key = f"{before}/{behind.partition('.')[2]}"
            layers.setdefault(key, []).append((p.name, p.name in statistics))
    for some in layers.values():
        missing = [name for name, known in some if not known]
        if missing and len(missing) < len(some):
            raise CalibrationError(
                f"{len(missing)} of {len(some)} experts have no FP8 scaling, though others of "
                "their layer have",
                file=path,
                tensor=missing[0],
                hint="the checkpoint is incomplete; or calibrate with data",
            )


def _save(
    opened: CheckpointSource, inputs: Inputs, statistics: dict[str, Statistics], target: Path
) -> None:
    from megtool.quant.calibration.calibration_file import Artefact
    from megtool.quant.calibration.fingerprint import Fingerprint, of_model

    facts = {name: float(s.amax.max()) for name, s in statistics.items()}
    said = json.dumps(["derived", facts, sorted(inputs.caches.items())], sort_keys=True)
    Artefact(
        fingerprint=Fingerprint(
            model=of_model(opened.catalogue, opened.side),
            recipe="",
            data=hashlib.sha256(said.encode()).hexdigest(),
        ),
        num_samples=0,
        num_tokens=0,
        statistics=statistics,
        needs_settling=True,
    ).save(target)


def _check_free(target: Path, overwrite: bool) -> None:
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
    own = [s.state for s in scaling.states if s.state.is_delayed]
    named = []
    if own:
        steps = max(s.history_length for s in own)
        named.append(f"delayed scaling of up to {steps:,} steps")
    if any(b.quantizer == "input_quantizer" for b in scaling.buffers):
        named.append("ModelOpt's quantizers")
    return " and ".join(named) or "weights alone"


def _stays(point: Point) -> bool:
    """No recipe asks for it by default: the head and routers."""
    return point.name == "head" or point.name.endswith(".router")


def _label(site: Site) -> str:
    return site.module if site.expert is None else f"{site.module} of expert {site.expert}"
