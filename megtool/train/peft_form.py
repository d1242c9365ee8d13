"""PEFT's form of adapters: what `PeftModel.from_pretrained` loads over a Hugging Face model.

PEFT gives each of the model's linear modules matrices of its own. Modules that Megatron fuses share
their A there, and have some of B's rows each, so that the two forms are exactly the same function.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megtool.config import ModelConfig
from megtool.convert.dialects import write_side
from megtool.convert.families import Family
from megtool.errors import MappingError
from megtool.model.lora import LoraSettings
from megtool.quant.simulation.views import canonical_side
from megtool.tensors.relation import Placement
from megtool.train.adapters import A, B, modules_of

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where a canonical module lies in a Hugging Face module with `out` rows and `inner` columns:
    its rows and columns are `rows` and `columns` of that; `is_transposed`: stored `[in, out]`."""

    module: str
    out: int
    inner: int
    rows: Tensor
    columns: Tensor
    is_transposed: bool


class PeftForm:
    """Names and rows of a model's modules in its Hugging Face form.

    Raises:
        MappingError: the family has no place for a module, or stores it as no matrix.
    """

    def __init__(self, config: ModelConfig, family: Family, linears: Iterable[str]) -> None:
        self.linear_of = {m: n for n in linears for m in modules_of(n, config)}
        layers = {m.split(".")[1] for m in self.linear_of}
        side = canonical_side(config, layers)
        target = write_side(side, dialect="hf", family=family, config=config)
        shapes = {t.name: t.shape for t in target.tensors}
        self.pieces: dict[str, Piece] = {}
        for module in self.linear_of:
            found = target.placements.get(f"{module}.weight")
            shape = shapes[found.stored] if found is not None else ()
            if found is None or len(shape) != 2:
                raise MappingError(
                    f"{family.name} stores {module} as no matrix of its own", tensor=module
                )
            self.pieces[module] = _piece(found, side.canonical[f"{module}.weight"].shape, shape)

    def tensors(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """PEFT's tensors, of canonical matrices (`megtool.train.adapters`)."""
        out: dict[str, Tensor] = {}
        for module, piece in self.pieces.items():
            a, b = whole[f"{self.linear_of[module]}.{A}"], whole[f"{module}.{B}"]
            name = f"base_model.model.{piece.module}"
            made = torch.zeros(a.shape[0], piece.inner, dtype=a.dtype)
            made[:, piece.columns] = a
            before = out.setdefault(f"{name}.{A}.weight", made)
            if not torch.equal(before, made):
                raise MappingError(
                    f"{piece.module} is one module, and Megatron has several of it", tensor=module
                )
            empty = torch.zeros(piece.out, b.shape[1], dtype=b.dtype)
            out.setdefault(f"{name}.{B}.weight", empty)[piece.rows] = b
        return out

    def config(self, settings: LoraSettings, base: str) -> bytes:
        """PEFT's adapter_config.json; `base` is where the model lies that it belongs to."""
        told = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": settings.rank,
            "lora_alpha": settings.alpha,
            "lora_dropout": settings.dropout,
            "target_modules": sorted({_within(p.module) for p in self.pieces.values()}),
            "fan_in_fan_out": any(p.is_transposed for p in self.pieces.values()),
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "init_lora_weights": True,
            "modules_to_save": None,
            "layers_to_transform": None,
            "layers_pattern": None,
            "rank_pattern": {},
            "alpha_pattern": {},
        }
        return (json.dumps(told, indent=2) + "\n").encode()


def _within(module: str) -> str:
    """What a module is called in its layer: `self_attn.q_proj`, which PEFT finds in all layers."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else module


def _piece(p: Placement, canonical: tuple[int, ...], stored: tuple[int, ...]) -> Piece:
    split = next(k for k in range(len(p.shape) + 1) if prod(p.shape[:k]) == canonical[0])
    axes = {d for d, n in zip(p.dims[:split], p.shape[:split], strict=True) if n > 1}
    dim = axes.pop() if axes else 0
    if axes or any(
        d == dim and n > 1 for d, n in zip(p.dims[split:], p.shape[split:], strict=True)
    ):
        raise MappingError(f"rows of {p.canonical} are no rows of {p.stored}", tensor=p.canonical)
    return Piece(
        module=p.stored.removesuffix(".weight"),
        out=stored[dim],
        inner=stored[1 - dim],
        rows=_positions(p, dim, range(split)),
        columns=_positions(p, 1 - dim, range(split, len(p.shape))),
        is_transposed=dim == 1,
    )


def _positions(p: Placement, dim: int, axes: range) -> Tensor:
    at = torch.tensor(p.base[dim])
    for j in axes:
        mult = p.mults[j] if p.dims[j] == dim else 0
        at = at.unsqueeze(-1) + torch.arange(p.shape[j]) * mult
    return at.flatten()
