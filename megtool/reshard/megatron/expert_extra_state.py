"""Expert states: each expert's own FP8 state, whatever a checkpoint of objects makes of it.

What Megatron-Core saves there for the experts of one rank is a mixture where Transformer Engine is
of release 2.3 or later (see `checkpoint.containers.extra_products`), and says so nowhere: it is
recognized by the columns that are never used, and put right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.containers.te_extra_state import ExtraState
from megtool.checkpoint.containers.te_grouped_state import unmixed
from megtool.checkpoint.megatron_metadata import args_of
from megtool.number_formats.delayed_scaling import Columns
from megtool.number_formats.grouped_delayed_scaling import is_idle
from megtool.reshard.megatron.amax_report import AmaxFinding
from megtool.reshard.megatron.extra_state_names import Site, site_of
from megtool.reshard.megatron.model_space import saved_layout
from megtool.reshard.megatron.optimizer import registration_order
from megtool.reshard.megatron.rank_extra_state import UNTOLD, merged_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStates:
    """What was put right, by the objects' names.

    `columns` is how the run that saved them lays several experts out, None where nothing tells. Of
    `untold` ones it cannot be told whose numbers they hold.
    """

    states: Mapping[str, ExtraState]
    columns: Columns | None
    untold: frozenset[str]
    findings: tuple[AmaxFinding, ...]


def expert_states(catalogue: Catalogue, states: Mapping[str, ExtraState]) -> ExpertStates:
    """The states of a checkpoint that have to be put right, of all it holds, by name."""
    merged = merged_of(catalogue)
    if merged.ranks:  # rank by rank, they were told apart when they were read
        columns = merged.columns or _said(states.values())
        return ExpertStates(states={}, columns=columns, untold=merged.untold, findings=())
    modules = by_expert(states)
    alone = ExpertStates(states={}, columns=_said(states.values()), untold=frozenset(), findings=())
    if not modules or not registration_order(catalogue).grouped_experts:
        return alone
    sound = all(is_idle(states[n].tensors, "blocked") for m in modules.values() for n in m.values())
    experts = max(max(m) for m in modules.values()) + 1
    said = local_experts(catalogue, experts)
    for number in _candidates(said, experts, sound=sound):
        found = _put_right(states, modules, number)
        if found is not None:
            return found if found.columns is not None else replace(found, columns=alone.columns)
    if said == 1:
        return alone
    return replace(
        alone,
        untold=frozenset(n for m in modules.values() for n in m.values()),
        findings=tuple(
            AmaxFinding(module=name, kind="columns", text=UNTOLD) for name in sorted(modules)
        ),
    )


def local_experts(catalogue: Catalogue, experts: int) -> int | None:
    """The experts that share a module on each rank of the run that saved it; None if not said."""
    args = args_of(catalogue)
    if not isinstance(args.get("expert_model_parallel_size"), int):
        return None
    each, rest = divmod(experts, saved_layout(catalogue).ep)
    return each if each and not rest else None


def by_expert(states: Mapping[str, ExtraState]) -> dict[str, dict[int, str]]:
    """The objects with scales and histories of experts, by module and expert."""
    out: dict[str, dict[int, str]] = {}
    for name, state in states.items():
        site: Site | None = site_of(name)
        if site is not None and site.expert is not None and state.is_delayed:
            out.setdefault(site.module, {})[site.expert] = name
    return out


def _candidates(said: int | None, experts: int, *, sound: bool) -> list[int]:
    """The numbers of experts on a rank that are possible, the likeliest first; 1 if all are so."""
    others = [n for n in range(experts, 1, -1) if experts % n == 0]
    likely = [said] if said is not None and (said > 1 or sound) else []
    return list(dict.fromkeys([*likely, *([1] if sound else []), *others]))


def _put_right(
    states: Mapping[str, ExtraState], modules: Mapping[str, Mapping[int, str]], number: int
) -> ExpertStates | None:
    """Those of a run with `number` experts on each rank; None where this cannot be."""
    out: dict[str, ExtraState] = {}
    told: Counter[Columns] = Counter()
    for held in modules.values():
        for first in range(0, max(held) + 1, number) if number > 1 else ():
            names = [held.get(first + k) for k in range(number)]
            if not any(names):
                continue
            found = unmixed([states[n] if n is not None else None for n in names])
            if found is None:
                return None
            right, columns = found
            if columns is not None:
                told[columns] += 1
            if columns == "interleaved":
                pairs = zip(names, right, strict=True)
                out |= {n: s for n, s in pairs if n is not None and s is not None}
    columns = told.most_common(1)[0][0] if told else None
    return ExpertStates(states=out, columns=columns, untold=frozenset(), findings=())


def _said(states: Iterable[ExtraState]) -> Columns | None:
    """How the release that pickled the recipes lays columns out, where they name it."""
    said = {c for s in states if s.is_delayed and (c := s.columns) is not None}
    return said.pop() if len(said) == 1 else None
