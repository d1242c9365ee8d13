"""Plan the tensors of a GGUF file, their types, and what fills each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megtool.convert.families.family import Family
from megtool.convert.language.binding import Binding, WrittenBinding, summarize
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel
from megtool.dtypes import DType, dtype
from megtool.errors import MappingError
from megtool.export.gguf.architecture import Architecture
from megtool.export.gguf.block_encoder import UNCHANGED, Change, plan_encoding
from megtool.export.gguf.carried_blocks import NVFP4, CarriedWeight, find_carried, plan_carried
from megtool.export.gguf.file_types import FileType, assign_types
from megtool.export.gguf.header import INTEGER, PLAIN, GgufTensor
from megtool.export.gguf.importance import ImportanceMatrix, column_weights
from megtool.export.gguf.integer_table import IntegerFeed
from megtool.export.gguf.latent_split import HALVES_OF_KV
from megtool.export.gguf.metadata_keys import build_rope_factors
from megtool.spec.model_config import ModelConfig
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import TensorFeed
from megtool.transport.constant_feed import ConstantFeed


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufContents:
    """What a file is to hold: `placements` are copied and cast by the plan, `feeds` computed.

    `fallen_back` are weights whose rows are no whole blocks of their type, and what they are
    instead; `carried` are those whose codes and scales are the source's. `named` says where weights
    lie, with their canonical names, and `weighed` counts those whose columns have weights.
    """

    tensors: list[GgufTensor]
    placements: dict[str, Placement]
    feeds: list[TensorFeed] = field(default_factory=list)
    fallen_back: dict[str, str] = field(default_factory=dict)
    carried: dict[str, CarriedWeight] = field(default_factory=dict)
    named: list[Placement] = field(default_factory=list)
    weighed: int = 0


def plan_gguf_tensors(
    canonical: Mapping[str, GlobalTensor],
    source: Mapping[str, Placement],
    catalogue: Catalogue,
    config: ModelConfig,
    family: Family,
    architecture: Architecture,
    *,
    file_type: FileType,
    importance: ImportanceMatrix | None = None,
) -> GgufContents:
    """The tensors of a file of this type.

    `canonical` are the model's tensors, and `source` says where each lies in `catalogue`.

    Raises:
        CalibrationError: the importance matrix does not fit a weight.
        MappingError: a tensor has no name in this architecture.
    """
    written = _bind_names(canonical, config, family, architecture)
    typed: dict[str, GgufTensor] = {}
    changes = architecture.changes(config) if architecture.changes else {}
    shapes = {t.name: t for t in written.tensors}
    floats = {n: t.shape for n, t in shapes.items() if t.dtype.is_float}
    carried: dict[str, CarriedWeight] = {}
    if file_type.base == NVFP4:
        changed = {
            to.stored
            for n, to in written.placements.items()
            if _find_change(n, to.stored, changes, architecture) != UNCHANGED
        }
        unchanged = {n: to for n, to in written.placements.items() if to.stored not in changed}
        carried = find_carried(
            catalogue, source, unchanged, {n: t.shape for n, t in shapes.items()}
        )
    types, fallen_back = assign_types(
        floats,
        file_type,
        config,
        architecture.name,
        has_importance=importance is not None,
        carried=carried,
    )
    out = GgufContents(
        tensors=[],
        placements={},
        fallen_back=fallen_back,
        carried=carried,
        named=list(written.placements.values()),
    )
    for tensor in written.tensors:
        kind = types.get(tensor.name, INTEGER)
        typed[tensor.name] = GgufTensor(name=tensor.name, shape=tensor.shape, kind=kind)
    weighed: set[str] = set()
    for name, to in written.placements.items():
        target, placement = typed[to.stored], source[name]
        if target.kind == INTEGER:
            out.feeds.append(IntegerFeed(placement=placement, tensor=target.stored))
            continue
        if target.kind == NVFP4:
            out.feeds.extend(plan_carried(carried[to.stored], to, target.stored))
            continue
        read_as = _read_type(catalogue[placement.stored].dtype)
        change = _find_change(name, to.stored, changes, architecture)
        if target.kind in PLAIN and change == UNCHANGED:
            out.placements[name] = to
            continue
        weights = None
        if target.kind not in PLAIN:
            weights = column_weights(importance, to, shapes[to.stored].shape[-1])
        feeds = plan_encoding(
            placement, read_as, to, shapes[to.stored], target.kind, target.stored, change, weights
        )
        weighed.update(to.stored for f in feeds if f.importance is not None)
        out.feeds.extend(feeds)
    constants = architecture.constants(config) if architecture.constants else {}
    scales = {f"{n.removesuffix('weight')}scale": w.scales for n, w in carried.items()}
    for name, values in {**build_rope_factors(config), **constants, **scales}.items():
        typed[name] = GgufTensor(name=name, shape=values.shape, kind="F32")
        out.feeds.append(ConstantFeed(values=((typed[name].stored, values),)))
    out.tensors.extend(typed.values())
    return replace(out, weighed=len(weighed))


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
