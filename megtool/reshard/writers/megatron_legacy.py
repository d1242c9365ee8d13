"""Megatron's legacy `torch` format: a folder per model-parallel rank, weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megtool.checkpoint.containers.pickle_reader import inert_global
from megtool.checkpoint.formats.auxiliary_files import MODELOPT_FOLDER
from megtool.checkpoint.formats.megatron_legacy import lay_out as lay_out_files
from megtool.checkpoint.formats.megatron_legacy_ranks import Sizes, rank_folder
from megtool.checkpoint.formats.save_folder import folder_name
from megtool.checkpoint.param_groups import Inner, read_groups
from megtool.checkpoint.rechunk import regroup
from megtool.config import ModelConfig, ParallelConfig
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron import is_encoder_decoder, split_state
from megtool.convert.rank_parameters import Parameter, RankPlace, rank_parameters
from megtool.convert.sharding import rule_of
from megtool.dtypes import DType
from megtool.errors import LayoutError, MappingError
from megtool.parallel.pipeline_split import Pipeline
from megtool.reshard.fp8_state.transfer import States
from megtool.reshard.megatron.box_runs import Collected, boxes_of
from megtool.reshard.megatron.checkpoint_objects import (
    Carried,
    carried_objects,
    join_grouped,
    values_of,
)
from megtool.reshard.megatron.common_state import account_for_common, common_state, saved_iteration
from megtool.reshard.megatron.dp_reshardable_writer import Run
from megtool.reshard.megatron.extra_state_names import SUFFIX, Site, asked_for, site_of
from megtool.reshard.megatron.local_names import module_to_local, to_local
from megtool.reshard.megatron.optimizer import require_states, run_of, states_of, warn_of_order
from megtool.reshard.megatron.rank_files import expert_rank
from megtool.reshard.megatron.rank_objects import of_chunk, own_state
from megtool.reshard.open_source import CheckpointSource
from megtool.reshard.source import files_beside_ranks
from megtool.reshard.writers.target_spec import Request, Target
from megtool.tensors import buckets
from megtool.tensors.registration_order import registered
from megtool.tensors.sharded import GlobalTensor

_LINEAR = tuple(f".linear_{n}{SUFFIX}" for n in ("qkv", "proj", "fc1", "fc2"))
_FLAT = "distrib_optim"


def lay_out(source: CheckpointSource, request: Request, out: Target, dtype: DType | None) -> None:
    """Lay out `model_optim_rng.pt`, and `distrib_optim.pt` where there is state, of every rank."""
    config = source.model.config if source.model else None
    if config is None:
        raise MappingError(
            "files per rank need the model's configuration",
            file=source.path,
            hint="--like HF_FOLDER gives it",
        )
    parallel = out.parallel or ParallelConfig()
    weights = [t for t in out.side.tensors if not is_optimizer_state(t.name)]
    _check_names(source, weights, parallel)
    carried = carried_objects(source, out.side.tensors, parallel, out.format)
    states = States(source, carried, request.amax)
    states.settle(asked_for(out.side.tensors, ()))
    writer = _Writer(source, config, parallel, weights, states_of(out.side), carried, states)
    out.amax = states.report()
    common = common_state(
        source,
        parallel,
        out.side.tensors,
        dtype,
        request.optimizer,
        target=out.format,
        objects=carried.kept,
    )
    out.account(carried.moved, carried.derived, carried.dropped)
    out.account(*account_for_common(source, common, out.format))
    files = writer.files(common)
    require_states(out.side, (n for _, n, _, _ in writer.pieces if is_optimizer_state(n)))
    iteration = saved_iteration(source.catalogue)
    small = files_beside_ranks(source, dtype, left_out=(f"{MODELOPT_FOLDER}/",))
    destination = lay_out_files(files, iteration=iteration, small=small)
    row = {
        destination.catalogue.tensors[int(t)].name: k
        for k, t in enumerate(destination.catalogue.shards.tensor.tolist())
    }
    collected = Collected(repeat=True)
    kinds = {t.name: t for t in out.side.tensors}
    for stored, name, p, start in writer.pieces:
        tensor = replace(kinds[name], shape=p.shape)
        for box, position in boxes_of(p, 0, p.numel):
            collected.add(tensor, box, row[stored], start + position)
    catalogue = regroup(destination.catalogue, lambda _: False, collected.regrouping())
    catalogue.shards.owner[:] = np.asarray(catalogue.extents.file, np.int32)
    out.destination = replace(destination, catalogue=catalogue)
    out.store_under(collected.names)
    out.sidecar_folder = folder_name(iteration)


class _Writer:
    """The trees of all files, and which part of the model each tensor in them is.

    `pieces` are `(stored name, name in the model, parameter, first element)`.
    """

    def __init__(
        self,
        source: CheckpointSource,
        config: ModelConfig,
        parallel: ParallelConfig,
        weights: Sequence[GlobalTensor],
        states: Mapping[str, DType],
        carried: Carried,
        fp8: States,
    ) -> None:
        self.source, self.config, self.parallel = source, config, parallel
        self.states = states
        self.run: Run = run_of(source, parallel, weights)
        if states:
            warn_of_order(source.catalogue, self.run.order)
        self.dtypes = {t.name: t.dtype for t in weights}
        self.ranks = rank_parameters(weights, config, parallel)
        self.has_own = parallel.ep > 1 and any(
            p.is_expert for found in self.ranks.values() for p in found
        )
        self.pieces: list[tuple[str, str, Parameter, int]] = []
        _check_experts(config, parallel)
        joined: dict[Site, Any] = {}
        if self.run.order.grouped_experts and config.num_experts:
            each = config.num_experts // parallel.ep
            joined = join_grouped(source, carried, each, fp8.findings, columns=fp8.columns)
        self.objects = values_of(source, carried)
        found = {site_of(name): value for name, value in self.objects.items()}
        self.nothing = fp8.nothing()
        self.extra = {site: value for site, value in found.items() if site is not None} | joined

    def files(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Every rank's files by path, their trees with `GlobalTensor` leaves."""
        p = self.parallel
        groups = read_groups(self.source.catalogue)
        inner = groups.for_chain(1 + self.has_own) if groups else []
        out: dict[str, Any] = {}
        sizes = Sizes(tp=p.tp, pp=p.pp, ep=p.ep, etp=p.etp)
        for (tp, pp, ep), is_first in sizes.ranks().items():
            folder = rank_folder((tp, pp, ep))
            stage, expert = pp or 0, ep or 0
            members = [self._members(stage, chunk, tp, expert) for chunk in range(p.vpp)]
            tree = self._small(common, inner, folder, (tp, stage))
            for chunk, found in enumerate(members):
                key = "model" if p.vpp == 1 else f"model{chunk}"
                tree[key] = self._model(folder, key, found, stage, chunk, expert)
            out[f"{folder}/model_optim_rng.pt"] = tree
            if self.states:
                flat = self._flat(folder, members, stage, with_dense=is_first)
                if flat is not None:
                    out[f"{folder}/{_FLAT}.pt"] = flat
        return out

    def _members(self, stage: int, chunk: int, tp: int, ep: int) -> list[Parameter]:
        """A chunk's parameters as they are registered: dense ones, and the rank's experts."""
        at = RankPlace(stage, chunk, 0, tp)
        dense = [p for p in self.ranks.get(at, []) if not p.is_expert]
        at = RankPlace(stage, chunk, ep, expert_rank(tp, ep, self.parallel))
        experts = [p for p in self.ranks.get(at, []) if p.is_expert]
        found = [*dense, *experts]
        try:
            order = registered([(_known(p), p.expert) for p in found], self.run.order)
        except MappingError:
            if self.states:
                raise
            return found  # weights go by name: only buckets need the order
        return [found[i] for i in order]

    def _model(
        self,
        folder: str,
        key: str,
        members: Sequence[Parameter],
        stage: int,
        chunk: int,
        ep: int,
    ) -> Any:
        """The state dict of one chunk: names of its modules, and an extra state per linear."""
        layers = Pipeline.of(self.parallel).layers_of(self.config.num_layers, stage, chunk)
        each = self.config.num_experts // self.parallel.ep
        first_expert = ep * each
        grouped = self.run.order.grouped_experts
        modules = {p.module_key.rpartition(".")[0] for p in members}
        experts = range(first_expert, first_expert + each)
        extra = {
            module_to_local(
                site.module,
                site.expert,
                first_layer=layers.start,
                first_expert=first_expert,
                grouped=grouped,
            )
            + SUFFIX: self.extra[site]
            for site in of_chunk(self.extra, layers, experts, modules)
        }
        tree: dict[str, Any] = {}
        for p in members:
            name = to_local(
                p,
                first_layer=layers.start,
                first_expert=first_expert,
                fused=self.run.order.fused_norms,
                grouped=grouped,
            )
            stored = f"{folder}/model_optim_rng/{key}/{name}"
            kind = self.dtypes[p.key]
            tree[name] = GlobalTensor(name=stored, shape=p.local_shape, dtype=kind)
            self.pieces.append((stored, p.key, p, 0))
            state = name.rpartition(".")[0] + SUFFIX
            if state not in tree and (state in extra or state.endswith(_LINEAR)):
                tree[state] = extra.pop(state, self.nothing)
        return _ordered(tree | extra)

    def _small(
        self,
        common: Mapping[str, Any],
        inner: Sequence[Inner],
        folder: str,
        rank: tuple[int, int],
    ) -> dict[str, Any]:
        """What a rank keeps beside its tensors."""
        tree = {k: v for k, v in common.items() if k != "optimizer"}
        if self.states and inner:
            parts = [dict(one) for one in inner]
            tree["optimizer"] = parts[0] if len(parts) == 1 else parts
        return tree | own_state(self.objects, folder, rank, self.parallel)

    def _flat(
        self, folder: str, members: Sequence[Sequence[Parameter]], stage: int, *, with_dense: bool
    ) -> Any:
        """The tree of a rank's distrib_optim.pt; None where it holds nothing."""
        if not self.has_own:
            return self._chain(folder, "", members, stage) if with_dense else None
        dense = [[p for p in found if not p.is_expert] for found in members]
        experts = [[p for p in found if p.is_expert] for found in members]
        first = self._chain(folder, "0/", dense, stage) if with_dense else None
        return [first, self._chain(folder, "1/", experts, stage)]

    def _chain(
        self, folder: str, chain: str, members: Sequence[Sequence[Parameter]], stage: int
    ) -> Any:
        """One optimizer's buffers, their buckets one after the other without padding."""
        dtypes = (
            inert_global("torch", self.run.param_dtype),
            inert_global("torch", self.run.grad_dtype),
        )
        spelled = f"torch.{self.run.param_dtype},torch.{self.run.grad_dtype}"
        out: dict[Any, Any] = {"buckets_coalesced": True}
        every = [[p for p in listed if not p.key.endswith(".expert_bias")] for listed in members]
        filled = [(chunk, found) for chunk, found in enumerate(every) if found]
        for number, (chunk, found) in enumerate(filled):  # others have no buffer, and no number
            slots, sizes = buckets.lay_out(
                [p.numel for p in found],
                [p.is_shared for p in found],
                bucket_size=self.run.bucket_size if stage == 0 and chunk == 0 else None,
            )
            starts = [sum(sizes[:k]) for k in range(len(sizes))]
            held: dict[str, Any] = {}
            for state, kind in self.states.items():
                stored = f"{folder}/{_FLAT}/{chain}{number}/{spelled}/{state}"
                held[state] = GlobalTensor(name=stored, shape=(sum(sizes),), dtype=kind)
                for p, slot in zip(found, slots, strict=True):
                    name = f"optimizer.state.{state}.{p.key}"
                    self.pieces.append((stored, name, p, starts[slot.bucket] + slot.start))
            held["numel_unpadded"] = sum(sizes)
            out[number] = {dtypes: held}
        return out


def _check_names(
    source: CheckpointSource, weights: Sequence[GlobalTensor], parallel: ParallelConfig
) -> None:
    """The tensors' names say which rank file each belongs in.

    Raises:
        LayoutError: an encoder with a decoder (T5) on several stages.
        MappingError: they do not.
    """
    keys = [split_state(t.name)[2] for t in weights]
    if is_encoder_decoder(keys) and parallel.pp > 1:
        raise LayoutError(
            f"pp={parallel.pp}: how an encoder and a decoder (T5) share stages is not known",
            hint="--pp 1, or --to torch_dist",
        )
    stacked = next((k for k in keys if rule_of(k, False).has_layer_axis), None)
    if stacked is not None:
        why = f": {source.reason.message}" if source.reason else ""
        raise MappingError(
            f"it keeps its name, which is all layers', and files per rank name each layer{why}",
            file=source.path,
            tensor=stacked,
            hint="--to torch_dist holds it as it is",
        )


def _check_experts(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Folders are named by tp, pp and ep: between them they hold every tensor rank of the experts.

    Raises:
        LayoutError: they do not.
    """
    p = parallel
    if not config.num_experts:
        return
    for ep in range(p.ep):
        if len({expert_rank(tp, ep, p) for tp in range(p.tp)}) < p.etp:
            raise LayoutError(
                f"etp={p.etp} with tp={p.tp} and ep={p.ep}: the folders of this format are named "
                "by tp, pp and ep, and several ranks of the experts fall into one",
                hint=f"--etp {p.tp}, or --to torch_dist, which has no such limit",
            )


def _known(p: Parameter) -> str:
    """The key by which the order is known; buffers stand where their module's weight does."""
    return p.module_key.replace(".expert_bias", ".bias")


def _ordered(values: dict[str, Any]) -> Any:
    """An OrderedDict, as `state_dict()` gives."""
    node = inert_global("collections", "OrderedDict")()
    for key, value in values.items():
        node[key] = value
    return node
