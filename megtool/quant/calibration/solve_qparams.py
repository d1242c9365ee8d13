"""Solves the quantization parameters of weights, KV caches and norms from statistics."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megtool.console import Progress, silent
from megtool.errors import CalibrationError
from megtool.process.threads import stream_in_threads
from megtool.quant.algorithms.algorithm_config import require_own_solver, resolve_algorithm
from megtool.quant.algorithms.fused_group import solve_fused_group
from megtool.quant.algorithms.pre_quant_scale import NormWeights
from megtool.quant.algorithms.weight_grid import max_input_code
from megtool.quant.calibration.requirements import (
    CalibrationRequirements,
    derive_requirements,
    is_two_level,
)
from megtool.quant.qparams import KVCacheQParams, QParams, WeightQParams
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.statistics.activation_sites import ATTN_NORM_READERS, ActivationSite
from megtool.quant.statistics.site_statistics import ActivationStatistics

ReadWeight = Callable[[str], Tensor]

ReadNorm = Callable[[str], NormWeights]

KV_AMAX_OF_UNIT_SCALE: Mapping[str, float] = {"FP8": 448.0, "NVFP4": 448.0 * 6.0}
"""The amax for which the scale of a KV cache is 1."""

FOLD_NOTE = "smoothing scales are used only where the preceding norm can absorb them (`fold: true`)"


def solve_qparams(
    sites: Iterable[ActivationSite],
    statistics: Mapping[str, ActivationStatistics],
    decisions: Mapping[str, Decision],
    recipe: Recipe,
    read_weight: ReadWeight,
    *,
    read_norm: ReadNorm | None = None,
    progress: Progress = silent,
) -> QParams:
    """Solve the quantization parameters of all modules of `sites` that have a format.

    The result depends neither on the number of threads (`torch.get_num_threads()`) nor on the order
    of sites.

    Args:
        sites: the activation sites to solve.
        statistics: by site name.
        decisions: by module name.
        recipe: the recipe, for its algorithm.
        read_weight: reads a canonical module's weight as float32 `[out, in]`, called by one thread
            at a time and only for weights that are needed.
        read_norm: reads the norm that absorbs a smoothing scale (None: the scale is not rounded to
            the dtype of the norm).
        progress: counts sites.

    Raises:
        CalibrationError: a decision needs data and there is none.
        RecipeError: an algorithm is not supported.
        MemoryError, StorageError: a thread ended for lack of memory, or cannot be started.
    """
    require_own_solver(recipe)
    listed = tuple(sites)
    sites_per_norm = Counter(p.norm for p in listed if p.norm)
    solver = _Solver(
        statistics=statistics,
        decisions=decisions,
        recipe=recipe,
        read_weight=read_weight,
        sites=listed,
        read_norm=read_norm,
        shared_norms=frozenset(n for n, times in sites_per_norm.items() if times > 1),
    )
    qparams = QParams()
    with _single_threaded() as threads:
        for part in stream_in_threads(
            solver.solve, listed, threads=min(threads, len(listed)), ahead=len(listed)
        ):
            qparams.update(part)
            progress("solve", 1, len(listed))
    return qparams


@contextlib.contextmanager
def _single_threaded() -> Iterator[int]:
    """Make sums independent of the number of threads; yields that number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solver:
    """Solves sites; `shared_norms` are norms that feed several of them."""

    statistics: Mapping[str, ActivationStatistics]
    decisions: Mapping[str, Decision]
    recipe: Recipe
    read_weight: ReadWeight
    sites: tuple[ActivationSite, ...]
    read_norm: ReadNorm | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    shared_norms: frozenset[str]

    def solve(self, site: ActivationSite) -> QParams:
        """Solve the modules of one site."""
        formats = {
            m: f
            for m in site.modules
            if m in self.decisions and (f := self.decisions[m].format) is not None and not f.choose
        }
        statistics = self.statistics.get(site.name)
        statistics = statistics if statistics is not None and statistics.num_tokens else None
        if site.kind == "kv_cache":
            return self._solve_kv_cache(site, statistics, formats)
        qparams = QParams()
        with torch.inference_mode():
            for format in dict.fromkeys(formats.values()):
                group = [m for m, f in formats.items() if f == format]
                self._solve_group(
                    qparams, site, statistics, format, group, len(group) == len(site.modules)
                )
        input_amax = max((t.input_amax for t in qparams.weights.values()), default=0.0)
        for module, params in qparams.weights.items():
            if params.input_amax:
                qparams.weights[module] = replace(params, input_amax=input_amax)
        return qparams

    def _solve_group(
        self,
        qparams: QParams,
        site: ActivationSite,
        statistics: ActivationStatistics | None,
        format: RecipeFormat,
        modules: list[str],
        is_whole: bool,
    ) -> None:
        config = resolve_algorithm(self.recipe, format)
        stores = format.number.has_branch or not self._is_foldable(site)
        if not is_whole and config.smoothing != "none":
            qparams.notes.append(
                f"{site.name}: no smoothing scale, because its modules have different formats"
            )
            config = config.without_smoothing()
        if stores and config.fold and config.smooths(format):
            qparams.notes.append(FOLD_NOTE)
            config = config.without_smoothing()
        requirements = [derive_requirements(self.recipe, self.decisions[m]) for m in modules]
        if statistics is None and any(n.data for n in requirements) and site.expert is None:
            raise CalibrationError(
                f"there is no calibration data for the inputs of {site.name}",
                hint="calibrate with data that reaches this module",
                error_id="missing-statistics",
            )
        if statistics is not None:
            _check_second_moments(site, statistics, requirements)
            smooths = config.smooths(format)
            if not statistics.has_channels and (smooths or config.input_observer != "max"):
                raise CalibrationError(
                    f"only the amax of the inputs of {site.name} is known, and the "
                    f"recipe needs {'channel statistics' if smooths else config.input_observer}",
                    hint="calibration files derived from FP8 training work for recipes with plain "
                    "static scales, such as fp8; else calibrate with data",
                    error_id="missing-statistics",
                )
        needs_weights = statistics is not None and any(n.gram or n.sample for n in requirements)
        needs_weights |= statistics is not None and config.smooths(format)
        needs_weights |= format.number.has_branch
        needs_weights |= config.mse or (is_two_level(format) and (len(modules) > 1 or config.cast))
        weights: dict[str, Tensor] = {}
        norm = None
        if needs_weights:
            with self.lock:
                weights = {m: self.read_weight(m) for m in modules}
                if self.read_norm is not None and config.smoothing != "none" and not stores:
                    norm = self.read_norm(site.norm)
        result = solve_fused_group(
            weights, format, config, statistics, norm=norm, stores_pre_quant_scale=stores
        )
        if format.input_amax:
            result.input_amax = format.input_amax
        elif statistics is None and max_input_code(format):
            result.input_amax = self._fallback_input_amax(site)
            qparams.notes.append(
                f"{site.name} received no tokens: its input scale is that of other experts"
            )
        elif statistics is None and any(n.data for n in requirements):
            qparams.notes.append(
                f"{site.name} received no tokens: its weights are rounded without calibration"
            )
        if result.smoothing_scale is not None and not stores:
            qparams.norm_scales[site.norm] = result.smoothing_scale
        for module in modules:
            qparams.weights[module] = WeightQParams(
                module=module,
                format=format,
                smoothing_scale=result.smoothing_scale,
                stores_pre_quant_scale=stores and result.smoothing_scale is not None,
                amax=result.amaxes.get(module),
                global_amax=result.global_amax,
                codes=result.codes.get(module),
                branch=result.branches.get(module),
                # All inputs were zero: any scale is fine.
                input_amax=result.input_amax or max_input_code(format),
            )

    def _is_foldable(self, site: ActivationSite) -> bool:
        """Whether the preceding norm feeds only the modules of the site."""
        if not site.norm or site.expert is not None or site.norm in self.shared_norms:
            return False
        if site.norm.endswith(".attn_norm"):
            parent = site.norm.removesuffix("_norm")
            names = [f"{parent}.{name}" for name in ATTN_NORM_READERS]
            readers = {
                n
                for n in names
                if n in self.decisions and self.decisions[n].module.kind == "linear"
            }
            return readers <= set(site.modules)
        return True

    def _fallback_input_amax(self, site: ActivationSite) -> float:
        """The input amax for an expert without tokens: that of the other experts of its layer, of
        the layer's other sites, or of the whole model."""
        last = site.name.rpartition(".")[2]
        measured = [
            (p, float(s.amax.max()))
            for p in self.sites
            if p.kind == "input" and (s := self.statistics.get(p.name)) is not None and s.num_tokens
        ]
        siblings = [
            a
            for p, a in measured
            if p.layer == site.layer and p.expert is not None and p.name.rpartition(".")[2] == last
        ]
        layer = [a for p, a in measured if p.layer == site.layer]
        amax = max(siblings or layer or [a for _, a in measured], default=0.0)
        if not amax:
            raise CalibrationError(
                f"there is no calibration data for the inputs of {site.name}, or of any other site",
                hint="calibrate with data",
                error_id="missing-statistics",
            )
        return amax

    def _solve_kv_cache(
        self,
        site: ActivationSite,
        statistics: ActivationStatistics | None,
        formats: Mapping[str, RecipeFormat],
    ) -> QParams:
        qparams = QParams()
        for module, format in formats.items():
            unit = KV_AMAX_OF_UNIT_SCALE[format.kv_algo]
            key = value = unit
            if not format.constant:
                if statistics is None:
                    raise CalibrationError(
                        f"there is no calibration data for {site.name}",
                        hint="calibrate with data",
                        error_id="missing-statistics",
                    )
                # Where all that was measured is 0, the scale is 1.
                key, value = (
                    float(statistics.amax[columns].max()) or unit
                    for columns in site.keys_and_values
                )
            qparams.kv_caches[module] = KVCacheQParams(
                module=module, format=format, key_amax=key, value_amax=value
            )
        return qparams


def _check_second_moments(
    site: ActivationSite,
    statistics: ActivationStatistics,
    requirements: Iterable[CalibrationRequirements],
) -> None:
    """Check that Gram matrices and samples, which calibration files do not store, are available."""
    for n in requirements:
        if (n.gram and statistics.gram is None) or (n.sample and statistics.sample is None):
            missing = "second moments" if n.gram and statistics.gram is None else "a sample"
            raise CalibrationError(
                f"{site.name} needs {missing} of its inputs, which is missing",
                hint="calibrate with data again: calibration files do not store it",
                error_id="missing-statistics",
            )
