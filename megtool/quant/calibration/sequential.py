"""The calibration loop over layers and the head, on the ranks that have them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.console import Progress
from megtool.errors import CalibrationError, MegtoolError
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.pipeline_split import Pipeline
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.algorithms.algorithm_config import resolve_algorithm
from megtool.quant.calibration.activations import Activations
from megtool.quant.calibration.block_rounding import BlockRounding
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.expert_coverage import fill_missing_statistics
from megtool.quant.calibration.layer_runner import LayerRunner, mask_uncounted
from megtool.quant.calibration.micro_batches import MicroBatch
from megtool.quant.calibration.rank_sync import RankSync
from megtool.quant.calibration.recorder import ActivationRecorder
from megtool.quant.calibration.requirements import derive_requirements
from megtool.quant.calibration.resume_folder import ResumeFolder
from megtool.quant.calibration.settings import CalibrationMethod, UnitSolver
from megtool.quant.calibration.solve_qparams import solve_qparams
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel
from megtool.quant.qparams import QParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quant.statistics.site_statistics import ActivationStatistics
from megtool.source.checkpoint import CheckpointSource
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

LayerResult = tuple[dict[str, ActivationStatistics], QParams]

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CalibrationRun:
    """One calibration on one rank. Units are the layers in order, then the head."""

    source: CheckpointSource
    config: ModelConfig
    decisions: Mapping[str, Decision]
    recipe: Recipe
    sites: tuple[ActivationSite, ...]
    ranks: RankSync
    micro_batches: list[MicroBatch]
    sequential: bool
    learned: bool
    settings: CalibrationMethod
    resume: ResumeFolder | None
    progress: Progress
    results: dict[int, LayerResult] = field(default_factory=dict)

    @property
    def num_units(self) -> int:
        """The number of layers, plus the head."""
        return self.config.num_layers + 1

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank runs, including padding."""
        return sum(p.num_tokens for p in self.micro_batches)

    def run(self) -> dict[int, LayerResult]:
        """Run all units and return their results."""
        begin = self._load_finished()
        total = self.num_tokens * self.num_units
        self.progress("calibrate", begin * self.num_tokens, total)
        if begin == self.num_units:
            return self.results
        decoder = self.settings.load(self.source, self.ranks.groups)
        layers = LayerRunner(decoder, self.micro_batches)
        activations, *more = (
            Activations(
                [p.num_tokens for p in self.micro_batches],
                self.config.residual_size,
                dtype=decoder.dtype,
                device=decoder.groups.device,
                spilled=self.settings.offload_activations,
            )
            for _ in range(1 + self.learned)
        )
        try:
            with CanonicalWeights(self.source) as weights:
                steps = _UnitRunner(
                    run=self,
                    decoder=decoder,
                    layers=layers,
                    activations=activations,
                    unquantized=more[0] if more else None,
                    weights=weights,
                )
                steps.prepare_input(begin)
                for unit in range(begin, self.num_units):
                    steps.run_unit(unit)
        finally:
            for stream in (activations, *more):
                stream.close()
            layers.close()
        if self.ranks.groups.rank == 0:
            for line in layers.graph_use.lines():
                _LOG.info("%s", line)
        return self._gather_results()

    def sites_of(self, unit: int) -> list[ActivationSite]:
        """The sites of a unit."""
        layer = None if unit == self.config.num_layers else unit
        return [p for p in self.sites if p.layer == layer]

    def _load_finished(self) -> int:
        """Load finished units; returns the first unit that some rank has not finished."""
        if self.resume is None:
            return 0
        num_finished: int = min(self.ranks.all_gather(self.resume.num_finished(self.num_units)))
        for unit in range(num_finished):
            if (result := self.resume.read_unit(unit)) is not None:
                self.results[unit] = result
        return num_finished

    def _gather_results(self) -> dict[int, LayerResult]:
        """Gather the results of all units on all ranks."""
        if self.ranks.groups.pp.size > 1:
            for results in self.ranks.all_gather(self.results):
                self.results |= {u: f for u, f in results.items() if u not in self.results}
        return self.results


@dataclass(slots=True, kw_only=True)
class _UnitRunner:
    """Runs units in order, each on the ranks of its pipeline stage.

    `activations` are the inputs of a unit, `unquantized` those in the unquantized model, if
    rounding is learned from the difference.
    """

    run: CalibrationRun
    decoder: Decoder
    layers: LayerRunner
    activations: Activations
    unquantized: Activations | None
    weights: CanonicalWeights
    stages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        split = Pipeline.of(self.groups.parallel)
        self.stages = split.stage_of_layer(self.run.config.num_layers).tolist()
        self.stages.append(split.loss[0])

    @property
    def groups(self) -> ProcessGroups:
        """The process groups."""
        return self.run.ranks.groups

    def has(self, unit: int) -> bool:
        """Whether this rank has the unit (-1: the embedding)."""
        return self.groups.pp.rank == self._stage(unit)

    @property
    def streams(self) -> list[Activations]:
        """The activations that pass from unit to unit."""
        return [self.activations, *([] if self.unquantized is None else [self.unquantized])]

    def activations_file(self, unit: int, stream: Activations | None = None) -> Path | None:
        """The file of the input of a unit, if there is a resume folder."""
        work = self.run.resume
        if work is None:
            return None
        is_other = stream is not None and stream is self.unquantized
        return work.activations_file(unit, self.groups.replicas.rank, unquantized=is_other)

    def prepare_input(self, unit: int) -> None:
        """Prepare the input of a unit, from an earlier run or from the tokens."""
        for place in (unit, unit - 1):
            if place > 0 and self._load_input(place):
                for previous in range(place, unit):
                    self.run_unit(previous)
                return
        with self.run.ranks.raise_together():
            if self.has(-1):
                for stream in self.streams:
                    self._begin(0, stream)
                for number, x_TH in enumerate(self.layers.embed()):
                    for stream in self.streams:
                        stream.put(number, x_TH)
                for stream in self.streams:
                    self._end(0, stream)
        self._send_output(-1)
        for previous in range(unit):
            self.run_unit(previous)

    def run_unit(self, unit: int) -> None:
        """Run one layer, or the head."""
        run = self.run
        with run.ranks.raise_together():
            if self.has(unit):
                self._run_local_unit(unit)
        self._send_output(unit)
        work, part = run.resume, self.groups.replicas.rank
        if work is not None and self._writes and self.has(unit):
            # The input of the unit itself may still be needed.
            work.remove_activations(unit - 1, part)
            if unit == run.config.num_layers:
                work.remove_activations(unit, part)
        run.progress("calibrate", run.num_tokens, run.num_tokens * run.num_units)

    def _stage(self, unit: int) -> int:
        return 0 if unit < 0 else self.stages[unit]

    def _load_input(self, unit: int) -> bool:
        """Whether all ranks of the unit have loaded its input."""
        if layer_sets.has_side_inputs(self.run.config):  # of which files hold the residual alone
            return False
        is_valid = True
        for stream in self.streams:
            path = self.activations_file(unit, stream)
            is_valid &= path is not None and (not self.has(unit) or stream.load(path))
        return all(self.run.ranks.all_gather(is_valid))

    @property
    def _writes(self) -> bool:
        """Of ranks with the same rows, only the first writes."""
        return self.groups.tp.is_first

    def _run_local_unit(self, unit: int) -> None:
        run = self.run
        is_last = unit == run.config.num_layers
        sites = run.sites_of(unit)
        if run.settings.solver is not None:
            self._solve_by_passes(unit, sites, run.settings.solver)
            return
        requirements = [
            (p, derive_requirements(run.recipe, d)) for p in sites for d in self._decisions(p)
        ]
        reruns = not is_last and run.sequential and self._is_changed(sites)
        recorder = ActivationRecorder(
            self.decoder,
            sites,
            groups=self.groups,
            gram={p.name for p, n in requirements if n.gram},
            normalize_tokens={p.name for p, n in requirements if n.normalized_gram}
            - {p.name for p, n in requirements if n.gram and not n.normalized_gram},
            sample={p.name for p, n in requirements if n.sample},
            calibrate_all_experts=run.settings.calibrate_all_experts,
        )
        stores_output = not is_last and not reruns
        if stores_output:
            self._begin(unit + 1)
        recorder.start(None if is_last else unit)
        try:
            if is_last:
                self._run_head(recorder)
            else:
                self._run_layer(unit, recorder, stores_output=stores_output)
            statistics = recorder.collect()
        except CalibrationError as error:
            raise self._locate_nonfinite(unit, error) from error
        finally:
            recorder.stop()
        if stores_output:
            self._end(unit + 1)
        self.layers.release()
        qparams = self._solve(sites, statistics)
        if self.unquantized is not None and not is_last:
            qparams = self._learn(unit, sites, qparams, self.unquantized)
        stored = {n: replace(s, gram=None, sample=None) for n, s in statistics.items()}
        del statistics
        if reruns:
            self._rerun(unit, sites, qparams)
        self._keep_result(unit, stored, qparams)

    def _solve_by_passes(self, unit: int, sites: list[ActivationSite], solver: UnitSolver) -> None:
        """Solve a unit with as many passes as a solver makes; then run it for its outputs, unless
        the only pass has done so."""
        is_last = unit == self.run.config.num_layers
        is_changed = self.run.sequential and self._is_changed(sites)
        stores_output = not is_last and not is_changed and solver.num_passes == 1
        num_passes = 0

        def run_pass(recorder: ActivationRecorder) -> None:
            nonlocal num_passes
            num_passes += 1
            recorder.start(None if is_last else unit)
            try:
                if is_last:
                    self._run_head(recorder)
                else:
                    self._run_layer(unit, recorder, stores_output=stores_output)
            finally:
                recorder.stop()

        if stores_output:
            self._begin(unit + 1)
        qparams = solver.solve_unit(self.decoder, sites, self.weights, run_pass)
        if stores_output:
            if not num_passes:
                self._run_layer(unit, None, stores_output=True)
            self._end(unit + 1)
        elif not is_last:
            self._rerun(unit, sites if is_changed else [], qparams)
        self.layers.release()
        self._keep_result(unit, {}, qparams)

    def _rerun(self, unit: int, sites: Sequence[ActivationSite], qparams: QParams) -> None:
        """Run a layer for its outputs, with the modules of `sites` fake-quantized."""
        self._begin(unit + 1)
        with FakeQuantModel(self.decoder, sites, qparams) if sites else contextlib.nullcontext():
            self._run_layer(unit, None, stores_output=True)
        self._end(unit + 1)
        self.layers.release()

    def _keep_result(
        self, unit: int, stored: dict[str, ActivationStatistics], qparams: QParams
    ) -> None:
        """Keep the result of a unit, also in the folder to resume from."""
        run = self.run
        run.results[unit] = stored, qparams
        if run.resume is not None and self.groups.tp.is_first and self.groups.replicas.is_first:
            run.resume.write_unit(unit, stored, qparams)
            if (result := run.resume.read_unit(unit)) is not None:
                run.results[unit] = result  # large arrays stay on disk

    def _run_layer(
        self, unit: int, recorder: ActivationRecorder | None, *, stores_output: bool
    ) -> None:
        """Run a layer over all micro-batches, with a recorder or fake-quantized."""
        run = self.layers.start_layer(unit, recorder)
        for number, micro_batch in enumerate(self.layers.micro_batches):
            if recorder is not None:
                recorder.set_batch(mask_uncounted(micro_batch), first_sample=micro_batch.first_row)
            y_TH = run(number, self.activations.get(number))
            self._check_finite(unit, micro_batch, y_TH)
            if recorder is not None:
                recorder.end_batch()
            if stores_output:
                self.activations.put(number, y_TH)

    def _learn(
        self,
        unit: int,
        sites: list[ActivationSite],
        qparams: QParams,
        unquantized: Activations,
    ) -> QParams:
        """Run the unquantized layer, and learn the rounding of the quantized one from it."""
        self._begin(unit + 1, unquantized)
        run = self.layers.start_layer(unit, None)
        for number in range(len(self.layers.micro_batches)):
            unquantized.put(number, run(number, unquantized.get(number)))
        self._end(unit + 1, unquantized)
        configs = {
            m: resolve_algorithm(self.run.recipe, params.format)
            for m, params in qparams.weights.items()
            if derive_requirements(self.run.recipe, self.run.decisions[m]).learned
        }
        if configs:
            qparams = BlockRounding(
                layers=self.layers,
                layer=unit,
                inputs=self.activations,
                targets=unquantized,
                sites=sites,
                qparams=qparams,
                configs=configs,
                read_weight=self.weights,
            ).run()
        self.layers.release()
        return qparams

    def _run_head(self, recorder: ActivationRecorder) -> None:
        with self.layers.only_final_norm():
            for number, micro_batch in enumerate(self.layers.micro_batches):
                recorder.set_batch(mask_uncounted(micro_batch), first_sample=micro_batch.first_row)
                self.layers.finish(self.activations.get(number))
                recorder.end_batch()

    def _check_finite(self, unit: int, micro_batch: MicroBatch, y_TH: Tensor) -> None:
        """Check the output of a layer; with several ranks the recorder of a later layer does so.

        Raises:
            CalibrationError: NaN or Inf; names the layer, the sample and the token.
        """
        if self.groups.world.size > 1 or bool(torch.isfinite(y_TH.sum())):
            return
        is_finite_T = torch.isfinite(y_TH).all(1)
        if micro_batch.valid_T is not None:
            is_finite_T |= ~micro_batch.valid_T
        if bool(is_finite_T.all()):
            return
        row, token = divmod(int((~is_finite_T).int().argmax()), micro_batch.batch.shape[1])
        raise CalibrationError(
            f"layer {unit} outputs NaN or Inf for token {token} of sample "
            f"{micro_batch.first_row + row}",
            hint="`megtool inspect SRC --stats` counts NaN in weights; if there are none, use "
            "--dtype float32",
            error_id="nan-activations",
        )

    def _locate_nonfinite(self, unit: int, error: CalibrationError) -> CalibrationError:
        """Add the weight that causes the error, if one has NaN or Inf, or else that none has."""
        kind = str(self.decoder.dtype).removeprefix("torch.")
        overflows = "--dtype float32 or bfloat16, for float16 overflows above 65504"
        if unit < self.run.config.num_layers:
            prefix = f"decoder.layers.{unit}"
            for name, weight in self.decoder.get_submodule(prefix).named_parameters():
                if weight.is_meta or bool(torch.isfinite(weight).all()):
                    continue
                is_cut = kind == "float16" and not bool(weight.isnan().any())
                return CalibrationError(
                    f"{error.message}: a weight of layer {unit} "
                    + ("is Inf as float16" if is_cut else "has NaN or Inf"),
                    tensor=f"{prefix}.{name}",
                    hint=overflows
                    if is_cut
                    else "`megtool inspect SRC --stats` counts them; use an intact checkpoint",
                    error_id="nan-activations",
                )
        way_out = overflows if kind == "float16" else "try --dtype float32"
        return CalibrationError(
            error.message,
            tensor=error.tensor,
            hint=f"every weight of it is finite as {kind}: {way_out}",
            error_id="nan-activations",
        )

    def _decisions(self, site: ActivationSite) -> list[Decision]:
        decisions = (self.run.decisions.get(m) for m in site.modules)
        return [d for d in decisions if d is not None]

    def _is_changed(self, sites: list[ActivationSite]) -> bool:
        """Whether any module of the unit is quantized."""
        return any(d.format is not None for p in sites for d in self._decisions(p))

    def _solve(
        self, sites: list[ActivationSite], statistics: Mapping[str, ActivationStatistics]
    ) -> QParams:
        """Solve the unit's parameters; the ranks of the stage split the sites."""
        run, ranks = self.run, self.run.ranks
        full, notes = fill_missing_statistics(sites, statistics, run.settings.uncalibrated_experts)
        stage_ranks = ranks.gather_stage(self.groups.rank)
        local_sites = sites[stage_ranks.index(self.groups.rank) :: len(stage_ranks)]
        part, local_error = QParams(), None
        try:
            part = solve_qparams(
                local_sites,
                full,
                run.decisions,
                run.recipe,
                self.weights,
                read_norm=self.weights.norm,
            )
        except MegtoolError as error:
            local_error = error  # raised on all ranks of the stage below
        parts = ranks.gather_stage((part, local_error))
        out = QParams(notes=list(notes))
        for part_, error_ in parts:
            if error_ is not None:
                raise error_
            out.update(part_)
        order = {m: i for i, p in enumerate(sites) for m in (p.norm, *p.modules)}

        def sort_entries(entries: dict[str, Any]) -> dict[str, Any]:
            return {n: entries[n] for n in sorted(entries, key=lambda n: (order.get(n, -1), n))}

        return QParams(
            weights=sort_entries(out.weights),
            kv_caches=sort_entries(out.kv_caches),
            norm_scales=sort_entries(out.norm_scales),
            notes=out.notes,
        )

    # ---- activations between units

    def _begin(self, unit: int, stream: Activations | None = None) -> None:
        path = self.activations_file(unit, stream) if self._writes else None
        (self.activations if stream is None else stream).begin(path)

    def _end(self, unit: int, stream: Activations | None = None) -> None:
        if self._writes:
            (self.activations if stream is None else stream).end(
                self.activations_file(unit, stream)
            )

    def _send_output(self, unit: int) -> None:
        """Send the output of a unit to the stage of the next one."""
        if unit + 1 == len(self.stages):
            return
        sender, receiver = self._stage(unit), self._stage(unit + 1)
        spilled = self.run.settings.offload_activations and not self._writes
        if sender == receiver and not spilled:
            return
        path = self.activations_file(unit + 1)
        if path is not None:
            if self.has(unit + 1) and not self.activations.load(path):
                raise CalibrationError(
                    f"the input of layer {unit + 1} is missing",
                    file=path,
                    hint="the resume folder must be on storage that all hosts share",
                )
            return
        pp = self.groups.pp
        for number, micro_batch in enumerate(self.layers.micro_batches):
            if pp.rank == sender:
                dist.send(
                    self.activations.get(number).contiguous(),
                    dst=pp.ranks[receiver],
                    group=pp.handle,
                )
            elif pp.rank == receiver:
                x_TH = torch.empty(
                    micro_batch.num_tokens,
                    self.run.config.residual_size,
                    dtype=self.decoder.dtype,
                    device=self.groups.device,
                )
                dist.recv(x_TH, src=pp.ranks[sender], group=pp.handle)
                self.activations.put(number, x_TH)
