"""Collect the FP8 states, and ModelOpt's amax buffers, of an open checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megtool.errors import CalibrationError, UsageError
from megtool.fp8_state.experts import separate_expert_states
from megtool.fp8_state.modelopt_amax import AmaxBuffer, read_amax_buffers
from megtool.megatron_state.extra_states.amax_report import AmaxFinding
from megtool.megatron_state.extra_states.merge_ranks import read_merge
from megtool.megatron_state.extra_states.names import (
    Site,
    is_empty_value,
    is_extra_state,
    parse_site,
)
from megtool.megatron_state.extra_states.te_state import ExtraState, decode
from megtool.megatron_state.saved_objects import read_object
from megtool.source.checkpoint import CheckpointSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleState:
    """One module's state and the name of its object; `site` is None where that names no module."""

    name: str
    site: Site | None
    state: ExtraState


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8ScalingState:
    """All FP8 scaling state of a checkpoint.

    `empty` counts empty extra states, `foreign` those that are not Transformer Engine's.
    `findings` are about states that were merged or separated. `ambiguous` names states whose
    columns cannot be assigned to experts.
    """

    states: tuple[ModuleState, ...]
    empty: int
    foreign: int
    buffers: tuple[AmaxBuffer, ...] = field(default=())
    findings: tuple[AmaxFinding, ...] = ()
    ambiguous: frozenset[str] = frozenset()

    @property
    def linear(self) -> set[Site]:
        """The modules whose weights have a state or a buffer."""
        sites = {s.site for s in self.states if s.site is not None and s.state.is_delayed}
        return sites | {b.site for b in self.buffers}


def collect_fp8_state(source: CheckpointSource) -> FP8ScalingState:
    """Read all states; no weight is read.

    Raises:
        FormatError: a state is damaged or hostile.
    """
    catalogue = source.catalogue
    states: dict[str, ExtraState] = {}
    empty = foreign = 0
    for name, stored in catalogue.objects.items():
        if not is_extra_state(name):
            continue
        file = catalogue.path(stored.extent[0]) if stored.extent else source.path
        value = read_object(catalogue, stored)
        state = decode(value, file=file)
        if state is not None:
            states[name] = state
        elif is_empty_value(value):
            empty += 1
        else:
            foreign += 1
    corrected = separate_expert_states(catalogue, states)
    return FP8ScalingState(
        states=tuple(
            ModuleState(name=n, site=parse_site(n), state=corrected.states.get(n, s))
            for n, s in states.items()
        ),
        empty=empty,
        foreign=foreign,
        buffers=tuple(read_amax_buffers(catalogue)),
        findings=(*read_merge(catalogue).findings, *corrected.findings),
        ambiguous=corrected.ambiguous,
    )


def require_known_experts(scaling: FP8ScalingState, source: CheckpointSource) -> None:
    """Refuse a checkpoint with states whose columns cannot be assigned to experts.

    Raises:
        CalibrationError: it has such states.
    """
    if scaling.ambiguous:
        raise CalibrationError(
            f"{len(scaling.ambiguous):,} FP8 states belong to several experts, and their columns "
            "cannot be assigned to the experts",
            file=source.path,
            tensor=min(scaling.ambiguous),
            hint="Transformer Engine 2.3 changed their order, and columns that it never uses are "
            "in use; train some steps and save again, or use megtool quantize --data",
        )


def require_fp8_state(scaling: FP8ScalingState, source: CheckpointSource) -> None:
    """Refuse a checkpoint without FP8 scaling state.

    Raises:
        UsageError: it has none; the message says what it has instead.
    """
    if any(s.state.is_delayed for s in scaling.states) or scaling.buffers:
        return
    raise UsageError(
        f"{source.path} has no FP8 scaling state: "
        f"{'; '.join(_list_other_states(scaling)) or 'no extra states'}",
        hint="Megatron checkpoints have it after training with delayed scaling "
        "(--fp8-recipe delayed), or after quantization by ModelOpt",
    )


def _list_other_states(scaling: FP8ScalingState) -> Iterator[str]:
    if scaling.states:
        names = sorted({s.state.recipe_name or "another recipe" for s in scaling.states})
        yield f"{len(scaling.states):,} states of stateless recipes ({', '.join(names)})"
    if scaling.empty:
        yield f"{scaling.empty:,} empty extra states"
    if scaling.foreign:
        yield f"{scaling.foreign:,} extra states of other libraries"
