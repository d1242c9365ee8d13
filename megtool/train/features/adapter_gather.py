"""Gather the matrices of an adapter and of its optimizer on rank 0, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.optim.segments import StatePiece
from megtool.parallel.collectives import all_sum
from megtool.train.features.adapter_tensors import AdapterSlice, AdapterViews, all_gather_objects

WEIGHT = "weight"
"""The state name of the adapter's own matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMatrix:
    """A full canonical matrix: of the adapter itself (`state` is WEIGHT), or a state of it."""

    state: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.state}:{self.name}"


class AdapterGather:
    """All matrices of an adapter, and of its optimizer's `pieces`, one at a time.

    A rank has one full matrix in memory at a time. Every rank makes an AdapterGather, and iterates
    over it to the end: rank 0 gets all matrices, on the CPU; others get None for those of their own
    stage.
    """

    def __init__(self, views: AdapterViews, pieces: Iterable[StatePiece] = ()) -> None:
        self._views, self._groups = views, views.groups
        self._pieces: dict[tuple[str, str], list[StatePiece]] = {}
        for piece in pieces:
            if piece.parameter in views.tensors:
                self._pieces.setdefault((piece.state, piece.parameter), []).append(piece)
        # States are sharded over replicas in different ways.
        local_keys = list(self._pieces)
        dense = [key for key in local_keys if not views.is_expert(key[1])]
        experts = [key for key in local_keys if views.is_expert(key[1])]
        keys_of_ranks = all_gather_objects(dense, self._groups.replicas) + all_gather_objects(
            experts, self._groups.expert_dp
        )
        weights = [(WEIGHT, name) for name in sorted(views.tensors)]
        self._local_entries = weights + sorted({key for keys in keys_of_ranks for key in keys})
        of_stage = [
            AdapterMatrix(
                state=state, name=spot.name, shape=spot.shape, dtype=self._dtype(state, name)
            )
            for state, name in self._local_entries
            for spot in views.slices[name]
        ]
        self.stages: list[list[AdapterMatrix]] = all_gather_objects(of_stage, self._groups.pp)

    @property
    def matrices(self) -> list[AdapterMatrix]:
        """The matrices in the order that rank 0 gets them."""
        return [matrix for stage in self.stages for matrix in stage]

    def __iter__(self) -> Iterator[tuple[AdapterMatrix, Tensor | None]]:
        """Every matrix and, on rank 0, its elements."""
        groups = self._groups
        pp, is_first = groups.pp, groups.rank == 0
        matrices = iter(self.stages[pp.rank])
        for state, name in self._local_entries:
            local = self._local_tensor(state, name)
            for spot in self._views.slices[name]:
                full = self._assemble(local, spot)
                if pp.rank and pp.ranks[0] == 0:
                    dist.send(full, 0, group=pp.handle)
                yield next(matrices), full.cpu() if is_first else None
        if not is_first:
            return
        for stage in range(1, pp.size):
            for matrix in self.stages[stage]:
                full = torch.empty(matrix.shape, dtype=matrix.dtype, device=groups.device)
                dist.recv(full, pp.ranks[stage], group=pp.handle)
                yield matrix, full.cpu()

    def _dtype(self, state: str, name: str) -> torch.dtype:
        return self._views.tensors[name].dtype if state == WEIGHT else torch.float32

    @torch.no_grad()
    def _local_tensor(self, state: str, name: str) -> Tensor:
        """This rank's tensor in the parameter's shape; a state is assembled from all replicas."""
        parameter = self._views.tensors[name]
        if state == WEIGHT:
            return parameter.detach()
        local_pieces = [
            (p.start, p.tensor.detach().cpu().float()) for p in self._pieces.get((state, name), ())
        ]
        groups = self._groups
        of_experts = self._views.is_expert(name)
        out = torch.zeros(parameter.numel())
        pieces_of_ranks: list[list[tuple[int, Any]]]
        pieces_of_ranks = all_gather_objects(
            local_pieces, groups.expert_dp if of_experts else groups.replicas
        )
        for start, values in (part for parts in pieces_of_ranks for part in parts):
            out[start : start + values.numel()] = values
        return out.view(parameter.shape).to(groups.device)

    @torch.no_grad()
    def _assemble(self, local: Tensor, spot: AdapterSlice) -> Tensor:
        """The canonical matrix, assembled from the ranks of a stage."""
        full = torch.zeros(spot.shape, dtype=local.dtype, device=local.device)
        global_index, local_index = (
            spot.global_index.to(local.device),
            spot.local_index.to(local.device),
        )
        spot.local_experts(full, local).index_copy_(
            spot.dim, global_index, local.index_select(spot.dim, local_index)
        )
        for group in spot.shard_groups:
            full = all_sum(full, group)
        return full
