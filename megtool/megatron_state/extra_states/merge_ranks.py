"""Merge the extra states of one module in several rank files into one.

Every tensor rank, and for all modules but experts every expert rank, has its own copy. Where
Transformer Engine reduces maxima over them (its default) they agree; otherwise the merged state is
their maximum. Experts of a rank that share one state are separated, by its columns or by those of
other states: all states of a checkpoint are of one release of Transformer Engine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megtool.megatron_state.extra_states.amax_report import AmaxFinding
from megtool.megatron_state.extra_states.fp8_faults import (
    find_faults,
    has_equal_tensors,
    make_finding,
)
from megtool.megatron_state.extra_states.names import SUFFIX, Site, is_empty_value
from megtool.megatron_state.extra_states.te_grouped_state import (
    has_gemms,
    split_gemms,
    unmix_expert_states,
)
from megtool.megatron_state.extra_states.te_state import (
    ExtraState,
    decode,
    merge,
    raw_bytes,
    to_tree,
)
from megtool.number_formats.delayed_scaling import Columns
from megtool.pickles.reader import dict_items
from megtool.tensors.catalogue import Catalogue

_KEY = re.compile(r"(.+)\._extra_state(\d*)")
_GROUPED_EXPERTS = re.compile(
    r"(?:decoder|encoder|mtp)\.layers\.\d+\.(?:\w+_layer\.)?mlp\.experts\.linear_fc[12]"
)
_METADATA = "merged_extra_states"
AMBIGUOUS = "its columns cannot be assigned to experts"
SOME_RANKS_LACK = "some ranks have no state"


@dataclass(slots=True, kw_only=True)
class StateMerge:
    """How the states of a checkpoint's ranks were merged.

    `ranks` says by the `id` of each value in the catalogue, which stays when objects get other
    names, how many ranks it is of; in `differing` are those whose ranks did not agree. `columns`
    is the layout of states of several experts, None if unknown; `ambiguous` names states that could
    not be separated.
    """

    ranks: dict[int, int] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)
    findings: list[AmaxFinding] = field(default_factory=list)
    columns: Columns | None = None
    ambiguous: frozenset[str] = frozenset()


def read_merge(catalogue: Catalogue) -> StateMerge:
    """How the states of ranks were merged when the catalogue was opened; empty in other formats."""
    merge = catalogue.metadata.get(_METADATA)
    return merge if isinstance(merge, StateMerge) else StateMerge()


def with_merge(metadata: Mapping[str, Any], merged: StateMerge) -> dict[str, Any]:
    """Metadata with a record of how states were merged."""
    return {**metadata, _METADATA: merged}


@dataclass(slots=True, kw_only=True)
class _ModuleEntry:
    """The state of one module: a value as it is in a file, or a merged state that no file has."""

    value: Any = None
    state: ExtraState | None = None
    ranks: int = 1
    differs: bool = False

    def read(self) -> ExtraState | None:
        """The state, None where it is empty or not Transformer Engine's."""
        if self.state is None and self.value is not None:
            self.state = decode(self.value)
        return self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupedState:
    """A state that several experts share; under `name` it is kept as it is."""

    name: str
    module: str
    value: Any
    state: ExtraState
    experts: range


class RankStateCollector:
    """The extra states of rank files, collected chunk by chunk of each rank."""

    def __init__(self) -> None:
        self._entries: dict[Site | str, _ModuleEntry] = {}
        self._findings: dict[AmaxFinding, None] = {}
        self._votes: Counter[Columns] = Counter()
        self._undecided: list[_GroupedState] = []
        self._ambiguous: set[str] = set()
        self._lacking: set[Site] = set()

    def add(
        self, model: Any, prefix: str, *, first_layer: int, first_expert: int, experts: int
    ) -> None:
        """Add a chunk's states; those that cannot be separated by module get names under `prefix`.

        Raises:
            FormatError: one is damaged or hostile.
        """
        from megtool.megatron_state.local_names import to_global

        keys: list[tuple[str, int | None, Any]] = []
        for key, value in dict_items(model) or ():
            if isinstance(key, str) and (match := _KEY.fullmatch(key)) is not None:
                keys.append((match[1], int(match[2]) if match[2] else None, value))
        numbered = {local_name for local_name, number, value in keys if number is not None}
        split_values: dict[str, dict[int, Any]] = {}
        for local_name, number, value in keys:
            global_name = to_global(local_name, first_layer=first_layer, first_expert=first_expert)
            if not _GROUPED_EXPERTS.fullmatch(global_name.key):
                if number is None:
                    self._add_value(Site(global_name.key, global_name.expert), value)
                continue
            module = global_name.key.replace(".mlp.experts.", ".mlp.experts.experts.")
            if local_name in numbered or experts == 1:
                split_values.setdefault(module, {})[number or 0] = value
            elif not is_empty_value(value):
                group = range(first_expert, first_expert + experts)
                self._add_parts(f"{prefix}/{local_name}{SUFFIX}", module, value, group)
        for module, values in split_values.items():
            self._add_split(module, values, first_expert)

    def _add_parts(self, name: str, module: str, value: Any, experts: range) -> None:
        """Add the state of experts that share a module, whole if it cannot be split."""
        state = decode(value)
        if state is None or not has_gemms(state, len(experts)):
            if state is not None:
                text = f"a state of another number than {len(experts)} experts"
                self._add_finding(module, "shape", text)
                self._ambiguous.add(name)
            self._entries.setdefault(name, _ModuleEntry(value=value))
            return
        grouped = _GroupedState(name=name, module=module, value=value, state=state, experts=experts)
        if state.is_delayed and state.column_order is not None:
            self._votes[state.column_order] += 1
        if not self._split(grouped, None):
            self._undecided.append(grouped)

    def _split(self, grouped: _GroupedState, columns: Columns | None) -> bool:
        """Split a state into those of its experts; whether the columns were known."""
        parts = split_gemms(grouped.state, len(grouped.experts), columns)
        for expert, part in zip(grouped.experts, parts or (), strict=False):
            self._add_state(Site(grouped.module, expert), part)
        return parts is not None

    def _resolve(self) -> None:
        """Split undecided states by the column layout of the others."""
        columns = next(iter(self._votes)) if len(self._votes) == 1 else None
        for grouped in self._undecided:
            if not self._split(grouped, columns):
                self._add_finding(grouped.module, "columns", AMBIGUOUS)
                self._ambiguous.add(grouped.name)
                self._entries.setdefault(grouped.name, _ModuleEntry(value=grouped.value))
        self._undecided = []
        for site in self._lacking:
            if (entry := self._entries.get(site)) is not None and entry.read() is not None:
                self._add_finding(site.module, "missing", SOME_RANKS_LACK)
        self._lacking = set()

    def _add_split(self, module: str, values: Mapping[int, Any], first_expert: int) -> None:
        """Add the states of a rank's experts that have one each, as Megatron-Core splits them."""
        states = {k: None if is_empty_value(v) else decode(v) for k, v in values.items()}
        if len(values) > 1 and all(s is not None and s.is_delayed for s in states.values()):
            order = sorted(states)
            unmixed_states = unmix_expert_states([states[k] for k in order])
            if unmixed_states is None:
                self._add_finding(module, "columns", AMBIGUOUS)
                self._ambiguous.add(module)
            elif unmixed_states[1] is not None:
                self._votes[unmixed_states[1]] += 1
            if unmixed_states is not None and unmixed_states[1] == "interleaved":
                for k, part in zip(order, unmixed_states[0], strict=True):
                    if part is not None:
                        self._add_state(Site(module, first_expert + k), part)
                return
        for k, value in values.items():
            self._add_value(Site(module, first_expert + k), value)

    def _add_value(self, site: Site, value: Any) -> None:
        if value is None:
            self._lacking.add(site)
            return
        entry = self._entries.get(site)
        if entry is None:
            self._entries[site] = _ModuleEntry(value=value)
        elif entry.value is not None and raw_bytes(entry.value) == raw_bytes(value):
            entry.ranks += 1
        elif (state := decode(value)) is not None:
            if entry.read() is None and is_empty_value(entry.value):
                self._entries[site] = _ModuleEntry(value=value, state=state)
                self._add_finding(site.module, "missing", SOME_RANKS_LACK)
            else:
                self._merge(site, entry, state)
        elif is_empty_value(value) and entry.read() is not None:
            self._add_finding(site.module, "missing", SOME_RANKS_LACK)

    def _add_state(self, site: Site, state: ExtraState) -> None:
        entry = self._entries.get(site)
        if entry is None:
            self._entries[site] = _ModuleEntry(state=state)
        else:
            self._merge(site, entry, state)

    def _merge(self, site: Site, entry: _ModuleEntry, state: ExtraState) -> None:
        current = entry.read()
        entry.ranks += 1
        if current is None:
            return
        if current.is_delayed and state.is_delayed and current.scaling_rule != state.scaling_rule:
            self._add_finding(
                site.module, "recipe", "ranks have different recipes: the first's is used"
            )
        merged = merge([current, state])
        if merged is None:
            self._add_finding(
                site.module, "shape", "the states of ranks do not fit: the first's is used"
            )
        elif not has_equal_tensors(current, state):
            entry.differs = True
            for original in (current, state):
                self._add_lost_faults(site.module, original, merged)
            if not has_equal_tensors(current, merged):
                entry.value, entry.state = None, merged

    def _add_lost_faults(self, module: str, state: ExtraState, merged: ExtraState) -> None:
        """Report faults of one rank's state that the merged state does not have."""
        remaining = {(f.kind, f.array, c) for f in find_faults(module, merged) for c in f.columns}
        for fault in find_faults(module, state):
            if any((fault.kind, fault.array, c) not in remaining for c in fault.columns):
                text = make_finding(module, fault, state).text
                self._add_finding(module, fault.kind, f"{text} on one rank, and not on others")

    def _add_finding(self, module: str, kind: str, text: str) -> None:
        self._findings[AmaxFinding(module=module, kind=kind, text=text)] = None

    def values(self) -> dict[Site | str, Any]:
        """Every module's state as an inert tree."""
        self._resolve()
        return {
            site: entry.value if entry.value is not None or entry.state is None
            else to_tree(entry.state)
            for site, entry in self._entries.items()
        }  # fmt: skip

    def summarize_merge(self, values: Mapping[Site | str, Any]) -> StateMerge:
        """How they were merged, by the `values` they became."""
        entries = {id(values[site]): entry for site, entry in self._entries.items()}
        return StateMerge(
            ranks={key: entry.ranks for key, entry in entries.items()},
            differing={key for key, entry in entries.items() if entry.differs},
            findings=list(self._findings),
            columns=self._votes.most_common(1)[0][0] if self._votes else None,
            ambiguous=frozenset(self._ambiguous),
        )
