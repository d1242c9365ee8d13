"""Megatron's legacy `torch` format: a folder per model-parallel rank, weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from megtool.console import several
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.families.nested import MEGATRON_PREFIX
from megtool.convert.megatron.names import split_state
from megtool.convert.megatron.rank_parameters import Parameter, RankPlace, rank_parameters
from megtool.convert.megatron.sharding import (
    is_known,
    is_tower,
    layers_of_stage,
    rule_of,
    with_decoder,
)
from megtool.dtypes import DType
from megtool.errors import LayoutError, MappingError, UsageError, listed
from megtool.formats.auxiliary_files import MODELOPT_FOLDER
from megtool.formats.megatron_legacy.ranks import RankSizes, rank_folder_name
from megtool.formats.megatron_legacy.reader import plan_megatron_legacy_layout as lay_out_files
from megtool.formats.save_folder import folder_name
from megtool.fp8_state.transfer import ExtraStateTransfer, resolve_amax
from megtool.megatron_state.extra_states.names import (
    SUFFIX,
    Site,
    list_required_states,
    parse_site,
)
from megtool.megatron_state.local_names import module_to_local, to_local
from megtool.megatron_state.optimizer.box_runs import BoxRunCollector, split_into_boxes
from megtool.megatron_state.param_groups import OptimizerState
from megtool.megatron_state.ranks.files import expert_rank
from megtool.megatron_state.ranks.objects import select_chunk_sites, select_rank_state
from megtool.options.layout import ParallelConfig
from megtool.options.target import TargetOptions
from megtool.pickles.reader import inert_global
from megtool.reshard.writers.target_spec import Target
from megtool.run_state.checkpoint_objects import (
    CarriedObjects,
    join_expert_states,
    plan_objects,
    read_objects,
)
from megtool.run_state.common_state import (
    account_for_common,
    make_common_state,
    read_iteration,
)
from megtool.run_state.optimizer import (
    choose_bucket_settings,
    find_state_dtypes,
    require_states,
    warn_unknown_order,
)
from megtool.run_state.state_dict_groups import read_any_groups
from megtool.source.checkpoint import CheckpointSource, collect_small_files
from megtool.spec.model_config import ModelConfig
from megtool.tensors import buckets
from megtool.tensors.buckets import BucketSettings
from megtool.tensors.registration_order import registered
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.rechunk import rechunk

_LINEAR = tuple(
    f".{n}{SUFFIX}"
    for n in (
        "linear_qkv",
        "linear_q",
        "linear_kv",
        "linear_q_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        "in_proj",
        "out_proj",
        "eh_proj",
        "linear_wq_b",
        "linear_wk",
        "linear_weights_proj",
        "fc1_latent_proj",
        "fc2_latent_proj",
        "output_layer",
    )
)
_FINAL_NORMS = tuple(f"decoder.final_{n}.weight" for n in ("norm", "layernorm"))
_FLAT = "distrib_optim"
_BUFFERS = (".expert_bias", ".tid2eid")


def plan_layout(
    source: CheckpointSource, options: TargetOptions, out: Target, dtype: DType | None
) -> None:
    """Plan every rank's `model_optim_rng.pt`, and `distrib_optim.pt` where there is state."""
    config = out.side.config or (source.model.config if source.model else None)
    if config is None:
        why = f": {source.reason.message}" if source.reason else ""
        raise MappingError(
            f"files per rank need the model's configuration{why}",
            file=source.path,
            hint="--like HF_FOLDER gives it",
            error_id="no-model-config",
        )
    parallel = out.parallel or ParallelConfig()
    weights = [t for t in out.side.tensors if not is_optimizer_state(t.name)]
    config = with_decoder(config, weights)
    _check_tensor_names(source, weights)
    out.replicated += _check_replicated(source, weights, parallel, options.replicate)
    carried = plan_objects(source, out.side.tensors, parallel, out.format)
    states = ExtraStateTransfer(source, carried, resolve_amax(options))
    states.convert(list_required_states(out.side.tensors, ()))
    writer = _RankFileWriter(
        source, config, parallel, weights, find_state_dtypes(out.side), carried, states
    )
    out.amax = states.report()
    common = make_common_state(
        source,
        parallel,
        out.side.tensors,
        dtype,
        out.optimizer_format,
        target=out.format,
        objects=carried.objects,
        config=config,
    )
    out.account(carried.moved, carried.derived, carried.dropped)
    out.account(*account_for_common(source, common, out.format))
    files = writer.files(common)
    require_states(out.side, (n for _, n, _, _ in writer.runs if is_optimizer_state(n)))
    iteration = read_iteration(source.catalogue)
    small = collect_small_files(source, dtype, left_out=(f"{MODELOPT_FOLDER}/",))
    destination = lay_out_files(files, iteration=iteration, small_files=small)
    row = {
        destination.catalogue.tensors[int(t)].name: k
        for k, t in enumerate(destination.catalogue.shards.tensor.tolist())
    }
    collected = BoxRunCollector(repeat=True)
    kinds = {t.name: t for t in out.side.tensors}
    for stored, name, p, start in writer.runs:
        tensor = replace(kinds[name], shape=p.shape)
        for box, position in split_into_boxes(p, 0, p.numel):
            collected.add(tensor, box, row[stored], start + position)
    catalogue = rechunk(destination.catalogue, lambda _: False, collected.regrouping())
    catalogue.shards.owner[:] = np.asarray(catalogue.extents.file, np.int32)
    out.destination = replace(destination, catalogue=catalogue)
    out.add_copies(collected.names)
    out.add_parts(collected.parts, source.placement_of)
    out.sidecar_folder = folder_name(iteration)


class _RankFileWriter:
    """Builds the trees of all files, and records which part of the model each tensor is.

    `runs` are `(stored name, name in the model, parameter, first element)`.
    """

    def __init__(
        self,
        source: CheckpointSource,
        config: ModelConfig,
        parallel: ParallelConfig,
        weights: Sequence[GlobalTensor],
        states: Mapping[str, DType],
        carried: CarriedObjects,
        fp8: ExtraStateTransfer,
    ) -> None:
        self.source, self.config, self.parallel = source, config, parallel
        self.states = states
        self.settings: BucketSettings = choose_bucket_settings(source, parallel, weights)
        if states:
            warn_unknown_order(source.catalogue, self.settings.order)
        family = source.model.family if source.model else None
        self.prefix = MEGATRON_PREFIX if family and family.nested else ""
        self.dtypes = {t.name: t.dtype for t in weights}
        self.ranks = rank_parameters(weights, config, parallel)
        self.has_expert_chain = parallel.ep > 1 and any(
            p.is_expert for states_by_site in self.ranks.values() for p in states_by_site
        )
        self.runs: list[tuple[str, str, Parameter, int]] = []
        _check_experts(config, parallel)
        joined: dict[Site, Any] = {}
        if self.settings.order.grouped_experts and config.moe.num_experts:
            experts_per_rank = config.moe.num_experts // parallel.ep
            joined = join_expert_states(
                source, carried, experts_per_rank, fp8.findings, columns=fp8.columns
            )
        self.objects = read_objects(source, carried)
        states_by_site = {parse_site(name): value for name, value in self.objects.items()}
        self.empty_state = fp8.empty_state()
        self.extra = {
            site: value for site, value in states_by_site.items() if site is not None
        } | joined

    def files(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Every rank's files by path, their trees with `GlobalTensor` leaves."""
        p = self.parallel
        groups = read_any_groups(self.source.catalogue)
        inner = groups.for_chain(1 + self.has_expert_chain) if groups else []
        out: dict[str, Any] = {}
        sizes = RankSizes(tp=p.tp, pp=p.pp, ep=p.ep, etp=p.etp)
        for (tp, pp, ep), is_first in sizes.writing_ranks().items():
            folder = rank_folder_name((tp, pp, ep))
            stage, expert = pp or 0, ep or 0
            members = [self._chunk_parameters(stage, chunk, tp, expert) for chunk in range(p.vpp)]
            tree = self._rank_tree(common, inner, folder, (tp, stage))
            for chunk, parameters in enumerate(members):
                key = "model" if p.vpp == 1 else f"model{chunk}"
                tree[key] = self._model_tree(folder, key, parameters, stage, chunk, expert)
            out[f"{folder}/model_optim_rng.pt"] = tree
            if self.states:
                flat = self._optimizer_tree(folder, members, stage, with_dense=is_first)
                if flat is not None:
                    out[f"{folder}/{_FLAT}.pt"] = flat
        return out

    def _chunk_parameters(self, stage: int, chunk: int, tp: int, ep: int) -> list[Parameter]:
        """A chunk's parameters in registration order: dense ones, and the rank's experts."""
        position = RankPlace(stage, chunk, 0, tp)
        dense = [p for p in self.ranks.get(position, []) if not p.is_expert]
        position = RankPlace(stage, chunk, ep, expert_rank(tp, ep, self.parallel))
        experts = [p for p in self.ranks.get(position, []) if p.is_expert]
        parameters = [p for p in (*dense, *experts) if not is_tower(p.key)]
        towers = [p for p in dense if is_tower(p.key)]
        try:
            order = registered([(_order_key(p), p.expert) for p in parameters], self.settings.order)
        except MappingError:
            if self.states:
                raise
            return towers + parameters  # weights are found by name: only buckets need the order
        return towers + [parameters[i] for i in order]

    def _model_tree(
        self,
        folder: str,
        key: str,
        members: Sequence[Parameter],
        stage: int,
        chunk: int,
        ep: int,
    ) -> Any:
        """The state dict of one chunk: names of its modules, and an extra state per linear."""
        layers = layers_of_stage(self.config, self.parallel, stage, chunk)
        experts_per_rank = self.config.moe.num_experts // self.parallel.ep
        first_expert = ep * experts_per_rank
        grouped = self.settings.order.grouped_experts
        modules = {p.module_key.rpartition(".")[0] for p in members}
        experts = range(first_expert, first_expert + experts_per_rank)
        extra = {
            self.prefix
            + module_to_local(
                site.module,
                site.expert,
                first_layer=layers.start,
                first_expert=first_expert,
                grouped=grouped,
            )
            + SUFFIX: self.extra[site]
            for site in select_chunk_sites(self.extra, layers, experts, modules)
        }
        if not self.settings.order.fused_norms:  # Megatron's own norms and attention have none
            extra = {n: v for n, v in extra.items() if v is not None or _is_of_linear(n)}
        tree: dict[str, Any] = {}
        for p in members:
            is_text = not is_tower(p.module_key)
            name = (self.prefix if is_text else "") + to_local(
                p,
                first_layer=layers.start,
                first_expert=first_expert,
                fused=self.settings.order.fused_norms,
                grouped=grouped,
                conv_first=self.settings.order.conv_first,
            )
            stored = f"{folder}/model_optim_rng/{key}/{name}"
            kind = self.dtypes[p.key]
            tree[name] = GlobalTensor(name=stored, shape=p.local_shape, dtype=kind)
            self.runs.append((stored, p.key, p, 0))
            state = name.rpartition(".")[0] + SUFFIX
            is_linear = is_text and _is_of_linear(state)
            if state not in tree and (state in extra or is_linear):
                tree[state] = extra.pop(state, self.empty_state)
            if name.removeprefix(self.prefix) in _FINAL_NORMS:  # the head's, which may be tied
                extra.setdefault(f"{self.prefix}output_layer{SUFFIX}", self.empty_state)
        return _ordered_dict(tree | extra)

    def _rank_tree(
        self,
        common: Mapping[str, Any],
        inner: Sequence[OptimizerState],
        folder: str,
        rank: tuple[int, int],
    ) -> dict[str, Any]:
        """A rank's state other than its tensors."""
        tree = {k: v for k, v in common.items() if k != "optimizer"}
        if self.states and inner:
            parts = [dict(state) for state in inner]
            tree["optimizer"] = parts[0] if len(parts) == 1 else parts
        return tree | select_rank_state(self.objects, folder, rank, self.parallel)

    def _optimizer_tree(
        self, folder: str, members: Sequence[Sequence[Parameter]], stage: int, *, with_dense: bool
    ) -> Any:
        """The tree of a rank's distrib_optim.pt; None if it is empty."""
        if not self.has_expert_chain:
            return self._buffer_tree(folder, "", members, stage) if with_dense else None
        dense_chunks = [[p for p in chunk if not p.is_expert] for chunk in members]
        experts = [[p for p in chunk if p.is_expert] for chunk in members]
        first = self._buffer_tree(folder, "0/", dense_chunks, stage) if with_dense else None
        return [first, self._buffer_tree(folder, "1/", experts, stage)]

    def _buffer_tree(
        self, folder: str, chain: str, members: Sequence[Sequence[Parameter]], stage: int
    ) -> Any:
        """One optimizer's buffers, their buckets one after the other without padding."""
        dtypes = (
            inert_global("torch", self.settings.param_dtype),
            inert_global("torch", self.settings.grad_dtype),
        )
        spelled = f"torch.{self.settings.param_dtype},torch.{self.settings.grad_dtype}"
        out: dict[Any, Any] = {"buckets_coalesced": True}
        chunks = [
            [p for p in listed if not (p.key.endswith(_BUFFERS) or is_tower(p.key))]
            for listed in members
        ]
        filled = [(chunk, parameters) for chunk, parameters in enumerate(chunks) if parameters]
        for number, (chunk, parameters) in enumerate(
            filled
        ):  # other chunks have no buffer and no number
            slots, sizes = buckets.lay_out(
                [p.numel for p in parameters],
                [p.is_shared for p in parameters],
                bucket_size=self.settings.bucket_size if stage == 0 and chunk == 0 else None,
            )
            starts = [sum(sizes[:k]) for k in range(len(sizes))]
            buffer: dict[str, Any] = {}
            for state, kind in self.states.items():
                stored = f"{folder}/{_FLAT}/{chain}{number}/{spelled}/{state}"
                buffer[state] = GlobalTensor(name=stored, shape=(sum(sizes),), dtype=kind)
                for p, slot in zip(parameters, slots, strict=True):
                    name = f"optimizer.state.{state}.{p.key}"
                    self.runs.append((stored, name, p, starts[slot.bucket] + slot.start))
            buffer["numel_unpadded"] = sum(sizes)
            out[number] = {dtypes: buffer}
        return out


def _is_of_linear(state: str) -> bool:
    """Whether a state is of a module that has one whichever layers the model is built of."""
    return f".{state}".endswith(_LINEAR)


def _check_tensor_names(source: CheckpointSource, weights: Sequence[GlobalTensor]) -> None:
    """Check that the names of tensors determine their rank files.

    Raises:
        MappingError: a name does not.
    """
    keys = [split_state(t.name)[2] for t in weights]
    stacked = next((k for k in keys if rule_of(k, False).has_layer_axis), None)
    if stacked is not None:
        why = f": {source.reason.message}" if source.reason else ""
        raise MappingError(
            f"its name is that of all layers, and files per rank name each layer{why}",
            file=source.path,
            tensor=stacked,
            hint="--to torch_dist holds it as it is",
        )


def _check_replicated(
    source: CheckpointSource,
    weights: Sequence[GlobalTensor],
    parallel: ParallelConfig,
    globs: Sequence[str],
) -> list[str]:
    """Tensors of unknown names, which every tensor rank gets whole; `globs` have to allow it.

    Raises:
        MappingError: a tensor would be written so, and no glob matches it.
        UsageError: a glob matches no tensor.
    """
    for glob in globs:
        if not any(fnmatchcase(t.name, glob) for t in weights):
            raise UsageError(f"--replicate {glob!r} matches no tensor that is written")
    unknown = []
    for t in weights:
        key = split_state(t.name)[2]
        ranks = parallel.etp if rule_of(key, False).is_expert else parallel.tp
        if (ranks or 1) > 1 and not is_known(key):
            unknown.append(t.name)
    refused = [n for n in unknown if not any(fnmatchcase(n, glob) for glob in globs)]
    if refused:
        raise MappingError(
            f"{several(len(refused), 'tensor')} of names that Megatron's modules do not have would "
            f"be written whole into the files of all tensor-parallel ranks: {listed(refused, 5)}",
            file=source.path,
            tensor=refused[0],
            hint="--replicate GLOB if they are the same on every rank, --exclude GLOB leaves them "
            "out, --to torch_dist holds each once",
        )
    return unknown


def _check_experts(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that folders, which are named by tp, pp and ep, have all tensor ranks of experts.

    Raises:
        LayoutError: they have not.
    """
    p = parallel
    if not config.moe.num_experts:
        return
    sizes = RankSizes(tp=p.tp, pp=p.pp, ep=p.ep, etp=p.etp)
    parts: dict[int, set[int]] = {}
    for tp, _, ep in sizes.writing_ranks():
        parts.setdefault(ep or 0, set()).add(expert_rank(tp, ep or 0, p))
    for ep in range(p.ep):
        if len(parts.get(ep, ())) < p.etp:
            raise LayoutError(
                f"etp={p.etp} with tp={p.tp} and ep={p.ep}: the folders of this format are named "
                "by tp, pp and ep, and several ranks of the experts share one",
                hint=f"--etp {p.tp}, or --to torch_dist, which has no such limit",
            )


def _order_key(p: Parameter) -> str:
    """The key for the registration order; buffers have that of their module's bias."""
    return p.module_key.replace(".expert_bias", ".bias")


def _ordered_dict(values: dict[str, Any]) -> Any:
    """An OrderedDict, as `state_dict()` gives."""
    node = inert_global("collections", "OrderedDict")()
    for key, value in values.items():
        node[key] = value
    return node
