"""A run of `quantize`: its options, and all that is derived from them before work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.errors import DestinationError, MappingError, UsageError
from megtool.options.execution import ExecutionOptions
from megtool.options.groups import RuntimeOptions
from megtool.options.quantize import (
    CalibrationOptions,
    QuantizedOutput,
    RecipeChoice,
    StreamedRuntime,
)
from megtool.process.worker_identity import WorkerIdentity
from megtool.quant.recipes.algorithm import SENSITIVITY_METHODS
from megtool.quant.recipes.match import Decision
from megtool.quant.resolve import ResolvedRecipe
from megtool.quant.statistics.activation_sites import ActivationSite, list_activation_sites
from megtool.quantize.calibration_data import CalibrationSamples
from megtool.source.open import require_decoder
from megtool.staging.destination.check import check_file
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.storage.local_copy import local_work_folder
from megtool.storage.location.path import resolve_links

if TYPE_CHECKING:
    from megtool.inference.windows import TokenDocument
    from megtool.quant.calibration.calibration_file import CalibrationFile
    from megtool.quant.calibration.fingerprint import Fingerprint
    from megtool.quant.calibration.sensitivities import Sensitivities
    from megtool.quant.mixed_precision.auto_quantize import FormatChoice
    from megtool.quantize.plan import QuantizePlan
    from megtool.source.checkpoint import CheckpointSource


DEFAULT_EVALUATION_TOKENS = 8192
"""The number of tokens for evaluating both models."""


@dataclass(kw_only=True)
class QuantizeRun:
    """A run of `quantize`.

    `auto` is the choice of formats by `sensitivities`, if the recipe leaves formats open; `written`
    is then the hash of the recipe before the choice. `worker` is this process, if several write;
    `page` is where the report is written, too.
    """

    resolved: ResolvedRecipe
    destination: Path
    began: float
    recipe: RecipeChoice
    bits: float | None = None
    runtime: RuntimeOptions = field(default_factory=StreamedRuntime)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    output: QuantizedOutput = field(default_factory=QuantizedOutput)
    execution: ExecutionOptions = field(default_factory=ExecutionOptions)
    page: Path | None = None
    auto: FormatChoice | None = None
    sensitivities: Sensitivities | None = None
    written: str = ""
    worker: WorkerIdentity | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decision about every module."""
        return self.resolved.matched.decisions

    @cached_property
    def model_source(self) -> CheckpointSource:
        """The source as a decoder that can run."""
        return require_decoder(self.resolved.source)

    @cached_property
    def sites(self) -> tuple[ActivationSite, ...]:
        """The activation sites of the model."""
        return list_activation_sites(self.resolved.modules.modules, self.model_source.config)

    @cached_property
    def wants_data(self) -> list[Decision]:
        """The decisions that need calibration data."""
        from megtool.quant.calibration.requirements import derive_requirements

        recipe = self.resolved.recipe
        return [
            d
            for d in self.decisions
            if d.choices or derive_requirements(recipe, d).data or self._is_modelopts(d)
        ]

    def _is_modelopts(self, decision: Decision) -> bool:
        """Whether ModelOpt has to run for a weight whose scales need no data."""
        format, algorithm = decision.format, self.resolved.recipe.algorithm
        if self.calibration.backend != "modelopt" or format is None or not format.algo:
            return False
        method = format.method or algorithm.get("method", "none")
        return method not in ("none", "max", *SENSITIVITY_METHODS) or bool(
            algorithm.get("four_over_six")
        )

    @property
    def needs_data(self) -> bool:
        """Whether the model has to run."""
        return bool(self.wants_data)

    @property
    def work(self) -> Path:
        """The folder with finished layers, to resume from."""
        if self.calibration.work_dir is not None:
            return self.calibration.work_dir
        local_folder = self.destination.parent / f".{self.destination.name}.calibration"
        return local_work_folder(self.destination, "calibration", local_folder)

    @property
    def needs_choice(self) -> bool:
        """Whether formats still have to be chosen."""
        return any(d.choices for d in self.decisions)

    def choose(self, sensitivities: Sensitivities) -> None:
        """Choose formats for what the recipe leaves open; updates `decisions`.

        Raises:
            MegtoolError: see `megtool.quant.mixed_precision.auto_quantize.choose`.
        """
        from megtool.quant.mixed_precision.auto_quantize import choose

        resolved = self.resolved
        choice = choose(
            self.decisions,
            resolved.recipe,
            sensitivities,
            target=resolved.target,
            architecture=resolved.architecture,
            bits=self.bits or 0.0,
            group_size=self.recipe.group_size or 0,
        )
        self.written = self.fingerprint(None).recipe
        self.auto, self.sensitivities = choice, sensitivities
        matched = replace(resolved.matched, decisions=choice.decisions)
        self.resolved = replace(resolved, matched=matched)
        self.__dict__.pop("wants_data", None)

    def source(self) -> CheckpointSource:
        """The checkpoint of the model that is quantized, a decoder that can run."""
        return self.model_source

    def fingerprint(self, samples: CalibrationSamples | None) -> Fingerprint:
        """The fingerprint of everything the calibration depends on."""
        from megtool.quant.calibration.fingerprint import compute_fingerprint

        source = self.resolved.source
        return compute_fingerprint(
            source.catalogue,
            source.view,
            self.resolved.recipe,
            self.decisions,
            samples.batches() if samples else (),
            seed=self.calibration.data.seed or 0,
        )

    @cached_property
    def calibration_file(self) -> CalibrationFile | None:
        """The merged calibration files; None if there are none."""
        from megtool.quant.calibration.calibration_file import CalibrationFile, merge_calibrations

        files = self.calibration.calibration
        return merge_calibrations([CalibrationFile.load(path) for path in files]) if files else None

    @cached_property
    def evaluation(self) -> list[TokenDocument]:
        """The texts for evaluating both models; empty if not requested."""
        from megtool.inference.evaluation.texts import read_token_documents

        data, tokenizer = self.output.eval_data, self.calibration.tokenizer
        if data is None:
            return []
        most = self.output.eval_tokens or DEFAULT_EVALUATION_TOKENS
        return read_token_documents(data, self.model_source.tokenizer(tokenizer), max_tokens=most)

    def check_evaluation(self) -> None:
        """Read the evaluation texts before any work.

        Raises:
            UsageError: there is no text, or no tokenizer.
            MegtoolError: they cannot be read.
        """
        data = self.output.eval_data
        if data is not None and not any(len(t.tokens) > 1 for t in self.evaluation):
            raise UsageError(
                f"{data} has no text to evaluate on", hint="--eval-data FILE: at least two tokens"
            )

    def check_storable(self) -> None:
        """Refuse, before any work, a recipe whose result cannot be stored.

        Raises:
            MappingError: no engine can load a weight of this family in this format; or a Megatron
                checkpoint is to hold SVDQuant's matrices.
        """
        from megtool.quantize.layout.write import check_storable

        formats = ((d.module.name, d.format) for d in self.decisions)
        names = [n for n, f in formats if f is not None and f.algo and f.number.has_branch]
        if names and self.output.to == "torch_dist":
            raise MappingError(
                f"{names[0]} is NVFP4_SVD, and a Megatron checkpoint has no place for its low-rank "
                "matrices",
                tensor=names[0],
                hint="--to hf writes them",
            )
        check_storable(self.resolved.source, self.decisions)

    def make_plan(self, samples: CalibrationSamples | None) -> QuantizePlan:
        """The plan of this run."""
        from megtool.quantize.plan import plan_quantize
        from megtool.transport.reading.parallel_scan import default_threads

        self.check_free()
        return plan_quantize(
            self.resolved,
            str(self.destination),
            wants_data=self.wants_data,
            samples=samples,
            calibration_file=self.calibration_file,
            calibration=", ".join(str(path) for path in self.calibration.calibration),
            threads=default_threads(self.runtime.threads, self.resolved.source.path),
        )

    def check_free(self) -> None:
        """Refuse a destination that must not be written, before any work.

        Raises:
            DestinationError: it exists, is inside the source, or cannot be written; or one of the
                other output files cannot be written, or would be lost.
        """
        source = self.resolved.source
        open_stage(
            self.destination,
            files=Files(),
            fingerprint="",
            overwrite=self.execution.overwrite,
            is_file=self.calibration.calibrate_only,
            sources=[source.path, source.catalogue.root],
            worker=self.worker,
        ).check_early()
        self._check_distinct_paths(resolve_links(source.path), resolve_links(source.catalogue.root))
        parent = self.destination.parent  # created if missing
        if self.calibration.work_dir is None:
            Files().check_own_folder(self.work)
        if self.calibration.save_calibration is not None:
            check_file(self.calibration.save_calibration, parent)
        if self.page is not None:
            check_file(self.page, parent, self.destination)

    def _check_distinct_paths(self, *sources: Path) -> None:
        """Refuse output files that replace each other or the source, or that are inside a folder
        that is replaced."""
        c, destination = self.calibration, resolve_links(self.destination)
        named = {
            "--save-calibration": c.save_calibration,
            "--work-dir": c.work_dir,
            "--report": self.page,
        }
        outputs = {name: resolve_links(path) for name, path in named.items() if path is not None}
        if c.calibrate_only and outputs.get("--save-calibration") == destination:
            del outputs["--save-calibration"]  # the same file
        owners = {destination: "DST"}
        for name, path in outputs.items():
            if (owner := owners.setdefault(path, name)) != name:
                message = f"{owner} and {name} are the same path"
                raise DestinationError(message, file=path, hint="choose different paths")
            if destination in path.parents and name != "--report":  # written last
                raise DestinationError(
                    f"{name} is inside DST, which is replaced as a whole",
                    file=path,
                    hint="choose a path outside DST",
                )
            if path.is_file() and any(s in (path, *path.parents) for s in sources):
                raise DestinationError(
                    f"{name} would replace a file of the source",
                    file=path,
                    hint="choose another file",
                )
