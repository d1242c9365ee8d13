"""Settings of a calibration: how the model runs, what is measured, and what is resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megtool.inference.load import load
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.recorder import ActivationRecorder
from megtool.quant.qparams import QParams
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.source.checkpoint import CheckpointSource

PassRunner = Callable[[ActivationRecorder], None]


class UnitSolver(Protocol):
    """Solves the parameters of a unit's modules by passes of its own over the data, instead of
    `solve_qparams` by statistics of one pass."""

    name: str
    num_passes: int | None
    """The passes, if their number is known."""

    def solve_unit(
        self,
        decoder: Decoder,
        sites: Sequence[ActivationSite],
        weights: CanonicalWeights,
        run_pass: PassRunner,
    ) -> QParams:
        """Solve the parameters of a unit; every rank of the stage calls this, and gets all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRuntime:
    """How a model runs over calibration data.

    Args:
        groups: process groups (None: a single process).
        dtype: dtype of activations and weights.
        device: device of a single process.
        stream_layers: keep one layer in memory at a time, instead of the whole model.
        threads: threads that read weights.
        resume_folder: folder to resume from after an interruption.
    """

    groups: ProcessGroups | None = None
    dtype: str = "float32"
    device: torch.device | str = "cpu"
    stream_layers: bool = True
    threads: int | None = None
    resume_folder: Path | None = None

    def process_groups(self) -> ProcessGroups:
        """The process groups, of one process if there are none."""
        return ProcessGroups.alone(self.device) if self.groups is None else self.groups

    def load(
        self, source: CheckpointSource, groups: ProcessGroups, *, stream_layers: bool = True
    ) -> Decoder:
        """Load a model, layer by layer if asked for here and in the settings."""
        return load(
            source,
            groups=groups,
            dtype=self.dtype,
            stream_layers=stream_layers and self.stream_layers,
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationMethod(CalibrationRuntime):
    """How activations are measured and parameters are solved.

    Args:
        sequential: later layers see the quantized outputs of earlier ones (None: if the algorithm
            asks for it).
        uncalibrated_experts: how experts without data are handled (see `expert_coverage`).
        calibrate_all_experts: experts see all tokens.
        offload_activations: keep activations between layers in `resume_folder` instead of memory.
        solver: solves units by itself (None: by statistics, which the result then has).
    """

    sequential: bool | None = None
    uncalibrated_experts: str = "share"
    calibrate_all_experts: bool = False
    offload_activations: bool = False
    solver: UnitSolver | None = None
