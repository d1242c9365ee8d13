"""Layout: the tensors of a GGUF file, their types, and what fills each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megtool.checkpoint.computed_tensors import Feed
from megtool.config import ModelConfig
from megtool.convert.binding import Binding, WrittenBinding, summarize
from megtool.convert.canonical import VOCABULARY, CanonicalModel
from megtool.convert.families import Family
from megtool.dtypes import DType, dtype
from megtool.errors import MappingError
from megtool.export.gguf.architectures import Architecture
from megtool.export.gguf.block_encoder import PlusOne, encoded
from megtool.export.gguf.header import Typed
from megtool.export.gguf.rope_scaling import Factors
from megtool.export.gguf.tensor_types import PLAIN, fits, type_of
from megtool.reshard.constant_feed import Given
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a file is to hold: `placements` are copied and cast by the plan, `feeds` computed.

    `fallen_back` are the names of weights whose rows are no whole blocks: they are F16.
    """

    tensors: list[Typed]
    placements: dict[str, Placement]
    feeds: list[Feed] = field(default_factory=list)
    fallen_back: list[str] = field(default_factory=list)


def contents(
    canonical: Mapping[str, GlobalTensor],
    source: Mapping[str, Placement],
    stored: Mapping[str, DType],
    config: ModelConfig,
    family: Family,
    architecture: Architecture,
    *,
    kind: str,
    factors: Factors,
) -> Contents:
    """The tensors of a file of this kind.

    `canonical` are the model's tensors, `source` where each lies in the source, and `stored` the
    element types of the source's tensors (decoded, where they are packed).

    Raises:
        MappingError: a tensor has no name in this architecture.
    """
    written = _named(canonical, config, family, architecture)
    out = Contents(tensors=[], placements={})
    typed: dict[str, Typed] = {}
    shapes = {t.name: t for t in written.tensors}
    for tensor in written.tensors:
        wanted = type_of(tensor.name, tensor.shape, kind, tied=config.tied_embeddings)
        if not fits(wanted, tensor.shape):
            out.fallen_back.append(tensor.name)
            wanted = "F16"
        typed[tensor.name] = Typed(name=tensor.name, shape=tensor.shape, kind=wanted)
    for name, to in written.placements.items():
        made, at = typed[to.stored], source[name]
        taken = _taken_as(stored[at.stored])
        if architecture.norms_plus_one and to.stored.endswith("_norm.weight"):
            out.feeds.append(PlusOne(placement=at, dtype=taken, tensor=made.held))
        elif made.kind in PLAIN:
            out.placements[name] = to
        else:
            feeds = encoded(at, taken, to, shapes[to.stored], made.kind, made.held)
            out.feeds.extend(feeds)
    for name, values in factors.items():
        typed[name] = Typed(name=name, shape=values.shape, kind="F32")
        out.feeds.append(Given(values=((typed[name].held, values),)))
    out.tensors.extend(typed.values())
    return out


def _named(
    canonical: Mapping[str, GlobalTensor],
    config: ModelConfig,
    family: Family,
    architecture: Architecture,
) -> WrittenBinding:
    """The tensors under GGUF's names.

    Raises:
        MappingError: some have none.
    """
    model = CanonicalModel(config, {**VOCABULARY, **family.vocabulary})
    out = Binding(architecture.table, model).write(canonical)
    if out.unplaced:
        raise MappingError(
            f"{len(out.unplaced)} tensors have no place in a GGUF file of architecture "
            f"{architecture.name!r}: {summarize(out.unplaced)}",
            tensor=out.unplaced[0],
            hint="--to hf writes them",
        )
    return out


def _taken_as(held: DType) -> DType:
    """The type in which elements are taken: their own, or float32."""
    return held if held.name in PLAIN.values() else dtype("float32")
