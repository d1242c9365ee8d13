"""Quantized folders made with the encoders alone: what a proof has to find right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout
from megtool.quant.qparams import KVCacheQParams, QParams, WeightQParams
from megtool.quant.recipes.formats import (
    FORMATS,
    INPUT_PACKINGS,
    PACKINGS,
    SMOOTHED_ALGOS,
    RecipeFormat,
    packing_of,
)
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import list_modules
from megtool.quant.statistics.activation_sites import list_activation_sites
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_source

Tensors = dict[str, torch.Tensor]

_KINDS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "float8_e8m0fnu": torch.uint8,
    "float32": torch.float32,
}


@dataclass(slots=True)
class QuantizedFolder:
    """A quantized folder, what it was made of, and what was decided."""

    source: CheckpointSource
    path: Path
    decisions: list[Decision]
    settlement: QParams
    facts: dict[str, Any] = field(default_factory=dict)

    def copied(self, to: Path) -> QuantizedFolder:
        """The same in a folder that may be broken."""
        shutil.copytree(self.path, to)
        return QuantizedFolder(self.source, to, list(self.decisions), self.settlement)

    def change(self, work: Callable[[Tensors], None]) -> None:
        """Write the tensors again after `work` changed them."""
        file = self.path / "model.safetensors"
        tensors = load_file(file)
        work(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt"})

    def edit(self, name: str, work: Callable[[dict[str, Any]], None]) -> None:
        """Write a JSON file again after `work` changed it."""
        file = self.path / name
        value = json.loads(file.read_text())
        work(value)
        file.write_text(json.dumps(value))


def randomize(source: Path, seed: int = 1) -> Path:
    """The same folder with random weights, some columns larger than others."""
    file = source / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, t in load_file(file).items():
        x = torch.randn(t.shape, generator=generator) * 0.1
        tensors[name] = (x + 1 if "norm" in name else x).to(t.dtype)
    save_file(tensors, file, {"format": "pt"})
    return source


def make_quantized(
    source: Path,
    destination: Path,
    *,
    algos: Mapping[str, str] | str,
    group: int = 0,
    smooth: bool = False,
    cache: bool = True,
) -> QuantizedFolder:
    """Quantize all linear modules but the head and routers; `algos` by the end of their names.

    With `smooth` factors of columns are folded into norms where they can be and stored elsewhere.
    """
    opened = open_source(source)
    assert opened.view.config is not None
    modules = list_modules(opened.view).modules
    by_end = {"": algos} if isinstance(algos, str) else algos
    decisions = [_decided(m, by_end, group, cache) for m in modules]
    settlement = QParams()
    formats = {d.module.name: d.format for d in decisions if d.format and d.format.algo}
    generator = np.random.default_rng(0)
    weights = load_file(source / "model.safetensors")
    shared: dict[str, float] = {}
    for point in list_activation_sites(modules, opened.view.config):
        fed = [m for m in point.modules if m in formats]
        if not fed:
            continue
        columns = None
        if smooth:
            columns = np.exp2(generator.integers(-2, 3, point.width)).astype(np.float32)
            columns *= generator.uniform(0.9, 1.1, point.width).astype(np.float32)
            if point.norm:
                settlement.norm_scales[point.norm] = columns
        for m in fed:
            settlement.weights[m] = WeightQParams(
                module=m,
                format=formats[m],
                smoothing_scale=columns,
                stores_pre_quant_scale=columns is not None and not point.norm,
                input_amax=3.0 if FORMATS[formats[m].algo].calibrates else 0.0,
            )
    hf = {d.module.name: d.module.names_in("hf")[0] for d in decisions}
    for point in list_activation_sites(modules, opened.view.config):
        for m in point.modules:
            if m in settlement.weights:
                top = weights[f"{hf[m]}.weight"].float()
                if (columns := settlement.weights[m].smoothing_scale) is not None:
                    top = top * torch.from_numpy(columns)
                shared[point.name] = max(shared.get(point.name, 0.0), float(top.abs().max()))
    out: Tensors = {}
    for name, tensor in weights.items():
        out[name] = tensor
    for norm, factors in settlement.norm_scales.items():
        stored = next(d.module.names_in("hf")[0] for d in decisions if d.module.name == norm)
        w = out[f"{stored}.weight"]
        out[f"{stored}.weight"] = (w.float() / torch.from_numpy(factors)).to(w.dtype)
    for point in list_activation_sites(modules, opened.view.config):
        for m in point.modules:
            if m in settlement.weights:
                _packed(out, hf[m], settlement.weights[m], shared[point.name])
    caches = [d for d in decisions if d.module.kind == "kv_cache" and d.format]
    for d in caches:
        for last in "kv":
            scale = {"k": 3.0, "v": 5.0}[last] / 448
            out[f"{hf[d.module.name]}.{last}_proj.{last}_scale"] = torch.tensor(scale)
        settlement.kv_caches[d.module.name] = KVCacheQParams(
            module=d.module.name,
            format=d.format or RecipeFormat(name="kv", kv_algo="FP8"),
            key_amax=3.0,
            value_amax=5.0,
        )
    shutil.copytree(source, destination)
    save_file(
        {n: t.contiguous() for n, t in out.items()},
        destination / "model.safetensors",
        {"format": "pt"},
    )
    _configs(destination, decisions, settlement, bool(caches))
    return QuantizedFolder(opened, destination, decisions, settlement)


def _decided(m: Any, by_end: Mapping[str, str], group: int, cache: bool) -> Decision:
    found = None
    if m.kind == "linear" and not m.roles & {"lm_head", "router"}:
        algo = next((a for end, a in by_end.items() if m.name.endswith(end)), "")
        if algo:
            size = group if len(FORMATS[algo].groups) > 1 and group else 0
            size = size or next(iter(FORMATS[algo].groups), 0)
            found = RecipeFormat(name=algo.lower(), algo=algo, group_size=size)
    if m.kind == "kv_cache" and cache:
        found = RecipeFormat(name="kv", kv_algo="FP8")
    return Decision(module=m, format=found, rules=(), reason="", num_bytes=m.num_bytes)


def _packed(out: Tensors, hf: str, treatment: WeightQParams, top: float) -> None:
    weight = out.pop(f"{hf}.weight").float()
    if treatment.smoothing_scale is not None:
        weight = weight * torch.from_numpy(treatment.smoothing_scale)
    packing, algo = packing_of(treatment.format), treatment.format.algo
    assert algo in PACKINGS
    parts = layout(packing, tuple(weight.shape))
    given = {}
    if packing.startswith("nvfp4"):
        given[SCALE_2] = np.asarray(top / (6 * 448), np.float32)
    zero = (0, 0)
    encoded = encode(
        packing, parts, weight.numpy(), "float32", zero, tuple(weight.shape), scales=given
    )
    names = {CODES: "weight", SCALE: "weight_scale", SCALE_2: "weight_scale_2"}
    for part in parts:
        array = torch.from_numpy(np.array(encoded[part.role]).reshape(part.shape))
        out[f"{hf}.{names[part.role]}"] = array.view(_KINDS[part.dtype])
    if algo == "W4A8_AWQ":
        out[f"{hf}.weight_scale_2"] = torch.tensor(top / 448)
    if treatment.input_amax:
        kind = INPUT_PACKINGS[algo].partition(":")[0]
        largest = {"fp8": 448.0, "int8": 127.0, "nvfp4": 2688.0}[kind]
        out[f"{hf}.input_scale"] = torch.tensor(treatment.input_amax / largest)
    if treatment.stores_pre_quant_scale and treatment.smoothing_scale is not None:
        scale = torch.from_numpy(1 / treatment.smoothing_scale)
        out[f"{hf}.pre_quant_scale"] = scale.to(torch.bfloat16)


def _configs(folder: Path, decisions: list[Decision], settlement: QParams, caches: bool) -> None:
    linear = [d for d in decisions if d.module.kind == "linear"]
    algos = dict.fromkeys(d.format.algo for d in linear if d.format)
    said: dict[str, Any] = {
        "quant_algo": next(iter(algos)) if len(algos) == 1 else "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8" if caches else None,
    }
    kept = [d.module.names_in("hf")[0] for d in linear if d.format is None]
    if len(algos) > 1:
        said["quantized_layers"] = {
            d.module.names_in("hf")[0]: {
                "quant_algo": d.format.algo,
                **({"group_size": d.format.group_size} if d.format.group_size else {}),
            }
            for d in linear
            if d.format
        }
    elif size := next(d.format.group_size for d in linear if d.format):
        said["group_size"] = size
    if FORMATS[next(iter(algos))].smooths and len(algos) == 1:
        stored = any(t.stores_pre_quant_scale for t in settlement.weights.values())
        said["pre_quant_scale"] = stored
        if stored:
            said["quant_algo"] = SMOOTHED_ALGOS.get(said["quant_algo"], said["quant_algo"])
    quant = {"producer": {"name": "modelopt"}, "quantization": said | {"exclude_modules": kept}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quant))
    config = json.loads((folder / "config.json").read_text())
    inline = said | {"quant_method": "modelopt", "ignore": kept}
    del inline["kv_cache_quant_algo"]
    if caches:
        inline["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    config["quantization_config"] = inline
    (folder / "config.json").write_text(json.dumps(config))
