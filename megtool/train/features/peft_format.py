"""PEFT's format of adapters: what `PeftModel.from_pretrained` loads with a Hugging Face model.

In PEFT each linear module has its own matrices. Modules that Megatron fuses share their A in PEFT,
and have some of B's rows each, so that both formats are exactly the same function. Parameters that
hold all experts (`target_parameters`) have matrices for each expert.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megtool.convert.canonical_view import canonical_side
from megtool.convert.dialects import write_side
from megtool.convert.families import Family
from megtool.errors import MappingError
from megtool.model.lora import LoraSettings
from megtool.model_config import ModelConfig
from megtool.tensors.placement import Placement
from megtool.train.features.adapter_tensors import A, B, canonical_modules

_EXPERTS = ".experts.experts."
_SAY_TRANSPOSED = {"gpt_oss"}
"""Families whose experts module tells PEFT that its inputs come before its outputs."""
_PARAMETERS = {"fc1": "gate_up_proj", "fc2": "down_proj"}
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftModuleSlice:
    """The position of a canonical module in a Hugging Face module with `out` rows and `inner`
    columns: its rows and columns are `rows` and `columns` of that. `is_transposed`: the module is
    stored as `[in, out]`."""

    module: str
    out: int
    inner: int
    rows: Tensor
    columns: Tensor
    is_transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftExperts:
    """The position of the matrices of all experts in a parameter of a Hugging Face module.

    The rows of a layer's weight are `rows` of the parameter, None if they are in order.
    `is_swapped`: the module has inputs before outputs without telling PEFT, so A and B are swapped.
    """

    module: str
    rows: Tensor | None = None
    is_swapped: bool = False

    def to_peft(self, a_ERI: Tensor, b_EOR: Tensor) -> tuple[Tensor, Tensor]:
        """PEFT's A and B."""
        if self.rows is not None:
            reordered = torch.empty_like(b_EOR)
            reordered[:, self.rows] = b_EOR
            b_EOR = reordered
        if self.is_swapped:
            a_ERI, b_EOR = b_EOR.transpose(1, 2), a_ERI.transpose(1, 2)
        return a_ERI, b_EOR


class PeftFormat:
    """Names and rows of a model's modules in PEFT's format.

    Raises:
        MappingError: the family has no place for a module, does not store it as a matrix, or stores
            several as one.
    """

    def __init__(self, config: ModelConfig, family: Family, linears: Iterable[str]) -> None:
        linears = list(linears)
        self.experts = [n for n in linears if _EXPERTS in n]
        dense = [n for n in linears if _EXPERTS not in n]
        self.linear_of = {m: n for n in dense for m in canonical_modules(n, config)}
        layers = {n.split(".")[2] for n in linears}
        side = canonical_side(config, layers)
        target = write_side(side, dialect="hf", family=family, config=config)
        shapes = {t.name: t.shape for t in target.tensors}
        self.pieces: dict[str, PeftModuleSlice] = {}
        for module in self.linear_of:
            placement = target.placements.get(f"{module}.weight")
            shape = shapes[placement.stored] if placement is not None else ()
            if placement is None or len(shape) != 2:
                raise MappingError(
                    f"{family.name} does not store {module} as a matrix of its own", tensor=module
                )
            self.pieces[module] = _piece(placement, side.canonical[f"{module}.weight"].shape, shape)
        self._check_shared_modules()
        self._mixtures: dict[str, PeftExperts] = {}
        for name in self.experts:
            first = f"layers.{name.split('.')[2]}.mlp.experts.0."
            gated = ("gate", "up") if config.gated else ("up",)
            parts = gated if name.endswith("fc1") else ("down",)
            places = [target.placements[f"{first}{part}.weight"] for part in parts]
            # transformers has all experts in two parameters of one module, however stored.
            within = places[0].stored.partition(".experts.")[0].replace("block_sparse_moe", "mlp")
            rows = None
            is_stacked = len(shapes[places[0].stored]) == 3
            if is_stacked:
                size = side.canonical[f"{first}{parts[0]}.weight"].shape[0]
                rows = torch.cat([_rows(p, size) for p in places])
            self._mixtures[name] = PeftExperts(
                module=f"{within}.experts",
                rows=rows,
                is_swapped=is_stacked and family.name not in _SAY_TRANSPOSED,
            )

    def _check_shared_modules(self) -> None:
        """Check that modules that share an A in PEFT are one linear layer in Megatron, too."""
        first: dict[str, str] = {}
        for module, piece in self.pieces.items():
            first_module = first.setdefault(piece.module, module)
            is_same_layer = self.linear_of[first_module] == self.linear_of[module]
            if not (
                is_same_layer and torch.equal(self.pieces[first_module].columns, piece.columns)
            ):
                raise MappingError(
                    f"{piece.module} is one module, and several in Megatron", tensor=module
                )

    def tensors(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """PEFT's tensors from canonical matrices (`megtool.train.features.adapter_tensors`)."""
        out: dict[str, Tensor] = {}
        for module, piece in self.pieces.items():
            a, b = matrices[f"{self.linear_of[module]}.{A}"], matrices[f"{module}.{B}"]
            name = f"base_model.model.{piece.module}"
            full_A = torch.zeros(a.shape[0], piece.inner, dtype=a.dtype)
            full_A[:, piece.columns] = a
            out.setdefault(f"{name}.{A}.weight", full_A)
            empty = torch.zeros(piece.out, b.shape[1], dtype=b.dtype)
            out.setdefault(f"{name}.{B}.weight", empty)[piece.rows] = b
        modules = [mixture.module for mixture in self._mixtures.values()]
        for linear, mixture in self._mixtures.items():
            # PEFT wraps a module's second parameter around the first.
            has_both = modules.count(mixture.module) == 2
            inner = ".base_layer" if has_both and linear.endswith("linear_fc1") else ""
            a, b = mixture.to_peft(matrices[f"{linear}.{A}"], matrices[f"{linear}.{B}"])
            name = f"base_model.model.{mixture.module}{inner}"
            out[f"{name}.{A}.weight"] = a.flatten(0, 1)
            out[f"{name}.{B}.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()
        return out

    def config(self, settings: LoraSettings, base: str) -> bytes:
        """PEFT's adapter_config.json; `base` is the path of the base model."""
        modules = {_name_in_layer(p.module) for p in self.pieces.values()}
        parameters = {
            f"{_name_in_layer(m.module)}.{_PARAMETERS[n[-3:]]}" for n, m in self._mixtures.items()
        }
        if parameters:
            # PEFT takes modules with these names for experts of transformers 4.
            mlps = {m for m in modules if m.startswith("mlp.")}
            modules, parameters = modules - mlps, parameters | {f"{m}.weight" for m in mlps}
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": settings.rank,
            "lora_alpha": settings.alpha,
            "lora_dropout": settings.dropout,
            "target_modules": sorted(modules),
            # Of two parameters of a module, the first is the inner one.
            "target_parameters": sorted(parameters, reverse=True) or None,
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
        return (json.dumps(content, indent=2) + "\n").encode()


def _name_in_layer(module: str) -> str:
    """A module's name in its layer, such as `self_attn.q_proj`, which PEFT finds in all layers."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else module


def _piece(p: Placement, canonical: tuple[int, ...], stored: tuple[int, ...]) -> PeftModuleSlice:
    split = next(k for k in range(len(p.shape) + 1) if prod(p.shape[:k]) == canonical[0])
    axes = {d for d, n in zip(p.dims[:split], p.shape[:split], strict=True) if n > 1}
    dim = axes.pop() if axes else 0
    if axes or any(
        d == dim and n > 1 for d, n in zip(p.dims[split:], p.shape[split:], strict=True)
    ):
        raise MappingError(f"rows of {p.canonical} are not rows of {p.stored}", tensor=p.canonical)
    return PeftModuleSlice(
        module=p.stored.removesuffix(".weight"),
        out=stored[dim],
        inner=stored[1 - dim],
        rows=_positions(p, dim, range(split)),
        columns=_positions(p, 1 - dim, range(split, len(p.shape))),
        is_transposed=dim == 1,
    )


def _rows(p: Placement, size: int) -> Tensor:
    """The positions of an expert's `size` rows along a dimension of a parameter."""
    split = next(k for k in range(len(p.shape) + 1) if prod(p.shape[:k]) == size)
    dim = next(d for d, n in zip(p.dims[:split], p.shape[:split], strict=True) if n > 1)
    return _positions(p, dim, range(split))


def _positions(p: Placement, dim: int, axes: range) -> Tensor:
    positions = torch.tensor(p.base[dim])
    for j in axes:
        mult = p.mults[j] if p.dims[j] == dim else 0
        positions = positions.unsqueeze(-1) + torch.arange(p.shape[j]) * mult
    return positions.flatten()
