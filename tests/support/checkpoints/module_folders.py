"""Small quantized folders made with the encoders alone, and folders made of them by feeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megtool.dtypes import dtype
from megtool.export.quantized_module import QuantizedModule, QuantizedModules
from megtool.export.repack import WeightSlice, plan_repack
from megtool.export.small_tensors import SmallTensorReader
from megtool.formats.safetensors.reader import open_checkpoint, plan_safetensors_layout
from megtool.number_formats.decode import CODES, COLUMNS, DIVISOR, SCALE, SCALE_2
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart, PartSpan
from megtool.plan.copies import DroppedItem, PlanSource, ReshardPlan
from megtool.plan.execute import execute
from megtool.plan.planner import build_plan
from megtool.quant.packed_tensors.hf_config import (
    QuantizedLayer,
    hf_quant_config,
    quantization,
    with_quantization,
)
from megtool.quant.recipes.formats import FORMATS, RecipeFormat, packing_of
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import TensorFeed
from megtool.transport.constant_feed import ConstantFeed
from megtool.transport.reading.reader import CheckpointReader

Tensors = dict[str, torch.Tensor]
PartTensors = list[tuple[PackedPart, GlobalTensor]]

KINDS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "float8_e8m0fnu": torch.uint8,
    "float32": torch.float32,
}
NAMES = {CODES: "weight", SCALE: "weight_scale", SCALE_2: "weight_scale_2"}
PLAIN = {"model_type": "llama", "dtype": "float32", "architectures": ["LlamaForCausalLM"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """A module of a folder to be made."""

    name: str
    shape: tuple[int, int]
    algo: str
    group: int = 0
    smoothed: bool = False

    @property
    def format(self) -> RecipeFormat:
        group = self.group or next(iter(FORMATS[self.algo].groups), 0)
        return RecipeFormat(name="x", algo=self.algo, group_size=group)


def weights_of(wanted: ModuleSpec, seed: int) -> np.ndarray[Any, Any]:
    """Random numbers, some of them large."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal(wanted.shape).astype(np.float32)
    return out * np.exp2(rng.integers(-3, 3, (wanted.shape[0], 1))).astype(np.float32)


def make_modelopt(folder: Path, modules: Sequence[ModuleSpec], *, seed: int = 0) -> Path:
    """A folder in ModelOpt's form, and one norm that is no part of it."""
    folder.mkdir(parents=True)
    out: Tensors = {"model.norm.weight": torch.ones(8)}
    for number, wanted in enumerate(modules):
        out |= _encoded(wanted, seed + number)
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    layers = [
        QuantizedLayer(
            name=w.name, algo=w.algo, group_size=w.format.group_size, smoothed=w.smoothed
        )
        for w in modules
    ]
    said = quantization(layers, ["lm_head"], None)
    (folder / "hf_quant_config.json").write_bytes(hf_quant_config(said))
    (folder / "config.json").write_bytes(with_quantization(json.dumps(PLAIN).encode(), said))
    return folder


def _encoded(wanted: ModuleSpec, seed: int) -> Tensors:
    weight = weights_of(wanted, seed)
    packing, number = packing_of(wanted.format), FORMATS[wanted.algo]
    parts, zero = layout(packing, wanted.shape), (0, 0)
    made = encode(packing, parts, weight, "float32", zero, wanted.shape)
    out: Tensors = {}
    for part in parts:
        array = torch.from_numpy(np.array(made[part.role]).reshape(part.shape))
        out[f"{wanted.name}.{NAMES[part.role]}"] = array.view(KINDS[part.dtype])
    rng = np.random.default_rng(seed + 100)
    if wanted.algo == "W4A8_AWQ":
        out[f"{wanted.name}.weight_scale_2"] = torch.tensor(float(rng.uniform(0.1, 2)))
    if number.calibrates:
        out[f"{wanted.name}.input_scale"] = torch.tensor(float(rng.uniform(0.1, 2)))
    if wanted.smoothed:
        factors = torch.from_numpy(rng.uniform(0.5, 2, wanted.shape[1]).astype(np.float32))
        out[f"{wanted.name}.pre_quant_scale"] = factors.to(torch.bfloat16)
    return out


def modelopt_held(coded: QuantizedModule) -> tuple[str, PartTensors]:
    """The packing and the tensors of a module in ModelOpt's form."""
    packing = packing_of(RecipeFormat(name="x", algo=coded.algo, group_size=coded.group_size))
    return packing, _held(coded, layout(packing, coded.shape), NAMES)


def compressed_held(coded: QuantizedModule) -> tuple[str, PartTensors]:
    """The packing and the tensors of a module in compressed-tensors' form."""
    packing = coded.packing.replace("int4rows", "int4")
    packed = packing.partition(":")[0] in ("int4", "int8words", "nvfp4", "mxfp4")
    names = {
        CODES: "weight_packed" if packed else "weight",
        SCALE: "weight_scale",
        DIVISOR: "weight_global_scale",
    }
    return packing, _held(coded, layout(packing, coded.shape, "compressed-tensors"), names)


def _held(
    coded: QuantizedModule, parts: Sequence[PackedPart], names: Mapping[str, str]
) -> PartTensors:
    out = []
    for part in parts:
        kind = "uint8" if part.dtype == "float8_e8m0fnu" else part.dtype
        name = f"{coded.name}.{names[part.role]}"
        out.append((part, GlobalTensor(name=name, shape=part.shape, dtype=dtype(kind))))
    if coded.is_smoothed:
        columns = PackedPart(
            role=COLUMNS, dtype="bfloat16", shape=coded.shape[1:], spans=(PartSpan(1),)
        )
        name = f"{coded.name}.pre_quant_scale"
        tensor = GlobalTensor(name=name, shape=columns.shape, dtype=dtype("bfloat16"))
        out.append((columns, tensor))
    return out


def given_of(values: Mapping[str, np.ndarray[Any, Any]]) -> ConstantFeed:
    """Tensors that are known."""
    kind = {"float32": "float32", "int64": "int64"}
    return ConstantFeed(
        values=tuple(
            (GlobalTensor(name=n, shape=v.shape, dtype=dtype(kind[v.dtype.name])), v)
            for n, v in values.items()
        )
    )


def to_compressed(source: QuantizedModules, to: Path, **more: Any) -> Path:
    """All modules of a folder in compressed-tensors' form."""
    feeds, known = [], {}
    with SmallTensorReader(source.catalogue) as values:
        for coded in source.modules:
            packing, held = compressed_held(coded)
            feeds.append((plan_repack([WeightSlice.of_module(coded)], packing, held), held))
            if packing.startswith("int4"):
                known[f"{coded.name}.weight_shape"] = np.array(coded.shape, np.int64)
            if (inputs := values.read_input_scale(coded)) is not None:
                divides = coded.packing.startswith("nvfp4")
                name = "input_global_scale" if divides else "input_scale"
                value = np.float32(1) / inputs if divides else inputs
                known[f"{coded.name}.{name}"] = np.asarray(value, np.float32).reshape(1)
    groups = {f"group_{i}": _group(c) for i, c in enumerate(source.modules)}
    config = PLAIN | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": groups,
            "ignore": ["lm_head"],
        }
    }
    return carried_out(source, feeds, to, known=known, config=config, **more)


def _group(coded: QuantizedModule) -> dict[str, Any]:
    number = FORMATS[coded.algo]
    weights: dict[str, Any] = {
        "num_bits": number.bits,
        "type": "int" if coded.packing.startswith("int") else "float",
        "symmetric": True,
        "strategy": number.scaling,
    }
    if coded.group_size and number.scaling == "group":
        weights["group_size"] = coded.group_size
    if number.scaling == "block":
        weights["block_structure"] = [128, 128]
    bits = 4 if coded.algo in ("NVFP4", "MXFP4") else 8
    kind = "int" if coded.packing.startswith("int8") else "float"
    inputs = {"num_bits": bits, "type": kind, "dynamic": not number.calibrates}
    asis = coded.algo in ("W8A16", "W4A16_AWQ", "W4A16_NVFP4", "FP8_PB_WO")
    return {
        "targets": [coded.name],
        "weights": weights,
        "input_activations": None if asis else inputs,
    }


def to_modelopt(source: QuantizedModules, to: Path) -> Path:
    """All modules of a folder in ModelOpt's form."""
    feeds, known = [], {}
    with SmallTensorReader(source.catalogue) as values:
        for coded in source.modules:
            packing, held = modelopt_held(coded)
            feeds.append((plan_repack([WeightSlice.of_module(coded)], packing, held), held))
            if (inputs := values.read_input_scale(coded)) is not None:
                known[f"{coded.name}.input_scale"] = np.asarray(inputs, np.float32)
    layers = [
        QuantizedLayer(name=c.name, algo=c.algo, group_size=c.group_size) for c in source.modules
    ]
    said = quantization(layers, ["lm_head"], None)
    config = json.loads(with_quantization(json.dumps(PLAIN).encode(), said))
    return carried_out(source, feeds, to, known=known, config=config)


def planned(
    source: QuantizedModules,
    made: Sequence[tuple[Sequence[TensorFeed], PartTensors]],
    *,
    known: Mapping[str, np.ndarray[Any, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> ReshardPlan:
    """The plan that fills the tensors of `made`, gives `known` ones and copies norms."""
    tensors = [t for _, held in made for _, t in held]
    feeds = [f for found, _ in made for f in found]
    if known:
        given = given_of(known)
        tensors += [t for t, _ in given.values]
        feeds.append(given)
    raw = source.catalogue
    norms = [t for t in raw.tensors if "norm" in t.name]
    small = {"config.json": json.dumps(config or PLAIN).encode()}
    placements = {t.name: Placement.identity(t.name, t.shape) for t in raw.tensors}
    read = {p.canonical for f in feeds for p in f.reads}
    unread = [t for t in raw.tensors if t.name not in read and "norm" not in t.name]
    return build_plan(
        [PlanSource(catalogue=raw, placements=placements)],
        plan_safetensors_layout([*tensors, *norms], small_files=small),
        {t.name: placements[t.name] for t in norms},
        dropped=[DroppedItem(name=t.name, reason="given", num_bytes=t.num_bytes) for t in unread],
        feeds=feeds,
    )


def carried_out(
    source: QuantizedModules,
    made: Sequence[tuple[Sequence[TensorFeed], PartTensors]],
    to: Path,
    *,
    known: Mapping[str, np.ndarray[Any, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    files: Files | None = None,
    memory_bytes: int = 64 << 20,
) -> Path:
    """A folder made by feeds."""
    plan = planned(source, made, known=known, config=config)
    stage = open_stage(to, files=files or Files(), fingerprint=plan.fingerprint)
    with stage:
        execute(plan, stage, files=stage.files, threads=1, memory_bytes=memory_bytes)
        stage.commit(fsync=False)
    return to


def tensors_in(folder: Path) -> Tensors:
    """All tensors."""
    return load_file(folder / "model.safetensors")


def decoded(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All weights as they decode."""
    catalogue, out = open_checkpoint(folder), {}
    with CheckpointReader(catalogue, Files()) as reader:
        for t in catalogue.tensors:
            if t.packing is not None:
                tiles = [tile.copy() for _, tile in reader.open_stored(t.name).tiles()]
                out[t.name] = np.concatenate(tiles).reshape(t.shape)
    return out
