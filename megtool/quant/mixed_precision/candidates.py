"""Quantization parameters of every decision unit in each candidate format, from one pass."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megtool.console import Progress
from megtool.errors import CalibrationError, MegtoolError
from megtool.model.decoder import Decoder
from megtool.quant.calibration.activation_sites import ActivationSite
from megtool.quant.calibration.activations import Activations
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.layer_runner import LayerRunner, mask_uncounted
from megtool.quant.calibration.micro_batches import MicroBatch
from megtool.quant.calibration.rank_sync import RankSync
from megtool.quant.calibration.recorder import ActivationRecorder
from megtool.quant.calibration.statistics import ActivationStatistics
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel
from megtool.quant.mixed_precision.decision_units import DecisionUnit, key_of
from megtool.quant.mixed_precision.sensitivity_cache import SensitivityCache
from megtool.quant.qparams import QParams
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.requirements import derive_requirements
from megtool.quant.solve_qparams import solve_qparams

SETTLING = 2
"""How many times as long a pass takes in which statistics are taken."""


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """A unit in a format."""

    unit: DecisionUnit
    key: str

    def finite(self, loss: float) -> float:
        """The loss, checked to be finite.

        Raises:
            CalibrationError: that is NaN or infinite.
        """
        if not math.isfinite(loss):
            raise CalibrationError(
                f"with {self.unit.name} as {self.key} the answers are not finite",
                hint="leave the format out of the choice, or keep the unit by a rule of its own",
            )
        return loss


class Passes:
    """Work in passes of so many tokens through one layer, as progress; parts of them add up."""

    def __init__(self, progress: Progress, num_tokens: int) -> None:
        self._progress, self._num_tokens = progress, max(num_tokens, 1)
        self._expected = self._done = 0.0
        self._reported = 0

    def expect(self, passes: float) -> None:
        """There will be so many more."""
        self._expected += passes

    def __call__(self, passes: float) -> None:
        """So many more are done."""
        self._done += passes
        finished = math.floor(self._done + 1e-6)
        self._progress("sensitivity", finished - self._reported, math.floor(self._expected + 1e-6))
        self._reported = finished

    def of(self, num_tokens: int) -> float:
        """Passes of other numbers of tokens."""
        return num_tokens / self._num_tokens


class CandidateSurvey:
    """A model with its decision units, and their quantization parameters in each candidate format.

    Every rank makes the same calls, over `pieces` of its own, of which each data-parallel rank has
    as many.
    """

    def __init__(
        self,
        decoder: Decoder,
        units: Sequence[DecisionUnit],
        decisions: Sequence[Decision],
        recipe: Recipe,
        points: Sequence[ActivationSite],
        weights: CanonicalWeights,
        pieces: Sequence[MicroBatch],
        cache: SensitivityCache | None = None,
    ) -> None:
        self.decoder, self.units, self.pieces = decoder, units, pieces
        self.ranks = RankSync(groups=decoder.groups)
        self._decisions = {d.module.name: d for d in decisions}
        self._recipe, self._weights, self._cache = recipe, weights, cache
        self._points: dict[str, list[ActivationSite]] = defaultdict(list)
        owner = {m: u.name for u in units for m in u.modules}
        for point in points:
            if point.kind == "input" and point.modules[0] in owner:
                self._points[owner[point.modules[0]]].append(point)
        self.qparams: dict[tuple[str, str], QParams] = {}

    def points_of(self, unit: DecisionUnit) -> list[ActivationSite]:
        """Where the unit's inputs are."""
        return self._points[unit.name]

    def runs(self) -> list[CandidateRun]:
        """All units in all formats, in the model's order, the head's last."""
        last = len(self.decoder.stage.layers)
        order = sorted(self.units, key=lambda u: last if u.layer is None else u.layer)
        return [CandidateRun(u, key_of(f, self._recipe)) for u in order for f in u.formats]

    def head_passes(self) -> float:
        """The cost of logits and their softmax, in passes through a layer."""
        config = self.decoder.config
        inside = [d.module for d in self._decisions.values() if d.module.layer is not None]
        layer = sum(m.numel for m in inside if m.kind == "linear" and "expert" not in m.roles)
        if config.num_experts:
            used = config.num_experts_per_token / config.num_experts
            layer += int(used * sum(m.numel for m in inside if "expert" in m.roles))
        each = layer / max(config.num_layers, 1)
        return 2 * config.vocab_size * config.hidden_size / max(each, 1)

    def solve(self, passes: Passes) -> None:
        """Run all micro batches through the model, and solve every decision unit in every format.

        It goes on behind the last layer that an earlier run has kept.
        """
        numbers: list[int | None] = [*self.decoder.stage.layers]
        if any(u.layer is None for u in self.units):
            numbers.append(None)
        done = self._finished(numbers)
        if done == len(numbers):
            return
        points = [p for u in self.units for p in self._points[u.name]]
        requirements = {p.name: self._requirements(p) for p in points}
        recorder = ActivationRecorder(
            self.decoder,
            points,
            gram={n for n, (gram, _) in requirements.items() if gram},
            sample={n for n, (_, sample) in requirements.items() if sample},
        )
        layers = LayerRunner(self.decoder, self.pieces)
        states = Activations(
            [p.num_tokens for p in layers.micro_batches],
            self.decoder.config.hidden_size,
            dtype=self.decoder.dtype,
            device=self.decoder.groups.device,
        )
        try:
            begin = self._enter(done, layers, states)
            upcoming = [n for n in numbers[begin:] if n is not None]
            passes.expect(
                SETTLING * len(upcoming) * sum(passes.of(p.num_tokens) for p in self.pieces)
            )
            for number, layer in enumerate(numbers[begin:], start=begin):
                with self.ranks.raise_together():
                    recorder.start(layer)
                    states.begin(self._written(number + 1))
                    for i, piece in enumerate(layers.micro_batches):
                        recorder.set_batch(mask_uncounted(piece), first_sample=piece.first_row)
                        x_TH = states.get(i)
                        if layer is None:
                            with torch.inference_mode():
                                self.decoder.logits(self.decoder.finish(x_TH))
                                states.put(i, x_TH)
                            continue
                        states.put(i, layers.run(layer, i, x_TH))
                        passes(SETTLING * passes.of(piece.num_tokens))
                    states.end(self._written(number + 1))
                    statistics = recorder.collect()
                self._solve_layer(number, layer, statistics)
            self._forget(len(numbers))
        finally:
            states.close()
            layers.release()

    def _finished(self, numbers: Sequence[int | None]) -> int:
        """The number of layers (and the head) that are finished on every rank; their results are
        loaded.
        """
        finished = []
        for number in range(len(numbers)):
            qparams = None if self._cache is None else self._cache.read_qparams(number)
            if qparams is None:
                break
            finished.append(qparams)
        done: int = min(self.ranks.all_gather(len(finished)))
        for qparams in finished[:done]:
            self.qparams |= qparams
        return done

    def _enter(self, done: int, layers: LayerRunner, states: Activations) -> int:
        """Load the inputs of the next layer; returns the first layer to run, 0 if nothing is
        finished.
        """
        path = self._entering(done)
        if all(self.ranks.all_gather(done > 0 and path is not None and states.load(path))):
            return done
        for i, x_TH in enumerate(layers.embed()):
            states.put(i, x_TH)
        return 0

    def _entering(self, number: int) -> Path | None:
        """The file with the inputs of a layer; one per data-parallel rank."""
        groups = self.decoder.groups
        return (
            None
            if self._cache is None
            else self._cache.work.activations_file(number, groups.dp.rank)
        )

    def _written(self, number: int) -> Path | None:
        """The same on the rank that writes it: others have the same rows."""
        return self._entering(number) if self.decoder.groups.tp.is_first else None

    def _forget(self, number: int) -> None:
        groups = self.decoder.groups
        if self._cache is not None and groups.tp.is_first:
            self._cache.work.remove_activations(number, groups.dp.rank)

    def _requirements(self, point: ActivationSite) -> tuple[bool, bool]:
        unit = next(u for u in self.units if point.modules[0] in u.modules)
        decision = self._decisions[point.modules[0]]
        requirements = [
            derive_requirements(self._recipe, replace(decision, format=f)) for f in unit.formats
        ]
        return any(n.gram for n in requirements), any(n.sample for n in requirements)

    def _solve_layer(
        self, number: int, layer: int | None, statistics: Mapping[str, ActivationStatistics]
    ) -> None:
        runs = [(u, f) for u in self.units if u.layer == layer for f in u.formats]
        groups, solved, fault = self.decoder.groups, dict[tuple[str, str], QParams](), None
        try:
            for unit, number_format in runs[groups.rank :: groups.world.size]:
                solved[unit.name, key_of(number_format, self._recipe)] = self._solve_unit(
                    unit, number_format, statistics
                )
        except MegtoolError as error:
            fault = error  # the others wait for what this rank was to settle
        every: dict[tuple[str, str], QParams] = {}
        for part, rank_fault in self.ranks.all_gather((solved, fault)):
            if rank_fault is not None:
                raise rank_fault
            every |= part
        keys = ((unit.name, key_of(number_format, self._recipe)) for unit, number_format in runs)
        some = {key: every[key] for key in keys}
        if self._cache is not None:
            with self.ranks.raise_together():
                if groups.rank == 0:
                    self._cache.record_qparams(number, some)
            self._forget(number)
            some = self._cache.read_qparams(number) or some  # large arrays stay on disk
        self.qparams |= some

    def _solve_unit(
        self,
        unit: DecisionUnit,
        number_format: RecipeFormat,
        statistics: Mapping[str, ActivationStatistics],
    ) -> QParams:
        decisions = {
            m: replace(self._decisions[m], format=number_format, choices=()) for m in unit.modules
        }
        points = self._points[unit.name]
        seen_points = _statistics_of(points, statistics)
        return solve_qparams(
            points,
            seen_points,
            decisions,
            self._recipe,
            self._weights,
            config=self.decoder.config,
            read_norm=self._weights.norm,
        )

    def simulated(self, run: CandidateRun) -> FakeQuantModel:
        """The model with only that decision unit fake-quantized, in `with`."""
        qparams = self.qparams[run.unit.name, run.key]
        return FakeQuantModel(self.decoder, self._points[run.unit.name], qparams, weights=True)


def _statistics_of(
    points: Sequence[ActivationSite], statistics: Mapping[str, ActivationStatistics]
) -> dict[str, ActivationStatistics]:
    """Statistics of points; of an expert without a token, those of all others together."""
    out = {p.name: statistics[p.name] for p in points}
    for point in points:
        if point.expert is None or out[point.name].num_tokens:
            continue
        last = point.name.rpartition(".")[2]
        partners = [
            statistics[p.name]
            for p in points
            if p.name.rpartition(".")[2] == last and statistics[p.name].num_tokens
        ]
        if partners:
            merged = partners[0]
            for partner in partners[1:]:
                merged = merged.merge(partner)
            out[point.name] = merged
    return out
