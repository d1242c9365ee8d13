"""Tiny models calibrated on random tokens: what tests of calibration have in common."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megtool.model.batch import Batch
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.calibrate import calibrate
from megtool.quant.calibration.calibration_file import CalibrationFile
from megtool.quant.calibration.fingerprint import compute_fingerprint
from megtool.quant.calibration.resume_folder import ResumeFolder
from megtool.quant.calibration.settings import CalibrationMethod
from megtool.quant.qparams import QParams
from megtool.quant.resolve import ResolvedRecipe, resolve_recipe
from megtool.quant.statistics.activation_sites import ActivationSite, list_activation_sites
from megtool.source.checkpoint import CheckpointSource
from tests.support.models import tiny_models


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint with decisions and data."""

    decided: ResolvedRecipe
    source: CheckpointSource
    points: tuple[ActivationSite, ...]
    batches: list[Batch]

    @property
    def facts(self) -> tuple[Any, ...]:
        """What `calibrate` takes first."""
        d = self.decided
        return self.source, d.matched.decisions, d.recipe, self.points, self.batches

    def run(self, **more: Any) -> CalibrationFile:
        """Calibrate."""
        d = self.decided
        seen = compute_fingerprint(
            d.source.catalogue, d.source.view, d.recipe, d.matched.decisions, self.batches
        )
        hooks = {n: more.pop(n) for n in ("progress",) if n in more}
        settings = CalibrationMethod(**more)
        return calibrate(*self.facts, fingerprint=seen, settings=settings, **hooks)


def case(
    folder: Path,
    recipe: str | Path = "fp8",
    *,
    batches: list[Batch] | None = None,
    width: int = 24,
    group_size: int | None = None,
) -> Case:
    """A case of a checkpoint in a folder, with rows of `width` tokens unless they are given."""
    decided = resolve_recipe(folder, recipe, group_size=group_size)
    opened, config = decided.source, decided.source.view.config
    assert config is not None
    return Case(
        decided=decided,
        source=opened,
        points=list_activation_sites(decided.modules.modules, config),
        batches=tokens(config.embedding.vocab_size, width=width) if batches is None else batches,
    )


def tokens(
    vocab: int, *, rows: int = 2, count: int = 3, width: int = 24, seed: int = 0
) -> list[Batch]:
    """Batches of random tokens."""
    made = torch.Generator().manual_seed(seed)
    return [
        Batch(tokens_BS=torch.randint(0, vocab, (rows, width), generator=made))
        for _ in range(count)
    ]


def random_moe(folder: Path) -> Path:
    """A mixture of experts of random weights."""
    from safetensors.torch import load_file, save_file

    tiny_models.moe(folder)
    made = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for name, t in tensors.items():
        around = 1.0 if "norm" in name else 0.0
        tensors[name] = (torch.randn(t.shape, generator=made) * 0.1 + around).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def saved_bytes(artefact: CalibrationFile, folder: Path) -> bytes:
    """The bytes of an artefact's file."""
    folder.mkdir(parents=True, exist_ok=True)
    artefact.save(folder / "calibration.safetensors")
    return (folder / "calibration.safetensors").read_bytes()


def interrupt_after(unit: int, folder: Path, recipe: str, work: Path) -> None:
    """Calibrate in `work`, and be killed when this unit is finished. For a process of its own."""
    torch.set_num_threads(1)
    whole = ResumeFolder.write_unit

    def record(self: ResumeFolder, number: int, *facts: Any) -> None:
        whole(self, number, *facts)
        if number == unit:
            os.kill(os.getpid(), signal.SIGKILL)

    ResumeFolder.write_unit = record  # type: ignore[method-assign]
    case(folder, recipe).run(resume_folder=work)


def on_rank(
    rank: int, size: int, folder: Path, recipe: str, layout: dict[str, int], more: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    """A rank's statistics and the bytes of its artefact. For `run_world`."""
    from megtool.options.layout import ParallelConfig

    groups = ProcessGroups.start(ParallelConfig(**layout))
    try:
        width = more.pop("width", 24)
        artefact = case(folder, recipe, width=width).run(groups=groups, **more)
        return artefact.statistics, saved_bytes(
            artefact, folder.parent / f"of-{rank}-{os.getpid()}"
        )
    finally:
        groups.stop()


def calibrate_by_modelopt(made: Case, groups: ProcessGroups | None = None, **more: Any) -> QParams:
    """What ModelOpt finds for a case, over the activations of our decoder."""
    from megtool.quant.modelopt.unit_solver import ModelOptSolver

    own = ProcessGroups.alone("cpu") if groups is None else groups
    d = made.decided
    solver = ModelOptSolver(d.recipe, d.matched.decisions, made.points, own)
    return made.run(groups=own, solver=solver, sequential=solver.sequential, **more).qparams


def modelopt_on_rank(
    rank: int, size: int, folder: Path, recipes: dict[str, dict[str, Any]], layout: dict[str, int]
) -> list[QParams]:
    """What ModelOpt finds on a rank for each recipe, with options of its case. For `run_world`."""
    from megtool.options.layout import ParallelConfig

    torch.set_num_threads(1)
    groups = ProcessGroups.start(ParallelConfig(**layout))
    try:
        return [
            calibrate_by_modelopt(case(folder, recipe, **more), groups)
            for recipe, more in recipes.items()
        ]
    finally:
        groups.stop()
