"""Runs of quantization, and what their folders hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from megtool.options.execution import DigestMode, ExecutionOptions
from megtool.options.target import TargetOptions
from megtool.quant.qparams import KVCacheQParams, QParams, WeightQParams
from megtool.quant.resolve import ResolvedRecipe, resolve_recipe
from megtool.quantize.layout import write as quantize_write
from megtool.quantize.layout.write import WriteReport, write
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader

Floats = np.ndarray


def make_qparams(decided: ResolvedRecipe, **more: Any) -> QParams:
    """By weights alone, with amax of inputs and caches made up."""
    out = QParams()
    for d in decided.matched.decisions:
        if d.format is not None and d.format.algo:
            out.weights[d.module.name] = WeightQParams(
                module=d.module.name, format=d.format, input_amax=3.5, **more
            )
        elif d.format is not None and d.format.kv_algo:
            out.kv_caches[d.module.name] = KVCacheQParams(
                module=d.module.name, format=d.format, key_amax=896.0, value_amax=2.0
            )
    return out


def write_quantized(
    source: Path, out: Path, recipe: str, settlement: QParams | None = None, **more: Any
) -> WriteReport:
    """Decided by a shipped recipe, settled, and written."""
    decided = resolve_recipe(source, recipe)
    told = settlement or make_qparams(decided)
    hooks = {n: more.pop(n) for n in ("files", "before_commit", "progress") if n in more}
    target = TargetOptions(
        to="hf", destination=out, max_shard_size=more.pop("max_shard_size", None)
    )
    options = {"threads": 1, "fsync": False, "digest": DigestMode.ALL} | more
    return write(
        decided.source,
        decided.matched.decisions,
        told,
        target,
        ExecutionOptions(**options),
        **hooks,
    )


def canonical_values(folder: Path) -> dict[str, Floats]:
    """Canonical tensors in float32, quantized ones decoded."""
    opened = open_source(folder)
    with CheckpointReader(opened.catalogue, Files()) as reader:
        out = {}
        for name, p in opened.view.placements.items():
            view = reader.open_canonical(p)
            flat = numeric_values(view.read().reshape(-1), view.dtype)
            out[name] = flat.reshape(opened.view.canonical[name].shape).astype(np.float32)
        return out


def shared_amaxes(decided: ResolvedRecipe, settlement: QParams) -> dict[str, WeightQParams]:
    """The treatments with their amax, one for all that engines run as one."""
    from megtool.quantize.layout.stored_layout import list_stored_modules
    from megtool.quantize.layout.weight_layout import make_quantized_target

    decisions, opened = decided.matched.decisions, decided.source
    target = make_quantized_target(opened, decisions, TargetOptions(destination=Path(), to="hf"))
    modules = list_stored_modules(opened, decisions, settlement.weights, target)
    quantize_write.find_shared_amaxes(opened, modules, Files(), threads=1)
    out = {}
    for p in (p for m in modules for p in m.weights):
        t = p.qparams
        top = np.asarray(p.amax, np.float32)
        own = t.format.algo == "FP8"
        out[t.module] = dataclasses.replace(t, amax=top if own else None, global_amax=p.amax)
    return out
