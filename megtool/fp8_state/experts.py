"""Separate the FP8 states of experts that Megatron-Core mixed in a checkpoint of objects.

With Transformer Engine 2.3 or later, Megatron-Core saves mixed states for the experts of one rank
(see `checkpoint.containers.te_grouped_state`). Nothing in the checkpoint says so: mixed states are
recognized by their columns that are never used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megtool.megatron_state.extra_states.amax_report import AmaxFinding
from megtool.megatron_state.extra_states.merge_ranks import AMBIGUOUS, read_merge
from megtool.megatron_state.extra_states.names import Site, parse_site
from megtool.megatron_state.extra_states.te_grouped_state import unmix_expert_states
from megtool.megatron_state.extra_states.te_state import ExtraState
from megtool.megatron_state.model_space import read_saved_layout
from megtool.megatron_state.saved_objects import saved_args
from megtool.number_formats.delayed_scaling import Columns
from megtool.number_formats.grouped_delayed_scaling import is_idle
from megtool.run_state.optimizer import find_registration_order
from megtool.tensors.catalogue import Catalogue


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStates:
    """The corrected states, by the names of their objects.

    `columns` is the column layout of the run that saved them, None if unknown. `ambiguous` names
    states whose numbers cannot be assigned to experts.
    """

    states: Mapping[str, ExtraState]
    columns: Columns | None
    ambiguous: frozenset[str]
    findings: tuple[AmaxFinding, ...]


def separate_expert_states(catalogue: Catalogue, states: Mapping[str, ExtraState]) -> ExpertStates:
    """Find the mixed states among all states of a checkpoint, and separate them."""
    merged = read_merge(catalogue)
    if merged.ranks:  # in files per rank, they were separated when they were read
        columns = merged.columns or _declared_columns(states.values())
        return ExpertStates(states={}, columns=columns, ambiguous=merged.ambiguous, findings=())
    modules = group_by_expert(states)
    unchanged = ExpertStates(
        states={}, columns=_declared_columns(states.values()), ambiguous=frozenset(), findings=()
    )
    if not modules or not find_registration_order(catalogue).grouped_experts:
        return unchanged
    is_unmixed = all(
        is_idle(states[n].tensors, "blocked") for m in modules.values() for n in m.values()
    )
    experts = max(max(m) for m in modules.values()) + 1
    declared = count_local_experts(catalogue, experts)
    for number in _candidates(declared, experts, is_unmixed=is_unmixed):
        separated = _unmix_modules(states, modules, number)
        if separated is not None:
            return (
                separated
                if separated.columns is not None
                else replace(separated, columns=unchanged.columns)
            )
    if declared == 1:
        return unchanged
    return replace(
        unchanged,
        ambiguous=frozenset(n for m in modules.values() for n in m.values()),
        findings=tuple(
            AmaxFinding(module=name, kind="columns", text=AMBIGUOUS) for name in sorted(modules)
        ),
    )


def count_local_experts(catalogue: Catalogue, experts: int) -> int | None:
    """The number of experts on each rank of the run that saved it; None if not known."""
    args = saved_args(catalogue)
    if not isinstance(args.get("expert_model_parallel_size"), int):
        return None
    num_local, remainder = divmod(experts, read_saved_layout(catalogue).ep)
    return num_local if num_local and not remainder else None


def group_by_expert(states: Mapping[str, ExtraState]) -> dict[str, dict[int, str]]:
    """The names of objects with delayed scaling state of experts, by module and expert."""
    out: dict[str, dict[int, str]] = {}
    for name, state in states.items():
        site: Site | None = parse_site(name)
        if site is not None and site.expert is not None and state.is_delayed:
            out.setdefault(site.module, {})[site.expert] = name
    return out


def _candidates(declared: int | None, experts: int, *, is_unmixed: bool) -> list[int]:
    """Possible numbers of experts on a rank, the likeliest first; 1 if no state is mixed."""
    divisors = [n for n in range(experts, 1, -1) if experts % n == 0]
    likely = [declared] if declared is not None and (declared > 1 or is_unmixed) else []
    return list(dict.fromkeys([*likely, *([1] if is_unmixed else []), *divisors]))


def _unmix_modules(
    states: Mapping[str, ExtraState], modules: Mapping[str, Mapping[int, str]], number: int
) -> ExpertStates | None:
    """The states of a run with `number` experts on each rank; None if that is impossible."""
    out: dict[str, ExtraState] = {}
    votes: Counter[Columns] = Counter()
    for name_of in modules.values():
        for first in range(0, max(name_of) + 1, number) if number > 1 else ():
            names = [name_of.get(first + k) for k in range(number)]
            if not any(names):
                continue
            unmixed_states = unmix_expert_states(
                [states[n] if n is not None else None for n in names]
            )
            if unmixed_states is None:
                return None
            parts, columns = unmixed_states
            if columns is not None:
                votes[columns] += 1
            if columns == "interleaved":
                pairs = zip(names, parts, strict=True)
                out |= {n: s for n, s in pairs if n is not None and s is not None}
    columns = votes.most_common(1)[0][0] if votes else None
    return ExpertStates(states=out, columns=columns, ambiguous=frozenset(), findings=())


def _declared_columns(states: Iterable[ExtraState]) -> Columns | None:
    """The column layout of the release that pickled the recipes, if they name it."""
    columns = {c for s in states if s.is_delayed and (c := s.column_order) is not None}
    return columns.pop() if len(columns) == 1 else None
