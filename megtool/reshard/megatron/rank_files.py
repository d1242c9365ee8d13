"""From ranks: the legacy `mp_rank_*` files, read as tensors of the model and their state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.rechunk import regroup
from megtool.config import ModelConfig, ParallelConfig
from megtool.convert.rank_parameters import EMBEDDING, OUTPUT, Parameter, boxes_of_rank
from megtool.convert.sharding import Glu, rule_of
from megtool.errors import FormatError, LayoutError
from megtool.parallel.pipeline_split import Pipeline
from megtool.reshard.megatron.box_runs import Collected, boxes_of
from megtool.reshard.megatron.bucket_decoding import Bucket, Holder, decode
from megtool.reshard.megatron.dp_reshardable import bucket_sizes
from megtool.reshard.megatron.local_names import to_global
from megtool.reshard.megatron.master_weight_check import check_copies
from megtool.reshard.megatron.non_distributed_optimizer import from_groups, has_numbered
from megtool.reshard.megatron.rank_extra_state import remember
from megtool.reshard.megatron.rank_objects import rank_objects
from megtool.tensors.sharded import GlobalTensor

_WEIGHT = re.compile(r"([^/]+)/model_optim_rng/model(\d*)/(.+)")
_FLAT = re.compile(
    r"([^/]+)/distrib_optim/(?:(\d+)/)?(\d+)/torch\.(\w+),torch\.(\w+)/(?:(\w+)|([^/]+)/(\d+))"
)
_BUFFERS = (".expert_bias", ".inv_freq", ".local_tokens_per_expert")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's place; `expert_tp` is its rank among those that cut experts."""

    tp: int
    pp: int
    ep: int
    expert_tp: int


@dataclass(frozen=True, slots=True)
class _Held:
    """A rank's tensor: its stored name, and which parameter it is."""

    stored: str
    parameter: Parameter


def from_ranks(
    catalogue: Catalogue,
    config: ModelConfig,
    parallel: ParallelConfig,
    *,
    whole: bool = False,
    alike: bool = True,
) -> Catalogue:
    """The catalogue with every rank's tensors in model space, one per layer, and their objects.

    `parallel` is the layout the checkpoint was saved at. `alike` demands that what several ranks
    hold is the same on all.

    Raises:
        FormatError: ranks that do not fit the layout or disagree, or an optimizer of another model.
    """
    held = dict(_parameters(catalogue, config, parallel))
    small, merged = rank_objects(catalogue, ranks_of(catalogue, parallel), config, parallel)
    catalogue = replace(
        catalogue,
        objects=catalogue.objects | small,
        metadata=remember(catalogue.metadata, merged),
    )
    collected = Collected()
    for found in held.values():
        for one in found:
            kind = catalogue[one.stored].dtype
            p = one.parameter
            tensor = GlobalTensor(name=p.key, shape=p.shape, dtype=kind)
            row = catalogue.shards.of(catalogue.index[one.stored]).start
            for box, position in boxes_of(p, 0, p.numel):
                collected.add(tensor, box, row, position)
    out = regroup(catalogue, lambda n: _WEIGHT.fullmatch(n) is None, collected.regrouping())
    if has_numbered(out):
        members: dict[str, list[Parameter]] = {}
        for (folder, _), found in sorted(held.items()):
            own = [one.parameter for one in found if not one.parameter.key.endswith(_BUFFERS)]
            members.setdefault(folder, []).extend(own)
        out = from_groups(out, members, whole=whole)
    elif holders := list(_holders(out, held, parallel)):
        out = decode(out, holders, lambda n: _FLAT.fullmatch(n) is not None, whole=whole)
    if alike:
        check_copies(out, whole=whole)
    return out


def _parameters(
    catalogue: Catalogue, config: ModelConfig, parallel: ParallelConfig
) -> Iterator[tuple[tuple[str, int], list[_Held]]]:
    """What every rank folder's chunks hold, in the order of the file."""
    listed: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for t in catalogue.tensors:
        if match := _WEIGHT.fullmatch(t.name):
            listed.setdefault((match[1], int(match[2] or 0)), []).append((t.name, match[3]))
    for alias, first in catalogue.metadata.get("aliases", {}).items():
        match = _WEIGHT.fullmatch(alias)  # two names for one tensor: another checkpoint has both
        if match and first in catalogue:
            listed.setdefault((match[1], int(match[2] or 0)), []).append((first, match[3]))
    ranks = ranks_of(catalogue, parallel)
    _check_version(catalogue)
    _check_stages(catalogue, listed, ranks)
    pipeline = Pipeline.of(parallel)
    for (folder, chunk), names in listed.items():
        rank = ranks[folder]
        if chunk >= parallel.vpp:
            raise FormatError(
                f"a model chunk {chunk}, but vpp={parallel.vpp} in the args",
                file=catalogue.root / folder,
            )
        layers = pipeline.layers_of(config.num_layers, rank.pp, chunk)
        first_expert = rank.ep * config.num_experts // parallel.ep
        renamed = [
            (stored, to_global(key, first_layer=layers.start, first_expert=first_expert))
            for stored, key in names
        ]
        tensors = [replace(catalogue[stored], name=g.key) for stored, g in renamed]
        glu = Glu(tensors, [t.name for t in tensors], config.gated)
        yield (
            (folder, chunk),
            [
                _Held(stored, _parameter(t, g.expert, rank, glu, config, parallel))
                for t, (stored, g) in zip(tensors, renamed, strict=True)
            ],
        )


def _check_version(catalogue: Catalogue) -> None:
    """Refuse files whose rows of queries, keys and values lie in another order.

    Source: `fix_query_key_value_ordering` in Megatron-LM's checkpointing.py.
    """
    version = catalogue.metadata.get("checkpoint_version")
    if isinstance(version, int | float) and 2 <= version < 4:
        return
    first = next(iter(catalogue.metadata["ranks"]))
    raise FormatError(
        f"checkpoint_version {version!r:.20}, and only 2 and 3 are known",
        file=catalogue.root / first / "model_optim_rng.pt",
        hint="rows of queries, keys and values lie in another order before version 2: load it with "
        "Megatron-LM, which puts them right, and save it again",
    )


def _check_stages(
    catalogue: Catalogue,
    listed: Mapping[tuple[str, int], Sequence[tuple[str, str]]],
    ranks: Mapping[str, Rank],
) -> None:
    """All ranks of a pipeline stage hold the same tensors, of the same shapes and types.

    Raises:
        FormatError: one lacks a tensor, or has another; names it, the file and a rank that differs.
    """
    first: dict[tuple[int, int], str] = {}
    facts: dict[tuple[str, int], dict[str, GlobalTensor]] = {}
    for at, names in listed.items():
        facts[at] = {key: catalogue[stored] for stored, key in names if not key.endswith(_OWN)}
    chunks = {chunk for _, chunk in listed}
    for folder, rank in ranks.items():
        for chunk in chunks:
            other = first.setdefault((rank.pp, chunk), folder)
            mine, theirs = facts.get((folder, chunk), {}), facts.get((other, chunk), {})
            for key in sorted(mine.keys() ^ theirs.keys())[:1]:
                lacks, has = (folder, other) if key in theirs else (other, folder)
                raise FormatError(
                    f"is missing, and {has} of the same pipeline stage has it",
                    file=catalogue.root / lacks / "model_optim_rng.pt",
                    tensor=key,
                    hint=_MIXED,
                )
            for key, t in mine.items():
                o = theirs[key]
                if (t.shape, t.dtype) != (o.shape, o.dtype):
                    raise FormatError(
                        f"is {list(t.shape)} {t.dtype.name}, and {list(o.shape)} {o.dtype.name} "
                        f"in {other} of the same pipeline stage",
                        file=catalogue.root / folder / "model_optim_rng.pt",
                        tensor=key,
                        hint=_MIXED,
                    )


_OWN = "._extra_state"
_MIXED = "the file is damaged or of another checkpoint: copy it again, or take another iteration"


def _parameter(
    t: GlobalTensor,
    expert: int | None,
    rank: Rank,
    glu: Glu,
    config: ModelConfig,
    parallel: ParallelConfig,
) -> Parameter:
    """A rank's tensor as a part of the model's."""
    rule = rule_of(t.name, glu(t.name))
    ranks, which = (parallel.etp, rank.expert_tp) if expert is not None else (parallel.tp, rank.tp)
    shape = list(t.shape)
    if rule.tp_dim and shape:
        shape[rule.tp_dim] *= ranks
    boxes = boxes_of_rank(t.name, tuple(shape), rule, ranks, which)
    key, registered_as = t.name, ""
    is_tied = (
        parallel.pp > 1
        and (config.tied_embeddings or (config.num_mtp_layers > 0 and key == EMBEDDING))
        and key in (EMBEDDING, OUTPUT)
    )
    if is_tied and key == OUTPUT:
        key, registered_as = EMBEDDING, OUTPUT
    if expert is not None:
        shape = [config.num_experts, *shape]
        boxes = tuple(((expert, *lo), (expert + 1, *hi)) for lo, hi in boxes)
    return Parameter(
        key=key,
        shape=tuple(shape),
        dtype=t.dtype.name,
        boxes=boxes,
        is_expert=expert is not None,
        expert=expert or 0,
        is_shared=is_tied,
        registered_as=registered_as,
    )


def ranks_of(catalogue: Catalogue, parallel: ParallelConfig) -> dict[str, Rank]:
    """The place of every rank folder."""
    out: dict[str, Rank] = {}
    for folder, (tp, pp, ep) in catalogue.metadata["ranks"].items():
        place = Rank(tp, pp or 0, ep or 0, expert_rank(tp, ep or 0, parallel))
        if place.tp >= parallel.tp or place.pp >= parallel.pp or place.ep >= parallel.ep:
            raise FormatError(
                f"a rank outside of tp={parallel.tp} pp={parallel.pp} ep={parallel.ep}, "
                "which the args say",
                file=catalogue.root / folder,
                hint="the folder belongs to another checkpoint",
            )
        out[folder] = place
    return out


def expert_rank(tp: int, ep: int, parallel: ParallelConfig) -> int:
    """Which part of its experts the folder of a (tp, ep) rank holds.

    Ranks of a stage count tensors first, and for experts their own tensor ranks first, then `ep`.
    """
    most = parallel.tp * parallel.etp * parallel.ep
    for i in range(tp, most, parallel.tp):
        if i // parallel.etp % parallel.ep == ep:
            return i % parallel.etp
    raise LayoutError(f"no rank has tp={tp} and ep={ep} at etp={parallel.etp}")


def _holders(
    catalogue: Catalogue,
    held: Mapping[tuple[str, int], list[_Held]],
    parallel: ParallelConfig,
) -> Iterator[Holder]:
    """Every flat buffer of every rank's distrib_optim.pt, with the parameters in it."""
    buffers: dict[tuple[str, int, int, str], dict[str, dict[int, GlobalTensor]]] = {}
    chained: set[str] = set()
    for t in catalogue.tensors:
        match = _FLAT.fullmatch(t.name)
        if match is None:
            continue
        folder, chain, number, dtype = match[1], match[2], int(match[3]), match[4]
        if chain is not None:
            chained.add(folder)
        state, bucket = match[6] or match[7], int(match[8] or 0)
        key = (folder, int(chain or 0), number, dtype)
        buffers.setdefault(key, {}).setdefault(state, {})[bucket] = t
    per_folder: dict[tuple[str, int], int] = {}
    for folder, chain, _, _ in buffers:
        per_folder[folder, chain] = per_folder.get((folder, chain), 0) + 1
    candidates = bucket_sizes(catalogue)
    for (folder, chain, number, dtype), states in sorted(buffers.items()):
        chunks = [
            [
                one.parameter
                for one in held.get((folder, chunk), [])
                if not one.parameter.key.endswith(_BUFFERS)
                and (parallel.ep == 1 or one.parameter.is_expert == bool(chain))
            ]
            for chunk in range(parallel.vpp)
        ]
        # Buffers are numbered over those chunks that have any parameters of the chain.
        filled = [found for found in chunks if found]
        dtypes = max(per_folder[folder, chain] // max(len(filled), 1), 1)
        if number >= dtypes * len(filled):
            raise FormatError(
                f"flat buffer {number} of optimizer {chain}, for {len(filled)} model chunks",
                file=catalogue.root / folder / "distrib_optim.pt",
                hint="the file is of another layout than the args; --optimizer none leaves it out",
            )
        members = [p for p in filled[number // dtypes] if dtypes == 1 or p.dtype == dtype]
        first = next(iter(states.values()))
        whole = len(first) == 1
        yield Holder(
            members=members,
            buckets=[
                Bucket(
                    first[k].numel,
                    {s: parts[k].name for s, parts in states.items() if k in parts},
                )
                for k in sorted(first)
            ],
            is_coalesced=whole,
            bucket_sizes=candidates,
        )
