"""Plan the tensors of a GGUF file, their types, and what fills each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megtool.checkpoint.computed_tensors import TensorFeed
from megtool.convert.binding import Binding, WrittenBinding, summarize
from megtool.convert.canonical import VOCABULARY, CanonicalModel
from megtool.convert.families import Family
from megtool.dtypes import DType, dtype
from megtool.errors import MappingError, UsageError
from megtool.export.gguf.architecture import Architecture
from megtool.export.gguf.block_encoder import UNCHANGED, Change, plan_encoding
from megtool.export.gguf.header import INTEGER, PLAIN, GgufTensor
from megtool.export.gguf.integer_table import IntegerFeed
from megtool.export.gguf.latent_split import HALVES_OF_KV
from megtool.export.gguf.metadata_keys import RopeFactors
from megtool.model_config import ModelConfig
from megtool.number_formats.gguf import block, encodings
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
    changes = architecture.changes(config) if architecture.changes else {}
    shapes = {t.name: t for t in written.tensors}
    for tensor in written.tensors:
        if not tensor.dtype.is_float:
            typed[tensor.name] = GgufTensor(name=tensor.name, shape=tensor.shape, kind=INTEGER)
            continue
        type_name = choose_tensor_type(tensor.name, tensor.shape, kind, tied=config.tied_embeddings)
        if not has_whole_blocks(type_name, tensor.shape):
            out.fallen_back.append(tensor.name)
            type_name = "F16"
        typed[tensor.name] = GgufTensor(name=tensor.name, shape=tensor.shape, kind=type_name)
    for name, to in written.placements.items():
        target, placement = typed[to.stored], source[name]
        if target.kind == INTEGER:
            out.feeds.append(IntegerFeed(placement=placement, tensor=target.stored))
            continue
        read_as = _read_type(stored[placement.stored])
        change = _find_change(name, to.stored, changes, architecture)
        if target.kind in PLAIN and change == UNCHANGED:
            out.placements[name] = to
            continue
        feeds = plan_encoding(
            placement, read_as, to, shapes[to.stored], target.kind, target.stored, change
        )
        out.feeds.extend(feeds)
    constants = architecture.constants(config) if architecture.constants else {}
    for name, values in {**factors, **constants}.items():
        typed[name] = GgufTensor(name=name, shape=values.shape, kind="F32")
        out.feeds.append(ConstantFeed(values=((typed[name].stored, values),)))
    out.tensors.extend(typed.values())
    return out


_NORM_PLUS_ONE = Change(shift=1.0)
_NUMBER = re.compile(r"\.\d+\.")


def _find_change(
    name: str, stored: str, changes: Mapping[str, Change], architecture: Architecture
) -> Change:
    """What becomes of the numbers of a canonical tensor, by its name without numbers."""
    is_norm = stored.endswith("norm.weight") and "ssm_norm" not in stored
    if architecture.norms_plus_one and is_norm:
        return _NORM_PLUS_ONE
    return changes.get(_NUMBER.sub(".", name), UNCHANGED)


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
    further = HALVES_OF_KV if architecture.is_latent else {}
    model = CanonicalModel(config, {**VOCABULARY, **family.vocabulary, **further})
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


_SMALL = ("_norm.", "ffn_gate_inp", "ssm_conv1d", "hc_", "_ape.")
_ENDS = ("token_embd.weight", "output.weight")
_FINER = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
_TERNARY = ("TQ1_0", "TQ2_0")


def parse_tensor_type(text: str) -> str:
    """GGUF's name of the type asked for.

    Raises:
        UsageError: there is none, or the installed package does not encode it.
        MissingPackageError: the gguf package is not installed.
    """
    name = text.upper()
    if name not in encodings():
        raise UsageError(
            f"--outtype is {text!r}, which is no type that the gguf package encodes",
            hint="one of " + ", ".join(k.lower() for k in encodings()),
        )
    return name


def choose_tensor_type(name: str, shape: Sequence[int], kind: str, *, tied: bool) -> str:
    """The type of one tensor of a file of this kind, where blocks divide its rows.

    Vectors, norms, routers, short convolutions, hyper-connections and position biases are F32. The
    output matrix (the embedding, where it serves as such) is Q8_0 in files of four and five bits:
    llama.cpp makes it Q6_K, which its package cannot encode. Ternary files have both ends in F16,
    and MXFP4 is for experts alone, beside Q8_0.
    """
    is_small = any(x in name for x in _SMALL)
    if len(shape) < 2 or is_small or not name.endswith(".weight"):
        return "F32"
    if kind in PLAIN:
        return kind
    if kind in _TERNARY and name in _ENDS:
        return "F16"
    if kind in _FINER and name == _ENDS[not tied]:
        return "Q8_0"
    if kind == "MXFP4" and "_exps." not in name:
        return "Q8_0"
    return kind


def has_whole_blocks(kind: str, shape: Sequence[int]) -> bool:
    """Whether rows of a tensor are whole blocks."""
    return kind in PLAIN or shape[-1] % block(kind)[0] == 0
