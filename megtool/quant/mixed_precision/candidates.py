"""Survey: what each unit of a model would be settled as in each of its formats, from one pass."""

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
from megtool.quant.calibration.activation_sites import Point
from megtool.quant.calibration.activations import Activations
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.layer_runner import Layers, one_batch
from megtool.quant.calibration.micro_batches import Piece
from megtool.quant.calibration.rank_sync import Ranks
from megtool.quant.calibration.recorder import Recorder
from megtool.quant.calibration.statistics import Statistics
from megtool.quant.fake_quant.fake_quant_model import Simulation
from megtool.quant.mixed_precision.decision_units import Unit, key_of
from megtool.quant.mixed_precision.sensitivity_cache import Measured
from megtool.quant.qparams import Settlement
from megtool.quant.recipes.formats import Format
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.requirements import needs
from megtool.quant.solve_qparams import settle

SETTLING = 2
"""How many times as long a pass takes in which statistics are taken."""


@dataclass(frozen=True, slots=True)
class Run:
    """A unit in a format."""

    unit: Unit
    key: str

    def finite(self, loss: float) -> float:
        """What it costs.

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
        self._told = 0

    def expect(self, passes: float) -> None:
        """There will be so many more."""
        self._expected += passes

    def __call__(self, passes: float) -> None:
        """So many more are done."""
        self._done += passes
        whole = math.floor(self._done + 1e-6)
        self._progress("sensitivity", whole - self._told, math.floor(self._expected + 1e-6))
        self._told = whole

    def of(self, num_tokens: int) -> float:
        """Passes of other numbers of tokens."""
        return num_tokens / self._num_tokens


class Survey:
    """A model and its units, and what each would be settled as in each of its formats.

    Every rank makes the same calls, over `pieces` of its own, of which each data-parallel rank has
    as many.
    """

    def __init__(
        self,
        decoder: Decoder,
        units: Sequence[Unit],
        decisions: Sequence[Decision],
        recipe: Recipe,
        points: Sequence[Point],
        weights: CanonicalWeights,
        pieces: Sequence[Piece],
        kept: Measured | None = None,
    ) -> None:
        self.decoder, self.units, self.pieces = decoder, units, pieces
        self.ranks = Ranks(groups=decoder.groups)
        self._decisions = {d.module.name: d for d in decisions}
        self._recipe, self._weights, self._kept = recipe, weights, kept
        self._points: dict[str, list[Point]] = defaultdict(list)
        owner = {m: u.name for u in units for m in u.modules}
        for point in points:
            if point.what == "input" and point.modules[0] in owner:
                self._points[owner[point.modules[0]]].append(point)
        self.settled: dict[tuple[str, str], Settlement] = {}

    def points_of(self, unit: Unit) -> list[Point]:
        """Where the unit's inputs are."""
        return self._points[unit.name]

    def runs(self) -> list[Run]:
        """All units in all formats, in the model's order, the head's last."""
        last = len(self.decoder.stage.layers)
        order = sorted(self.units, key=lambda u: last if u.layer is None else u.layer)
        return [Run(u, key_of(f, self._recipe)) for u in order for f in u.formats]

    def head_passes(self) -> float:
        """What logits and their softmax take, as passes through a layer."""
        config = self.decoder.config
        inside = [d.module for d in self._decisions.values() if d.module.layer is not None]
        layer = sum(m.numel for m in inside if m.kind == "linear" and "expert" not in m.roles)
        if config.num_experts:
            used = config.num_experts_per_token / config.num_experts
            layer += int(used * sum(m.numel for m in inside if "expert" in m.roles))
        each = layer / max(config.num_layers, 1)
        return 2 * config.vocab_size * config.hidden_size / max(each, 1)

    def settle(self, passes: Passes) -> None:
        """Run all pieces through the model as it is, and settle every unit in every format.

        It goes on behind the last layer that an earlier run has kept.
        """
        numbers: list[int | None] = [*self.decoder.stage.layers]
        if any(u.layer is None for u in self.units):
            numbers.append(None)
        done = self._finished(numbers)
        if done == len(numbers):
            return
        points = [p for u in self.units for p in self._points[u.name]]
        asked = {p.name: self._asked(p) for p in points}
        recorder = Recorder(
            self.decoder,
            points,
            gram={n for n, (gram, _) in asked.items() if gram},
            sample={n for n, (_, sample) in asked.items() if sample},
        )
        layers = Layers(self.decoder, self.pieces)
        states = Activations(
            [p.num_tokens for p in layers.pieces],
            self.decoder.config.hidden_size,
            dtype=self.decoder.dtype,
            device=self.decoder.groups.device,
        )
        try:
            begin = self._enter(done, layers, states)
            rest = [n for n in numbers[begin:] if n is not None]
            passes.expect(SETTLING * len(rest) * sum(passes.of(p.num_tokens) for p in self.pieces))
            for number, layer in enumerate(numbers[begin:], start=begin):
                with self.ranks.together():
                    recorder.start(layer)
                    states.begin(self._written(number + 1))
                    for i, piece in enumerate(layers.pieces):
                        recorder.see(one_batch(piece), first_sample=piece.first)
                        x_TH = states.get(i)
                        if layer is None:
                            with torch.inference_mode():
                                self.decoder.logits(self.decoder.finish(x_TH))
                                states.put(i, x_TH)
                            continue
                        states.put(i, layers.run(layer, i, x_TH))
                        passes(SETTLING * passes.of(piece.num_tokens))
                    states.end(self._written(number + 1))
                    seen = recorder.take()
                self._settle_layer(number, layer, seen)
            self._forget(len(numbers))
        finally:
            states.close()
            layers.release()

    def _finished(self, numbers: Sequence[int | None]) -> int:
        """How many layers (and the head) are settled on every rank, from the first on; they are
        taken over."""
        known = []
        for number in range(len(numbers)):
            found = None if self._kept is None else self._kept.settled(number)
            if found is None:
                break
            known.append(found)
        done: int = min(self.ranks.gathered(len(known)))
        for found in known[:done]:
            self.settled |= found
        return done

    def _enter(self, done: int, layers: Layers, states: Activations) -> int:
        """Have what enters the next layer; the layer that is begun with, 0 where nothing has."""
        path = self._entering(done)
        if all(self.ranks.gathered(done > 0 and path is not None and states.load(path))):
            return done
        for i, x_TH in enumerate(layers.embed()):
            states.put(i, x_TH)
        return 0

    def _entering(self, number: int) -> Path | None:
        """The file of what enters a layer, of which every data-parallel rank has one."""
        groups = self.decoder.groups
        return None if self._kept is None else self._kept.work.entering(number, groups.dp.rank)

    def _written(self, number: int) -> Path | None:
        """The same on the rank that writes it: others have the same rows."""
        return self._entering(number) if self.decoder.groups.tp.is_first else None

    def _forget(self, number: int) -> None:
        groups = self.decoder.groups
        if self._kept is not None and groups.tp.is_first:
            self._kept.work.forget(number, groups.dp.rank)

    def _asked(self, point: Point) -> tuple[bool, bool]:
        unit = next(u for u in self.units if point.modules[0] in u.modules)
        decision = self._decisions[point.modules[0]]
        found = [needs(self._recipe, replace(decision, format=f)) for f in unit.formats]
        return any(n.gram for n in found), any(n.sample for n in found)

    def _settle_layer(
        self, number: int, layer: int | None, statistics: Mapping[str, Statistics]
    ) -> None:
        runs = [(u, f) for u in self.units if u.layer == layer for f in u.formats]
        groups, own, fault = self.decoder.groups, dict[tuple[str, str], Settlement](), None
        try:
            for unit, found in runs[groups.rank :: groups.world.size]:
                own[unit.name, key_of(found, self._recipe)] = self._settle(unit, found, statistics)
        except MegtoolError as error:
            fault = error  # the others wait for what this rank was to settle
        every: dict[tuple[str, str], Settlement] = {}
        for part, told in self.ranks.gathered((own, fault)):
            if told is not None:
                raise told
            every |= part
        keys = ((unit.name, key_of(found, self._recipe)) for unit, found in runs)
        some = {key: every[key] for key in keys}
        if self._kept is not None:
            with self.ranks.together():
                if groups.rank == 0:
                    self._kept.record_settled(number, some)
            self._forget(number)
            some = self._kept.settled(number) or some  # large arrays stay on disk
        self.settled |= some

    def _settle(
        self, unit: Unit, found: Format, statistics: Mapping[str, Statistics]
    ) -> Settlement:
        seen = {m: replace(self._decisions[m], format=found, choices=()) for m in unit.modules}
        points = self._points[unit.name]
        seen_points = _seen(points, statistics)
        return settle(
            points,
            seen_points,
            seen,
            self._recipe,
            self._weights,
            config=self.decoder.config,
            norms=self._weights.norm,
        )

    def simulated(self, run: Run) -> Simulation:
        """The model with that unit alone rounded, in `with`."""
        settled = self.settled[run.unit.name, run.key]
        return Simulation(self.decoder, self._points[run.unit.name], settled, weights=True)


def _seen(points: Sequence[Point], statistics: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """Statistics of points; of an expert without a token, those of all others together."""
    out = {p.name: statistics[p.name] for p in points}
    for point in points:
        if point.expert is None or out[point.name].num_tokens:
            continue
        last = point.name.rpartition(".")[2]
        others = [
            statistics[p.name]
            for p in points
            if p.name.rpartition(".")[2] == last and statistics[p.name].num_tokens
        ]
        if others:
            both = others[0]
            for other in others[1:]:
                both = both.merged(other)
            out[point.name] = both
    return out
