"""Weights of single modules as views of a decoder's fused and sharded parameters.

A parameter has several canonical weights (queries, keys and values by groups of heads), or a part
of one on this rank. The tables of load and reshard give the position of each element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megtool.convert.canonical_view import canonical_side, layer_number
from megtool.convert.dialects import DialectNaming, write_side
from megtool.convert.megatron.rank_parameters import rank_parameters
from megtool.convert.rank_tensors import RankCoordinates, local_side, local_tensors
from megtool.errors import MappingError
from megtool.model.stacks.decoder import VOCAB_MULTIPLE, Decoder
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import Group
from megtool.tensors.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPart:
    """A rank's part of a weight: `boxes` of its local `parameter`, possibly none.

    Each box is a pair of placements: in the parameter, and in the full weight of `shape`. `is_cut`
    says, on every rank, whether ranks have different boxes.
    """

    parameter: str
    shape: tuple[int, ...]
    is_cut: bool
    boxes: tuple[tuple[Placement, Placement], ...]


class WeightViews:
    """Reads and writes weights of modules as `[out, in]` in a loaded decoder.

    Covers those `modules` of which this rank has a part; other stages and expert ranks have the
    others. A sharded weight is gathered when it is read, by all ranks of its group together.
    """

    def __init__(self, decoder: Decoder, modules: Iterable[str]) -> None:
        self._decoder = decoder
        config, groups = decoder.config, decoder.groups
        layers = {str(n) for n in decoder.stage.layers}
        names = {f"{m}.weight" for m in modules if layer_number(m) in (*layers, "")}
        self.parts: dict[str, ParameterPart] = {}
        if not names:
            return
        side = canonical_side(config, {layer_number(n) for n in names})
        for name in sorted(names - set(side.canonical)):
            raise MappingError(f"the model has no weight {name!r}", tensor=name)
        target = write_side(
            side,
            dialect="megatron",
            parallel=groups.parallel,
            per_layer=True,
            options=DialectNaming(divisible_by=VOCAB_MULTIPLE),
        )
        coordinates = RankCoordinates(
            stage=groups.pp.rank, tp=groups.tp.rank, ep=groups.ep.rank, etp=groups.etp.rank
        )
        ranks = rank_parameters(target.tensors, config, groups.parallel)
        stored = {n: target.placements[n].stored for n in names}
        fused = set(stored.values())
        local_tensors_by_key = {
            t.key: t for t in local_tensors(ranks, coordinates).values() if t.key in fused
        }
        local = local_side(local_tensors_by_key.values(), side, target)
        placements: dict[str, list[tuple[Placement, Placement]]] = {
            n: [] for n, key in stored.items() if key in local_tensors_by_key
        }
        for part, source_box in local.source.items():
            name = part.rpartition("#")[0]
            if name in placements:
                placements[name].append((local.target[part], source_box))
        sizes = {t.name: prod(t.shape) for t in target.tensors}
        for name, boxes in placements.items():
            if ".experts." in name and not boxes:  # another rank's
                continue
            tensor = local_tensors_by_key[stored[name]]
            share = groups.ep.size if ".experts." in name else 1
            self.parts[name.removesuffix(".weight")] = ParameterPart(
                parameter=tensor.name,
                shape=side.canonical[name].shape,
                is_cut=prod(tensor.shape) * share < sizes[tensor.key],
                boxes=tuple(boxes),
            )

    def parameters(self, modules: Iterable[str]) -> tuple[str, ...]:
        """The parameters that hold the weights of modules."""
        return tuple(dict.fromkeys(self.parts[m].parameter for m in modules))

    def read(self, module: str, source: Mapping[str, Tensor] | None = None) -> Tensor:
        """A copy of the full weight `[out, in]`: of tensors by parameter name, as gradients are, or
        of the parameters themselves."""
        part = self.parts[module]
        if source is None:
            parameter = self._decoder.get_parameter(part.parameter).detach()
        else:
            parameter = source[part.parameter]
        out = torch.zeros(part.shape, dtype=parameter.dtype, device=parameter.device)
        for local_box, weight_box in part.boxes:
            strided_view(out, weight_box).copy_(strided_view(parameter, local_box))
        return all_sum(out, self._group(module)) if part.is_cut else out

    def write(
        self, module: str, weight_OI: Tensor, into: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write this rank's part of a weight, cast to the dtype of its parameter: into tensors by
        parameter name, or into the parameters themselves."""
        part, weight_OI = self.parts[module], weight_OI.contiguous()
        parameter = (
            self._decoder.get_parameter(part.parameter) if into is None else into[part.parameter]
        )
        for local_box, weight_box in part.boxes:
            strided_view(parameter.detach(), local_box).copy_(strided_view(weight_OI, weight_box))

    def _group(self, module: str) -> Group:
        groups = self._decoder.groups
        return groups.etp if ".experts." in module else groups.tp


def strided_view(tensor: Tensor, p: Placement) -> Tensor:
    """The elements of a tensor at a placement, in its shape."""
    steps = tensor.stride()
    start = tensor.storage_offset() + sum(b * s for b, s in zip(p.base, steps, strict=True))
    strides = [m * steps[d] for m, d in zip(p.mults, p.dims, strict=True)]
    return tensor.as_strided(p.shape, strides, start)


def list_indices(local: Placement, whole: Placement, dim: int) -> tuple[Tensor, Tensor]:
    """The rows (or columns) of a box, in the parameter and in the whole weight."""
    axes = [a for a, d in enumerate(whole.dims) if d == dim]
    pairs = []
    for place, base_dim in ((local, len(local.base) - 2 + dim), (whole, dim)):
        index = torch.tensor([place.base[base_dim]])
        for a in axes:
            steps = torch.arange(place.shape[a]) * place.mults[a]
            index = (index[:, None] + steps).flatten()
        pairs.append(index)
    return pairs[0], pairs[1]
