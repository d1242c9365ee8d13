"""Solves the parameters of a layer's modules by ModelOpt, over the activations of our decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megtool.errors import MegtoolError
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.rank_sync import RankSync
from megtool.quant.calibration.row_recorder import RowRecorder
from megtool.quant.calibration.settings import PassRunner
from megtool.quant.modelopt.load import import_modelopt, silence_output
from megtool.quant.modelopt.quantizer_config import (
    MULTIPLYING,
    algorithm_for,
    build_modelopt_config,
    name_modules,
    unused_options,
)
from megtool.quant.modelopt.read_qparams import read_qparams
from megtool.quant.modelopt.unit_modules import KVCacheInputs, UnitModules, WholeLinear
from megtool.quant.qparams import QParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.statistics.activation_sites import ActivationSite, map_norm_readers


class ModelOptSolver:
    """Runs `mtq.quantize` on the modules of one unit after another, a `UnitSolver`.

    The ranks of a pipeline stage share the sites of a unit. Each has whole weights of its own sites
    in `mtq.quantize`, whose forward loop is one pass of the layer over the data by all ranks: ranks
    that need no more passes take part in those of the others. Every rank makes one.

    Args:
        recipe: the recipe, for its algorithm.
        decisions: the format of each module.
        sites: all activation sites of the model.
        groups: the process groups.
        calibrate_all_experts: experts see all tokens.

    Raises:
        MissingPackageError: ModelOpt is not installed.
        RecipeError: ModelOpt does not support the recipe.
    """

    name = "modelopt"

    def __init__(
        self,
        recipe: Recipe,
        decisions: Sequence[Decision],
        sites: Sequence[ActivationSite],
        groups: ProcessGroups,
        *,
        calibrate_all_experts: bool = False,
    ) -> None:
        self._mtq = import_modelopt()
        self._recipe, self._groups, self._route_all = recipe, groups, calibrate_all_experts
        self._decisions = {d.module.name: d for d in decisions}
        self._names = name_modules(decisions)
        self._readers = map_norm_readers(sites, [d.module for d in decisions])
        self._ranks = RankSync(groups=groups)
        self._stage: Group = groups.stage()
        algorithm = algorithm_for(recipe, decisions, self._names)
        self.method = str(algorithm["method"])
        unused = ", ".join(unused_options(recipe, algorithm))
        self._notes = [f"ModelOpt's {self.method} has no {unused}: left out"] if unused else []
        self.num_passes = 1 if self.method == "max" else None

    @property
    def sequential(self) -> bool:
        """Whether later layers see the quantized outputs of earlier ones: ModelOpt's GPTQ alone
        has it so (`get_qdq_activations_from_prev_layer`)."""
        return self.method == "gptq"

    def solve_unit(
        self,
        decoder: Decoder,
        sites: Sequence[ActivationSite],
        weights: CanonicalWeights,
        run_pass: PassRunner,
    ) -> QParams:
        """Solve the parameters of a unit.

        Raises:
            CalibrationError: an activation is NaN or Inf, or no data reaches a module.
        """
        quantized_sites = [s for s in sites if any(self._format_of(m) for m in s.modules)]
        if not quantized_sites:
            return QParams()
        stage = self._stage
        owners = {site.name: i % stage.size for i, site in enumerate(quantized_sites)}
        own_sites = quantized_sites[stage.rank :: stage.size]
        modules: dict[str, nn.Module] = {
            m: self._make_module(site, m, weights, decoder.dtype)
            for site in own_sites
            for m in site.modules
            if self._format_of(m)
        }

        def read(site: ActivationSite, rows_TW: Tensor) -> None:
            for m in site.modules:
                if m in modules and site.kind == "kv_cache":
                    modules[m](*(rows_TW[:, columns] for columns in site.keys_and_values))
                elif m in modules:
                    modules[m](rows_TW)

        recorder = RowRecorder(
            decoder,
            quantized_sites,
            stage=stage,
            owners=owners,
            read=read,
            calibrate_all_experts=self._route_all,
        )
        rounds = _SharedPasses(self._ranks, self._groups, lambda: run_pass(recorder))
        try:
            if modules:
                self._quantize(modules, rounds)
            rounds.finish()
            part = self._read(modules, own_sites)
        finally:
            _dissolve(modules)
        return self._share(part)

    def _format_of(self, module: str) -> Any:
        decision = self._decisions.get(module)
        return None if decision is None else decision.format

    def _make_module(
        self, site: ActivationSite, module: str, weights: CanonicalWeights, dtype: torch.dtype
    ) -> Any:
        if site.kind == "kv_cache":
            return KVCacheInputs()
        weight = weights(module).to(self._groups.device, dtype)
        return WholeLinear(weight, multiplies=self.method in MULTIPLYING)

    def _quantize(self, modules: Mapping[str, Any], rounds: _SharedPasses) -> None:
        """Run `mtq.quantize` on these modules, which it changes in place."""
        unit = UnitModules()
        for name, module in modules.items():
            unit.put(self._names[name], module)
        config = build_modelopt_config(
            self._recipe,
            [self._decisions[m] for m in modules],
            device=self._groups.device.type,
            names=self._names,
        )
        with silence_output(), torch.no_grad():
            self._mtq.quantize(unit, config, lambda _: rounds.run())

    def _read(
        self, modules: Mapping[str, Any], sites: Sequence[ActivationSite]
    ) -> tuple[QParams, MegtoolError | None]:
        try:
            return (
                read_qparams(
                    modules,
                    self._decisions,
                    sites,
                    self._readers,
                    chose_codes=self.method == "gptq",
                ),
                None,
            )
        except MegtoolError as error:
            return QParams(), error

    def _share(self, part: tuple[QParams, MegtoolError | None]) -> QParams:
        """The parameters of all ranks of the stage; the first error of any is raised by all."""
        out = QParams(notes=list(self._notes))
        for qparams, error in self._ranks.gather_stage(part):
            if error is not None:
                raise error
            out.update(qparams)
        return out


def _dissolve(modules: dict[str, nn.Module]) -> None:
    """Take all tensors away from modules that nobody uses any more. ModelOpt's refer to each other,
    so their weights would stay in memory until Python looks for such cycles, which takes longer
    than to quantize a small layer.
    """
    for module in [m for top in modules.values() for m in top.modules()]:
        module.__dict__.clear()
    modules.clear()


class _SharedPasses:
    """Passes over the data that all ranks of a stage make together, as often as one needs them."""

    def __init__(self, ranks: RankSync, groups: ProcessGroups, run_pass: Any) -> None:
        self._ranks, self._groups, self._run_pass = ranks, groups, run_pass

    def run(self) -> None:
        """Make one pass; the other ranks are in `run` or `finish`."""
        self._ranks.gather_stage(True)
        self._run_pass()

    def finish(self) -> None:
        """Take part in the passes of other ranks until none needs more."""
        while any(self._ranks.gather_stage(False)):
            self._run_pass()
