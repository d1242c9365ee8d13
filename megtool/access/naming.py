"""The tensors of a checkpoint as another program calls and cuts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megtool.access.rank_cut import cut_for_rank
from megtool.convert.canonical_view import CanonicalView, TargetView
from megtool.convert.dialects import (
    STATE_FIRST,
    DialectNaming,
    detect_dialect,
    read_side,
    write_side,
)
from megtool.convert.megatron.names import split_optimizer
from megtool.convert.megatron.rank_parameters import rank_parameters
from megtool.convert.rank_tensors import (
    LocalTensor,
    RankCoordinates,
    local_tensors,
    whole_tensor,
)
from megtool.dtypes import DType
from megtool.errors import LayoutError, MappingError, MegtoolError, UsageError
from megtool.megatron_state.saved_objects import vocab_divisor
from megtool.options.layout import ParallelConfig
from megtool.parallel.mesh import Mesh
from megtool.process.gc_pause import paused_collection
from megtool.source.checkpoint import CheckpointSource, unknown_model
from megtool.tensors.catalogue import Catalogue

NAMINGS = ("stored", "hf", "megatron", "torchtitan")
"""`stored`: the checkpoint's own names; `hf`: those of a Hugging Face folder; `megatron`: those of
Megatron's modules, one key per layer; `torchtitan`: those of its models, experts stacked."""

_EMBEDDING, _HEAD = "tok_embeddings.weight", "lm_head.weight"
"""Of a model that ties them, torchtitan's state dict has both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensors:
    """Tensors by name, as boxes of those of `target`, which was planned from `source`."""

    naming: str
    tensors: Mapping[str, LocalTensor]
    dtypes: Mapping[str, DType]
    source: CanonicalView
    target: TargetView


@paused_collection()
def name_tensors(
    source: CheckpointSource,
    naming: str,
    *,
    parallel: ParallelConfig | None = None,
    rank: int = 0,
    dtype: DType | None = None,
) -> NamedTensors:
    """The tensors of a checkpoint under a naming; with `parallel`, those of one rank.

    Floating model weights are cast to `dtype`, if it is given. A rank has model weights alone.

    Raises:
        UsageError: the naming is unknown, or stored tensors would be cut.
        MappingError: the naming needs a family that is not known, or has no place for a tensor.
        LayoutError: the layout does not divide the model, or has no such rank.
    """
    if naming not in NAMINGS:
        raise UsageError(f"the naming {naming!r} is unknown", hint=f"known: {', '.join(NAMINGS)}")
    if naming == "hf" and source.view.dialect == "megatron":
        source.check_config()  # whoever loads them has the class's settings
    view = _canonical_view(source, naming)
    if parallel is not None:
        if view.dialect == "identity":
            raise UsageError(
                f"tensors by their {naming!r} names are not cut: the model is not known",
                file=source.path,
                hint="--family NAME and --like HF_FOLDER say which model it is",
            )
        view = replace(view, canonical={n: t for n, t in view.canonical.items() if ":" not in n})
    options = DialectNaming(
        divisible_by=vocab_divisor(source.catalogue) if naming == "megatron" else 1,
        state_names=STATE_FIRST,
    )
    target = write_side(
        view,
        dialect=view.dialect if view.dialect == "identity" else naming,
        config=source.known_config,
        dtype=dtype,
        parallel=parallel if naming == "megatron" else None,
        per_layer=True if naming == "megatron" else None,
        options=options,
    )
    tensors = {t.name: whole_tensor(t) for t in target.tensors}
    dtypes = {t.name: t.dtype for t in target.tensors}
    if parallel is not None:
        tensors = _of_rank(source, view, target, naming, parallel, rank)
    if naming == "torchtitan" and _HEAD not in tensors and (tied := tensors.get(_EMBEDDING)):
        tensors[_HEAD] = replace(tied, name=_HEAD)
    dtypes = {name: dtypes[t.key] for name, t in tensors.items()}
    return NamedTensors(naming=naming, tensors=tensors, dtypes=dtypes, source=view, target=target)


def fitting_namings(
    source: CheckpointSource,
    naming: str | None = None,
    *,
    parallel: ParallelConfig | None = None,
    rank: int = 0,
    reasons: dict[str, MegtoolError] | None = None,
) -> Iterator[NamedTensors]:
    """The tensors under `naming`, or under one naming after another of those that they have.

    Why a naming is left out is added to `reasons`, by its name.

    Raises:
        MegtoolError: `naming` is none of theirs; see `name_tensors`.
    """
    if naming is not None:
        yield name_tensors(source, naming, parallel=parallel, rank=rank)
        return
    for candidate in NAMINGS:
        try:
            named = name_tensors(source, candidate, parallel=parallel, rank=rank)
        except (MappingError, UsageError) as e:
            if reasons is not None:
                reasons[candidate] = e
            continue
        yield named
        if candidate == "stored" and (keyed := _by_keys_in_parts(source, named)) is not None:
            yield keyed


def _by_keys_in_parts(source: CheckpointSource, named: NamedTensors) -> NamedTensors | None:
    """Name weights by their keys in the parts of a nested state dict, such as `{"app": {"model"`.

    A key that several parts have is left out. None if no part is nested.
    """
    paths = source.catalogue.metadata.get("planner_data")
    names: dict[str, list[str]] = {}
    for name, path in (paths if isinstance(paths, dict) else {}).items():
        if name in named.tensors and not split_optimizer(name)[0] and isinstance(path, tuple):
            names.setdefault(str(path[-1]), []).append(name)
    alone = {key: same_key[0] for key, same_key in names.items() if len(same_key) == 1}
    if all(key == name for key, name in alone.items()):
        return None
    return replace(
        named,
        tensors={key: replace(named.tensors[n], name=key) for key, n in alone.items()},
        dtypes={key: named.dtypes[n] for key, n in alone.items()},
    )


def name_as_stored(catalogue: Catalogue) -> NamedTensors:
    """The tensors of a catalogue under their own names, whatever model they are of."""
    side = read_side(catalogue.tensors, dialect="identity")
    target = write_side(side, dialect="identity")
    return NamedTensors(
        naming="stored",
        tensors={t.name: whole_tensor(t) for t in target.tensors},
        dtypes={t.name: t.dtype for t in target.tensors},
        source=side,
        target=target,
    )


def _canonical_view(source: CheckpointSource, naming: str) -> CanonicalView:
    """The side that is read: canonical tensors, or the stored ones under their own names.

    Raises:
        MappingError: other names are needed, and the model is not known.
    """
    stored = read_side(source.catalogue.tensors, dialect="identity")
    if naming == "stored":
        return stored
    if source.view.dialect != "identity":
        return source.view
    if detect_dialect([t.name for t in source.catalogue.tensors]) == naming:
        return stored
    raise source.reason or unknown_model(source, f"{naming!r} names are asked for")


def _of_rank(
    source: CheckpointSource,
    view: CanonicalView,
    target: TargetView,
    naming: str,
    parallel: ParallelConfig,
    rank: int,
) -> dict[str, LocalTensor]:
    seat = seat_of(parallel, rank)
    if naming != "megatron":
        return cut_for_rank(view, target, source.config, parallel, seat)
    ranks = rank_parameters(target.tensors, target.config or source.config, parallel)
    return local_tensors(ranks, seat, num_chunks=parallel.vpp)


def seat_of(parallel: ParallelConfig, rank: int) -> RankCoordinates:
    """The coordinates of a rank, counted in Megatron's order: `tp` first, then `cp`, `dp`, `pp`.

    Raises:
        LayoutError: the layout has no such rank.
    """
    if not isinstance(rank, int) or not 0 <= rank < parallel.world_size:
        raise LayoutError(
            f"rank {rank!r} is none of the layout's {parallel.world_size}",
            hint=f"ranks are 0 to {parallel.world_size - 1}",
        )
    position = Mesh(parallel).position(rank)
    return RankCoordinates(
        stage=int(position["pp"]),
        tp=int(position["tp"]),
        ep=int(position["ep"]),
        etp=int(position["etp"]),
    )
