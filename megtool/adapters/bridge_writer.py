"""Updates of a model's weights as an adapter that Megatron-Bridge loads: its `LoRA`.

Every layer has the same modules, rank and scale there. Layers and modules without an update get
zeros, smaller ranks rows of zeros, and the rest of a scale is in `linear_out`. Experts that all
have the same update share one adapter, `[rank, in]` and `[out, rank]`, as grouped experts
(megatron-core's `TEGroupedMLP`) do. Others have an adapter each, as those of its `SequentialMLP`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megtool.adapters.fuse import EXPERTS, FusedUpdate, fuse_layers
from megtool.convert.families.family import Family
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.transport.weight_update import WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeAdapter:
    """An adapter to write: tensors by name, and the section `peft` of run_config.yaml.

    `model` are settings of the model that loads it. `rounded` are weights of which elements were
    rounded, because scales differ.
    """

    tensors: Mapping[str, Tensor]
    section: Mapping[str, Any]
    model: Mapping[str, Any]
    rounded: tuple[str, ...] = ()


def make_bridge_adapter(
    updates: Mapping[str, WeightUpdate],
    config: ModelConfig,
    family: Family | None,
    *,
    dropout: float = 0.0,
) -> BridgeAdapter:
    """The adapter that adds `updates` to canonical weights.

    Layers are stacked where all of the model are alike, as Megatron saves them.

    Raises:
        MappingError: a weight is none of a linear layer in Megatron's decoder.
    """
    fused = fuse_layers(updates, config, family, program="Megatron-Bridge")
    layers, rank, scale = fused.modules, fused.rank, fused.scale
    experts_in = [module for module in layers if EXPERTS in module]
    is_shared = all(_is_one(layer) for module in experts_in for layer in layers[module].values())
    tensors: dict[str, Tensor] = {}
    for module, of_layers in layers.items():
        for side, part in (("linear_in", "down"), ("linear_out", "up")):
            has_one = is_shared or module not in experts_in
            matrices = {n: _join(of_layers[n], part, has_one=has_one) for n in sorted(of_layers)}
            name = f"{module}.adapter.{side}.weight"
            if layer_sets.is_homogeneous(config):
                tensors[f"decoder.layers.{name}"] = torch.stack([*matrices.values()])
            else:
                tensors |= {f"decoder.layers.{n}.{name}": m for n, m in matrices.items()}
    alpha = scale * rank
    experts_name = ".experts." if is_shared else ".experts.local_experts.*."
    return BridgeAdapter(
        tensors=tensors,
        section={
            "_target_": "megatron.bridge.peft.lora.LoRA",
            "target_modules": sorted(
                f"*.{module.replace(EXPERTS, experts_name)}" for module in layers
            ),
            "dim": rank,
            "alpha": round(alpha) if round(alpha) / rank == scale else alpha,
            "dropout": dropout,
            "dropout_position": "pre",
            "lora_A_init_method": "xavier",
            "lora_B_init_method": "zero",
        },
        model={"moe_grouped_gemm": is_shared} if experts_in else {},
        rounded=fused.rounded,
    )


def _is_one(updates: Sequence[FusedUpdate]) -> bool:
    """Whether the updates of all experts of a layer have the same matrices."""
    first = updates[0]
    return all(
        u is first or (torch.equal(u.down, first.down) and torch.equal(u.up, first.up))
        for u in updates
    )


def _join(updates: Sequence[FusedUpdate], part: str, *, has_one: bool) -> Tensor:
    """The matrices of a layer's module: one, or one of each expert."""
    matrices = [getattr(update, part) for update in updates]
    return matrices[0] if has_one else torch.stack(matrices)
