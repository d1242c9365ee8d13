"""Settle: from what was seen of inputs to what becomes of each weight, cache and norm."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megtool.config import ModelConfig
from megtool.console import Progress, silent
from megtool.errors import CalibrationError
from megtool.quant.algorithms.algorithm_config import method_of
from megtool.quant.algorithms.fused_group import decide
from megtool.quant.algorithms.pre_quant_scale import Norm
from megtool.quant.algorithms.weight_grid import input_largest
from megtool.quant.calibration.activation_sites import Point
from megtool.quant.calibration.statistics import Statistics
from megtool.quant.qparams import Cache, Settlement, Treatment
from megtool.quant.recipes.formats import Format
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.requirements import Needs, is_two_level, needs

Weights = Callable[[str], Tensor]

Norms = Callable[[str], Norm]

LARGEST_CACHE: Mapping[str, float] = {"FP8": 448.0, "NVFP4": 448.0 * 6.0}
"""The amax under which the scale of a KV cache is 1."""

FOLDED = "columns have factors only where a norm before takes them in, as the recipe asks (`fold`)"

_READERS = ("q", "k", "v", "gate", "q_down", "kv_down")


def settle(
    points: Iterable[Point],
    statistics: Mapping[str, Statistics],
    decisions: Mapping[str, Decision],
    recipe: Recipe,
    weights: Weights,
    *,
    config: ModelConfig,
    norms: Norms | None = None,
    progress: Progress = silent,
) -> Settlement:
    """Settle all modules of `points` for which `decisions` (by module) have a format.

    `statistics` are by the points' names. `weights` gives a canonical module's weight as float32
    `[out, in]`, to one thread at a time; it is asked only where weights are looked at, as `norms`
    is where one takes factors in (None: these are then not those of the rounded norm). The result
    depends neither on the number of threads (`torch.get_num_threads()`) nor on the order of points.
    `progress` counts points.

    Raises:
        CalibrationError: a decision needs data and there is none at all.
        RecipeError: an algorithm is not known here.
    """
    listed = tuple(points)
    before = Counter(p.norm for p in listed if p.norm)
    work = _Work(
        statistics=statistics,
        decisions=decisions,
        recipe=recipe,
        weights=weights,
        config=config,
        points=listed,
        norms=norms,
        shared=frozenset(n for n, times in before.items() if times > 1),
    )
    done = Settlement()
    with _single_threaded() as threads, ThreadPoolExecutor(threads) as pool:
        for part in pool.map(work.settled, listed):
            done.add(part)
            progress("settle", 1, len(listed))
    return done


@contextlib.contextmanager
def _single_threaded() -> Iterator[int]:
    """Within it every sum is taken in one order; gives how many threads there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """All that points are settled by; `shared` are norms before several of them."""

    statistics: Mapping[str, Statistics]
    decisions: Mapping[str, Decision]
    recipe: Recipe
    weights: Weights
    config: ModelConfig
    points: tuple[Point, ...]
    norms: Norms | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    shared: frozenset[str]

    def settled(self, point: Point) -> Settlement:
        """What becomes of the modules of one point."""
        formats = {
            m: f
            for m in point.modules
            if m in self.decisions and (f := self.decisions[m].format) is not None and not f.choose
        }
        seen = self.statistics.get(point.name)
        seen = seen if seen is not None and seen.num_tokens else None
        if point.what == "kv_cache":
            return self._cache(point, seen, formats)
        done = Settlement()
        with torch.inference_mode():
            for found in dict.fromkeys(formats.values()):
                alike = [m for m, f in formats.items() if f == found]
                self._add(done, point, seen, found, alike, len(alike) == len(point.modules))
        inputs = max((t.input_amax for t in done.treatments.values()), default=0.0)
        for module, treatment in done.treatments.items():
            if treatment.input_amax:
                done.treatments[module] = replace(treatment, input_amax=inputs)
        return done

    def _add(
        self,
        done: Settlement,
        point: Point,
        seen: Statistics | None,
        found: Format,
        modules: list[str],
        is_whole: bool,
    ) -> None:
        method = method_of(self.recipe, found)
        stores = not self._folds(point)
        if not is_whole and method.columns != "none":
            done.notes.append(f"{point.name}: no factors of columns, as its formats differ")
            method = method.without_columns()
        if stores and method.fold and method.columns != "none" and found.number.smooths:
            done.notes.append(FOLDED)
            method = method.without_columns()
        needed = [needs(self.recipe, self.decisions[m]) for m in modules]
        if seen is None and any(n.data for n in needed) and point.expert is None:
            raise CalibrationError(
                f"nothing was seen of the inputs of {point.name}",
                hint="calibrate with data that reaches it",
            )
        if seen is not None:
            _check_kept(point, seen, needed)
            smooths = method.columns != "none" and found.number.smooths
            if not seen.has_columns and (smooths or method.inputs != "max"):
                raise CalibrationError(
                    f"of the inputs of {point.name} nothing is known but the largest, and the "
                    f"recipe asks for {'their columns' if smooths else method.inputs}",
                    hint="a calibration derived from FP8 training serves recipes with plain static "
                    "scales, such as fp8; else calibrate with data",
                )
        looks = seen is not None and any(n.gram or n.sample for n in needed)
        looks |= seen is not None and method.columns != "none" and found.number.smooths
        looks |= method.mse or (is_two_level(found) and len(modules) > 1)
        held: dict[str, Tensor] = {}
        norm = None
        if looks:
            with self.lock:
                held = {m: self.weights(m) for m in modules}
                if self.norms is not None and method.columns != "none" and not stores:
                    norm = self.norms(point.norm)
        joint = decide(held, found, method, seen, norm=norm, stores_columns=stores)
        if found.input_amax:
            joint.input_amax = found.input_amax
        elif seen is None and input_largest(found):
            joint.input_amax = self._borrowed(point)
            done.notes.append(f"{point.name} saw no token: its input scale is that of others")
        elif seen is None and any(n.data for n in needed):
            done.notes.append(f"{point.name} saw no token: its weights were rounded as they are")
        if joint.columns is not None and not stores:
            done.norms[point.norm] = joint.columns
        for module in modules:
            done.treatments[module] = Treatment(
                module=module,
                format=found,
                columns=joint.columns,
                stores_columns=stores and joint.columns is not None,
                amax=joint.amax.get(module),
                second_amax=joint.second_amax,
                codes=joint.codes.get(module),
                # Nothing but zeros was seen: any scale will do.
                input_amax=joint.input_amax or input_largest(found),
            )

    def _folds(self, point: Point) -> bool:
        """Whether the norm before the point feeds nothing but its modules."""
        if not point.norm or point.expert is not None or point.norm in self.shared:
            return False
        if point.norm.endswith(".attn_norm"):
            at = point.norm.removesuffix("_norm")
            readers = {f"{at}.{name}" for name in _READERS} & set(self.decisions)
            return readers <= set(point.modules)
        return True

    def _borrowed(self, point: Point) -> float:
        """The amax of inputs of an expert that saw none: that of the others of its layer, of the
        layer's other points, or of the whole model's."""
        last = point.name.rpartition(".")[2]
        known = [
            (p, float(s.amax.max()))
            for p in self.points
            if p.what == "input" and (s := self.statistics.get(p.name)) is not None and s.num_tokens
        ]
        same = [
            a
            for p, a in known
            if p.layer == point.layer and p.expert is not None and p.name.rpartition(".")[2] == last
        ]
        layer = [a for p, a in known if p.layer == point.layer]
        found = max(same or layer or [a for _, a in known], default=0.0)
        if not found:
            raise CalibrationError(
                f"nothing was seen of the inputs of {point.name}, nor of any other",
                hint="calibrate with data",
            )
        return found

    def _cache(
        self, point: Point, seen: Statistics | None, formats: Mapping[str, Format]
    ) -> Settlement:
        done = Settlement()
        for module, found in formats.items():
            key = value = LARGEST_CACHE[found.kv_algo]
            if not found.constant:
                if seen is None:
                    raise CalibrationError(
                        f"nothing was seen of {point.name}", hint="calibrate with data"
                    )
                half = point.width // 2
                latent = bool(self.config.kv_lora_rank)
                key = float((seen.amax if latent else seen.amax[:half]).max()) or key
                value = float((seen.amax if latent else seen.amax[half:]).max()) or value
            done.caches[module] = Cache(module=module, format=found, key_amax=key, value_amax=value)
        return done


def _check_kept(point: Point, seen: Statistics, needed: Iterable[Needs]) -> None:
    """What is kept while a layer is settled, and in no artefact, is there where it is needed."""
    for n in needed:
        if (n.gram and seen.gram is None) or (n.sample and seen.sample is None):
            what = "second moments" if n.gram and seen.gram is None else "a sample"
            raise CalibrationError(
                f"{point.name} needs {what} of its inputs, and there are none",
                hint="calibrate with data again: artefacts do not hold them",
            )
