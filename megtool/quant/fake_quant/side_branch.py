"""SVDQuant's branches in a decoder: they multiply inputs that are not rounded.

A decoded weight has the product of its branch in it, and the hook of its inputs rounds them for the
whole. What the branch makes of the difference between inputs and rounded ones is added to the
output, as a LoRA adapter of the layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megtool.model.moe.experts import ExpertLinear
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import HookLocation
from megtool.model.stacks.lora import Adapter, ExpertAdapter, Linear, LoraSettings
from megtool.quant.fake_quant.weight_views import WeightViews, list_indices
from megtool.quant.qparams import Floats, LowRankBranch
from megtool.tensors.placement import Placement


@dataclass(slots=True, eq=False)
class SideBranch:
    """The adapter of a layer, and the hook of its inputs. What it adds is of the rows that `tap`
    was handed last."""

    linear: Any
    adapter: Adapter | ExpertAdapter
    round: Callable[..., Tensor]
    missed: Tensor | None = None

    def tap(self, rows: Tensor, *more: Tensor) -> Tensor:
        """Round rows, and keep what they lose."""
        rounded = self.round(rows, *more)
        self.missed = rows - rounded
        return rounded

    def __call__(self, rows: Tensor, *more: Tensor) -> Tensor:
        """The addition to the layer's output."""
        out: Tensor = self.adapter(rows if self.missed is None else self.missed, *more)
        return out

    def delta(self) -> Tensor:
        """The addition to the layer's weight: none. Latent attention asks for it, whose branches
        of keys and values so multiply rounded inputs."""
        return torch.zeros(())

    def attach(self, adapter: SideBranch | None) -> None:
        """Add to the layer's output from now on, or (None) no longer."""
        self.linear.adapter = adapter


def fold_columns(branch: LowRankBranch, columns: Floats | None) -> LowRankBranch:
    """A branch of inputs that are not divided by smoothing scales."""
    if columns is None:
        return branch
    return LowRankBranch(up=branch.up, down=branch.down / columns)


def make_side_branch(
    decoder: Decoder,
    views: WeightViews,
    place: HookLocation,
    branches: Mapping[str, LowRankBranch],
    hook: Callable[..., Tensor],
) -> SideBranch | None:
    """The branches of modules that are one layer on this rank; None if they are no linear layer, as
    the head, whose branch then multiplies rounded inputs.

    `branches` are of inputs that are not divided, by module.
    """
    linear = place.module
    if place.attribute != "tap" or not isinstance(linear, Linear | ExpertLinear):
        return None
    weight = linear.get_parameter("weight")
    modules = [m for m in branches if m in views.parts and _is_of(decoder, views, m, linear)]
    if not modules:
        return None
    up, down = _local_factors(weight.shape, views, modules, branches)
    settings = LoraSettings(rank=down.shape[-2], alpha=down.shape[-2])
    adapter: Adapter | ExpertAdapter
    if isinstance(linear, ExpertLinear):
        adapter = ExpertAdapter(linear, decoder.groups.ep, settings)
    else:
        adapter, down, up = Adapter(linear, settings), down[0], up[0]
    adapter.lora_A, adapter.lora_B = (
        nn.Parameter(m.to(decoder.groups.device, decoder.dtype), requires_grad=False)
        for m in (down, up)
    )
    return SideBranch(linear, adapter, hook)


def _is_of(decoder: Decoder, views: WeightViews, module: str, linear: nn.Module) -> bool:
    owner = views.parts[module].parameter.rpartition(".")[0]
    return decoder.get_submodule(owner) is linear


def _local_factors(
    shape: Iterable[int],
    views: WeightViews,
    modules: Iterable[str],
    branches: Mapping[str, LowRankBranch],
) -> tuple[Tensor, Tensor]:
    """This rank's `up` `[E, out, rank]` and `down` `[E, rank, in]` for a parameter of a shape; E is
    1 where it has no experts. Modules of an expert with the same `down` share its rows."""
    *experts, out, inner = shape
    boxes = [(m, *box) for m in modules for box in views.parts[m].boxes]
    downs: dict[int, list[Floats]] = defaultdict(list)
    for module, local, _ in boxes:
        expert, down = _expert_of(local), branches[module].down
        if all(down is not d and not _equal(down, d) for d in downs[expert]):
            downs[expert].append(down)
    rank = max(sum(len(d) for d in listed) for listed in downs.values())
    up_EOR = torch.zeros(*(experts or [1]), out, rank)
    down_ERI = torch.zeros(*(experts or [1]), rank, inner)
    for module, local, whole in boxes:
        expert, branch, first = _expert_of(local), branches[module], 0
        for down in downs[expert]:
            ranks = slice(first, first + len(down))
            first += len(down)
            if _equal(down, branch.down):
                rows, whole_rows = list_indices(local, whole, 0)
                columns, whole_columns = list_indices(local, whole, 1)
                up_EOR[expert, rows, ranks] = torch.from_numpy(branch.up)[whole_rows]
                down_ERI[expert, ranks, columns] = torch.from_numpy(down)[:, whole_columns]
    return up_EOR, down_ERI


def _equal(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _expert_of(local: Placement) -> int:
    return local.base[0] if len(local.base) > 2 else 0
