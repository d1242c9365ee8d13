"""Views: the weights of modules inside the fused and cut parameters of a decoder.

A parameter holds several canonical weights (queries, keys and values by groups of heads), or a part
of one, as a rank has it: the tables that load and reshard say where each element is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megtool.convert.canonical import VOCABULARY, Model
from megtool.convert.dialects import write_side
from megtool.convert.local import Seat, local_side, local_tensors
from megtool.convert.ranks import rank_parameters
from megtool.convert.sides import Side
from megtool.dtypes import dtype as named
from megtool.errors import MappingError
from megtool.model.decoder import VOCAB_MULTIPLE, Decoder
from megtool.parallel.collectives import all_sum
from megtool.parallel.groups import ALONE, Group
from megtool.tensors.relation import Placement
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a weight: where it is in this rank's `parameter`, and where in the whole weight."""

    parameter: str
    here: Placement
    there: Placement


class WeightViews:
    """Reads and writes weights of modules, float or not, as `[out, in]`, in a loaded decoder.

    Of those named, the ones that this rank has a part of: other stages and expert ranks have the
    others. A weight that is cut is gathered to be read, by all ranks of its group together.
    """

    def __init__(self, decoder: Decoder, modules: Iterable[str]) -> None:
        self._decoder = decoder
        config, groups = decoder.config, decoder.groups
        layers = {str(n) for n in decoder.stage.layers}
        wanted = {f"{m}.weight" for m in modules if _layer(m) in (*layers, "")}
        self._shapes, self.pieces = {}, dict[str, tuple[Piece, ...]]()
        if not wanted:
            return
        side = _side(decoder, {_layer(n) for n in wanted})
        for name in sorted(wanted - set(side.canonical)):
            raise MappingError(f"the model has no weight {name!r}", tensor=name)
        target = write_side(
            side,
            dialect="megatron",
            parallel=groups.parallel,
            per_layer=True,
            divisible_by=VOCAB_MULTIPLE,
        )
        seat = Seat(
            stage=groups.pp.rank, tp=groups.tp.rank, ep=groups.ep.rank, etp=groups.etp.rank
        )
        ranks = rank_parameters(target.tensors, config, groups.parallel)
        fused = {target.placements[n].stored for n in wanted}
        mine = [t for t in local_tensors(ranks, seat).values() if t.key in fused]
        local = local_side(mine, side, target)
        found: dict[str, list[Piece]] = defaultdict(list)
        for part, there in local.source.items():
            name = part.rpartition("#")[0]
            if name in wanted:
                here = local.target[part]
                found[name.removesuffix(".weight")].append(
                    Piece(parameter=here.stored, here=here, there=there)
                )
        self.pieces = {name: tuple(some) for name, some in found.items()}
        self._shapes = {n: side.canonical[f"{n}.weight"].shape for n in self.pieces}

    def parameters(self, modules: Iterable[str]) -> tuple[str, ...]:
        """The parameters that hold the weights of modules."""
        return tuple(dict.fromkeys(p.parameter for m in modules for p in self.pieces[m]))

    def read(self, module: str) -> Tensor:
        """The whole weight `[out, in]`, in memory of its own."""
        shape, pieces = self._shapes[module], self.pieces[module]
        held = sum(_numel(p.here.shape) for p in pieces)
        first = self._decoder.get_parameter(pieces[0].parameter)
        out = torch.zeros(shape, dtype=first.dtype, device=first.device)
        for p in pieces:
            view = _strided(self._decoder.get_parameter(p.parameter).detach(), p.here)
            _strided(out, p.there).copy_(view)
        return out if held == out.numel() else all_sum(out, self._group(module))

    def write(
        self, module: str, weight_OI: Tensor, into: Mapping[str, Tensor] | None = None
    ) -> None:
        """Put this rank's part of a weight in its place, as the type that is there: in tensors by
        the parameters' names, or the parameters themselves."""
        weight_OI = weight_OI.contiguous()
        for p in self.pieces[module]:
            held = self._decoder.get_parameter(p.parameter) if into is None else into[p.parameter]
            _strided(held.detach(), p.here).copy_(_strided(weight_OI, p.there))

    def _group(self, module: str) -> Group:
        groups = self._decoder.groups
        group = groups.etp if ".experts." in module else groups.tp
        return group if group.size > 1 else ALONE


def _layer(name: str) -> str:
    """The number of the layer a name belongs to; empty for the head."""
    parts = name.split(".")
    return parts[1] if parts[0] == "layers" else ""


def _side(decoder: Decoder, layers: Collection[str]) -> Side:
    """The canonical tensors of some layers, each stored as it is."""
    config = replace(decoder.config, num_mtp_layers=0)
    model = Model(config, VOCABULARY)
    kind = named("float32")
    canonical = {
        name: GlobalTensor(name=name, shape=tuple(model.shape(pattern)), dtype=kind)
        for pattern, entry in VOCABULARY.items()
        if entry.flag is None or model.value(entry.flag)
        for name in model.names(pattern)
        if _layer(name) in layers
    }
    return Side(
        dialect="hf",
        tensors=tuple(canonical.values()),
        placements={n: Placement.identity(n, t.shape) for n, t in canonical.items()},
        canonical=canonical,
        config=config,
    )


def _strided(tensor: Tensor, p: Placement) -> Tensor:
    """The elements of a tensor that a placement names, in its shape."""
    steps = tensor.stride()
    start = tensor.storage_offset() + sum(b * s for b, s in zip(p.base, steps, strict=True))
    strides = [m * steps[d] for m, d in zip(p.mults, p.dims, strict=True)]
    return tensor.as_strided(p.shape, strides, start)


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
