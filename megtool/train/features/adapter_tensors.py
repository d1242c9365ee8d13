"""Adapters as matrices of canonical modules, at any layout of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.errors import CheckpointError, MegtoolError
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.lora import Adapter, ExpertAdapter, adapters_of
from megtool.parallel.process_groups import Group
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement

T = TypeVar("T")
A, B = "lora_A", "lora_B"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlice:
    """A matrix of an adapter on this rank: its rows (of B) or columns (of A) `local_index` are rows
    or columns `global_index` of the canonical matrix `name`, of `shape`. Ranks of `shard_groups`
    have the others.

    If there is a matrix for each expert, this rank has experts from `first` on."""

    name: str
    shape: tuple[int, ...]
    dim: int
    local_index: Tensor
    global_index: Tensor
    shard_groups: tuple[Group, ...] = ()
    first: int = 0

    def local_experts(self, full: Tensor, local: Tensor) -> Tensor:
        """The part of the full matrix with the experts of this rank."""
        return full if len(self.shape) == 2 else full.narrow(0, self.first, local.shape[0])


class AdapterViews:
    """The positions of this rank's adapters in canonical matrices.

    A canonical adapter has an A `[rank, in]` for each fused layer, named by Megatron's name of it
    (`decoder.layers.0.self_attention.linear_qkv.lora_A`), and a B `[out, rank]` for each module
    (`layers.0.attn.q.lora_B`). Both matrices of experts have the layer's name, A `[E, rank, in]`
    and B `[E, out, rank]`, with the rows of the layer on one rank. All ranks make the same calls.
    """

    def __init__(self, stages: Sequence[Decoder]) -> None:
        self.groups = stages[0].groups
        self.slices: dict[str, list[AdapterSlice]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._experts: set[str] = set()
        for decoder in stages:
            adapters: dict[str, Adapter] = {}
            for name, _, adapter in adapters_of(decoder):
                if isinstance(adapter, ExpertAdapter):
                    self._add_experts(name, adapter, decoder.config)
                else:
                    adapters[name] = adapter
            modules = [m for name in adapters for m in canonical_modules(name, decoder.config)]
            views = WeightViews(decoder, modules)
            for name, adapter in adapters.items():
                parts = [(m, views.parts[m]) for m in canonical_modules(name, decoder.config)]
                local_A, local_B = f"{name}.adapter.{A}", f"{name}.adapter.{B}"
                self._tensors |= {local_A: adapter.lora_A, local_B: adapter.lora_B}
                self.slices[local_A], self.slices[local_B] = [], []
                rank, inner = adapter.lora_A.shape
                out = adapter.lora_B.shape[0]
                cut = adapter.group.size > 1
                columns = [(p.boxes, p.shape[1]) for _, p in parts[:1] if adapter.is_row]
                for pieces, width in columns or [((), inner)]:
                    local_index, global_index = (
                        match_indices(pieces, 1) if columns else (torch.arange(inner),) * 2
                    )
                    self.slices[local_A].append(
                        AdapterSlice(
                            name=f"{name}.{A}",
                            shape=(rank, width),
                            dim=1,
                            local_index=local_index,
                            global_index=global_index,
                            shard_groups=(self.groups.tp,) if cut and adapter.is_row else (),
                        )
                    )
                for module, part in parts:
                    is_rows = adapter.is_column
                    local_index, global_index = (
                        match_indices(part.boxes, 0) if is_rows else (torch.arange(out),) * 2
                    )
                    self.slices[local_B].append(
                        AdapterSlice(
                            name=f"{module}.{B}",
                            shape=(part.shape[0], rank),
                            dim=0,
                            local_index=local_index,
                            global_index=global_index,
                            shard_groups=(self.groups.tp,) if cut and is_rows else (),
                        )
                    )

    def _add_experts(self, name: str, adapter: ExpertAdapter, config: ModelConfig) -> None:
        """Add the positions of both matrices of all experts."""
        etp, first = adapter.etp, adapter.ep.rank * adapter.lora_A.shape[0]
        for kind, tensor in ((A, adapter.lora_A), (B, adapter.lora_B)):
            dim = 2 if kind == A else 1
            size, shape = tensor.shape[dim], list(tensor.shape)
            shape[0] *= adapter.ep.size
            local_index = global_index = torch.arange(size)
            is_cut = adapter.split_dim == dim
            if is_cut:
                # Gate and up are stacked, and each is split.
                parts = 2 if dim == 1 and config.mlp.gated else 1
                shape[dim] *= etp.size
                global_index = global_index.view(parts, -1) + torch.arange(parts).view(-1, 1) * (
                    (etp.size - 1) * (size // parts)
                )
                global_index = (global_index + etp.rank * (size // parts)).flatten()
            self._tensors[local_name := f"{name}.adapter.{kind}"] = tensor
            self._experts.add(local_name)
            self.slices[local_name] = [
                AdapterSlice(
                    name=f"{name}.{kind}",
                    shape=tuple(shape),
                    dim=dim,
                    local_index=local_index,
                    global_index=global_index,
                    shard_groups=(adapter.ep, etp) if is_cut else (adapter.ep,),
                    first=first,
                )
            ]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The adapters' own parameters, by name."""
        return self._tensors

    def is_expert(self, name: str) -> bool:
        """Whether a parameter is of experts, whose states are sharded over other replicas."""
        return name in self._experts

    def slice_local(self, matrices: Mapping[str, Tensor], state: str, name: str) -> Tensor:
        """This rank's part of a parameter, or of a state of it, from canonical matrices by their
        keys (`megtool.train.features.adapter_gather`).

        Raises:
            CheckpointError: it is missing, or of another shape.
        """
        out = torch.empty_like(self._tensors[name], dtype=torch.float32, device="cpu")
        for part in self.slices[name]:
            matrix = matrices.get(f"{state}:{part.name}")
            if matrix is None or tuple(matrix.shape) != part.shape:
                shape = None if matrix is None else list(matrix.shape)
                raise CheckpointError(
                    f"the saved adapter has {shape or 'no such matrix'} where the run has "
                    f"{list(part.shape)}",
                    tensor=part.name,
                    hint="use the --lora-rank and --lora-target that the run was started with",
                )
            rows = part.local_experts(matrix, out).float().index_select(part.dim, part.global_index)
            out.index_copy_(part.dim, part.local_index, rows)
        return out


_LATENT = {
    f"linear_{name}": name.removesuffix("_proj")
    for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
}


_DELTA_NET = {"in_proj": ("q", "k", "v", "z", "b", "a"), "out_proj": ("o",)}
_KIMI_DELTA = {"in_proj": ("q", "k", "v"), "out_proj": ("o",)}
_MAMBA = {"in_proj": ("in_z", "in_x", "in_B", "in_C", "in_dt"), "out_proj": ("out",)}
_SHORT_CONV = {"in_proj": ("in_B", "in_C", "in_x"), "out_proj": ("out",)}


def canonical_modules(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The canonical modules that are fused in a linear layer of Megatron."""
    _, _, number, *_, within, last = name.split(".")
    attn, mlp = f"layers.{number}.attn.", f"layers.{number}.mlp."
    is_kda = int(number) in layer_sets.kda_layers(config)
    delta = f"layers.{number}.{'kda' if is_kda else 'delta'}."
    if within == "shared_experts":
        mlp += "shared."
    if last in _LATENT:
        return (attn + _LATENT[last],)
    if last == "linear_qkv":
        gate = ("gate",) if config.attention.attn_output_gate else ()
        return tuple(attn + m for m in ("q", *gate, "k", "v"))
    if last == "linear_proj":
        return (attn + "o",)
    if within in ("mixer", "mamba_mixer"):
        return tuple(f"layers.{number}.mamba.{m}" for m in _MAMBA[last])
    if within == "short_conv":
        return tuple(f"layers.{number}.short_conv.{m}" for m in _SHORT_CONV[last])
    if last in _DELTA_NET:
        return tuple(delta + m for m in (_KIMI_DELTA if is_kda else _DELTA_NET)[last])
    if last == "linear_fc1":
        return (mlp + "gate", mlp + "up") if config.mlp.gated else (mlp + "up",)
    return (mlp + "down",)


def match_indices(pieces: Iterable[tuple[Placement, Placement]], dim: int) -> tuple[Tensor, Tensor]:
    """The rows (`dim` 0) or columns (1) that pieces relate, on their first and second side."""
    local_index, global_index = [], []
    for local_side, canonical_side in pieces:
        axes = [d == dim for d in canonical_side.dims]
        local_index.append(_positions_along(local_side, dim, axes))
        global_index.append(_positions_along(canonical_side, dim, axes))
    none = torch.empty(0, dtype=torch.int64)
    return torch.cat(local_index or [none]), torch.cat(global_index or [none])


def _positions_along(p: Placement, dim: int, axes: Sequence[bool]) -> Tensor:
    """The positions along a dimension of a stored tensor, over some axes of a view of it."""
    positions = torch.tensor(p.base[dim])
    for is_axis, size, d, mult in zip(axes, p.shape, p.dims, p.mults, strict=True):
        if is_axis:
            steps = torch.arange(size) * (mult if d == dim else 0)
            positions = positions.unsqueeze(-1) + steps
    return positions.flatten()


def all_gather_objects(value: T, group: Group) -> list[T]:
    """The values of every rank of a group."""
    if group.handle is None:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    return values


def raise_on_all(error: MegtoolError | None, group: Group) -> None:
    """Raise the error of the first rank that has one, on all ranks; every rank calls it."""
    for rank_error in all_gather_objects(error, group):
        if rank_error is not None:
            raise rank_error
