"""Plan the tensors of a GGUF file, their types, and what fills each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megtool.checkpoint.computed_tensors import TensorFeed
from megtool.config import ModelConfig
from megtool.convert.binding import Binding, WrittenBinding, summarize
from megtool.convert.canonical import VOCABULARY, CanonicalModel
from megtool.convert.families import Family
from megtool.dtypes import DType, dtype
from megtool.errors import MappingError
from megtool.export.gguf.architectures import Architecture
from megtool.export.gguf.block_encoder import NormPlusOne, plan_encoding
from megtool.export.gguf.header import GgufTensor
from megtool.export.gguf.rope_scaling import RopeFactors
from megtool.export.gguf.tensor_types import PLAIN, choose_tensor_type, has_whole_blocks
from megtool.reshard.constant_feed import ConstantFeed
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufContents:
    """What a file is to hold: `placements` are copied and cast by the plan, `feeds` computed.

    `fallen_back` are the names of weights whose rows are no whole blocks: they are F16.
    """

    tensors: list[GgufTensor]
    placements: dict[str, Placement]
    feeds: list[TensorFeed] = field(default_factory=list)
    fallen_back: list[str] = field(default_factory=list)


def plan_gguf_tensors(
    canonical: Mapping[str, GlobalTensor],
    source: Mapping[str, Placement],
    stored: Mapping[str, DType],
    config: ModelConfig,
    family: Family,
    architecture: Architecture,
    *,
    kind: str,
    factors: RopeFactors,
) -> GgufContents:
    """The tensors of a file of this kind.

    `canonical` are the model's tensors, `source` where each lies in the source, and `stored` the
    element types of the source's tensors (decoded, where they are packed).

    Raises:
        MappingError: a tensor has no name in this architecture.
    """
    written = _bind_names(canonical, config, family, architecture)
    out = GgufContents(tensors=[], placements={})
    typed: dict[str, GgufTensor] = {}
    shapes = {t.name: t for t in written.tensors}
    for tensor in written.tensors:
        type_name = choose_tensor_type(tensor.name, tensor.shape, kind, tied=config.tied_embeddings)
        if not has_whole_blocks(type_name, tensor.shape):
            out.fallen_back.append(tensor.name)
            type_name = "F16"
        typed[tensor.name] = GgufTensor(name=tensor.name, shape=tensor.shape, kind=type_name)
    for name, to in written.placements.items():
        target, placement = typed[to.stored], source[name]
        read_as = _read_type(stored[placement.stored])
        if architecture.norms_plus_one and to.stored.endswith("_norm.weight"):
            out.feeds.append(NormPlusOne(placement=placement, dtype=read_as, tensor=target.stored))
        elif target.kind in PLAIN:
            out.placements[name] = to
        else:
            feeds = plan_encoding(
                placement, read_as, to, shapes[to.stored], target.kind, target.stored
            )
            out.feeds.extend(feeds)
    for name, values in factors.items():
        typed[name] = GgufTensor(name=name, shape=values.shape, kind="F32")
        out.feeds.append(ConstantFeed(values=((typed[name].stored, values),)))
    out.tensors.extend(typed.values())
    return out


def _bind_names(
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
            error_id="unsupported-by-engine",
        )
    return out


def _read_type(stored: DType) -> DType:
    """The type in which elements are taken: their own, or float32."""
    return stored if stored.name in PLAIN.values() else dtype("float32")
