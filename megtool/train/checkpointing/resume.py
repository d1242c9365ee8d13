"""Load optimizer state and the progress of a run from any checkpoint, at any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.access.read_boxes import BUFFER_BYTES
from megtool.console import Progress, silent
from megtool.convert.language.binding import summarize
from megtool.convert.megatron.names import MAIN
from megtool.dtypes import dtype
from megtool.errors import MappingError
from megtool.inference.layer_streaming import units_of
from megtool.inference.rank_weights import Weights
from megtool.megatron_state.param_groups import read_groups
from megtool.megatron_state.random_state import RNG
from megtool.megatron_state.saved_objects import read_object, saved_args, vocab_divisor
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.catalogue import Catalogue
from megtool.train.checkpointing.megatron_common_state import (
    join_chain,
    restore_rng_state,
    rng_object_name,
)
from megtool.train.model.build import rank_coordinates

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer

_OTHER_RUN = (
    "resume with the same optimizer and the same trained layers, or start a new run from this "
    "checkpoint's weights"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRun:
    """The progress of a saved run.

    `scheduler` is `SaveMetadata.scheduler`, None if the checkpoint has none. `has_optimizer`: it
    had optimizer state, which is loaded. `has_random`: it had this rank's random state, which is
    set.
    """

    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    scheduler: Mapping[str, Any] | None
    has_optimizer: bool
    has_random: bool


def resume(
    source: CheckpointSource,
    stages: Sequence[Decoder],
    optimizer: Optimizer | None,
    *,
    own_states: Mapping[tuple[str, str], Tensor] = MappingProxyType({}),
    random: bool = True,
    threads: int | None = None,
    memory_bytes: int = BUFFER_BYTES,
    progress: Progress = silent,
) -> ResumedRun:
    """Resume from a checkpoint whose weights `load_for_training` has loaded into `stages`.

    Moments and master weights are read from any supported format and layout, bit for bit. Master
    weights that the checkpoint lacks are its weights. `own_states` are those of parameters that
    features have added, by state and parameter. Every rank calls it.

    Raises:
        MappingError: the state is of another model, some parameters have none, or its number of
            steps is missing.
        CheckpointError: it cannot be read.
    """
    groups, catalogue = stages[0].groups, source.catalogue
    has_optimizer = optimizer is not None and bool(source.view.states)
    if optimizer is not None and has_optimizer:
        states = _OptimizerStateReader(
            source, groups, threads=threads, memory_bytes=memory_bytes, progress=progress
        )
        states.require({(p.state, p.parameter) for p in optimizer.pieces()} - own_states.keys())
        groups_state = read_groups(catalogue)
        small = None if groups_state is None else join_chain(groups_state.chain)
        if any("exp_avg_sq" in update.states for update in optimizer.updates.values()):
            _require_step(small, catalogue)

        def read(state: str, name: str) -> Tensor:
            own = own_states.get((state, name))
            return states.read(state, name) if own is None else own

        optimizer.load(read)
        if small is not None:
            optimizer.load_small_state(small)
    common = catalogue.metadata.get("common")
    common = common if isinstance(common, dict) else {}
    scheduler = common.get("opt_param_scheduler", common.get("lr_scheduler"))
    args = saved_args(catalogue)
    return ResumedRun(
        iteration=_int_or_zero(catalogue.metadata.get("iteration", common.get("iteration"))),
        consumed_train_samples=_int_or_zero(args.get("consumed_train_samples")),
        consumed_valid_samples=_int_or_zero(args.get("consumed_valid_samples")),
        scheduler=scheduler if isinstance(scheduler, dict) else None,
        has_optimizer=has_optimizer,
        has_random=random and _restore_rng(catalogue, groups),
    )


def _require_step(small: Mapping[str, Any] | None, catalogue: Catalogue) -> None:
    """Check that Adam's moments come with their number of steps.

    Raises:
        MappingError: no parameter group has it.
    """
    groups = [] if small is None else small["optimizer"]["param_groups"]
    if all(group.get("step") is None for group in groups):
        raise MappingError(
            "the checkpoint has moments of an optimizer without a number of steps: the bias "
            "correction would start from zero",
            file=catalogue.root,
            hint="resume from a checkpoint whose parameter groups have a 'step', or start a new "
            "run from this checkpoint's weights",
        )


def _int_or_zero(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _restore_rng(catalogue: Catalogue, groups: ProcessGroups) -> bool:
    """Set the random state that was saved for this rank, if there is one."""
    p = groups.parallel
    shared = f"{RNG}/shard_{groups.pp.rank}.{groups.tp.rank}_{p.pp}.{p.tp}"
    for name in (rng_object_name(groups), shared):
        stored = catalogue.objects.get(name)
        if stored is not None:
            return restore_rng_state(read_object(catalogue, stored), groups)
    return False


class _OptimizerStateReader:
    """A checkpoint's optimizer state, each state read as if it were a model's weights.

    What a state lacks is read from the weights: missing master weights are the weights, and
    `require` reports missing moments.
    """

    def __init__(
        self,
        source: CheckpointSource,
        groups: ProcessGroups,
        *,
        threads: int | None,
        memory_bytes: int,
        progress: Progress,
    ) -> None:
        self._root = source.catalogue.root
        self._weights: dict[str, Weights] = {}
        self._lacking: dict[str, set[str]] = {}
        self._units: dict[str, dict[str, list[str]]] = {}
        self._read: dict[tuple[str, str], Tensor] = {}
        for state in {MAIN, *source.view.states}:
            side = source.view
            tensors = {n: t for n, t in side.canonical.items() if ":" not in n}
            places = {n: side.placements[n] for n in tensors}
            names_with_state = set()
            for name in list(tensors):
                if (state_name := f"{state}:{name}") in side.canonical:
                    tensors[name] = replace(side.canonical[state_name], name=name)
                    places[name] = replace(side.placements[state_name], canonical=name)
                    names_with_state.add(name)
            weights = Weights(
                replace(
                    source, view=replace(side, canonical=tensors, placements=places, states={})
                ),
                parallel=groups.parallel,
                seat=rank_coordinates(groups),
                vocab_multiple=vocab_divisor(source.catalogue),
                threads=threads,
                memory_bytes=memory_bytes,
                keeps_mtp=True,
                progress=progress,
            )
            weights.become(dict.fromkeys(weights.tensors, dtype("float32")))
            if state != MAIN:
                weights.read_unshifted()
            self._weights[state] = weights
            self._lacking[state] = weights.made_of(tensors.keys() - names_with_state)
            self._units[state] = units_of(weights.tensors)

    def require(self, required: set[tuple[str, str]]) -> None:
        """Check that all states of all parameters exist.

        Raises:
            MappingError: some are missing, or the parameters are of another model.
        """
        absent = []
        for state, name in sorted(required):
            weights = self._weights.get(state)
            if weights is None or (state != MAIN and name in self._lacking[state]):
                absent.append(f"{state} of {name}")
            elif name not in weights.tensors:
                raise MappingError(
                    "the model has a parameter that the checkpoint does not hold",
                    file=self._root,
                    tensor=name,
                    hint="is it a checkpoint of this model?",
                    error_id="missing-tensors",
                )
        if absent:
            raise MappingError(
                f"the optimizer's state lacks {len(absent)} of {len(required)} tensors: "
                f"{summarize(absent)}",
                file=self._root,
                hint=_OTHER_RUN,
                error_id="missing-tensors",
            )

    def read(self, state: str, name: str) -> Tensor:
        """This rank's state of a parameter in float32; a layer is read at a time."""
        if (state, name) not in self._read:
            unit = next(names for names in self._units[state].values() if name in names)
            for tensor_name, tensor in self._weights[state].load(unit).items():
                self._read[state, tensor_name] = tensor
        return self._read.pop((state, name)).to(torch.float32)
