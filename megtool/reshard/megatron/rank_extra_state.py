"""Rank states: the extra states of one module in several rank files, merged into the module's own.

Tensor ranks, and for all but experts the ranks of experts too, have each their own copy. Where
Transformer Engine reduces maxima over them (its default) they agree; where not, the module's is
their maximum. Experts of a rank that share one state are told apart, by its own columns or by those
of the others: all states of a checkpoint are of one release of Transformer Engine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.containers.te_extra_state import (
    ExtraState,
    decode,
    merge,
    raw_bytes,
    to_tree,
)
from megtool.checkpoint.containers.te_grouped_state import fits, split, unmixed
from megtool.checkpoint.formats.megatron_legacy_file import entries
from megtool.checkpoint.megatron_metadata import args_of
from megtool.number_formats.delayed_scaling import Columns
from megtool.number_formats.grouped_delayed_scaling import is_idle
from megtool.reshard.megatron.amax_report import AmaxFinding
from megtool.reshard.megatron.extra_state_names import SUFFIX, Site, holds_nothing, site_of
from megtool.reshard.megatron.fp8_faults import as_finding, faults_of
from megtool.reshard.megatron.local_names import to_global
from megtool.reshard.megatron.model_space import saved_layout
from megtool.reshard.megatron.optimizer import registration_order

_KEY = re.compile(r"(.+)\._extra_state(\d*)")
_TOGETHER = re.compile(
    r"(?:decoder|encoder|mtp)\.layers\.\d+\.(?:\w+_layer\.)?mlp\.experts\.linear_fc[12]"
)
_METADATA = "merged_extra_states"
UNTOLD = "which of its columns are of which expert cannot be told"
NOT_ALL = "some ranks have no state"


@dataclass(slots=True, kw_only=True)
class Merged:
    """How the states of a checkpoint's ranks were merged.

    `ranks` says by the `id` of each value in the catalogue, which stays when objects get other
    names, how many ranks it is of; in `differing` are those whose ranks did not agree. `columns`
    is how states of several experts lay them out, None where none tells; `untold` are the names
    of those that could not be told apart.
    """

    ranks: dict[int, int] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)
    findings: list[AmaxFinding] = field(default_factory=list)
    columns: Columns | None = None
    untold: frozenset[str] = frozenset()


def merged_of(catalogue: Catalogue) -> Merged:
    """How the ranks' states were merged when it was opened; nothing in other formats."""
    found = catalogue.metadata.get(_METADATA)
    return found if isinstance(found, Merged) else Merged()


def remember(metadata: Mapping[str, Any], merged: Merged) -> dict[str, Any]:
    """Metadata of a catalogue that knows how states were merged."""
    return {**metadata, _METADATA: merged}


@dataclass(slots=True, kw_only=True)
class _Held:
    """What ranks hold of one module: a value as it is in a file, or a state that no file has."""

    value: Any = None
    state: ExtraState | None = None
    ranks: int = 1
    differs: bool = False

    def read(self) -> ExtraState | None:
        """The state, None where it holds none or is not Transformer Engine's."""
        if self.state is None and self.value is not None:
            self.state = decode(self.value)
        return self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grouped:
    """A state that several experts share; under `name` it stays what it is."""

    name: str
    module: str
    value: Any
    state: ExtraState
    experts: range


class RankStates:
    """The extra states of rank files, collected chunk by chunk of each rank."""

    def __init__(self) -> None:
        self._held: dict[Site | str, _Held] = {}
        self._findings: dict[AmaxFinding, None] = {}
        self._told: Counter[Columns] = Counter()
        self._untold: list[_Grouped] = []
        self._whole: set[str] = set()
        self._without: set[Site] = set()

    def add(
        self, model: Any, place: str, *, first_layer: int, first_expert: int, experts: int
    ) -> None:
        """A chunk's states; those of several modules that cannot be told apart, under `place`.

        Raises:
            FormatError: one is damaged or hostile.
        """
        keys: list[tuple[str, int | None, Any]] = []
        for key, value in entries(model) or ():
            if isinstance(key, str) and (match := _KEY.fullmatch(key)) is not None:
                keys.append((match[1], int(match[2]) if match[2] else None, value))
        numbered = {own for own, number, value in keys if number is not None}
        apart: dict[str, dict[int, Any]] = {}
        for own, number, value in keys:
            known = to_global(own, first_layer=first_layer, first_expert=first_expert)
            if not _TOGETHER.fullmatch(known.key):
                if number is None:
                    self._add_value(Site(known.key, known.expert), value)
                continue
            module = known.key.replace(".mlp.experts.", ".mlp.experts.experts.")
            if own in numbered or experts == 1:
                apart.setdefault(module, {})[number or 0] = value
            elif not holds_nothing(value):
                group = range(first_expert, first_expert + experts)
                self._add_parts(f"{place}/{own}{SUFFIX}", module, value, group)
        for module, values in apart.items():
            self._add_apart(module, values, first_expert)

    def _add_parts(self, name: str, module: str, value: Any, experts: range) -> None:
        """The state of experts that share a module; the module's own if it cannot be split."""
        state = decode(value)
        if state is None or not fits(state, len(experts)):
            if state is not None:
                text = f"a state of another number than {len(experts)} experts"
                self._find(module, "shape", text)
                self._whole.add(name)
            self._held.setdefault(name, _Held(value=value))
            return
        grouped = _Grouped(name=name, module=module, value=value, state=state, experts=experts)
        if state.is_delayed and state.columns is not None:
            self._told[state.columns] += 1
        if not self._split(grouped, None):
            self._untold.append(grouped)

    def _split(self, grouped: _Grouped, columns: Columns | None) -> bool:
        """Give each expert its own part, if it is known which that is."""
        parts = split(grouped.state, len(grouped.experts), columns)
        for expert, part in zip(grouped.experts, parts or (), strict=False):
            self._add_state(Site(grouped.module, expert), part)
        return parts is not None

    def _settle(self) -> None:
        """Take apart, as the others tell, what did not tell itself."""
        known = next(iter(self._told)) if len(self._told) == 1 else None
        for grouped in self._untold:
            if not self._split(grouped, known):
                self._find(grouped.module, "columns", UNTOLD)
                self._whole.add(grouped.name)
                self._held.setdefault(grouped.name, _Held(value=grouped.value))
        self._untold = []
        for site in self._without:
            if (held := self._held.get(site)) is not None and held.read() is not None:
                self._find(site.module, "missing", NOT_ALL)
        self._without = set()

    def _add_apart(self, module: str, values: Mapping[int, Any], first_expert: int) -> None:
        """The states of a rank's experts that have one each, as Megatron-Core splits them."""
        states = {k: None if holds_nothing(v) else decode(v) for k, v in values.items()}
        if len(values) > 1 and all(s is not None and s.is_delayed for s in states.values()):
            order = sorted(states)
            found = unmixed([states[k] for k in order])
            if found is None:
                self._find(module, "columns", UNTOLD)
                self._whole.add(module)
            elif found[1] is not None:
                self._told[found[1]] += 1
            if found is not None and found[1] == "interleaved":
                for k, part in zip(order, found[0], strict=True):
                    if part is not None:
                        self._add_state(Site(module, first_expert + k), part)
                return
        for k, value in values.items():
            self._add_value(Site(module, first_expert + k), value)

    def _add_value(self, site: Site, value: Any) -> None:
        if value is None:
            self._without.add(site)
            return
        held = self._held.get(site)
        if held is None:
            self._held[site] = _Held(value=value)
        elif held.value is not None and raw_bytes(held.value) == raw_bytes(value):
            held.ranks += 1
        elif (state := decode(value)) is not None:
            if held.read() is None and holds_nothing(held.value):
                self._held[site] = _Held(value=value, state=state)
                self._find(site.module, "missing", NOT_ALL)
            else:
                self._merge(site, held, state)
        elif holds_nothing(value) and held.read() is not None:
            self._find(site.module, "missing", NOT_ALL)

    def _add_state(self, site: Site, state: ExtraState) -> None:
        held = self._held.get(site)
        if held is None:
            self._held[site] = _Held(state=state)
        else:
            self._merge(site, held, state)

    def _merge(self, site: Site, held: _Held, state: ExtraState) -> None:
        mine = held.read()
        held.ranks += 1
        if mine is None:
            return
        if mine.is_delayed and state.is_delayed and mine.rule != state.rule:
            self._find(site.module, "recipe", "ranks have different recipes: the first's is used")
        merged = merge([mine, state])
        if merged is None:
            self._find(site.module, "shape", "the states of ranks do not fit: the first's is used")
        elif not _alike(mine, state):
            held.differs = True
            for one in (mine, state):
                self._find_lost(site.module, one, merged)
            if not _alike(mine, merged):
                held.value, held.state = None, merged

    def _find_lost(self, module: str, one: ExtraState, merged: ExtraState) -> None:
        """Say what is wrong with one rank's state, and no longer with all ranks' together."""
        kept = {(f.kind, f.array, c) for f in faults_of(module, merged) for c in f.columns}
        for fault in faults_of(module, one):
            if any((fault.kind, fault.array, c) not in kept for c in fault.columns):
                text = as_finding(module, fault, one).text
                self._find(module, fault.kind, f"{text} on one rank, and not on others")

    def _find(self, module: str, kind: str, text: str) -> None:
        self._findings[AmaxFinding(module=module, kind=kind, text=text)] = None

    def values(self) -> dict[Site | str, Any]:
        """Every module's state as an inert tree."""
        self._settle()
        return {
            site: held.value if held.value is not None or held.state is None
            else to_tree(held.state)
            for site, held in self._held.items()
        }  # fmt: skip

    def merged(self, values: Mapping[Site | str, Any]) -> Merged:
        """How they were merged, by the `values` they became."""
        held = {id(values[site]): one for site, one in self._held.items()}
        return Merged(
            ranks={key: one.ranks for key, one in held.items()},
            differing={key for key, one in held.items() if one.differs},
            findings=list(self._findings),
            columns=self._told.most_common(1)[0][0] if self._told else None,
            untold=frozenset(self._whole),
        )


def _alike(a: ExtraState, b: ExtraState) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(
        np.array_equal(t, b.tensors[n], equal_nan=True) for n, t in a.tensors.items()
    )


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
