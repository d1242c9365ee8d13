"""Steps: a calibration's layers, and its head, one after the other on the ranks that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.config import ModelConfig
from megtool.console import Progress
from megtool.errors import CalibrationError, MegtoolError
from megtool.inference.load import load
from megtool.inference.rank_weights import Source
from megtool.model.decoder import Decoder
from megtool.parallel.pipeline_split import Pipeline
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.activation_sites import Point
from megtool.quant.calibration.activations import Activations
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.expert_coverage import filled
from megtool.quant.calibration.layer_runner import Layers, one_batch
from megtool.quant.calibration.micro_batches import Piece
from megtool.quant.calibration.rank_sync import Ranks
from megtool.quant.calibration.recorder import Recorder
from megtool.quant.calibration.resume_folder import Work
from megtool.quant.calibration.statistics import Statistics
from megtool.quant.fake_quant.fake_quant_model import Simulation
from megtool.quant.qparams import Settlement
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.requirements import needs
from megtool.quant.solve_qparams import settle

Found = tuple[dict[str, Statistics], Settlement]


@dataclass(slots=True, kw_only=True)
class Run:
    """One calibration on one rank. Units are layers by number, then the head."""

    source: Source
    config: ModelConfig
    decisions: Mapping[str, Decision]
    recipe: Recipe
    points: tuple[Point, ...]
    ranks: Ranks
    pieces: list[Piece]
    sequential: bool
    policy: str
    route_all: bool
    work: Work | None
    spill: bool
    rehearsed: bool
    progress: Progress
    how: dict[str, Any]
    found: dict[int, Found] = field(default_factory=dict)

    @property
    def num_units(self) -> int:
        """Layers, and the head."""
        return self.config.num_layers + 1

    @property
    def num_tokens(self) -> int:
        """What this rank runs, padding included."""
        return sum(p.num_tokens for p in self.pieces)

    def all(self) -> dict[int, Found]:
        """What came of every unit."""
        begin = self._finished()
        total = self.num_tokens * self.num_units
        self.progress("calibrate", begin * self.num_tokens, total)
        if begin == self.num_units:
            return self.found
        decoder = load(self.source, **self.how)
        layers = Layers(decoder, self.pieces, rehearsed=self.rehearsed)
        activations = Activations(
            [p.num_tokens for p in self.pieces],
            self.config.hidden_size,
            dtype=decoder.dtype,
            device=decoder.groups.device,
            spilled=self.spill,
        )
        try:
            with CanonicalWeights(self.source) as weights:
                steps = _Steps(
                    run=self, decoder=decoder, layers=layers, held=activations, weights=weights
                )
                steps.enter(begin)
                for unit in range(begin, self.num_units):
                    steps.unit(unit)
        finally:
            activations.close()
            layers.close()
        return self._everywhere()

    def points_of(self, unit: int) -> list[Point]:
        """The points of a unit."""
        layer = None if unit == self.config.num_layers else unit
        return [p for p in self.points if p.layer == layer]

    def _finished(self) -> int:
        """The unit to begin with: behind all that is finished, and sound, on every rank."""
        if self.work is None:
            return 0
        done: int = min(self.ranks.gathered(self.work.num_finished(self.num_units)))
        for unit in range(done):
            if (found := self.work.recorded(unit)) is not None:
                self.found[unit] = found
        return done

    def _everywhere(self) -> dict[int, Found]:
        """All units on all ranks."""
        if self.ranks.groups.pp.size > 1:
            for other in self.ranks.gathered(self.found):
                self.found |= {u: f for u, f in other.items() if u not in self.found}
        return self.found


@dataclass(slots=True, kw_only=True)
class _Steps:
    """One unit after the other, on the ranks of the stage that has it."""

    run: Run
    decoder: Decoder
    layers: Layers
    held: Activations
    weights: CanonicalWeights
    stages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        split = Pipeline.of(self.groups.parallel)
        self.stages = split.stage_of_layer(self.run.config.num_layers).tolist()
        self.stages.append(split.loss[0])

    @property
    def groups(self) -> ProcessGroups:
        """This process' groups."""
        return self.run.ranks.groups

    def has(self, unit: int) -> bool:
        """This rank has the unit (-1: the embedding)."""
        return self.groups.pp.rank == self._stage(unit)

    def path(self, unit: int) -> Path | None:
        """Where what enters a unit is kept."""
        work = self.run.work
        return None if work is None else work.entering(unit, self.groups.dp.rank)

    def enter(self, unit: int) -> None:
        """Have what enters a unit: what an earlier run has left, or what becomes of the tokens."""
        for place in (unit, unit - 1):
            if place > 0 and self._loaded(place):
                for again in range(place, unit):
                    self.unit(again)
                return
        with self.run.ranks.together():
            if self.has(-1):
                self._begin(0)
                for number, x_TH in enumerate(self.layers.embed()):
                    self.held.put(number, x_TH)
                self._end(0)
        self._hand_on(-1)
        for again in range(unit):
            self.unit(again)

    def unit(self, unit: int) -> None:
        """One layer, or the head."""
        run = self.run
        with run.ranks.together():
            if self.has(unit):
                self._unit(unit)
        self._hand_on(unit)
        work, part = run.work, self.groups.dp.rank
        if work is not None and self._writes and self.has(unit):
            work.forget(unit - 1, part)  # of the unit itself it may still be wanted
            if unit == run.config.num_layers:
                work.forget(unit, part)
        run.progress("calibrate", run.num_tokens, run.num_tokens * run.num_units)

    def _stage(self, unit: int) -> int:
        return 0 if unit < 0 else self.stages[unit]

    def _loaded(self, unit: int) -> bool:
        """All ranks that have the unit have found what enters it."""
        path = self.path(unit)
        sound = path is not None and (not self.has(unit) or self.held.load(path))
        return all(self.run.ranks.gathered(sound))

    @property
    def _writes(self) -> bool:
        """Ranks that have the same rows leave them to the first."""
        return self.groups.tp.is_first

    def _unit(self, unit: int) -> None:
        run = self.run
        is_last = unit == run.config.num_layers
        some = run.points_of(unit)
        asked = [(p, needs(run.recipe, d)) for p in some for d in self._decisions(p)]
        again = not is_last and run.sequential and self._is_changed(some)
        recorder = Recorder(
            self.decoder,
            some,
            groups=self.groups,
            gram={p.name for p, n in asked if n.gram},
            even={p.name for p, n in asked if n.even}
            - {p.name for p, n in asked if n.gram and not n.even},
            sample={p.name for p, n in asked if n.sample},
            route_all=run.route_all,
        )
        puts = not is_last and not again
        if puts:
            self._begin(unit + 1)
        recorder.start(None if is_last else unit)
        try:
            if is_last:
                self._show_head(recorder)
            else:
                self._show_layer(unit, recorder, puts=puts)
            seen = recorder.take()
        except CalibrationError as error:
            raise self._blamed(unit, error) from error
        finally:
            recorder.stop()
        if puts:
            self._end(unit + 1)
        self.layers.release()
        settlement = self._settled(some, seen)
        bare = {n: replace(s, gram=None, sample=None) for n, s in seen.items()}
        del seen
        if again:
            self._begin(unit + 1)
            with Simulation(self.decoder, some, settlement, weights=True):
                self._show_layer(unit, None, puts=True)
            self._end(unit + 1)
            self.layers.release()
        run.found[unit] = bare, settlement
        if run.work is not None and self.groups.tp.is_first and self.groups.dp.is_first:
            run.work.record(unit, bare, settlement)
            if (found := run.work.recorded(unit)) is not None:
                run.found[unit] = found  # large arrays stay on disk

    def _show_layer(self, unit: int, recorder: Recorder | None, *, puts: bool) -> None:
        """Run a layer over everything, watched or as it will be."""
        state = [] if recorder is None else recorder.state
        graphable = recorder is not None and recorder.is_graphable
        replayed = self.layers.replayed(unit, state, graphable=graphable)
        for number, piece in enumerate(self.layers.pieces):
            if recorder is not None:
                recorder.see(one_batch(piece), first_sample=piece.first)
            x_TH = self.held.get(number)
            if replayed is not None:
                y_TH = replayed(number, x_TH)
            else:
                y_TH = self.layers.run(unit, number, x_TH)
            self._check(unit, piece, y_TH)
            if puts:
                self.held.put(number, y_TH)

    def _show_head(self, recorder: Recorder) -> None:
        with self.layers.norm_alone():
            for number, piece in enumerate(self.layers.pieces):
                recorder.see(one_batch(piece), first_sample=piece.first)
                self.layers.finish(self.held.get(number))

    def _check(self, unit: int, piece: Piece, y_TH: Tensor) -> None:
        """What leaves a layer are numbers; with several ranks a later layer's input tells.

        Raises:
            CalibrationError: they are not; names the layer, the sample and the token.
        """
        if self.groups.world.size > 1 or bool(torch.isfinite(y_TH.sum())):
            return
        good_T = torch.isfinite(y_TH).all(1)
        if piece.valid_T is not None:
            good_T |= ~piece.valid_T
        if bool(good_T.all()):
            return
        row, token = divmod(int((~good_T).int().argmax()), piece.batch.shape[1])
        raise CalibrationError(
            f"layer {unit} makes NaN or infinity of token {token} of sample {piece.first + row}",
            hint="`megtool inspect SRC --stats` counts NaN in weights; where there are none, "
            "--dtype float32",
        )

    def _blamed(self, unit: int, error: CalibrationError) -> CalibrationError:
        """The error, and the weight that is to blame for it where one is no number."""
        if unit < self.run.config.num_layers:
            at = f"decoder.layers.{unit}"
            for name, weight in self.decoder.get_submodule(at).named_parameters():
                if not weight.is_meta and not bool(torch.isfinite(weight.sum())):
                    return CalibrationError(
                        f"{error.message}: a weight of layer {unit} holds NaN or infinity",
                        tensor=f"{at}.{name}",
                        hint="`megtool inspect SRC --stats` counts them; load a sound checkpoint",
                    )
        return error

    def _decisions(self, point: Point) -> list[Decision]:
        found = (self.run.decisions.get(m) for m in point.modules)
        return [d for d in found if d is not None]

    def _is_changed(self, some: list[Point]) -> bool:
        """Something of the unit is quantized."""
        return any(d.format is not None for p in some for d in self._decisions(p))

    def _settled(self, some: list[Point], seen: Mapping[str, Statistics]) -> Settlement:
        """The unit's settlement, each rank of the stage having settled some of the points."""
        run, ranks = self.run, self.run.ranks
        full, notes = filled(some, seen, run.policy)
        places = ranks.of_stage(self.groups.rank)
        own = some[places.index(self.groups.rank) :: len(places)]
        part, fault = Settlement(), None
        try:
            part = settle(
                own,
                full,
                run.decisions,
                run.recipe,
                self.weights,
                config=run.config,
                norms=self.weights.norm,
            )
        except MegtoolError as error:
            fault = error  # the others wait for what this rank was to settle
        parts = ranks.of_stage((part, fault))
        out = Settlement(notes=list(notes))
        for other, told in parts:
            if told is not None:
                raise told
            out.add(other)
        order = {m: i for i, p in enumerate(some) for m in (p.norm, *p.modules)}

        def in_order(held: dict[str, Any]) -> dict[str, Any]:
            return {n: held[n] for n in sorted(held, key=lambda n: (order.get(n, -1), n))}

        return Settlement(
            treatments=in_order(out.treatments),
            caches=in_order(out.caches),
            norms=in_order(out.norms),
            notes=out.notes,
        )

    # ---- what passes between units

    def _begin(self, unit: int) -> None:
        self.held.begin(self.path(unit) if self._writes else None)

    def _end(self, unit: int) -> None:
        if self._writes:
            self.held.end(self.path(unit))

    def _hand_on(self, unit: int) -> None:
        """Bring what leaves a unit to the ranks of the stage that has the next one."""
        if unit + 1 == len(self.stages):
            return
        here, there = self._stage(unit), self._stage(unit + 1)
        spilled = self.run.spill and not self._writes
        if here == there and not spilled:
            return
        path = self.path(unit + 1)
        if path is not None:
            if self.has(unit + 1) and not self.held.load(path):
                raise CalibrationError(
                    f"what enters layer {unit + 1} is not there",
                    file=path,
                    hint="the folder for work has to be on storage that all hosts share",
                )
            return
        pp = self.groups.pp
        for number, piece in enumerate(self.layers.pieces):
            if pp.rank == here:
                dist.send(self.held.get(number).contiguous(), dst=pp.ranks[there], group=pp.handle)
            elif pp.rank == there:
                x_TH = torch.empty(
                    piece.num_tokens,
                    self.run.config.hidden_size,
                    dtype=self.decoder.dtype,
                    device=self.groups.device,
                )
                dist.recv(x_TH, src=pp.ranks[here], group=pp.handle)
                self.held.put(number, x_TH)
