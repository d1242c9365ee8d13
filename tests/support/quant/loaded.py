"""Tiny models with random weights, loaded, and what becomes of all their matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megtool.model.batch import Batch
from megtool.quant.calibration.sensitivities import Sensitivities
from megtool.quant.fake_quant.fake_quant_model import StoredQuantization
from megtool.quant.mixed_precision.sensitivity import SensitivityRuntime, measure
from megtool.quant.qparams import KVCacheQParams, LowRankBranch, QParams, WeightQParams
from megtool.quant.recipes.formats import FORMATS, INPUT_PACKINGS, RecipeFormat
from megtool.quant.recipes.modules import ModuleInfo, list_modules
from megtool.quant.resolve import ResolvedRecipe
from megtool.quant.statistics.activation_sites import ActivationSite, list_activation_sites
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_source


def randomize(folder: Path, seed: int = 0) -> Path:
    """The checkpoint with other weights: matrices about as large as trained ones."""
    generator = torch.Generator().manual_seed(seed)
    path = folder / "model.safetensors"
    tensors = {
        n: (
            torch.randn(t.shape, generator=generator) * (0.3 / t.shape[-1] ** 0.5)
            if t.ndim > 1
            else 1 + 0.1 * torch.randn(t.shape, generator=generator)
        ).to(t.dtype)
        for n, t in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def stored_quantization(folder: Path, qparams: QParams) -> StoredQuantization:
    """What a folder that was written with these parameters stores for running it."""
    source, modules, _ = open_model_source(folder)
    tensors = load_file(folder / "model.safetensors")
    scales = {
        m.name: float(tensors[source.placement_of(f"{m.name}.weight").stored + "_scale"])
        for m in modules
        if (t := qparams.weights.get(m.name)) is not None and t.format.algo == "FP8"
    }
    return StoredQuantization.of(qparams, scales)


def open_model_source(
    folder: Path,
) -> tuple[CheckpointSource, tuple[ModuleInfo, ...], tuple[ActivationSite, ...]]:
    """A checkpoint to load, its modules and its points."""
    found = open_source(folder)
    config = found.view.config
    assert config is not None
    modules = list_modules(found.view).modules
    source = found
    return source, modules, list_activation_sites(modules, config)


def points_of(decided: ResolvedRecipe) -> tuple[ActivationSite, ...]:
    """The points of what a recipe decided about."""
    config = decided.source.view.config
    assert config is not None
    return list_activation_sites(decided.modules.modules, config)


def source_of(decided: ResolvedRecipe) -> CheckpointSource:
    """What a recipe decided about, to load."""
    opened = decided.source
    return opened


def make_qparams(
    modules: tuple[ModuleInfo, ...],
    points: tuple[ActivationSite, ...],
    algo: Callable[[str], str],
    *,
    smooth: bool = False,
    cache: str = "",
) -> QParams:
    """Every matrix but routers in the format that `algo` says (none: kept); factors of columns, the
    same for siblings, where `smooth`."""
    known = {m.name: m for m in modules}
    out = QParams()
    for number, point in enumerate(points):
        if point.kind == "kv_cache":
            if cache:
                out.kv_caches[point.name] = KVCacheQParams(
                    module=point.name,
                    format=RecipeFormat(name="kv", kv_algo=cache),
                    key_amax=1.5,
                    value_amax=1.25,
                )
            continue
        columns = np.exp2(np.random.default_rng(number).normal(size=point.width) / 2)
        for name in point.modules:
            if "router" in known[name].roles or not (chosen := algo(name)):
                continue
            group = (FORMATS[chosen].groups or (0,))[0]
            more: dict[str, Any] = {"smoothing_scale": columns.astype(np.float32)} if smooth else {}
            if FORMATS[chosen].has_branch:
                more["branch"] = _branch(known[name].shape, seed=len(out.weights))
            out.weights[name] = WeightQParams(
                module=name,
                format=RecipeFormat(name="f", algo=chosen, group_size=group),
                stores_pre_quant_scale=bool(smooth and not point.norm),
                input_amax=3.0 + number / 7 if chosen in INPUT_PACKINGS else 0.0,
                **more,
            )
    return out


def _branch(shape: Sequence[int], *, seed: int) -> LowRankBranch:
    """A branch of rank 3, of another `down` for each module."""
    draw = np.random.default_rng(seed)
    up, down = draw.normal(size=(shape[0], 3)) / 20, draw.normal(size=(3, shape[1])) / 2
    return LowRankBranch(up=up.astype(np.float32), down=down.astype(np.float32))


def measure_sensitivities(
    decided: ResolvedRecipe, batches: list[Batch], **more: Any
) -> Sensitivities:
    """Sensitivities of a recipe on data; `more` are settings, a fingerprint and progress."""
    arguments = {n: more.pop(n) for n in ("fingerprint", "progress") if n in more}
    return measure(
        source_of(decided),
        decided.matched.decisions,
        decided.recipe,
        points_of(decided),
        batches,
        settings=SensitivityRuntime(**more),
        **arguments,
    )
