"""Adapters as whole matrices of canonical modules, whatever the ranks of a run hold of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.config import ModelConfig
from megtool.errors import CheckpointError
from megtool.model.decoder import Decoder
from megtool.model.expert_lora import ExpertAdapter
from megtool.model.lora import Adapter, adapters_of
from megtool.parallel.process_groups import Group
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.tensors.placement import Placement

T = TypeVar("T")
A, B = "lora_A", "lora_B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A matrix of an adapter on this rank: rows (of B) or columns (of A) `here` are those `there`
    of the whole matrix `name`, of `shape`; ranks of the groups `cut` have the others.

    Of one with a matrix for each expert, the experts here are those from `first` on."""

    name: str
    shape: tuple[int, ...]
    dim: int
    here: Tensor
    there: Tensor
    cut: tuple[Group, ...] = ()
    first: int = 0

    def part(self, whole: Tensor, held: Tensor) -> Tensor:
        """Of the whole matrix, that of the experts of what this rank holds."""
        return whole if len(self.shape) == 2 else whole.narrow(0, self.first, held.shape[0])


class AdapterViews:
    """Where the adapters of this rank's stages lie in the canonical ones.

    A canonical adapter has an A `[rank, in]` for each fused layer, by Megatron's name of the layer
    (`decoder.layers.0.self_attention.linear_qkv.lora_A`), and a B `[out, rank]` for each module
    (`layers.0.attn.q.lora_B`). Those of experts are both by the layer's name, A `[E, rank, in]` and
    B `[E, out, rank]`, whose rows are those of the layer on one rank. All ranks make the same
    calls.
    """

    def __init__(self, stages: Sequence[Decoder]) -> None:
        self.groups = stages[0].groups
        self.spots: dict[str, list[Spot]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._experts: set[str] = set()
        for decoder in stages:
            found: dict[str, Adapter] = {}
            for name, _, adapter in adapters_of(decoder):
                if isinstance(adapter, ExpertAdapter):
                    self._put_experts(name, adapter, decoder.config)
                else:
                    found[name] = adapter
            modules = [m for name in found for m in modules_of(name, decoder.config)]
            views = WeightViews(decoder, modules)
            for name, adapter in found.items():
                parts = [(m, views.parts[m]) for m in modules_of(name, decoder.config)]
                own_A, own_B = f"{name}.adapter.{A}", f"{name}.adapter.{B}"
                self._tensors |= {own_A: adapter.lora_A, own_B: adapter.lora_B}
                self.spots[own_A], self.spots[own_B] = [], []
                rank, inner = adapter.lora_A.shape
                out = adapter.lora_B.shape[0]
                cut = adapter.group.size > 1
                columns = [(p.pieces, p.shape[1]) for _, p in parts[:1] if adapter.is_row]
                for pieces, width in columns or [((), inner)]:
                    here, there = lines(pieces, 1) if columns else (torch.arange(inner),) * 2
                    self.spots[own_A].append(
                        Spot(
                            name=f"{name}.{A}",
                            shape=(rank, width),
                            dim=1,
                            here=here,
                            there=there,
                            cut=(self.groups.tp,) if cut and adapter.is_row else (),
                        )
                    )
                for module, part in parts:
                    is_rows = adapter.is_column
                    here, there = lines(part.pieces, 0) if is_rows else (torch.arange(out),) * 2
                    self.spots[own_B].append(
                        Spot(
                            name=f"{module}.{B}",
                            shape=(part.shape[0], rank),
                            dim=0,
                            here=here,
                            there=there,
                            cut=(self.groups.tp,) if cut and is_rows else (),
                        )
                    )

    def _put_experts(self, name: str, adapter: ExpertAdapter, config: ModelConfig) -> None:
        """Note where both matrices of all experts lie."""
        etp, first = adapter.etp, adapter.ep.rank * adapter.lora_A.shape[0]
        for kind, held in ((A, adapter.lora_A), (B, adapter.lora_B)):
            dim = 2 if kind == A else 1
            size, shape = held.shape[dim], list(held.shape)
            shape[0] *= adapter.ep.size
            here = there = torch.arange(size)
            is_cut = adapter.split_dim == dim
            if is_cut:
                # Gate and up are one above the other, and cut each.
                parts = 2 if dim == 1 and config.gated else 1
                shape[dim] *= etp.size
                there = there.view(parts, -1) + torch.arange(parts).view(-1, 1) * (
                    (etp.size - 1) * (size // parts)
                )
                there = (there + etp.rank * (size // parts)).flatten()
            self._tensors[own := f"{name}.adapter.{kind}"] = held
            self._experts.add(own)
            self.spots[own] = [
                Spot(
                    name=f"{name}.{kind}",
                    shape=tuple(shape),
                    dim=dim,
                    here=here,
                    there=there,
                    cut=(adapter.ep, etp) if is_cut else (adapter.ep,),
                    first=first,
                )
            ]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The adapters' own parameters, by name."""
        return self._tensors

    def is_of_experts(self, name: str) -> bool:
        """Whether a parameter is of experts, whose states are shared out over other replicas."""
        return name in self._experts

    def local(self, whole: Mapping[str, Tensor], state: str, name: str) -> Tensor:
        """This rank's part of a parameter, or of a state of it, out of canonical matrices by their
        keys (`megtool.train.features.adapter_gather`).

        Raises:
            CheckpointError: it is not there, or of another shape.
        """
        out = torch.empty_like(self._tensors[name], dtype=torch.float32, device="cpu")
        for spot in self.spots[name]:
            found = whole.get(f"{state}:{spot.name}")
            if found is None or tuple(found.shape) != spot.shape:
                shape = None if found is None else list(found.shape)
                raise CheckpointError(
                    f"the saved adapter has {shape or 'no such matrix'} where the run has "
                    f"{list(spot.shape)}",
                    tensor=spot.name,
                    hint="give the --lora-rank and --lora-target that the run was started with",
                )
            rows = spot.part(found, out).float().index_select(spot.dim, spot.there)
            out.index_copy_(spot.dim, spot.here, rows)
        return out


_LATENT = {
    f"linear_{name}": name.removesuffix("_proj")
    for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
}


def modules_of(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The canonical modules that are fused in a linear layer, by Megatron's name of it."""
    _, _, number, *_, within, last = name.split(".")
    attn, mlp = f"layers.{number}.attn.", f"layers.{number}.mlp."
    if within == "shared_experts":
        mlp += "shared."
    if last in _LATENT:
        return (attn + _LATENT[last],)
    if last == "linear_qkv":
        gate = ("gate",) if config.attn_output_gate else ()
        return tuple(attn + m for m in ("q", *gate, "k", "v"))
    if last == "linear_proj":
        return (attn + "o",)
    if last == "linear_fc1":
        return (mlp + "gate", mlp + "up") if config.gated else (mlp + "up",)
    return (mlp + "down",)


def lines(pieces: Iterable[tuple[Placement, Placement]], dim: int) -> tuple[Tensor, Tensor]:
    """Rows (`dim` 0) or columns (1) of what pieces relate: of the first, and of the second."""
    here, there = [], []
    for one, other in pieces:
        axes = [d == dim for d in other.dims]
        here.append(_line(one, dim, axes))
        there.append(_line(other, dim, axes))
    none = torch.empty(0, dtype=torch.int64)
    return torch.cat(here or [none]), torch.cat(there or [none])


def _line(p: Placement, dim: int, axes: Sequence[bool]) -> Tensor:
    """The positions along a dimension of a stored tensor, over some axes of a view of it."""
    at = torch.tensor(p.base[dim])
    for is_axis, size, d, mult in zip(axes, p.shape, p.dims, p.mults, strict=True):
        if is_axis:
            steps = torch.arange(size) * (mult if d == dim else 0)
            at = at.unsqueeze(-1) + steps
    return at.flatten()


def gathered(mine: T, group: Group) -> list[T]:
    """What every rank of a group says."""
    if group.handle is None:
        return [mine]
    said: list[Any] = [None] * group.size
    dist.all_gather_object(said, mine, group=group.handle)
    return said
