"""Found: the FP8 states, and ModelOpt's amaxes, of a checkpoint that was opened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megtool.checkpoint.containers.te_extra_state import ExtraState, decode
from megtool.checkpoint.megatron_metadata import object_value
from megtool.errors import CalibrationError, UsageError
from megtool.reshard.fp8_state.modelopt_amax import Buffer, read_buffers
from megtool.reshard.megatron.amax_report import AmaxFinding
from megtool.reshard.megatron.extra_state_names import Site, holds_nothing, is_extra_state, site_of
from megtool.reshard.megatron.rank_extra_state import expert_states, merged_of
from megtool.reshard.open_source import CheckpointSource


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One module's state, by the name of the object that holds it; `site` None if it says no one
    module."""

    name: str
    site: Site | None
    state: ExtraState


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """All that a checkpoint holds of it.

    `empty` extra states hold nothing, `foreign` ones something that is not Transformer Engine's.
    `findings` are of states that were merged or told apart on the way; of those in `untold`, by
    name, it is not known whose columns are whose.
    """

    states: tuple[State, ...]
    empty: int
    foreign: int
    buffers: tuple[Buffer, ...] = field(default=())
    findings: tuple[AmaxFinding, ...] = ()
    untold: frozenset[str] = frozenset()

    @property
    def linear(self) -> set[Site]:
        """The modules whose weights something is known about."""
        own = {s.site for s in self.states if s.site is not None and s.state.is_delayed}
        return own | {b.site for b in self.buffers}


def scaling_of(opened: CheckpointSource) -> Scaling:
    """Read the states, and no weight.

    Raises:
        FormatError: a state is damaged or hostile.
    """
    catalogue = opened.catalogue
    states: dict[str, ExtraState] = {}
    empty = foreign = 0
    for name, held in catalogue.objects.items():
        if not is_extra_state(name):
            continue
        file = catalogue.path(held.extent[0]) if held.extent else opened.path
        value = object_value(catalogue, held)
        state = decode(value, file=file)
        if state is not None:
            states[name] = state
        elif holds_nothing(value):
            empty += 1
        else:
            foreign += 1
    right = expert_states(catalogue, states)
    return Scaling(
        states=tuple(
            State(name=n, site=site_of(n), state=right.states.get(n, s)) for n, s in states.items()
        ),
        empty=empty,
        foreign=foreign,
        buffers=tuple(read_buffers(catalogue)),
        findings=(*merged_of(catalogue).findings, *right.findings),
        untold=right.untold,
    )


def require_told(scaling: Scaling, opened: CheckpointSource) -> None:
    """Refuse a checkpoint of which it is not known which expert's some of the numbers are.

    Raises:
        CalibrationError: it is such a one.
    """
    if scaling.untold:
        raise CalibrationError(
            f"{len(scaling.untold):,} FP8 states are of several experts, and which of their "
            "columns are of which expert cannot be told",
            file=opened.path,
            tensor=min(scaling.untold),
            hint="Transformer Engine 2.3 changed their order, and columns that it never uses are "
            "in use here; train some steps and save again, or megtool quantize --data",
        )


def require(scaling: Scaling, opened: CheckpointSource) -> None:
    """Refuse a checkpoint that holds nothing of it.

    Raises:
        UsageError: it does; says what it has instead.
    """
    if any(s.state.is_delayed for s in scaling.states) or scaling.buffers:
        return
    raise UsageError(
        f"{opened.path} holds no FP8 scaling state: {'; '.join(_instead(scaling)) or 'none'}",
        hint="it is kept by checkpoints of Megatron's that were trained with delayed scaling "
        "(--fp8-recipe delayed), or quantized by ModelOpt",
    )


def _instead(scaling: Scaling) -> Iterator[str]:
    if scaling.states:
        names = sorted({s.state.recipe_name or "a recipe of its own" for s in scaling.states})
        yield f"{len(scaling.states):,} states of recipes without any ({', '.join(names)})"
    if scaling.empty:
        yield f"{scaling.empty:,} empty extra states"
    if scaling.foreign:
        yield f"{scaling.foreign:,} extra states of others"
