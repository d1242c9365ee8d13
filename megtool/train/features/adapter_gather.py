"""Gathering: the matrices of an adapter and of its optimizer, brought to rank 0 one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.optim.segments import StatePiece
from megtool.parallel.collectives import all_sum
from megtool.train.features.adapter_tensors import AdapterViews, Spot, gathered

WEIGHT = "weight"
"""What stands for the name of a state where a matrix is the adapter's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A whole canonical matrix: of the adapter itself (`state` is WEIGHT), or a state of it."""

    state: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """What it is called in a file."""
        return f"{self.state}:{self.name}"


class Gathering:
    """All matrices of an adapter, and of its optimizer's `pieces`, one after the other.

    Beside its own parts a rank holds one matrix at a time. Every rank makes a Gathering, and goes
    through it to the end: rank 0 meets all matrices, on the CPU, and the others those of their own
    stage, as None.
    """

    def __init__(self, views: AdapterViews, pieces: Iterable[StatePiece] = ()) -> None:
        self._views, self._groups = views, views.groups
        self._pieces: dict[tuple[str, str], list[StatePiece]] = {}
        for piece in pieces:
            if piece.parameter in views.tensors:
                self._pieces.setdefault((piece.state, piece.parameter), []).append(piece)
        # Which replica has a part of a state is different from state to state.
        mine = list(self._pieces)
        dense = [key for key in mine if not views.is_of_experts(key[1])]
        experts = [key for key in mine if views.is_of_experts(key[1])]
        said = gathered(dense, self._groups.replicas) + gathered(experts, self._groups.expert_dp)
        weights = [(WEIGHT, name) for name in sorted(views.tensors)]
        self._own = weights + sorted({key for keys in said for key in keys})
        of_stage = [
            Matrix(state=state, name=spot.name, shape=spot.shape, dtype=self._dtype(state, name))
            for state, name in self._own
            for spot in views.spots[name]
        ]
        self.stages: list[list[Matrix]] = gathered(of_stage, self._groups.pp)

    @property
    def matrices(self) -> list[Matrix]:
        """What rank 0 meets, in its order."""
        return [matrix for stage in self.stages for matrix in stage]

    def __iter__(self) -> Iterator[tuple[Matrix, Tensor | None]]:
        """Every matrix and, on rank 0, its elements."""
        groups = self._groups
        pp, is_first = groups.pp, groups.rank == 0
        own = iter(self.stages[pp.rank])
        for state, name in self._own:
            held = self._held(state, name)
            for spot in self._views.spots[name]:
                whole = self._whole(held, spot)
                if pp.rank and pp.ranks[0] == 0:
                    dist.send(whole, 0, group=pp.handle)
                yield next(own), whole.cpu() if is_first else None
        if not is_first:
            return
        for stage in range(1, pp.size):
            for matrix in self.stages[stage]:
                whole = torch.empty(matrix.shape, dtype=matrix.dtype, device=groups.device)
                dist.recv(whole, pp.ranks[stage], group=pp.handle)
                yield matrix, whole.cpu()

    def _dtype(self, state: str, name: str) -> torch.dtype:
        return self._views.tensors[name].dtype if state == WEIGHT else torch.float32

    @torch.no_grad()
    def _held(self, state: str, name: str) -> Tensor:
        """What this rank holds, in the parameter's shape; a state is put together of replicas'."""
        parameter = self._views.tensors[name]
        if state == WEIGHT:
            return parameter.detach()
        mine = [
            (p.start, p.tensor.detach().cpu().float()) for p in self._pieces.get((state, name), ())
        ]
        groups = self._groups
        of_experts = self._views.is_of_experts(name)
        out = torch.zeros(parameter.numel())
        found: list[list[tuple[int, Any]]]
        found = gathered(mine, groups.expert_dp if of_experts else groups.replicas)
        for start, values in (part for parts in found for part in parts):
            out[start : start + values.numel()] = values
        return out.view(parameter.shape).to(groups.device)

    @torch.no_grad()
    def _whole(self, held: Tensor, spot: Spot) -> Tensor:
        """The canonical matrix of what the ranks of a stage hold."""
        made = torch.zeros(spot.shape, dtype=held.dtype, device=held.device)
        there, here = spot.there.to(held.device), spot.here.to(held.device)
        spot.part(made, held).index_copy_(spot.dim, there, held.index_select(spot.dim, here))
        for group in spot.cut:
            made = all_sum(made, group)
        return made
