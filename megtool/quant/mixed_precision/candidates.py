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
from megtool.model.stacks.decoder import Decoder
from megtool.quant.calibration.activations import Activations
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.layer_runner import LayerRunner, mask_uncounted
from megtool.quant.calibration.micro_batches import MicroBatch
from megtool.quant.calibration.rank_sync import RankSync
from megtool.quant.calibration.recorder import ActivationRecorder
from megtool.quant.calibration.requirements import derive_requirements
from megtool.quant.calibration.solve_qparams import solve_qparams
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel
from megtool.quant.mixed_precision.sensitivity_cache import SensitivityCache
from megtool.quant.qparams import QParams
from megtool.quant.recipes.decision_units import DecisionUnit, key_of
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quant.statistics.site_statistics import ActivationStatistics
from megtool.spec import layer_sets

CALIBRATION_PASS_COST = 2
"""The cost of a pass that collects statistics, in passes without."""


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """A decision unit in one format."""

    unit: DecisionUnit
    key: str

    def finite(self, loss: float) -> float:
        """The loss, checked to be finite.

        Raises:
            CalibrationError: that is NaN or infinite.
        """
        if not math.isfinite(loss):
            raise CalibrationError(
                f"the logits have NaN or Inf with {self.unit.name} in {self.key}",
                hint="remove the format from the choice, or exclude the module with a rule",
            )
        return loss


class Passes:
    """Progress in passes of a number of tokens through one layer; partial passes add up."""

    def __init__(self, progress: Progress, num_tokens: int) -> None:
        self._progress, self._num_tokens = progress, max(num_tokens, 1)
        self._expected = self._done = 0.0
        self._reported = 0

    def expect(self, passes: float) -> None:
        """Add expected passes."""
        self._expected += passes

    def __call__(self, passes: float) -> None:
        """Add finished passes."""
        self._done += passes
        finished = math.floor(self._done + 1e-6)
        self._progress("sensitivity", finished - self._reported, math.floor(self._expected + 1e-6))
        self._reported = finished

    def of(self, num_tokens: int) -> float:
        """Convert a number of tokens to passes."""
        return num_tokens / self._num_tokens


class CandidateSurvey:
    """A model with its decision units, and their quantization parameters in each candidate format.

    Every rank makes the same calls, with its own micro-batches, of which each data-parallel rank
    has the same number.
    """

    def __init__(
        self,
        decoder: Decoder,
        units: Sequence[DecisionUnit],
        decisions: Sequence[Decision],
        recipe: Recipe,
        sites: Sequence[ActivationSite],
        weights: CanonicalWeights,
        micro_batches: Sequence[MicroBatch],
        cache: SensitivityCache | None = None,
    ) -> None:
        self.decoder, self.units, self.micro_batches = decoder, units, micro_batches
        self.ranks = RankSync(groups=decoder.groups)
        self._decisions = {d.module.name: d for d in decisions}
        self._recipe, self._weights, self._cache = recipe, weights, cache
        self._sites: dict[str, list[ActivationSite]] = defaultdict(list)
        owner = {m: u.name for u in units for m in u.modules}
        for site in sites:
            if site.kind == "input" and site.modules[0] in owner:
                self._sites[owner[site.modules[0]]].append(site)
        self.qparams: dict[tuple[str, str], QParams] = {}

    def sites_of(self, unit: DecisionUnit) -> list[ActivationSite]:
        """The activation sites of a decision unit."""
        return self._sites[unit.name]

    def runs(self) -> list[CandidateRun]:
        """All units in all formats, in model order; those of the head are last."""
        last = len(self.decoder.stage.layers)
        order = sorted(self.units, key=lambda u: last if u.layer is None else u.layer)
        return [CandidateRun(u, key_of(f, self._recipe)) for u in order for f in u.formats]

    def head_passes(self) -> float:
        """The cost of logits and their softmax, in passes through a layer."""
        config = self.decoder.config
        inside = [d.module for d in self._decisions.values() if d.module.layer is not None]
        layer = sum(m.numel for m in inside if m.kind == "linear" and "expert" not in m.roles)
        if config.moe.num_experts:
            used = config.moe.num_experts_per_token / config.moe.num_experts
            layer += int(used * sum(m.numel for m in inside if "expert" in m.roles))
        layer_numel = layer / max(config.num_layers, 1)
        return 2 * config.embedding.vocab_size * config.hidden_size / max(layer_numel, 1)

    def solve(self, passes: Passes) -> None:
        """Run all micro-batches through the model and solve every decision unit in every format.

        Resumes after the last layer that an earlier run has finished.
        """
        numbers: list[int | None] = [*self.decoder.stage.layers]
        if any(u.layer is None for u in self.units):
            numbers.append(None)
        done = self._finished(numbers)
        if done == len(numbers):
            return
        sites = [p for u in self.units for p in self._sites[u.name]]
        requirements = {p.name: self._requirements(p) for p in sites}
        recorder = ActivationRecorder(
            self.decoder,
            sites,
            gram={n for n, (gram, _) in requirements.items() if gram},
            sample={n for n, (_, sample) in requirements.items() if sample},
        )
        layers = LayerRunner(self.decoder, self.micro_batches)
        states = Activations(
            [p.num_tokens for p in layers.micro_batches],
            self.decoder.config.residual_size,
            dtype=self.decoder.dtype,
            device=self.decoder.groups.device,
        )
        try:
            begin = self._load_inputs(done, layers, states)
            upcoming = [n for n in numbers[begin:] if n is not None]
            passes.expect(
                CALIBRATION_PASS_COST
                * len(upcoming)
                * sum(passes.of(p.num_tokens) for p in self.micro_batches)
            )
            for number, layer in enumerate(numbers[begin:], start=begin):
                with self.ranks.raise_together():
                    recorder.start(layer)
                    states.begin(self._input_file_to_write(number + 1))
                    run = None if layer is None else layers.start_layer(layer, recorder)
                    for i, micro_batch in enumerate(layers.micro_batches):
                        recorder.set_batch(
                            mask_uncounted(micro_batch), first_sample=micro_batch.first_row
                        )
                        x_TH = states.get(i)
                        if run is None:
                            with torch.inference_mode():
                                self.decoder.logits(self.decoder.finish(x_TH))
                                states.put(i, x_TH)
                            continue
                        states.put(i, run(i, x_TH))
                        passes(CALIBRATION_PASS_COST * passes.of(micro_batch.num_tokens))
                    states.end(self._input_file_to_write(number + 1))
                    statistics = recorder.collect()
                self._solve_layer(number, layer, statistics)
            self._remove_inputs(len(numbers))
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

    def _load_inputs(self, done: int, layers: LayerRunner, states: Activations) -> int:
        """Load the inputs of the next layer; returns the first layer to run, 0 if nothing is
        finished.
        """
        path = self._input_file(done)
        if layer_sets.has_side_inputs(
            self.decoder.config
        ):  # of which files hold the residual alone
            path = None
        if all(self.ranks.all_gather(done > 0 and path is not None and states.load(path))):
            return done
        for i, x_TH in enumerate(layers.embed()):
            states.put(i, x_TH)
        return 0

    def _input_file(self, number: int) -> Path | None:
        """The file with the inputs of a layer; one per data-parallel rank."""
        groups = self.decoder.groups
        return (
            None
            if self._cache is None
            else self._cache.work.activations_file(number, groups.replicas.rank)
        )

    def _input_file_to_write(self, number: int) -> Path | None:
        """The file with the inputs of a layer on the rank that writes it; None on ranks with the
        same rows."""
        return self._input_file(number) if self.decoder.groups.tp.is_first else None

    def _remove_inputs(self, number: int) -> None:
        groups = self.decoder.groups
        if self._cache is not None and groups.tp.is_first:
            self._cache.work.remove_activations(number, groups.replicas.rank)

    def _requirements(self, site: ActivationSite) -> tuple[bool, bool]:
        unit = next(u for u in self.units if site.modules[0] in u.modules)
        decision = self._decisions[site.modules[0]]
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
            fault = error  # raised on all ranks below
        results: dict[tuple[str, str], QParams] = {}
        for part, rank_fault in self.ranks.all_gather((solved, fault)):
            if rank_fault is not None:
                raise rank_fault
            results |= part
        keys = ((unit.name, key_of(number_format, self._recipe)) for unit, number_format in runs)
        layer_qparams = {key: results[key] for key in keys}
        if self._cache is not None:
            with self.ranks.raise_together():
                if groups.rank == 0:
                    self._cache.record_qparams(number, layer_qparams)
            self._remove_inputs(number)
            layer_qparams = (
                self._cache.read_qparams(number) or layer_qparams
            )  # large arrays stay on disk
        self.qparams |= layer_qparams

    def _solve_unit(
        self,
        unit: DecisionUnit,
        number_format: RecipeFormat,
        statistics: Mapping[str, ActivationStatistics],
    ) -> QParams:
        decisions = {
            m: replace(self._decisions[m], format=number_format, choices=()) for m in unit.modules
        }
        sites = self._sites[unit.name]
        site_statistics = _statistics_of(sites, statistics)
        return solve_qparams(
            sites,
            site_statistics,
            decisions,
            self._recipe,
            self._weights,
            read_norm=self._weights.norm,
        )

    def fake_quantized(self, run: CandidateRun) -> FakeQuantModel:
        """The model with only this decision unit fake-quantized; use in `with`."""
        qparams = self.qparams[run.unit.name, run.key]
        return FakeQuantModel(self.decoder, self._sites[run.unit.name], qparams)


def _statistics_of(
    sites: Sequence[ActivationSite], statistics: Mapping[str, ActivationStatistics]
) -> dict[str, ActivationStatistics]:
    """Statistics of sites; an expert without tokens gets the merged statistics of the others."""
    out = {p.name: statistics[p.name] for p in sites}
    for site in sites:
        if site.expert is None or out[site.name].num_tokens:
            continue
        last = site.name.rpartition(".")[2]
        siblings = [
            statistics[p.name]
            for p in sites
            if p.name.rpartition(".")[2] == last and statistics[p.name].num_tokens
        ]
        if siblings:
            merged = siblings[0]
            for sibling in siblings[1:]:
                merged = merged.merge(sibling)
            out[site.name] = merged
    return out
