"""Read Megatron's legacy `mp_rank_*` files as tensors of the model and their optimizer state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megtool.convert.megatron.names import EMBEDDING, OUTPUT
from megtool.convert.megatron.pre_core import core_names, is_classic_rank_name, order_qkv_rows
from megtool.convert.megatron.rank_parameters import (
    EVERYWHERE,
    Parameter,
    boxes_of_rank,
    in_buffer,
)
from megtool.convert.megatron.sharding import Glu, layers_of_stage, rule_of
from megtool.errors import FormatError, LayoutError
from megtool.megatron_state.extra_states.merge_ranks import with_merge
from megtool.megatron_state.local_names import to_global
from megtool.megatron_state.optimizer.box_runs import BoxRunCollector, split_into_boxes
from megtool.megatron_state.optimizer.bucket_decoding import Bucket, FlatBuffer, decode_buckets
from megtool.megatron_state.optimizer.dp_reshardable import candidate_bucket_sizes
from megtool.megatron_state.optimizer.master_weight_check import check_copies
from megtool.megatron_state.optimizer.non_distributed import (
    has_numbered_state,
    read_numbered_state,
)
from megtool.megatron_state.ranks.objects import read_rank_objects
from megtool.options.layout import ParallelConfig
from megtool.spec.model_config import ModelConfig
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.rechunk import rechunk

_WEIGHT = re.compile(r"([^/]+)/model_optim_rng/model(\d*)/(.+)")
_FLAT = re.compile(
    r"([^/]+)/distrib_optim/(?:(\d+)/)?(\d+)/torch\.(\w+),torch\.(\w+)/(?:(\w+)|([^/]+)/(\d+))"
)
_BUFFERS = (".expert_bias", ".tid2eid", ".inv_freq", ".local_tokens_per_expert")


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The rank of a folder; `expert_tp` is its rank among those that shard experts."""

    tp: int
    pp: int
    ep: int
    expert_tp: int


@dataclass(frozen=True, slots=True)
class _RankTensor:
    """A rank's tensor: its stored name and its parameter."""

    stored: str
    parameter: Parameter


def read_rank_files(
    catalogue: Catalogue,
    config: ModelConfig,
    parallel: ParallelConfig,
    *,
    verify_master_weights: bool = False,
    require_equal_copies: bool = True,
) -> Catalogue:
    """The catalogue with every rank's tensors in model space, one per layer, and their objects.

    `parallel` is the layout the checkpoint was saved at. `require_equal_copies`
    refuses copies of several ranks that differ.

    Raises:
        FormatError: ranks that do not fit the layout or disagree, or an optimizer of another model.
    """
    chunks = dict(_read_chunks(catalogue, config, parallel))
    rank_objects, merged = read_rank_objects(
        catalogue, list_ranks(catalogue, parallel), config, parallel
    )
    catalogue = replace(
        catalogue,
        objects=catalogue.objects | rank_objects,
        metadata=with_merge(catalogue.metadata, merged),
    )
    if conv_names := [t.name for t in catalogue.tensors if "mixer.conv1d" in t.name]:
        catalogue.metadata["conv_first"] = "mixer.conv1d_" in conv_names[0]
    collected = BoxRunCollector()
    for tensors in chunks.values():
        for rank_tensor in tensors:
            kind = catalogue[rank_tensor.stored].dtype
            p = rank_tensor.parameter
            if p.is_unused:
                continue
            tensor = GlobalTensor(name=p.key, shape=p.shape, dtype=kind)
            row = catalogue.shards.of(catalogue.index[rank_tensor.stored]).start
            for box, position in split_into_boxes(p, 0, p.numel):
                collected.add(tensor, box, row, position)
    out = rechunk(catalogue, lambda n: _WEIGHT.fullmatch(n) is None, collected.regrouping())
    if has_numbered_state(out):
        members: dict[str, list[Parameter]] = {}
        for (folder, _), tensors in sorted(chunks.items()):
            parameters = [
                rank_tensor.parameter
                for rank_tensor in tensors
                if not rank_tensor.parameter.key.endswith(_BUFFERS)
            ]
            members.setdefault(folder, []).extend(parameters)
        out = read_numbered_state(out, members, verify_master_weights=verify_master_weights)
    elif flat_buffers := list(_flat_buffers(out, chunks, parallel)):
        out = decode_buckets(
            out,
            flat_buffers,
            lambda n: _FLAT.fullmatch(n) is not None,
            verify_master_weights=verify_master_weights,
        )
    if require_equal_copies:
        check_copies(out, verify_master_weights=verify_master_weights)
    return out


def _read_chunks(
    catalogue: Catalogue, config: ModelConfig, parallel: ParallelConfig
) -> Iterator[tuple[tuple[str, int], list[_RankTensor]]]:
    """The tensors of every chunk in every rank folder, in the order of the file."""
    names_of: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for t in catalogue.tensors:
        if match := _WEIGHT.fullmatch(t.name):
            names_of.setdefault((match[1], int(match[2] or 0)), []).append((t.name, match[3]))
    for alias, first in catalogue.metadata.get("aliases", {}).items():
        match = _WEIGHT.fullmatch(alias)  # two names for one tensor: another checkpoint has both
        if match and first in catalogue:
            names_of.setdefault((match[1], int(match[2] or 0)), []).append((first, match[3]))
    ranks = list_ranks(catalogue, parallel)
    version = _check_version(catalogue, config)
    names_of = {place: _core_keys(names) for place, names in names_of.items()}
    _check_stages(catalogue, names_of, ranks)
    for (folder, chunk), names in names_of.items():
        rank = ranks[folder]
        if chunk >= parallel.vpp:
            raise FormatError(
                f"there is a model chunk {chunk}, but vpp={parallel.vpp} in the args",
                file=catalogue.root / folder,
            )
        layers = layers_of_stage(config, parallel, rank.pp, chunk)
        first_expert = rank.ep * config.moe.num_experts // parallel.ep
        renamed = [
            (stored, to_global(key, first_layer=layers.start, first_expert=first_expert))
            for stored, key in names
            # Megatron makes one where the encoder ends as well, and does not use it.
            if rank.pp >= parallel.encoder_pp or not key.startswith(_OUTPUT_LAYERS)
        ]
        tensors = [replace(catalogue[stored], name=g.key) for stored, g in renamed]
        glu = Glu(tensors, [t.name for t in tensors], config.mlp.gated)
        loaded = [
            _RankTensor(
                stored,
                _in_old_order(
                    _parameter(t, g.expert, rank, glu, config, parallel), version, config
                ),
            )
            for t, (stored, g) in zip(tensors, renamed, strict=True)
        ]
        yield (folder, chunk), _without_unused_output(loaded)


def _without_unused_output(tensors: Sequence[_RankTensor]) -> list[_RankTensor]:
    """A chunk's tensors, with the output layer marked that Megatron makes and does not use.

    With tied embeddings, the chunk of multi-token prediction computes with its own embedding.
    """
    if not any(t.parameter.module_key == EMBEDDING for t in tensors):
        return list(tensors)
    return [
        replace(t, parameter=replace(t.parameter, is_shared=False, is_unused=True))
        if t.parameter.registered_as == OUTPUT
        else t
        for t in tensors
    ]


def _core_keys(names: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Stored names with their keys, those of modules in modules as the core has them."""
    if not any(key.startswith("language_model/") for _, key in names):
        return names
    dotted = {key: key.replace("/", ".") for _, key in names}
    core = core_names(dotted.values())
    return [(stored, core.get(dotted[key], dotted[key])) for stored, key in names]


def _in_old_order(parameter: Parameter, version: float, config: ModelConfig) -> Parameter:
    """The parameter as a file before version 2 has its rows."""
    if version >= 2 or not parameter.key.endswith((".linear_qkv.weight", ".linear_qkv.bias")):
        return parameter
    try:
        boxes = order_qkv_rows(parameter.boxes, version, config.attention.head_dim)
    except ValueError as e:
        raise FormatError(
            f"its rows of queries, keys and values are no whole heads: {e}",
            tensor=parameter.key,
            hint=_MIXED_HINT,
        ) from e
    return replace(parameter, boxes=boxes)


def _check_version(catalogue: Catalogue, config: ModelConfig) -> float:
    """Return the version, by which rows of queries, keys and values lie in another order.

    Files of the core without a version, or with one before 2, are refused: the core never wrote
    such. Source: `fix_query_key_value_ordering` in Megatron-LM's checkpointing.py.
    """
    version = catalogue.metadata.get("checkpoint_version")
    is_classic = any(is_classic_rank_name(t.name) for t in catalogue.tensors)
    has_groups = config.attention.num_kv_heads != config.attention.num_heads
    least = 0 if is_classic and not has_groups else 2
    if isinstance(version, int | float) and least <= version < 4:
        return float(version)
    first = next(iter(catalogue.metadata["ranks"]))
    raise FormatError(
        f"checkpoint_version {version!r:.20}, and only 2 and 3 are known",
        file=catalogue.root / first / "model_optim_rng.pt",
        hint="rows of queries, keys and values are in another order before version 2: load it with "
        "Megatron-LM, which reorders them, and save it again",
    )


def _check_stages(
    catalogue: Catalogue,
    names_of: Mapping[tuple[str, int], Sequence[tuple[str, str]]],
    ranks: Mapping[str, RankFolder],
) -> None:
    """Check that all ranks of a pipeline stage have the same tensors, shapes and dtypes.

    Raises:
        FormatError: one lacks a tensor or has another one.
    """
    first: dict[tuple[int, int], str] = {}
    facts: dict[tuple[str, int], dict[str, GlobalTensor]] = {}
    for chunk_key, names in names_of.items():
        facts[chunk_key] = {
            key: catalogue[stored] for stored, key in names if not key.endswith(_EXTRA_STATE)
        }
    chunks = {chunk for _, chunk in names_of}
    for folder, rank in ranks.items():
        for chunk in chunks:
            reference = first.setdefault((rank.pp, chunk), folder)
            tensors, reference_tensors = (
                facts.get((folder, chunk), {}),
                facts.get((reference, chunk), {}),
            )
            for key in sorted(tensors.keys() ^ reference_tensors.keys())[:1]:
                lacks, has = (
                    (folder, reference) if key in reference_tensors else (reference, folder)
                )
                raise FormatError(
                    f"is missing, and {has} of the same pipeline stage has it",
                    file=catalogue.root / lacks / "model_optim_rng.pt",
                    tensor=key,
                    hint=_MIXED_HINT,
                )
            for key, t in tensors.items():
                expected = reference_tensors[key]
                if (t.shape, t.dtype) != (expected.shape, expected.dtype):
                    raise FormatError(
                        f"is {list(t.shape)} {t.dtype.name}, and {list(expected.shape)} "
                        f"{expected.dtype.name} in {reference} of the same pipeline stage",
                        file=catalogue.root / folder / "model_optim_rng.pt",
                        tensor=key,
                        hint=_MIXED_HINT,
                    )


_EXTRA_STATE = "._extra_state"
_OUTPUT_LAYERS = ("output_layer.", "lm_head.")
_MIXED_HINT = (
    "the file is damaged or of another checkpoint: copy it again, or take another iteration"
)


def _parameter(
    t: GlobalTensor,
    expert: int | None,
    rank: RankFolder,
    glu: Glu,
    config: ModelConfig,
    parallel: ParallelConfig,
) -> Parameter:
    """A rank's tensor as a part of the model's tensor."""
    rule = rule_of(t.name, glu(t.name), config)
    ranks, index = (parallel.etp, rank.expert_tp) if expert is not None else (parallel.tp, rank.tp)
    shape = list(t.shape)
    if rule.tp_dim and shape:
        shape[rule.tp_dim] *= ranks
    boxes = boxes_of_rank(t.name, tuple(shape), rule, ranks, index)
    key, registered_as = t.name, ""
    is_copied = config.mtp.num_mtp_layers > 0 or parallel.encoder_pp > 0
    is_tied = (
        parallel.pp > 1
        and (config.embedding.tied_embeddings or (is_copied and key == EMBEDDING))
        and key in (EMBEDDING, OUTPUT)
    )
    if is_tied and key == OUTPUT:
        key, registered_as = EMBEDDING, OUTPUT
    if expert is not None:
        shape = [config.moe.num_experts, *shape]
        boxes = tuple(((expert, *lo), (expert + 1, *hi)) for lo, hi in boxes)
    return Parameter(
        key=key,
        shape=tuple(shape),
        dtype=t.dtype.name,
        boxes=boxes,
        is_expert=expert is not None,
        expert=expert or 0,
        is_shared=is_tied or bool(parallel.encoder_pp and EVERYWHERE.match(key)),
        registered_as=registered_as,
    )


def list_ranks(catalogue: Catalogue, parallel: ParallelConfig) -> dict[str, RankFolder]:
    """The rank of every rank folder."""
    out: dict[str, RankFolder] = {}
    for folder, (tp, pp, ep) in catalogue.metadata["ranks"].items():
        rank = RankFolder(tp, pp or 0, ep or 0, expert_rank(tp, ep or 0, parallel))
        if rank.tp >= parallel.tp or rank.pp >= parallel.pp or rank.ep >= parallel.ep:
            raise FormatError(
                f"a rank outside of tp={parallel.tp} pp={parallel.pp} ep={parallel.ep}, "
                "which the args say",
                file=catalogue.root / folder,
                hint="the folder belongs to another checkpoint",
            )
        out[folder] = rank
    return out


def expert_rank(tp: int, ep: int, parallel: ParallelConfig) -> int:
    """Which part of its experts the folder of a (tp, ep) rank has.

    Ranks of a stage count tensors first, and for experts their own tensor ranks first, then `ep`.
    """
    most = parallel.tp * parallel.etp * parallel.ep
    for i in range(tp, most, parallel.tp):
        if i // parallel.etp % parallel.ep == ep:
            return i % parallel.etp
    raise LayoutError(f"no rank has tp={tp} and ep={ep} at etp={parallel.etp}")


def _flat_buffers(
    catalogue: Catalogue,
    chunk_tensors: Mapping[tuple[str, int], list[_RankTensor]],
    parallel: ParallelConfig,
) -> Iterator[FlatBuffer]:
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
    candidates = candidate_bucket_sizes(catalogue)
    for (folder, chain, number, dtype), states in sorted(buffers.items()):
        chunks = [
            [
                rank_tensor.parameter
                for rank_tensor in chunk_tensors.get((folder, chunk), [])
                if not rank_tensor.parameter.key.endswith(_BUFFERS)
                and (parallel.ep == 1 or rank_tensor.parameter.is_expert == bool(chain))
            ]
            for chunk in range(parallel.vpp)
        ]
        # Buffers are numbered over the chunks that have parameters of the chain.
        filled = [members for members in chunks if members]
        dtypes = max(per_folder[folder, chain] // max(len(filled), 1), 1)
        if number >= dtypes * len(filled):
            raise FormatError(
                f"there is a flat buffer {number} of optimizer {chain}, but only {len(filled)} "
                "model chunks",
                file=catalogue.root / folder / "distrib_optim.pt",
                hint="the args have another layout; --optimizer-format none leaves the state out",
            )
        members = [p for p in filled[number // dtypes] if dtypes == 1 or p.dtype == dtype]
        first_state = next(iter(states.values()))
        members = in_buffer(members, sum(t.numel for t in first_state.values()))
        is_coalesced = len(first_state) == 1
        yield FlatBuffer(
            members=members,
            buckets=[
                Bucket(
                    first_state[k].numel,
                    {s: parts[k].name for s, parts in states.items() if k in parts},
                )
                for k in sorted(first_state)
            ],
            is_coalesced=is_coalesced,
            bucket_sizes=candidates,
        )
